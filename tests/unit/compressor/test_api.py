"""What every caller relies on: it fits or is refused, nothing protected changes, nothing hangs."""

import json
import pickle
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import compressor
from bench.compressor.trials import texts
from compressor import Compressed, Refused, compress
from tests.unit.compressor.texts import prose, size, user

QUESTION = "\n\nQuestion: Which colour has the lighthouse door?"
ANY: dict[str, Any] = {"safety": 1.0, "when": "any", "mark": False}
"""Whatever the task, to the exact byte, without marks."""
GOLD = "The door of the lighthouse has a turquoise colour."


def extract(messages: list[dict[str, Any]], share: float, **options: Any) -> Compressed[Any]:
    """Compressed to `share` of the bytes; fails on a refusal."""
    total = sum(size(m["content"]) for m in messages if isinstance(m["content"], str))
    found = compress(messages, int(total * share), 1.0, **{**ANY, **options})
    assert isinstance(found, Compressed), found
    return found


def refusal(messages: list[dict[str, Any]], budget: int, **options: Any) -> Refused:
    found = compress(messages, budget, 1.0, **{**ANY, **options})
    assert isinstance(found, Refused), found
    return found


def with_gold() -> str:
    paragraphs = prose(120).split("\n\n")
    paragraphs[11] += " " + GOLD
    return "\n\n".join(paragraphs) + QUESTION


def test_the_sentence_that_answers_stays_and_the_extract_fits() -> None:
    found = extract(user(with_gold()), 0.5)
    text = found.messages[0]["content"]
    assert GOLD in text
    assert text.endswith(QUESTION.strip())
    assert size(text) == found.bytes_after <= found.budget_bytes
    assert found.cut >= 0.5


def test_the_paper_s_profile_empties_the_middle_and_the_default_does_not() -> None:
    shares = {}
    for profile in ("paper", "default"):
        kept = [u.kept for u in extract(user(prose(120) + QUESTION), 0.5, profile=profile).units]
        third = len(kept) // 3
        shares[profile] = sum(kept[third : 2 * third]) / third
    assert shares["paper"] < 0.2
    assert shares["default"] > 2 * shares["paper"], shares


def test_a_result_explains_itself() -> None:
    found = extract(user(with_gold()), 0.6)
    assert found.question == QUESTION.strip()
    units = found.units
    assert {u.tier for u in units} == {"question", "edge", "scored"}
    best = max((u for u in units if u.tier == "scored"), key=lambda u: u.score)
    assert best.text == GOLD
    assert best.kept
    assert [u for u in units if u.tier != "scored" and not u.kept] == []
    kept = "".join(u.text for u in units if u.kept)
    assert "".join(kept.split()) == "".join(found.messages[0]["content"].split())


def test_what_fits_is_given_back_as_it_is() -> None:
    messages = user("Short. Enough.")
    found = compress(messages, 1000, 4.0)
    assert isinstance(found, Compressed)
    assert found.messages is messages
    assert not found.changed
    assert found.units == ()


@pytest.mark.parametrize("fixed", [0, 100])
def test_the_margin_and_fixed_tokens_come_off_the_budget(fixed: int) -> None:
    found = compress(user(with_gold()), 2000 + fixed, 4.0, fixed_tokens=fixed, when="any")
    assert isinstance(found, Compressed)
    assert found.budget_bytes == int(2000 * 4.0 * 0.83)


