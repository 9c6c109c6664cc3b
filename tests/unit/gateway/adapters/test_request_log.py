"""Decision records: a bounded ring, and JSONL that survives a disk that cannot be written."""

from pathlib import Path

import msgspec
import pytest

from gateway.adapters import request_log
from gateway.adapters.request_log import DecisionRing, RequestLog, Sinks
from gateway.domain import DecisionRecord
from gateway.telemetry import Metrics
from tests.builders import decision
from tests.fakes import ListSink


def ids(records: list[msgspec.Struct]) -> list[str]:
    return [r.request_id for r in records if isinstance(r, DecisionRecord)]


def lines(path: Path) -> list[DecisionRecord]:
    decode = msgspec.json.Decoder(DecisionRecord).decode
    return [decode(line) for line in path.read_bytes().splitlines()]


def log_at(path: Path) -> tuple[RequestLog, Metrics]:
    metrics = Metrics()
    return RequestLog(path, metrics), metrics


def test_the_ring_keeps_the_newest() -> None:
    ring = DecisionRing(2)
    for name in "abc":
        ring.append(decision(name))
    assert ring.find("a") is None
    assert ids(ring.latest(10)) == ["c", "b"]
    assert len(ring) == 2


def test_the_ring_gives_as_many_as_asked_for() -> None:
    ring = DecisionRing(9)
    for name in "abc":
        ring.append(decision(name))
    assert ids(ring.latest(2)) == ["c", "b"]


def test_a_ring_of_none_keeps_nothing() -> None:
    ring = DecisionRing(0)
    ring.append(decision("a"))
    assert (len(ring), ring.find("a")) == (0, None)


def test_of_an_id_used_twice_the_newer_record_is_found_and_nobody_else_is_lost() -> None:
    ring = DecisionRing(3)
    for name in "abc":
        ring.append(decision(name))
    again = decision("b", status=500)
    ring.append(again)
    assert ring.find("b") is again
    assert ids(ring.latest(3)) == ["b", "c", "a"]


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
    assert line["schema"] == 1
    assert "worker" not in line


async def test_an_existing_log_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    for name in "ab":
        log, _ = log_at(path)
        log.open()
        log.append(decision(name))
        await log.close()
    assert [r.request_id for r in lines(path)] == ["a", "b"]


async def test_closing_writes_what_is_left(tmp_path: Path) -> None:
    log, _ = log_at(tmp_path / "l.jsonl")
    log.start()
    log.append(decision("a"))
    await log.close()
    assert len(lines(tmp_path / "l.jsonl")) == 1


async def test_flushing_nothing_makes_no_file(tmp_path: Path) -> None:
    log, _ = log_at(tmp_path / "l.jsonl")
    await log.flush()
    assert not (tmp_path / "l.jsonl").exists()


def test_a_log_that_cannot_be_opened_says_so_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    log, _ = log_at(tmp_path / "file" / "l.jsonl")
    with pytest.raises(OSError, match=r"exists|Not a directory"):
        log.open()


async def test_what_cannot_be_written_is_kept_and_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "l.jsonl"
    path.mkdir()  # opening it fails, as a full disk does
    log, metrics = log_at(path)
    for name in "abc":
        log.append(decision(name))
        await log.flush()
    assert caplog.text.count("cannot be written") == 1, "one line in the log, not one a flush"
    path.rmdir()
    log.append(decision("d"))
    await log.flush()
    assert [r.request_id for r in lines(path)] == ["a", "b", "c", "d"]
    assert metrics.log_dropped.values == {}


async def test_beyond_the_bound_records_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "MAX_PENDING", 3)
    path = tmp_path / "l.jsonl"
    path.mkdir()
    log, metrics = log_at(path)
    for n in range(5):
        log.append(decision(f"{n}"))
        await log.flush()
    assert metrics.log_dropped.values == {(): 2}
    path.rmdir()
    await log.flush()
    assert [r.request_id for r in lines(path)] == ["0", "1", "2"]


def test_several_sinks_get_each_record() -> None:
    first, second = DecisionRing(5), DecisionRing(5)
    Sinks(first, second).append(decision("a"))
    assert (len(first), len(second)) == (1, 1)


def test_the_fake_sink_keeps_everything() -> None:
    sink = ListSink()
    sink.append(decision("a"))
    assert [r.request_id for r in sink.records] == ["a"]


async def test_recorded_bodies_that_wait_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "MAX_PENDING_PROMPT_CHARS", 10)
    log, _ = log_at(tmp_path / "l.jsonl")
    for name in "abc":
        log.append(decision(name, prompt="x" * 6))
    await log.flush()
    log.append(decision("d", prompt="x" * 6))
    await log.flush()
    found = {r.request_id: r.prompt for r in lines(tmp_path / "l.jsonl")}
    assert found == {"a": "x" * 6, "b": None, "c": None, "d": "x" * 6}
