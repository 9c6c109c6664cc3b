"""Blocks of headers, and traceparent in them: what is the client's, and what an engine gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.payload.head import QUEUE, child_id, lines_of, lines_to_engine, pairs_of, parent_of
from gateway.records.record import Trace

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"traceparent: 00-{TRACE}-{SPAN}-01\r\n".encode()
OWN = Trace(trace_id=TRACE, span_id="4000000000001000", parent_span_id=SPAN, sampled=True)


def test_a_valid_parent_is_taken() -> None:
    assert parent_of(b"accept: */*\r\n" + VALID) == (TRACE, SPAN, True)
    assert parent_of(VALID.replace(b"-01\r", b"-00\r")) == (TRACE, SPAN, False)
    assert parent_of(VALID.replace(b"-01\r", b"-03\r")) == (TRACE, SPAN, True)


def test_a_later_version_may_say_more() -> None:
    later = VALID.replace(b": 00-", b": cc-").replace(b"-01\r", b"-01-what-will-be\r")
    assert parent_of(later) == (TRACE, SPAN, True)


@pytest.mark.parametrize(
    "lines",
    [
        b"",
        b"user-agent: traceparent: x\r\n",
        VALID + VALID,
        VALID.replace(b": 00-", b": ff-"),
        VALID.replace(b"-01\r", b"-01-more\r"),
        VALID.replace(TRACE.encode(), b"0" * 32),
        VALID.replace(SPAN.encode(), b"0" * 16),
        VALID.upper().replace(b"TRACEPARENT", b"traceparent"),
        b"traceparent: " + b"a" * 10_000 + b"\r\n",
        b"traceparent: \r\n",
    ],
)
def test_what_is_no_valid_parent_is_none(lines: bytes) -> None:
    assert parent_of(lines) is None


def test_an_engine_gets_the_attempt_as_parent_and_the_rest_as_it_came() -> None:
    lines = b"accept: */*\r\n" + VALID + b"tracestate: a=b\r\nbaggage: c=d\r\n"
    own = f"traceparent: 00-{TRACE}-{child_id(OWN, 2)}-01\r\n".encode()
    kept = b"accept: */*\r\ntracestate: a=b\r\nbaggage: c=d\r\n"
    assert lines_to_engine(lines, OWN, 2) == kept + own
    assert lines_to_engine(b"", OWN, 2) == own


def test_the_state_of_no_valid_trace_goes_no_further() -> None:
    alone = Trace(trace_id=TRACE, span_id="4000000000001000")
    sent = lines_to_engine(b"traceparent: bad\r\ntracestate: a=b\r\naccept: */*\r\n", alone, 1)
    assert sent == f"accept: */*\r\ntraceparent: 00-{TRACE}-4000000000001002-00\r\n".encode()


def test_the_spans_of_a_request_have_ids_of_their_own() -> None:
    ids = {OWN.span_id, child_id(OWN, QUEUE), child_id(OWN, 1), child_id(OWN, 2)}
    assert len(ids) == 4
    assert {len(found) for found in ids} == {16}


NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1).map(str.encode)
VALUES = st.text(st.characters(codec="ascii", min_codepoint=32)).map(str.encode)


@given(st.lists(st.tuples(NAMES, VALUES)))
def test_what_was_written_is_read(headers: list[tuple[bytes, bytes]]) -> None:
    assert pairs_of(lines_of(headers)) == headers
