"""Hostile cases: reproducible, of every family, and read to the end of an answer."""

import itertools

import pytest

from bench.attacks.attacker import _complete, _final
from bench.attacks.cases import FAMILIES, stream_of_cases


def test_a_seed_draws_the_same_cases_again_and_another_seed_others() -> None:
    first, again, other = (list(itertools.islice(stream_of_cases(s), 200)) for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_every_family_is_drawn() -> None:
    drawn = {case.family for case in itertools.islice(stream_of_cases(1), 500)}
    assert drawn == set(FAMILIES)


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("answer", "complete"),
    [
        (HEAD, False),
        (HEAD + b"Content-Length: 2\r\n\r\n{", False),
        (HEAD + b"Content-Length: 2\r\n\r\n{}", True),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n", False),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n", False),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"content-length: 0\r\n\r\n", True),
    ],
)
def test_an_answer_is_read_to_its_end(answer: bytes, complete: bool) -> None:
    assert _complete(bytearray(answer)) is complete


def test_interim_answers_are_not_the_answer() -> None:
    assert _final(b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD) == HEAD
    assert _final(b"HTTP/1.1 100 Continue\r\n") == b""
