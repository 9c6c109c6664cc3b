"""Decision records: JSONL that survives a disk that cannot be written, and a bounded ring."""

import asyncio
import fcntl
import json
import os
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.metrics import Metrics
from gateway.records.decision import DecisionRecord
from gateway.usage import request_log, usage_export
from gateway.usage.ledger import Ledger
from gateway.usage.request_log import MAX_IN_PIECE, DecisionRing, Records, RequestLog, append
from gateway.usage.usage_export import UsageExport
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
    line = msgspec.json.decode((tmp_path / "log" / "decisions.jsonl").read_bytes().splitlines()[0])
    assert (line["schema"], "worker" in line) == (2, False)


async def test_a_decision_goes_to_ring_log_and_further_sinks_its_text_to_no_ring(
    tmp_path: Path,
) -> None:
    ring, other, path = DecisionRing(5), ListSink(), tmp_path / "l.jsonl"
    log, _ = log_at(path)
    record = decision("a", prompt="the text")
    records = Records(ring, log, other.append)
    records.append(record)
    await log.flush()
    assert ring.find("a") == msgspec.json.encode(decision("a"))
    assert (lines(path), [each.request_id for each in other.records]) == ([record], ["a"])
    Records(ring, log).append(Event(event="boundary"))
    await log.flush()
    assert len(ring) == 1
    assert path.read_bytes().endswith(b'{"event":"boundary"}\n')


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


# -- lines written by a thread: none is lost, and none falls into another process's


BATCHES, LINES, WRITERS = 40, 60, 4
WRITER = f"""
import json, sys
from pathlib import Path
from gateway.usage.request_log import append
for batch in range({BATCHES}):
    line = json.dumps({{"writer": sys.argv[2], "batch": batch, "x": "y" * 200}}).encode()
    append(Path(sys.argv[1]), b"\\n".join([line] * {LINES}) + b"\\n")
"""


def test_batches_of_several_processes_stay_whole(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    commands = [[sys.executable, "-c", WRITER, str(file), f"w{n}"] for n in range(WRITERS)]
    for writer in [subprocess.Popen(command) for command in commands]:
        assert writer.wait(60) == 0
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert Counter(line["writer"] for line in found) == {
        f"w{n}": BATCHES * LINES for n in range(WRITERS)
    }
    runs = [found[at : at + LINES] for at in range(0, len(found), LINES)]
    assert all(len({(line["writer"], line["batch"]) for line in run}) == 1 for run in runs)


def test_a_torn_line_ends_before_the_next_batch(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_bytes(b'{"half": ')
    append(file, b'{"whole": 1}\n')
    assert file.read_bytes() == b'{"half": \n{"whole": 1}\n'


def test_a_new_file_has_the_asked_mode(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        append(tmp_path / "plain", b"x\n")
        append(tmp_path / "private", b"x\n", mode=0o640)
    finally:
        os.umask(old)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "private")]
    assert modes == [0o644, 0o640]


def test_a_pipe_is_written_as_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        append(pipe, b"a\n", sync=True)
        append(pipe, b"b\n")
        assert os.read(reader, 100) == b"a\nb\n"
    finally:
        os.close(reader)


def test_a_pipe_that_nobody_reads_and_a_lock_that_is_held_end_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "WAIT_S", 0.05)
    pipe, file = tmp_path / "pipe", tmp_path / "log"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="nobody reads"):
        append(pipe, b"x" * (1 << 20))
    with file.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        append(file, b"")  # whether it can be written
        with pytest.raises(OSError, match="holds its lock"):
            append(file, b"x\n")
    append(file, b"y\n")
    assert file.read_bytes() == b"y\n"


# -- lines that wait to be written, in each format