def test_a_turn_s_tools_images_and_system_prompt_are_untouched() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief. Obey rule nine."},
        {"role": "user", "content": [image, {"type": "text", "text": prose(100)}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": '{"found": [1, 2, 3], "ok": true}'},
        {"role": "user", "content": "Which colour has the door?"},
    ]
    found = compress(messages, int(size(prose(100)) * 0.7), 1.0, **ANY, tools=True)
    assert isinstance(found, Compressed)
    after = found.messages
    assert [m["role"] for m in after] == [m["role"] for m in messages]
    assert after[0] == messages[0]
    assert after[1]["content"][0] == image
    assert after[2:] == messages[2:]
    assert size(after[1]["content"][1]["text"]) < size(prose(100))


def test_a_system_prompt_stays_whole_or_the_prompt_is_refused() -> None:
    system = prose(40, seed=5) + "\n\nNever reveal the code. " + prose(40, seed=6)
    messages = [{"role": "developer", "content": system}, *user(with_gold())]
    total = size(system) + size(with_gold())
    found = extract(messages, 0.8)
    assert found.messages[0] == messages[0]
    assert GOLD in found.messages[1]["content"]
    beyond = refusal(messages, int(total * 0.42), max_cut=0.9)
    assert beyond.reason == "protected_too_large"
    assert beyond.protected_bytes > size(system)
    only = refusal([messages[0]], int(total * 0.1), max_cut=0.99)
    assert only.reason == "protected_too_large"


def test_older_turns_give_way_first() -> None:
    messages: list[dict[str, Any]] = []
    for turn in range(6):
        messages += user(prose(20, seed=turn))
        messages.append({"role": "assistant", "content": prose(10, seed=100 + turn)})
    messages += user("Thanks! Please go on.")
    after = extract(messages, 0.6).messages
    share = [size(a["content"]) / size(b["content"]) for a, b in zip(after, messages, strict=True)]
    assert share[-1] == 1
    assert share[0] < 0.4 < share[10]
    assert all(message["content"].strip() for message in after)


def test_a_follow_up_without_a_subject_uses_the_earlier_question() -> None:
    documents = prose(90).split("\n\n")
    documents[9] += " " + GOLD
    messages = [
        *user("\n\n".join(documents)),
        {"role": "assistant", "content": "I have read it."},
        *user("Which colour has the lighthouse door?"),
        {"role": "assistant", "content": "One moment."},
        *user("Please go on."),
    ]
    assert GOLD in extract(messages, 0.6).messages[0]["content"]


def test_code_is_verbatim_or_absent() -> None:
    code = "```python\nfor i in range(3):\n    print(i)  # e.g. 0. One. Two.\n```"
    text = prose(60) + "\n\n" + code + "\n\n" + prose(60, seed=2) + QUESTION
    for share in (0.55, 0.7, 0.85):
        after = extract(user(text), share).messages[0]["content"]
        assert code in after or "print(i)" not in after


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (json.dumps([{"id": i, "name": f"n{i}"} for i in range(900)]), "json"),
        ("```\n" + prose(100) + "\n```" + QUESTION, "code"),
        ("\n".join(f"{i},{i * 7919 % 10007},{i * 31}" for i in range(900)) + QUESTION, "digits"),
        ("".join(f"Zm9vYmFyMTIzNDU2Nzg5{i}QUJD " for i in range(500)) + QUESTION, "encoded"),
        ("\n".join(f"def f{c}(a, b):\n    return g(a[{c!r}], b)" for c in "abcdefgh" * 9), "code"),
        (prose(30) + "\n\n```\n" + prose(28, seed=3) + "\n```\n\n" + QUESTION, "block_too_large"),
        (prose(10) + "x" * 5000 + QUESTION, "too_coarse"),
    ],
    ids=["json", "fence", "numbers", "base64", "code", "large block", "one long word"],
)
def test_what_must_not_be_extracted_from_is_refused(text: str, reason: str) -> None:
    found = refusal(user(text), int(size(text) * 0.45), max_cut=0.9)
    assert (found.reason, bool(found)) == (reason, False)


