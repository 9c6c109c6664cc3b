"""Engines' refusals in all their wordings: overflow is rescued, busy is tried elsewhere."""

import orjson
import pytest

from gateway.records.request import BodyFacts, Measure
from gateway.routing.overflow import (
    in_band_error,
    is_busy,
    max_prompt_tokens,
    overflow_of,
    refuses_priority,
)
from tests.builders import OVERFLOWS, chunk, error_answer, event

LONG_BYTES = 28_000
WINDOW = 8192


def window_of(status: int, body: bytes, *, size: int = LONG_BYTES, cap: int | None = None) -> int:
    facts = BodyFacts(
        model="m", measure=Measure(text_bytes=size, longest_text_bytes=size), cap_tokens=cap
    )
    found = overflow_of(status, body, facts, size, WINDOW)
    return 0 if found is None else found.window_tokens


def is_overflow(status: int, body: bytes) -> bool:
    return window_of(status, body) > 0


def is_overflow_event(first: bytes) -> bool:
    return is_overflow(400, in_band_error(first))


@pytest.mark.parametrize("wording", OVERFLOWS)
def test_the_old_error_shape_without_a_wrapper_is_understood_too(wording: str) -> None:
    assert is_overflow(400, orjson.dumps({"object": "error", "message": wording}))


MORE = (
    (
        "Requested token count exceeds the model's maximum context length of 8192 tokens. You "
        "requested a total of 9000 tokens: 8000 tokens from the input messages and 1000 tokens for "
        "the completion. Please reduce the number of tokens in the input messages or the "
        "completion to fit within the limit."
    ),
    "max_completion_tokens is too large: 9000.This model supports at most 8192 completion tokens.",
    (
        "'max_tokens' or 'max_completion_tokens' is too large: 4000. This model's maximum context "
        "length is 8192 tokens and your request has 5000 input tokens (4000 > 8192 - 5000)."
    ),
    "The decoder prompt (length 8825) is longer than the maximum model length of 8192. Make sure",
    # vLLM: a prompt as long as the window; by characters; its tokens in the sum
    (
        "The decoder prompt (length 8192) plus the number of requested output tokens (at least 1) "
        "is longer than the maximum model length of 8192. Make sure it is not."
    ),
    (
        "You passed 25000 input characters and requested 100 output tokens. However, the model's "
        "context length is only 8192 tokens, resulting in a maximum input length of 8092 tokens."
    ),
    "Prompt length of 8192 is longer than the maximum model length of 8192.",
    (
        "The prompt (total length 9000) is too long to fit into the model (context length 8192). "
        "For image inputs, the number of image tokens depends on the number of images."
    ),
    "max_tokens=9000 cannot be greater than max_model_len=max_total_tokens=8192.",
    # TensorRT-LLM, llama.cpp, TGI, and gateways that stand before other engines
    "The sum of prompt length (9000.0) and query length (0) should not exceed max_seq_len (8192)",
    "request (9000 tokens) exceeds the available context size (8192 tokens), try increasing it",
    "`inputs` tokens + `max_new_tokens` must be <= 8192. Given: 9000 `inputs` tokens and 100",
    "prompt is too long: 9000 tokens > 8192 maximum",
    "The input token count (9000) exceeds the maximum number of tokens allowed (8192).",
    "Your input exceeds the context window of this model. Please adjust your input and try again.",
)
NEAR = {
    # SGLang keeps some tokens of its window, or of its KV cache, back
    "Input length (8300 tokens) exceeds the maximum allowed length (8186 tokens).": 8186,
    "Multimodal prompt is too long after expanding multimodal tokens. After expanding "
    "len(req.origin_input_ids_unpadded)=300 => 8592 >= 8186.": 8186,
    "Input length (9000 tokens) exceeds the maximum allowed length (5000 tokens).": 5000,
}


@pytest.mark.parametrize("wording", NEAR)
def test_a_bound_without_a_name_is_known_by_the_pools_window(wording: str) -> None:
    assert window_of(400, error_answer(wording)) == NEAR[wording]


def test_an_engines_code_needs_no_words() -> None:
    error = {"message": "Too much.", "type": "exceed_context_size_error", "code": 400}
    assert is_overflow(400, orjson.dumps({"error": error}))
    error = {"message": "Too much.", "code": "context_length_exceeded"}
    assert is_overflow(400, orjson.dumps({"error": error}))


@pytest.mark.parametrize("wording", [*OVERFLOWS, *MORE])
def test_the_engines_window_is_read(wording: str) -> None:
    window = 2048 if "2048" in wording else 8192
    assert window_of(400, error_answer(wording)) == window
    assert window_of(400, error_answer(wording), cap=9_000) == window


