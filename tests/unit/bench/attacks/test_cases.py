"""Hostile cases: reproducible, of every family, and read to the end of an answer."""

import itertools

from bench.attacks.cases import FAMILIES, stream_of_cases


def test_a_seed_draws_the_same_cases_again_and_another_seed_others() -> None:
    first, again, other = (list(itertools.islice(stream_of_cases(s), 200)) for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_every_family_is_drawn() -> None:
    drawn = {case.family for case in itertools.islice(stream_of_cases(1), 500)}
    assert drawn == set(FAMILIES)