def test_refusals_name_their_figures() -> None:
    text = with_gold()
    assert refusal(user(text), 0).reason == "no_budget"
    assert refusal(user(text), size(text) // 4).reason == "cut_too_deep"
    assert refusal(user(text), size(text), category="code", safety=0.5).reason == "code"
    assert refusal([], 100).reason == "no_text"
    assert refusal([{"role": "user", "content": 5}, "x"], 100).reason == "malformed"  # type: ignore[list-item]
    long_question = user(prose(20, seed=4) + "\n\nQuestion: " + " ".join(["bridge"] * 90) + "?")
    found = refusal(long_question, 500, max_cut=0.9)
    assert found.reason == "protected_too_large"
    assert found.protected_bytes > found.budget_bytes == 500


def test_bad_arguments_are_errors() -> None:
    for options in ({"safety": 0.0}, {"max_cut": 1.0}, {"profile": "x"}, {"when": "x"}):
        with pytest.raises(ValueError, match=r"must be|unknown (profile|when)"):
            compress(user("a"), 10, 4.0, **options)
    with pytest.raises(ValueError, match="bytes_per_token"):
        compress(user("a"), 10, 0.0)


HOSTILE = texts()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_neither_hangs_nor_vanishes(name: str) -> None:
    text = HOSTILE[name]
    started = time.perf_counter()
    found = compress(user(text + QUESTION), int(size(text) * 0.7), 1.0, **ANY)
    assert time.perf_counter() - started < 5
    if isinstance(found, Compressed):
        after = found.messages[0]["content"]
        assert 0.5 * found.budget_bytes <= size(after) <= found.budget_bytes
        assert after.endswith(QUESTION.strip())


@pytest.mark.parametrize(
    "name", ["no punctuation", "one sentence", "emoji", "lone surrogates", "Thai"]
)
def test_text_without_seams_is_still_cut(name: str) -> None:
    text = HOSTILE[name]
    found = compress(user(text + QUESTION), int(size(text) * 0.7), 1.0, **ANY)
    assert isinstance(found, Compressed)
    assert found.changed


drawn = st.text(
    st.sampled_from('abcXYZ 12\n\n.?!。、|`~#[]{}":,-_é漢字かなไทย\u0301\u200d\ud83d👍ه؟।क')
    | st.characters(),
    max_size=400,
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["user", "assistant", "tool", "system"]), drawn), max_size=5
    ),
    st.floats(0.05, 1.1),
    st.sampled_from(["default", "paper"]),
)
def test_any_text_fits_or_is_refused_and_is_a_subsequence(
    turns: list[tuple[str, str]], share: float, profile: compressor.Profile
) -> None:
    messages = [{"role": role, "content": text * 3} for role, text in turns]
    total = sum(size(m["content"]) for m in messages)
    found = compress(messages, int(total * share), 1.0, **ANY, max_cut=0.95, profile=profile)
    if isinstance(found, Refused):
        return
    after = found.messages
    assert [m["role"] for m in after] == [m["role"] for m in messages]
    assert sum(size(m["content"]) for m in after) == found.bytes_after <= found.budget_bytes
    for old, new in zip(messages, after, strict=True):
        left = iter("".join(old["content"].split()))
        assert all(char in left for char in "".join(new["content"].split()))


def test_an_exact_counter_fills_the_budget_and_never_passes_it() -> None:
    def count(text: str) -> int:
        return len(text.split())

    messages = user(with_gold())
    total = count(messages[0]["content"])
    for wrong in (1.5, 6.0, 12.0):
        found = compress(
            messages, int(total * 0.7), wrong, exact_counter=count, max_cut=0.9, when="any"
        )
        assert isinstance(found, Compressed), found
        tokens = count(found.messages[0]["content"])
        assert tokens == found.tokens_after
        assert 0.9 * int(total * 0.7) <= tokens <= int(total * 0.7)


def test_a_counter_that_rejects_surrogates_is_given_none() -> None:
    def count(text: str) -> int:
        return len(text.encode()) // 4

    text = "text \ud83d more words here. " * 300
    found = compress(user(text + QUESTION), 1100, 4.0, exact_counter=count, when="any")
    assert isinstance(found, Compressed)
    assert found.tokens_after is not None
    assert found.tokens_after <= 1100


def test_marks_stand_once_in_each_gap_and_count_in_the_budget() -> None:
    text = with_gold()
    for share in (0.5, 0.7, 0.9):
        plain, marked = (extract(user(text), share, mark=mark) for mark in (False, True))
        after = marked.messages[0]["content"]
        assert size(after) == marked.bytes_after <= marked.budget_bytes
        kept = [unit.kept for unit in marked.units]
        gaps = sum(not b and (at == 0 or kept[at - 1]) for at, b in enumerate(kept))
        assert after.count("[...]") == gaps > 0
        assert "[...]" not in plain.messages[0]["content"]
        assert marked.bytes_after > 0.9 * marked.budget_bytes


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), drawn), max_size=4),
    st.floats(0.05, 1.1),
)
def test_any_text_with_marks_fits_or_is_refused(turns: list[tuple[str, str]], share: float) -> None:
    messages = [{"role": role, "content": text * 3} for role, text in turns]
    total = sum(size(m["content"]) for m in messages)
    options = {**ANY, "mark": True, "tools": True, "max_cut": 0.95}
    found = compress(messages, int(total * share), 1.0, **options)
    if found:
        assert sum(size(m["content"]) for m in found.messages) <= found.budget_bytes


PROMISES: dict[str, list[dict[str, Any]]] = {
    "prefill": [*user(with_gold()), {"role": "assistant", "content": "The colour is"}],
    "tool_results": [*user("Which colour?"), {"role": "tool", "content": with_gold()}],
    "cache_control": [
        {
            "role": "user",
            "content": [{"type": "text", "text": with_gold(), "cache_control": {"type": "x"}}],
        }
    ],
}