@pytest.mark.parametrize("wording", [*OVERFLOWS, *MORE])
def test_a_wording_within_a_message_is_an_echo(wording: str) -> None:
    assert not is_overflow(400, error_answer(f"Input should be 1, not '{wording}'"))
    assert not is_overflow(400, event({"detail": [{"msg": "bad", "input": wording}]}))
    assert not is_overflow_event(event({"error": {"message": f"bad: {wording}", "code": 400}}))


def test_numbers_that_cannot_be_true_are_no_overflow() -> None:
    said = error_answer(OVERFLOWS[1])  # 8,193 in the prompt, of 8,192
    assert not window_of(400, said, size=1_900, cap=100)
    assert window_of(400, said, size=2_100, cap=100)
    fits = error_answer(OVERFLOWS[1].replace("8193", "5000"))
    assert not window_of(400, fits, cap=100)
    assert not window_of(400, error_answer(OVERFLOWS[0].replace("8192", "9" * 30)), size=9000)


def test_a_body_of_the_size_of_no_refusal_is_not_looked_into() -> None:
    assert not is_overflow(400, error_answer(OVERFLOWS[0] + "x" * 100_000))


def test_what_is_not_in_the_body_may_be_long() -> None:
    measure = Measure(text_bytes=10, longest_text_bytes=10)
    assert max_prompt_tokens(BodyFacts(model="m", measure=measure), 100) < 10_000
    stored = BodyFacts(model="m", measure=measure, previous_response_id="resp_1")
    assert max_prompt_tokens(stored, 100) > 1_000_000


@pytest.mark.parametrize("status", [200, 404, 500, 503])
def test_another_status_is_no_overflow_whatever_it_says(status: int) -> None:
    assert not is_overflow(status, error_answer(OVERFLOWS[0]))


@pytest.mark.parametrize(
    "message",
    [
        "max_tokens must be at least 1, got 0.",
        "The model `m` does not exist.",
        "temperature must be non-negative, got -1.",
        "",
        # sizes, counts and bounds that are not the window's
        "At most 4 image(s) may be provided in one prompt.",
        (
            "You set image=5 (or defaulted to 1) in --limit-mm-per-prompt, but found 8 items in "
            "the same prompt."
        ),
        (
            "The decoder prompt contains a(n) image item with length 9000, which exceeds the "
            "pre-allocated encoder cache size 8192. Please reduce the input size."
        ),
        "The prompt contains 9000 images, exceeding the maximum of 8192 images per prompt",
        "Input audio is too long: 9000 seconds, maximum 8192 seconds",
        "Requested sample logprobs of 30, which is greater than max allowed: 20",
        "This model only supports up to 20 logprobs, requested 25",
        "Invalid 'input': array too long. Expected an array with maximum length 8192, got 9000.",
        "Invalid 'tools[0].function.name': string too long. Expected at most 64, got 70.",
        "`max_tokens` must be greater than `thinking.budget_tokens`. (4096 > 8192)",
        "min_tokens must be less than or equal to max_tokens=8192, got 9000.",
        "Token id 9000 exceeds maximum vocabulary size 8192",
        "Request body too large: 9000 bytes, maximum is 8192 bytes",
        "Too many tools: 9000 (max 8192)",
        "Batch size 9000 exceeds maximum 8192",
        "Stop sequences are too long: 9000 > 8192",
        "Unterminated string starting at: line 1 column 9000 (char 8190)",
        "n must be at most 128, got 200",
    ],
)
def test_other_400s_belong_to_the_client(message: str) -> None:
    assert not is_overflow(400, error_answer(message))


def test_a_body_that_is_not_json_is_looked_at_all_the_same() -> None:
    assert is_overflow(400, OVERFLOWS[0].encode())


def test_an_answer_that_talks_about_overflows_is_not_one() -> None:
    assert not is_overflow_event(chunk(OVERFLOWS[0]))


@pytest.mark.parametrize(
    "message",
    [
        "The server is busy, please try again later.",
        "Backlog limit reached (--max-num-queued-reqs).",
        "Please Try Again in a moment",
    ],
)
def test_a_503_that_says_busy_is_a_live_engine(message: str) -> None:
    assert is_busy(503, error_answer(message, code=503))


def test_a_503_that_a_router_explains_is_busy() -> None:
    assert is_busy(503, b"inference error", b"rejected-no-endpoints")
    assert not is_busy(500, b"inference error", b"rejected-no-endpoints")


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "Got priority 1 but Priority scheduling is not enabled."),
        (400, "Got priority -3 but Priority scheduling is not enabled."),
        (503, "Using priority is disabled for this server. Please send a new request"),
    ],
)
def test_a_refused_priority_is_known_by_the_engines_own_words(status: int, message: str) -> None:
    assert refuses_priority(status, error_answer(message, code=status))
    assert refuses_priority(status, orjson.dumps({"object": "error", "message": message}))
    assert not refuses_priority(200, error_answer(message))
    assert not refuses_priority(status, error_answer(f"The text {message} is too long"))
    assert not refuses_priority(status, error_answer(message + " " * 70_000))
