"""Heads that come again: only the very same bytes are taken for known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.data_plane import MAX_HEAD_BYTES, KnownHead, learn

HEADERS = [(b"Host", b"x"), (b"Authorization", b"Bearer k")]


def head(length: bytes, *, name: bytes = b"Content-Length", last: bool = False) -> bytes:
    lines = [b"%b: %b" % pair for pair in HEADERS]
    lines.insert(len(lines) if last else 1, b"%b: %b" % (name, length))
    return b"POST /v1/chat/completions HTTP/1.1\r\n" + b"\r\n".join(lines) + b"\r\n\r\n"


def known(*, last: bool = False) -> KnownHead:
    found = learn(head(b"2", last=last) + b"{}", HEADERS)
    assert found is not None
    return found


@given(st.binary(max_size=300), st.booleans())
def test_a_whole_request_is_its_body(body: bytes, last: bool) -> None:
    data = head(b"%d" % len(body), last=last) + body
    assert known(last=last).body_of(data) == (len(data) - len(body), len(body))


@given(st.binary(min_size=1, max_size=60), st.booleans(), st.data())
def test_one_byte_that_differs_makes_it_another(
    body: bytes, last: bool, data: st.DataObject
) -> None:
    plain = head(b"%d" % len(body), last=last)
    at = data.draw(st.integers(0, len(plain) - 1))
    byte = data.draw(st.integers(0, 255))
    changed = plain[:at] + bytes([byte]) + plain[at + 1 :]
    found = known(last=last).body_of(changed + body)
    # Only the length may differ, and then it is told.
    assert found is None or changed in (plain, head(b"%d" % found[1], last=last))


@pytest.mark.parametrize("length", [b"12345678", b"-1", b"1x", b"", b"1 1", b"+1"])
def test_a_length_that_is_none_or_has_many_digits_is_left_to_the_parser(length: bytes) -> None:
    assert known().body_of(head(b"1234567")) is not None
    assert known().body_of(head(length)) is None


@pytest.mark.parametrize(
    ("data", "headers"),
    [
        (head(b"2")[:-2], HEADERS),  # it has not all come
        (head(b"2").replace(b"\r\n", b"\n"), HEADERS),
        (head(b"2").replace(b"Host: x\r\n", b"Host: x\n"), HEADERS),
        (head(b"2").replace(b": x", b": x\r\n y"), HEADERS),  # a folded line
        (head(b"2").replace(b"Content-Length: 2\r\n", b""), HEADERS),
        (head(b"2").replace(b"Host: x", b"Content-Length: 2"), HEADERS),
        (head(b"2"), HEADERS[:1]),
        (head(b"2").replace(b"k\r", b"k" * MAX_HEAD_BYTES + b"\r"), HEADERS),
        *(
            (head(b"2").replace(b"Host: x", b"%b: %b" % pair), [pair, HEADERS[1]])
            for pair in (
                *((b"Expect", b"x"), (b"UPGRADE", b"x"), (b"connection", b"close")),
                *((b"transfer-encoding", b"chunked"), (b"Expect", b"keep-alive")),
            )
        ),
    ],
)
def test_what_could_mean_something_else_is_not_learned(
    data: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    assert learn(data, headers) is None
