"""Edits are splices: the edited members change, all other bytes stay."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.payload.members import edits, locate, with_usage
from tests.growth import assert_linear

WHITE = st.sampled_from(["", " ", "\n", "\t ", "\r\n  "])
NAMES = st.sampled_from(["model", "a", "b", "priority", "\u00e9", 'q"uote', "", "back\\slash"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10)
    | st.sampled_from(['"model":1', '{"a":', "\\", ",}"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def splice(raw: bytes, **changes: Any) -> bytes:
    pieces = edits(raw, **changes)
    return raw if pieces is None else b"".join(pieces)


def spell(name: str, draw: st.DrawFn) -> str:
    """A JSON spelling of a string, some characters escaped though they need not be."""
    if draw(st.booleans()):
        return json.dumps(name, ensure_ascii=draw(st.booleans()))
    return '"' + "".join(f"\\u{ord(char):04x}" for char in name) + '"'


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, dict[str, Any], dict[str, bytes]]:
    """A spelled object, what it means, and each member's exact bytes."""
    meant = draw(st.dictionaries(NAMES, VALUES, max_size=6))
    members: dict[str, bytes] = {}
    pieces: list[str] = []
    for name, value in meant.items():
        text = json.dumps(
            value, ensure_ascii=draw(st.booleans()), indent=draw(st.none() | st.just(1))
        )
        member = spell(name, draw) + draw(WHITE) + ":" + draw(WHITE) + text
        members[name] = member.encode()
        pieces.append(draw(WHITE) + member + draw(WHITE))
    empty = "" if pieces else draw(WHITE)
    text = draw(WHITE) + "{" + empty + ",".join(pieces) + "}" + draw(WHITE)
    return text.encode(), meant, members


@settings(max_examples=500)
@given(body=bodies(), replace=st.dictionaries(NAMES, VALUES, max_size=3), remove=st.sets(NAMES))
def test_splices_equal_edits_of_the_object(
    body: tuple[bytes, dict[str, Any], dict[str, bytes]],
    replace: dict[str, Any],
    remove: set[str],
) -> None:
    raw, meant, members = body
    remove -= replace.keys()
    edited = splice(
        raw,
        replace={name: json.dumps(value).encode() for name, value in replace.items()},
        remove=remove,
    )
    expected = {**{k: v for k, v in meant.items() if k not in remove}, **replace}
    assert json.loads(edited) == expected
    for name, spelled in members.items():
        if name not in replace and name not in remove:
            assert spelled in edited
    if not replace and not (remove & meant.keys()):
        assert edited is raw


@given(body=bodies(), name=st.sampled_from(["new", "n\u00e9w"]), value=VALUES)
def test_inserting_keeps_all_bytes(
    body: tuple[bytes, dict[str, Any], dict[str, bytes]], name: str, value: Any
) -> None:
    raw, meant, _ = body
    edited = splice(raw, insert={name: json.dumps(value).encode()})
    assert json.loads(edited) == {name: value, **meant}
    brace = raw.index(b"{") + 1
    assert edited.startswith(raw[:brace])
    assert edited.endswith(raw[brace:])


@given(body=bodies())
def test_members_are_located_exactly(body: tuple[bytes, dict[str, Any], dict[str, bytes]]) -> None:
    raw, meant, members = body
    found = locate(raw)
    assert [m.name for m in found] == list(meant)
    for member in found:
        assert raw[member.key_start : member.value_end] == members[member.name]
        assert json.loads(raw[member.value_start : member.value_end]) == meant[member.name]


def test_every_occurrence_of_a_repeated_name_is_edited() -> None:
    raw = b'{"a":1,"b":2,"\\u0061":3}'
    assert splice(raw, replace={"a": b"9"}) == b'{"a":9,"b":2,"\\u0061":9}'
    assert splice(raw, remove=["a"]) == b'{"b":2}'


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (b"null", {"include_usage": True}),
        (b"{}", {"include_usage": True}),
        (b'{ "include_usage": false }', {"include_usage": True}),
        (
            b'{"continuous_usage_stats": true}',
            {"continuous_usage_stats": True, "include_usage": True},
        ),
        (b'{"include_usage":null,"x":[1]}', {"x": [1], "include_usage": True}),
        (b'{"include_usage":false,"include_usage":false}', {"include_usage": True}),
    ],
)
def test_usage_merges_into_stream_options(options: bytes, expected: dict[str, Any]) -> None:
    assert json.loads(with_usage(msgspec.Raw(options))) == expected


@pytest.mark.parametrize("name", ["bootstrap_%06d", "a%06d"])
def test_twice_the_members_take_twice_the_time(name: str) -> None:
    def run(raw: bytes) -> None:
        names = [m.name for m in locate(raw) if m.name != "a000001"]
        splice(raw, replace={"a000001": b"2"}, remove=names)

    def body(count: int) -> bytes:
        return ("{" + ",".join(f'"{name % n}":1' for n in range(count)) + "}").encode()

    assert_linear(body, run, 125, 500)


def test_an_edit_of_a_large_body_copies_none_of_it() -> None:
    raw = b'{"model":"m","messages":"%b","user":"u"}' % (b"x" * 1_000_000)
    pieces = edits(raw, replace={"model": b'"n"'}, insert={"stream": b"true"}, remove=["user"])
    assert pieces is not None
    assert sum(len(piece) for piece in pieces if isinstance(piece, bytes)) < 100
    assert json.loads(b"".join(pieces)) == {"stream": True, "model": "n", "messages": "x" * 10**6}
    assert edits(raw) is None
