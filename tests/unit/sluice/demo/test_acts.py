"""What the demo's acts say of their answers, and what they ask."""

import random

import msgspec

from sluice.demo import prompts
from sluice.demo.acts import calm, engine, flood, phases, retrieval
from sluice.demo.client import Answer
from sluice.demo.story import ACTS


def served(pool: str = "short", ttft_ms: float | None = 10.0, **more: object) -> Answer:
    ttft_s = None if ttft_ms is None else ttft_ms / 1000
    answer = Answer(
        who="elastic", what="question", request_id="r", status=200, whole=True, pool=pool,
        worker="h:1", ttft_s=ttft_s, prompt_tokens=100,
    )  # fmt: skip
    return msgspec.structs.replace(answer, **more)


REFUSED = Answer(who="spot", what="flood", request_id="r", status=429, reason="concurrency")
FAILED = Answer(who="spot", what="flood", request_id="r", reason="ConnectError")
BROKEN = served(whole=False)


def test_calm_tells_the_pools_apart_and_counts_the_cached_share() -> None:
    answers = [served(ttft_ms=6.0), served("long", 200.0), served("long", 300.0)]
    talk = [served(cached_tokens=0), served(cached_tokens=90), served(cached_tokens=60)]
    assert calm.said(answers, talk) == (
        "6 of 6 answered, 0 failed. First token: 6 ms in the short pool, 250 ms for documents in "
        "the long one. A conversation found 75 % of its prompts cached, on 1 worker."
    )
    moved = [*talk, served(cached_tokens=0, worker="h:2")]
    assert "50 % of its prompts cached, on 2 workers." in calm.said(answers, moved)


def test_flood_sets_the_protected_tenant_beside_the_unmanaged_one() -> None:
    quiet, protected = [served(ttft_ms=5.0)], [served(ttft_ms=9.0), REFUSED]
    spot = [served(), REFUSED, REFUSED]
    alone = flood.said(quiet, protected, spot, None)
    assert alone == (
        "Guaranteed tenant's first token (p95): 5 ms in calm, 9 ms in the flood; 1 of 2 answered. "
        "Spot: 1 served, 2 told to wait (429)."
    )
    beside = flood.said(quiet, protected, spot, [served("one", 2300.0)])
    assert beside == f"{alone} Same flood, same engines, one unmanaged pool: 2,300 ms."


def test_retrieval_counts_only_what_was_cut_and_went_short() -> None:
    whole = [served("long", 120.0)] * 3
    cut = [
        served(ttft_ms=100.0, compressed="9000->7000"),
        served(ttft_ms=100.0, compressed="10000->8000"),
        served("long", compressed="9500->7500"),
    ]
    assert retrieval.said(whole, cut, 2) == (
        "2 of 3 fitted into the short pool, 9,500 -> 7,500 tokens on average; the sentence with "
        "the answer was kept in 2. First token: 100 ms; as they were, in the long pool: 120 ms. "
        "6 of 6 answered, 0 failed."
    )
    none = retrieval.said(whole, [served("long")], None)
    assert none.startswith("0 of 1 fitted into the short pool. First token: none;")


def test_engine_tells_failures_and_the_return() -> None:
    told = engine.said("http://h:1", [served(), FAILED], 3, 0.84)
    assert told == (
        "h:1 killed: 1 of 2 answered, 1 failed; 3 sent again to another engine; back in the "
        "rotation after 0.8 s."
    )
    assert engine.said("http://h:1", [served()], 0, None).endswith("it is not back yet.")


def test_phases_sets_the_pace_of_answers_beside_that_on_shared_engines() -> None:
    def answers(pace_ms: float) -> list[Answer]:
        return [served(took_s=0.01 + 0.1 * pace_ms, completion_tokens=101)]

    read = [
        *(served("apart", 300.0, what="document"), served("apart", 9.0, what="again")),
        served("apart", 9.0, what="again", cached_tokens=98),
    ]
    assert phases.said(answers(2.5), answers(2.7), read, answers(7.0), []) == (
        "Time per token of answers (p95): 2.5 ms alone, 2.7 ms while long prompts are computed "
        "apart, 7.0 ms on as many engines that do both. First token of the long prompts: 300 ms "
        "and none; asked about again, 49 % of them was cached. 6 of 6 answered, 0 failed."
    )


def test_captions_fit_a_line_of_a_narrow_terminal() -> None:
    assert list(ACTS) == ["calm", "flood", "retrieval", "engine", "phases"]
    for act in ACTS.values():
        assert len(f"{act.name}  {act.caption}") <= 79


def test_retrieval_prompts_hold_one_answer_among_others_and_end_with_the_question() -> None:
    found = prompts.retrieval(random.Random(1), 4, 38_000)
    assert len(found) == 4
    for prompt in found:
        (message,) = prompt.messages
        text = message["content"]
        assert 36_000 < len(text) < 42_000
        assert text.count(prompt.answer) == 1
        assert text.rpartition("\n\n")[2].startswith("Question: ")
        assert text.endswith("?")
