"""What an engine says that it evicts, mapped to the points of prompts."""

from gateway.scheduling.prefix_gossip import PrefixGossip
from gateway.scheduling.prefix_index import PrefixIndex
from gateway.scheduling.prefix_notices import KEPT, MAX_PLACED, PrefixNotices

BLOCK = 16
CAPACITY = 10_000


def world() -> tuple[PrefixIndex, PrefixNotices]:
    index = PrefixIndex(1, capacity_tokens=CAPACITY)
    return index, PrefixNotices(index, PrefixGossip(), 0)


def prompt(number: int, tokens: int = 320) -> tuple[tuple[int, int], ...]:
    """Points of four bytes a token; prompts of other numbers share nothing."""
    return ((2 * tokens, 10 * number), (4 * tokens, 10 * number + 1))


def blocks(number: int, tokens: int = 320) -> list[int | bytes]:
    return [b"%d-%d" % (number, n) for n in range(tokens // BLOCK)]


def bind(index: PrefixIndex, notices: PrefixNotices, number: int, tokens: int = 320) -> str:
    index.insert(prompt(number, tokens), 0, 0.25)
    return notices.begin(prompt(number, tokens), 0.25)


def serve(index: PrefixIndex, notices: PrefixNotices, number: int, tokens: int = 320) -> None:
    session = bind(index, notices, number, tokens)
    notices.stored(session, blocks(number, tokens), None, BLOCK)


def hit(index: PrefixIndex, number: int, tokens: int = 320) -> int:
    match = index.match(prompt(number, tokens), 0.25)
    return match[0][0] if match else 0


def test_nothing_is_forgotten_by_its_age_while_events_tell_and_all_is_after_a_gap() -> None:
    index, notices = world()
    serve(index, notices, 0)  # from the next one on
    serve(index, notices, 1)
    for number in range(2, 2 + 3 * CAPACITY // 320):
        serve(index, notices, number)
    assert hit(index, 1) == 320
    index.correct(0, index.insert(prompt(1), 0, 0.25), 0)
    assert hit(index, 1) == 320
    notices.forget()
    assert hit(index, 1) == 0
    bind(index, notices, 1)
    for number in range(1000, 1000 + 3 * CAPACITY // 320):  # of none of these it tells
        bind(index, notices, number)
    assert hit(index, 1) == 0


def test_what_was_known_before_the_first_event_still_ages() -> None:
    index, notices = world()
    index.insert(prompt(1), 0, 0.25)
    for number in range(2, 2 + 3 * CAPACITY // 320):
        serve(index, notices, number)
    assert (hit(index, 1), hit(index, 3)) == (0, 320)


def test_prompts_in_pieces_and_with_a_shared_beginning_are_mapped() -> None:
    index, notices = world()
    session = bind(index, notices, 1)
    all_of_it = blocks(1)
    notices.stored(session, all_of_it[:7], None, BLOCK)
    notices.stored(session, all_of_it[7:], all_of_it[6], BLOCK)
    notices.removed(all_of_it[11:])
    assert hit(index, 1) == 160
    # Preempted, and computed again from its first block on.
    session = bind(index, notices, 1)
    notices.stored(session, all_of_it[:10], None, BLOCK)
    notices.stored(session, all_of_it, None, BLOCK)
    assert hit(index, 1) == 320
    notices.removed(all_of_it[9:])
    assert hit(index, 1) == 0


def test_prompts_shorter_than_estimated_go_with_their_last_block() -> None:
    index, notices = world()
    session = bind(index, notices, 1, tokens=640)
    notices.stored(session, blocks(1), None, BLOCK)
    assert hit(index, 1, 640) == 640
    notices.removed(blocks(1)[-1:])
    assert hit(index, 1, 640) == 0


def test_a_chain_whose_beginning_was_not_told_is_left_alone() -> None:
    index, notices = world()
    session = bind(index, notices, 1)
    notices.stored(session, blocks(1)[5:], b"unknown", BLOCK)
    notices.stored("another gateway's", blocks(1), None, BLOCK)
    notices.removed(blocks(1))
    assert hit(index, 1) == 320


def test_a_prompt_that_nobody_computed_is_forgotten() -> None:
    index, notices = world()
    serve(index, notices, 0)
    bind(index, notices, 1)
    for number in range(2, 2 + KEPT):
        assert hit(index, 1) == 320
        serve(index, notices, number)
    assert (hit(index, 1), hit(index, 2)) == (0, 320)


def test_what_is_held_is_bounded() -> None:
    index, notices = world()
    most, tokens = MAX_PLACED // 2 + 50, 2 * BLOCK  # two points each
    for number in range(most):
        serve(index, notices, number, tokens)
    assert len(notices) == MAX_PLACED + KEPT
    assert (hit(index, 49, tokens), hit(index, 50, tokens)) == (0, tokens)
    for number in range(50, most):
        notices.removed(blocks(number, tokens))
    assert len(notices) == KEPT
    assert hit(index, most - 1, tokens) == 0
