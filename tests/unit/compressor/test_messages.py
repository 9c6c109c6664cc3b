from compressor.messages import all_texts, read_anthropic, read_chat, read_responses


def test_chat_texts_turns_and_what_stays() -> None:
    call = {"function": {"name": "look", "arguments": '{"q":"x"}'}}
    prompt = read_chat(
        [
            {"role": "system", "content": "S"},
            {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "image_url"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": "no"},
            {"role": "tool", "content": "T"},
            {"role": "user", "content": "B", "name": "ann"},
        ]
    )
    assert [(s.role, s.text, s.turn) for s in prompt.slots] == [
        ("system", "S", 0),
        ("user", "A", 0),
        ("tool", "T", 0),
        ("user", "B", 1),
    ]
    assert prompt.fixed == ["no", "look", '{"q":"x"}', "ann"]
    assert "".join(all_texts(prompt)) == 'SATBnolook{"q":"x"}ann'


def test_anthropic_blocks() -> None:
    prompt = read_anthropic(
        {
            "system": [{"type": "text", "text": "S"}],
            "messages": [
                {"role": "user", "content": "A"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "x"},
                        {"type": "tool_use", "name": "f", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "content": [{"type": "text", "text": "R"}]},
                        {"type": "image", "source": {}},
                    ],
                },
            ],
        }
    )
    assert [(s.role, s.text, s.turn) for s in prompt.slots] == [
        ("system", "S", 0),
        ("user", "A", 0),
        ("tool", "R", 0),
    ]
    assert prompt.fixed == ["hm", "f", '{"a":1}']


def test_responses_items() -> None:
    prompt = read_responses(
        {
            "instructions": "S",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "A"}]},
                {"type": "function_call", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "output": "R"},
            ],
        }
    )
    assert [(s.role, s.text) for s in prompt.slots] == [
        ("system", "S"),
        ("user", "A"),
        ("tool", "R"),
    ]
    assert prompt.fixed == ["f", "{}"]
