"""A file that several processes append to: no line falls into another."""

import fcntl
import json
import os
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from gateway.usage import writing
from gateway.usage.writing import append

BATCHES, LINES, WRITERS = 40, 60, 4
WRITER = f"""
import json, sys
from pathlib import Path
from gateway.usage.writing import append
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
    monkeypatch.setattr(writing, "WAIT_S", 0.05)
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


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        append(tmp_path / "log", b"x\n")
