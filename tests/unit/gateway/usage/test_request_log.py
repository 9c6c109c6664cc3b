"""Decision records: JSONL that survives a disk that cannot be written, and a bounded ring."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.metrics import Metrics
from gateway.records.decision import DecisionRecord
from gateway.usage import request_log
from gateway.usage.request_log import MAX_IN_PIECE, DecisionRing, Records, RequestLog
from tests.builders import decision
from tests.fakes import ListSink


class Event(msgspec.Struct):
    event: str


def lines(path: Path) -> list[DecisionRecord]:
    decode = msgspec.json.Decoder(DecisionRecord).decode
    return [decode(line) for line in path.read_bytes().splitlines()]


def log_at(path: Path) -> tuple[RequestLog, Metrics]:
    metrics = Metrics()
    return RequestLog(path, metrics), metrics


async def test_records_are_written_one_a_line_and_read_back(tmp_path: Path) -> None:
    log, _ = log_at(tmp_path / "log" / "decisions.jsonl")
    log.open()
    written = [decision("a", candidates=(("w0", 0.5),)), decision("b", prompt='two\nlines "')]
    for record in written:
        log.append(record)
    await log.flush()
    assert lines(tmp_path / "log" / "decisions.jsonl") == written


async def test_a_line_names_its_schema_and_leaves_out_what_is_not_known(tmp_path: Path) -> None:
    log, _ = log_at(tmp_path / "l.jsonl")
    log.append(decision("a"))
    await log.flush()
    line = msgspec.json.decode((tmp_path / "l.jsonl").read_bytes())
    assert line["schema"] == 2
    assert "worker" not in line


async def test_a_decision_goes_to_ring_log_and_further_sinks(tmp_path: Path) -> None:
    ring, other = DecisionRing(5), ListSink()
    log, _ = log_at(tmp_path / "l.jsonl")
    record = decision("a")
    Records(ring, log, other.append).append(record)
    await log.flush()
    assert ring.find("a") == msgspec.json.encode(record)
    assert lines(tmp_path / "l.jsonl") == [record]
    assert other.records == [record]


async def test_recorded_text_is_in_the_file_and_not_in_the_ring(tmp_path: Path) -> None:
    ring = DecisionRing(5)
    log, _ = log_at(tmp_path / "l.jsonl")
    Records(ring, log).append(decision("a", prompt="the text"))
    await log.flush()
    assert ring.find("a") == msgspec.json.encode(decision("a"))
    assert lines(tmp_path / "l.jsonl")[0].prompt == "the text"


async def test_what_is_no_decision_goes_to_the_log_alone(tmp_path: Path) -> None:
    ring = DecisionRing(5)
    log, _ = log_at(tmp_path / "l.jsonl")
    Records(ring, log).append(Event(event="boundary"))
    await log.flush()
    assert len(ring) == 0
    assert (tmp_path / "l.jsonl").read_bytes() == b'{"event":"boundary"}\n'


async def test_recorded_bodies_that_wait_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "MAX_PENDING_PROMPT_BYTES", 200)
    log, _ = log_at(tmp_path / "l.jsonl")
    text = "x" * 20
    size = len(msgspec.json.encode(decision("a", prompt=text)))
    assert 100 < size <= 200, "one fits, two do not"
    for name in "abc":
        log.append(decision(name, prompt=text))
    await log.flush()
    log.append(decision("d", prompt=text))
    await log.flush()
    found = {r.request_id: r.prompt for r in lines(tmp_path / "l.jsonl")}
    assert found == {"a": text, "b": None, "c": None, "d": text}


async def test_a_body_that_is_dropped_takes_no_room_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "MAX_PENDING", 1)
    log, metrics = log_at(tmp_path / "l.jsonl")
    for name in "abc":
        log.append(decision(name, prompt="text"))
    assert metrics.log_dropped.values == {(): 2}
    assert log.pending_bytes == len(msgspec.json.encode(decision("a", prompt="text")))


def ids(records: list[msgspec.Raw]) -> list[bytes]:
    return [bytes(record) for record in records]


def filled(capacity: int, *names: str) -> DecisionRing:
    ring = DecisionRing(capacity)
    for name in names:
        ring.append(name, name.encode())
    return ring


def test_of_an_id_used_twice_the_newer_record_is_found_and_none_is_lost() -> None:
    ring = filled(4, *"abc")
    ring.append("b", b"again")
    assert ring.find("b") == b"again"
    assert ids(ring.latest(4)) == [b"again", b"c", b"b", b"a"]


def test_that_holds_within_a_piece_too() -> None:
    ring = DecisionRing(64 * MAX_IN_PIECE)
    for n in range(MAX_IN_PIECE):
        ring.append("same" if n % 5 == 0 else f"{n}", b"%d" % n)
    assert ring.find("same") == b"%d" % (MAX_IN_PIECE - 1 - (MAX_IN_PIECE - 1) % 5)


@given(
    st.integers(0, 40 * MAX_IN_PIECE),
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from([None, "x", "y"]), st.binary(max_size=9)),
        max_size=900,
    ),
)
def test_it_is_the_newest_records_and_hardly_more(
    capacity: int, said: list[tuple[int, str | None, bytes]]
) -> None:
    ring = DecisionRing(capacity)
    for name, tenant, line in said:
        ring.append(f"{name}", line, tenant)
    newest = [line for _, _, line in reversed(said)]
    found = ids(ring.latest(len(said)))
    assert found == newest[: len(found)]
    assert min(capacity, len(said)) <= len(ring) == len(found)
    assert len(ring) < capacity + MAX_IN_PIECE
    kept = said[len(said) - len(ring) :]
    for name in range(10):
        of_id = [(tenant, line) for id_, tenant, line in kept if id_ == name]
        assert ring.find(f"{name}") == (of_id[-1][1] if of_id else None)
        for tenant in "xy":
            of_tenant = [line for owner, line in of_id if owner == tenant]
            assert ring.find(f"{name}", tenant) == (of_tenant[-1] if of_tenant else None)


def test_what_the_ring_dropped_leaves_nothing_in_its_index() -> None:
    ring = DecisionRing(100)
    for n in range(10_000):
        ring.append(f"{n}", b"", "x")
    assert len(ring._newest) == 2 * len(ring)