class Rig:
    """A writer of one format, and its file."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.path = folder / "lines.jsonl"
        self.metrics = Metrics()
        self.dropped = self.metrics.usage_dropped
        self.writer: RequestLog | UsageExport
        if kind == "log":
            self.writer, self.dropped = (
                RequestLog(self.path, self.metrics),
                self.metrics.log_dropped,
            )
        else:
            ledger = None
            if kind == "ledger":
                ledger = Ledger(folder / "l.db", keep_days=9, currency="EUR")
            self.writer = UsageExport(self.path, self.metrics, ledger)

    def append(self, *names: str) -> None:
        for name in names:
            record = decision(name, lease_id=name, charge_tokens=1, settled_unix_s=12.5)
            self.writer.append(record)

    def ids(self) -> list[str]:
        found = [json.loads(line) for line in self.path.read_bytes().splitlines()]
        return [line.get("id") or line["request_id"] for line in found]


FORMATS = ["log", "export", "ledger"]


@pytest.fixture(params=FORMATS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    return Rig(request.param, tmp_path)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No file can be written until it is undone."""

    def failing(*_: object, **__: object) -> None:
        raise OSError(28, "no space left")

    with monkeypatch.context() as patched:
        for module in (request_log, usage_export):
            patched.setattr(module, "append", failing)
        yield patched


async def test_lines_come_in_order_and_one_each(rig: Rig) -> None:
    rig.writer.open()
    rig.append(*"abc")
    await asyncio.gather(rig.writer.flush(), rig.writer.flush())
    await rig.writer.flush()
    assert (rig.ids(), rig.writer.pending) == (["a", "b", "c"], 0)
    assert rig.path.read_bytes().endswith(b"}\n")
    await rig.writer.close()


async def test_closing_writes_what_is_left_and_a_restart_appends(tmp_path: Path, rig: Rig) -> None:
    for name in "ab":
        again = Rig(rig.kind, tmp_path)
        again.writer.open()
        again.writer.start()
        again.append(name)
        await again.writer.close()
    assert rig.ids() == ["a", "b"]


def test_a_file_that_cannot_be_opened_says_so_at_once(rig: Rig) -> None:
    rig.path.mkdir()
    with pytest.raises(OSError, match="directory"):
        rig.writer.open()


@pytest.mark.parametrize("kind", ["log", "export"])
async def test_what_cannot_be_written_is_kept_whole_and_in_order(
    tmp_path: Path, kind: str, full: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig, names = Rig(kind, tmp_path), [f"{n}" for n in range(11)]
    full.setattr(request_log, "JOINED", 3)
    for name in names[:7]:
        rig.append(name)
        await rig.writer.flush()
    assert caplog.text.count("cannot be written") == 1, "one line in the log, not one a flush"
    full.undo()
    rig.append(*names[7:])
    await rig.writer.flush()
    assert rig.ids() == names
    assert rig.dropped.values == {}


@pytest.mark.parametrize("kind", FORMATS)
async def test_the_log_says_which_file_cannot_be_written_and_why(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "100%s"
    folder.mkdir()
    rig = Rig(kind, folder)
    rig.writer.open()
    rig.path.unlink()
    rig.path.mkdir()
    rig.append("a")
    await rig.writer.flush()
    (said,) = caplog.messages
    assert "cannot be written: [Errno 21] Is a directory" in said
    assert str(rig.path) in said
    await rig.writer.close()


@pytest.mark.parametrize("kind", ["log", "export"])
async def test_beyond_the_bound_the_newest_are_dropped_and_counted(
    tmp_path: Path, kind: str, full: pytest.MonkeyPatch
) -> None:
    for module in (request_log, usage_export):
        full.setattr(module, "MAX_PENDING", 3)
    rig = Rig(kind, tmp_path)
    for n in range(5):
        rig.append(f"{n}")
        await rig.writer.flush()
    assert rig.dropped.values == {(): 2}
    full.undo()
    await rig.writer.flush()
    assert rig.ids() == ["0", "1", "2"]


@pytest.mark.parametrize("kind", ["log", "export"])
async def test_what_is_not_written_at_shutdown_is_counted(
    tmp_path: Path, kind: str, full: pytest.MonkeyPatch
) -> None:
    rig = Rig(kind, tmp_path)
    rig.append("a")
    await rig.writer.close()
    assert rig.dropped.values == {(): 1}


async def test_lines_that_come_during_a_write_go_with_the_next(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    rig.writer.open()
    rig.append("a")

    def slow(batch: bytes) -> OSError | None:
        loop.call_soon_threadsafe(rig.append, "b")
        return write(batch)

    write = rig.writer._write
    with monkeypatch.context() as patched:
        patched.setattr(rig.writer, "_write", slow)
        await rig.writer.flush()
    assert (rig.ids(), rig.writer.pending) == (["a"], 1)
    await rig.writer.flush()
    assert rig.ids() == ["a", "b"]
    await rig.writer.close()
