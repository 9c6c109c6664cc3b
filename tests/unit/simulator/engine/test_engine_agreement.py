"""Stepping, jumping and the naive engine tell the same story for any workload."""

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulator.engine.engine import Engine
from tests.unit.simulator.drive import by_jumps, by_steps, naively, profiles, workloads
from tests.unit.simulator.naive_engine import NaiveEngine

EXAMPLES = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@EXAMPLES
@given(st.data())
def test_jumping_over_iterations_gives_what_stepping_gives_to_the_last_bit(
    data: st.DataObject,
) -> None:
    p = data.draw(profiles())
    actions = data.draw(workloads(p))
    stepped, jumped, jumped_all, peeked = Engine(p), Engine(p), Engine(p), Engine(p)

    tokens = by_steps(stepped, actions)
    ends = [t for t in tokens if t[2] == 1 or t[3]]

    assert by_jumps(jumped_all, actions, every_token=True) == tokens
    assert by_jumps(jumped, actions, every_token=False) == ends
    assert by_jumps(peeked, actions, every_token=False, peeks=1000) == ends
    for other in (jumped_all, jumped, peeked):
        for counter in (
            "prompt_tokens_total",
            "generation_tokens_total",
            "preemptions_total",
            "prefix_queries_total",
            "prefix_hits_total",
            "remote_hits_total",
        ):
            assert getattr(other, counter) == getattr(stepped, counter), counter


@EXAMPLES
@given(st.data())
def test_the_closed_forms_agree_with_the_rules_written_out(data: st.DataObject) -> None:
    p = data.draw(profiles(exact=True))
    actions = data.draw(workloads(p))
    engine, naive = Engine(p), NaiveEngine(p)

    seen = by_jumps(engine, actions, every_token=True)
    expected = naively(naive, actions)

    assert seen == expected
    assert engine.preemptions_total == naive.preemptions


@EXAMPLES
@given(st.data())
def test_every_request_gets_each_token_once_and_in_order(data: st.DataObject) -> None:
    p = data.draw(profiles())
    actions = data.draw(workloads(p))
    aborted = {a.abort for a in actions if a.abort}
    engine = Engine(p)

    tokens = by_steps(engine, actions)

    for submitted in (a.submit for a in actions if a.submit is not None):
        length = min(submitted.output_tokens, p.max_model_len - submitted.prompt_tokens)
        mine = [(index, finished) for _, name, index, finished in tokens if name == submitted.id]
        whole = [(i, i == length) for i in range(1, length + 1)]
        assert mine == (whole[: len(mine)] if submitted.id in aborted else whole)
    assert (engine.running, engine.waiting, engine.kv_usage, engine.kv_tokens) == (0, 0, 0.0, 0)
    assert engine.held == 0
    assert engine.generation_tokens_total == len(tokens)


@EXAMPLES
@given(st.data())
def test_the_next_event_never_comes_before_it_was_announced(data: st.DataObject) -> None:
    p = data.draw(profiles())
    actions = [a for a in data.draw(workloads(p)) if a.submit is not None]
    engine = Engine(p)
    for action in actions:
        assert action.submit is not None
        engine.run_until(action.at_s)
        # What is held for ever may let nothing happen any more.
        engine.submit(msgspec.structs.replace(action.submit, hold=False), action.at_s)
    last_s = -1.0
    while (next_s := engine.next_event_s()) is not None:
        assert next_s > last_s
        last_s = next_s
        assert all(at_s == next_s for at_s, _ in engine.run_until(next_s))
