"""Twice the input takes twice the time, in every parser of the request path, at its worst.

Forms and edits of bodies are in `test_multipart.py` and `test_splice.py`.
"""

import contextlib

import numpy as np
import pytest

from compressor.scoring.question import asking_units
from compressor.text.segment import Spans
from gateway.errors import BadRequest
from gateway.payload.body import read_body
from gateway.payload.counting import classify, has_retrieval_headers, sample
from gateway.payload.head import read_head
from gateway.records.endpoint import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Endpoint
from tests.growth import assert_linear

MAX_BYTES = 2**22


def chat(content: bytes) -> bytes:
    return b'{"model":"m","messages":[{"role":"user","content":%b}]}' % content


BODIES: dict[str, tuple[Endpoint, bytes, bytes, bytes]] = {
    "escapes": (CHAT, b'{"model":"m","messages":[{"role":"user","content":"', b'\\"', b'"}]}'),
    "parts": (CHAT, b'{"model":"m","messages":[{"role":"user","content":[', b'"",', b'"x"]}]}'),
    "messages": (
        CHAT,
        b'{"model":"m","messages":[',
        b'{"role":"user","content":"x"},',
        b'{"role":"user","content":"x"}]}',
    ),
    "unknown members of messages": (
        CHAT,
        b'{"model":"m","messages":[',
        b'{"role":"user","content":"x","u":{"a":[1]}},',
        b'{"role":"user","content":"x"}]}',
    ),
    "unknown members": (CHAT, chat(b'"x"')[:-1] + b',"x":[', b"[[[]]],", b"1]}"),
    "tools": (CHAT, chat(b'"x"')[:-1] + b',"tools":[', b'{"\\u0061":1},', b"1]}"),
    "ids": (COMPLETIONS, b'{"model":"m","prompt":[', b"1,", b"1]}"),
    "lists of ids": (COMPLETIONS, b'{"model":"m","prompt":[', b"[1],", b"[1]]}"),
    "items": (RESPONSES, b'{"model":"m","input":[', b'{"type":"x","y":1},', b'{"role":"user"}]}'),
    "blocks": (
        MESSAGES,
        b'{"model":"m","messages":[{"role":"user","content":[',
        b'{"type":"document","source":{"type":"text"}},',
        b'"x"]}]}',
    ),
    "white space": (CHAT, b'{"model":"m",', b" \n", chat(b'"x"')[len(b'{"model":"m",') :]),
}


@pytest.mark.parametrize("shape", BODIES)
def test_of_bodies(shape: str) -> None:
    endpoint, head, unit, tail = BODIES[shape]

    def run(body: bytes) -> None:
        with contextlib.suppress(BadRequest):
            read_body(endpoint, body)

    assert_linear(lambda n: head + unit * (n // len(unit)) + tail, run, 2**14, MAX_BYTES)


@pytest.mark.parametrize("unit", ["word ", "[1] ", "\n## ", "  \t ", '{"a":1,', "漢", "<doc", "# "])
def test_of_categories(unit: str) -> None:
    def run(text: str) -> None:
        classify(sample(text))
        has_retrieval_headers([text])

    assert_linear(lambda n: unit * n, run, 2**12, MAX_BYTES // len(unit))


def one_or_many(text: str, size: int) -> Spans:
    """A text's units, each of `size` characters."""
    starts = np.arange(0, len(text), size, dtype=np.int64)
    ends = np.minimum(starts + size, len(text))
    return Spans(starts, ends, np.zeros(len(starts), np.int8), np.zeros(len(starts), np.bool_))


@pytest.mark.parametrize("size", [1000, 2**24], ids=["many units", "one unit"])
@pytest.mark.parametrize("unit", ["? ", "#", "*", "# ", " ", "1", "\u201d", "a\n"])
@pytest.mark.parametrize("lead", ["", "# ", "question", "user "])
def test_of_questions(lead: str, unit: str, size: int) -> None:
    def run(text: str) -> None:
        spans = one_or_many(text, size)
        own = np.arange(len(spans.starts))
        asking_units(text, spans, own, np.ones(len(own), np.bool_))

    assert_linear(lambda n: lead + unit * n + "x", run, 2**10, 2**20)


HEADS: dict[str, tuple[bytes, bytes]] = {
    "forwarded": (b"accept", b"*/*"),
    "keys": (b"x-api-key", b"sk-x"),
    "bearers": (b"authorization", b"Bearer sk-x"),
    "categories": (b"x-sluice-category", b"prose"),
    "content types": (b"content-type", b"application/json"),
    "unknown": (b"x-unknown", b"y"),
}


@pytest.mark.parametrize("worst", HEADS)
def test_twice_the_headers_take_twice_the_time(worst: str) -> None:
    assert_linear(lambda n: [HEADS[worst]] * n, read_head)
