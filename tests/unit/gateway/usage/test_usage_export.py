"""Usage for billing: every charged request is in the file, whatever the disk does."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from gateway.metrics import Metrics
from gateway.records.decision import DecisionRecord
from gateway.usage.usage_export import UsageExport, usage_line
from tests.builders import decision


def charged(name: str = "l1", **more: Any) -> DecisionRecord:
    """The decision of a request that was charged."""
    fields: dict[str, Any] = {
        "lease_id": name,
        "tenant": "acme",
        "key": "web",
        "entitlement": "prod",
        "model": "m",
        "prompt_tokens": 100,
        "cached_tokens": 40,
        "completion_tokens": 20,
        "charge_tokens": 84,
        "source": "engine",
        "settled_unix_s": 12.5,
        **more,
    }
    return decision(f"request {name}", **fields)


def export_at(path: Path) -> tuple[UsageExport, Metrics]:
    metrics = Metrics()
    return UsageExport(path, metrics), metrics


def ids(path: Path) -> list[str]:
    """Ids in a file, lines that are no JSON left out, as a reader must."""
    found = []
    for line in path.read_bytes().splitlines():
        try:
            found.append(json.loads(line)["id"])
        except ValueError:
            continue
    return found


class FullDisk:
    """Takes the place of os.write: writes so many bytes more, then the disk is full."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._write = os.write

    def __call__(self, descriptor: int, data: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = self._write(descriptor, bytes(data)[: self.room])
        self.room -= done
        return done


# -- what is exported


async def test_a_line_says_who_used_what(tmp_path: Path) -> None:
    path = tmp_path / "billing" / "usage.jsonl"
    export, _ = export_at(path)
    export.open()
    export.append(charged())
    await export.flush()
    assert json.loads(path.read_bytes()) == {
        "id": "l1",
        "time_unix_s": 12.5,
        "tenant": "acme",
        "key": "web",
        "entitlement": "prod",
        "model": "m",
        "endpoint": "chat",
        "input_tokens": 100,
        "cached_input_tokens": 40,
        "output_tokens": 20,
        "charge_tokens": 84,
        "source": "engine",
        "status": "ok",
    }


def test_what_was_not_charged_has_no_line() -> None:
    assert usage_line(charged(charge_tokens=None)) is None
    assert usage_line(decision("refused", outcome="refused")) is None


# -- restarts and rotation


async def test_a_file_that_was_moved_is_made_anew(tmp_path: Path) -> None:
    path, moved = tmp_path / "u.jsonl", tmp_path / "u.jsonl.1"
    export, _ = export_at(path)
    export.append(charged("a"))
    await export.flush()
    path.rename(moved)
    export.append(charged("b"))
    await export.flush()
    assert (ids(moved), ids(path)) == (["a"], ["b"])


# -- disks that fail


@pytest.mark.parametrize("room", [0, 1, 100, 300, 500])
async def test_a_full_disk_loses_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    path = tmp_path / "u.jsonl"
    export, metrics = export_at(path)
    for name in "abc":
        export.append(charged(name))
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", FullDisk(room))
        await export.flush()
        export.append(charged("d"))
        await export.flush()
    assert export.pending == 4
    await export.flush()
    assert set(ids(path)) == set("abcd")
    assert ids(path)[-4:] == list("abcd"), "a batch is written again as a whole"
    assert (export.pending, metrics.usage_dropped.values) == (0, {})


async def test_a_batch_that_was_not_synced_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "u.jsonl"
    export, _ = export_at(path)
    export.append(charged("a"))

    def broken(_: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", broken)
        await export.flush()
    assert export.pending == 1
    await export.flush()
    assert ids(path) == ["a", "a"]


async def test_a_batch_is_synced_before_it_counts_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "u.jsonl"
    export, _ = export_at(path)
    export.open()
    synced: list[int] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        assert export.pending == 1
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    export.append(charged("a"))
    await export.flush()
    assert path.stat().st_size in synced
    assert export.pending == 0