@pytest.mark.parametrize("reason", PROMISES)
def test_what_a_body_promises_is_never_compressed(reason: str) -> None:
    budget = int(size(with_gold()) * 0.7)
    assert refusal(PROMISES[reason], budget).reason == reason
    body = {"messages": PROMISES[reason]}
    found = compressor.compress_anthropic(body, budget, 1.0, **ANY)
    if reason != "tool_results":  # Anthropic's are parts of a user message
        assert isinstance(found, Refused)
        assert found.reason == reason


def test_tool_results_of_all_dialects_need_the_tools_definitions() -> None:
    budget = int(size(with_gold()) * 0.7)
    part = {"type": "tool_result", "tool_use_id": "1", "content": with_gold()}
    anthropic: dict[str, Any] = {
        "messages": [*user("Which colour has the door?"), {"role": "user", "content": [part]}]
    }
    output = {"type": "function_call_output", "call_id": "1", "output": with_gold()}
    responses: dict[str, Any] = {"input": [*user("Which colour has the door?"), output]}
    for call, body in (
        (compressor.compress_anthropic, anthropic),
        (compressor.compress_responses, responses),
    ):
        without = call(body, budget, 1.0, **ANY)
        assert isinstance(without, Refused)
        assert without.reason == "tool_results"
        assert call({**body, "tools": [{"name": "f"}]}, budget, 1.0, **ANY)


def test_the_reason_says_what_is_missing() -> None:
    passages = "\n\n".join(f"[{i}] Title {i}\n{prose(6, seed=i)}" for i in range(1, 12))
    paragraphs = prose(60)
    french = "\n\nOù se trouve la porte turquoise du phare ?"
    asked = "\n\nWhich bridge has the copper lantern?"
    reasons = {
        "not_retrieval": paragraphs + asked,
        "no_question": passages + "\n\nWrite it anew.",
        "several_questions": f"Which river? And which harbour?\n\n{passages}",
        "cross_lingual": passages + french,
        "broad_question": passages + "\n\nWhich bridge, which river?",
    }
    for reason, text in reasons.items():
        found = refusal(user(text), int(size(text) * 0.7), when="asked")
        assert found.reason == reason, found
    conversation = [*user(passages), {"role": "assistant", "content": "Yes."}, *user(asked)]
    assert refusal(conversation, int(size(passages) * 0.7), when="asked").reason == "not_retrieval"


def test_results_can_be_pickled_and_made_in_another_process() -> None:
    found = extract(user(with_gold()), 0.6)
    copied = pickle.loads(pickle.dumps(found))
    assert copied.messages == found.messages
    assert copied.units == found.units
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=compressor.warm
    ) as pool:
        far = pool.submit(compress, user(with_gold()), 2000, 4.0, when="any").result()
    near = compress(user(with_gold()), 2000, 4.0, when="any")
    assert isinstance(near, Compressed)
    assert isinstance(far, Compressed)
    assert far.messages == near.messages


def test_completions_responses_and_anthropic_keep_their_structure() -> None:
    text = with_gold()
    budget = int(size(text) * 0.6)
    ids = compressor.compress_prompt([1, 2, 3], budget, 1.0)
    assert isinstance(ids, Refused)
    assert ids.reason == "token_ids"
    prompt = compressor.compress_prompt(text, budget, 1.0, **ANY)
    assert isinstance(prompt, Compressed)
    assert GOLD in prompt.body
    request = {"model": "m", "instructions": "Be brief.", "input": text, "stream": True}
    response = compressor.compress_responses(request, budget, 1.0, **ANY)
    assert isinstance(response, Compressed)
    assert response.body == {**request, "input": response.body["input"]}
    assert GOLD in response.body["input"]
    block = {"type": "text", "text": text}
    asked = {
        "model": "m",
        "system": "Be brief.",
        "messages": [{"role": "user", "content": [block]}],
    }
    message = compressor.compress_anthropic(asked, budget, 1.0, **ANY)
    assert isinstance(message, Compressed)
    after = message.body["messages"][0]["content"][0]
    assert after == {**block, "text": after["text"]}
    assert GOLD in after["text"]
    assert asked["messages"][0]["content"][0]["text"] == text  # type: ignore[index]
