"""The state file: whose it is, which schema it has, and what happens when it is no good."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import StateFailure
from gateway.replicas.bus import LASTING
from gateway.store.sqlite_file import SqliteNotes

M = LASTING + "default:m"
NOTE = b"note"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sluice.db"


@pytest.fixture
async def state(path: Path) -> AsyncIterator[SqliteNotes]:
    state = SqliteNotes(path)
    yield state
    await state.close()


async def saved(path: Path) -> None:
    """Make a good file."""
    state = SqliteNotes(path, wall_clock=lambda: 1000.0)
    await state.exchange({M: b""})
    await state.exchange({M: NOTE})
    await state.close()


def read(path: Path) -> bytes:
    return path.read_bytes()


def write(path: Path, content: bytes | bytearray) -> None:
    path.write_bytes(content)


async def kept(path: Path) -> list[tuple[float, bytes]]:
    """What a further process reads."""
    state = SqliteNotes(path, wall_clock=lambda: 1600.0)
    found = await state.exchange({M: b""})
    await state.close()
    return found[M].notes


async def test_the_age_is_the_wall_clock_s_and_never_negative(path: Path) -> None:
    await saved(path)
    for now_s, age_s in ((1600.0, 600.0), (400.0, 0.0)):
        state = SqliteNotes(path, wall_clock=lambda now_s=now_s: now_s)  # type: ignore[misc]
        assert (await state.exchange({M: b""}))[M].notes == [(age_s, NOTE)]
        await state.close()


async def test_a_newer_schema_is_left_as_it_is(path: Path, state: SqliteNotes) -> None:
    await saved(path)
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("PRAGMA user_version = 7")
    before = read(path)
    with pytest.raises(StateFailure, match=r"newer version \(schema 7, this one reads 1\)"):
        await state.exchange({M: NOTE})
    assert read(path) == before


@pytest.mark.parametrize("junk", [b"not a database at all, but long enough" * 100, b"x"])
async def test_what_is_no_database_is_left_as_it_is(
    path: Path, state: SqliteNotes, junk: bytes
) -> None:
    write(path, junk)
    with pytest.raises(StateFailure, match="not a database"):
        await state.exchange({M: NOTE})
    assert read(path) == junk


async def test_a_damaged_file_is_found_out(path: Path, state: SqliteNotes) -> None:
    await saved(path)
    content = bytearray(read(path))
    content[4096:] = b"\xa5" * (len(content) - 4096)
    write(path, content)
    with pytest.raises(StateFailure, match=r"damaged|malformed"):
        await state.exchange({M: NOTE})


async def test_a_path_that_cannot_be_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    state = SqliteNotes(tmp_path / "file" / "sluice.db")
    with pytest.raises(StateFailure):
        await state.exchange({M: b""})
    await state.close()


async def test_a_locked_file_is_a_failure_and_is_saved_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.sqlite_file.BUSY_S", 0.0)
    await saved(path)
    state = SqliteNotes(path)
    await state.exchange({M: b""})
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StateFailure, match="locked"):
            await state.exchange({M: b"newer"})
        other.execute("ROLLBACK")
    found = await state.exchange({M: b"newer"})
    assert found[M].notes == [], "its own note is not heard as another's"
    await state.close()
    assert [note for _, note in await kept(path)] == [b"newer"]


async def test_cancelled_in_the_middle_of_saving_the_file_stays_whole(path: Path) -> None:
    await saved(path)
    state = SqliteNotes(path)
    await state.exchange({M: b""})
    task = asyncio.create_task(state.exchange({M: NOTE}))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await state.close()
    assert await kept(path)


async def test_an_exchange_after_one_that_was_given_up_is_not_lost(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await saved(path)
    state = SqliteNotes(path)
    await state.exchange({M: b""})
    release = threading.Event()
    exchange = state._file._run

    def slow(*arguments: Any) -> Any:
        release.wait(5.0)
        return exchange(*arguments)

    monkeypatch.setattr(state._file, "_run", slow)
    given_up = asyncio.create_task(state.exchange({M: NOTE}))
    await asyncio.sleep(0)
    given_up.cancel()
    last = asyncio.create_task(state.exchange({M: b"newer"}))
    await asyncio.sleep(0)
    release.set()
    await last
    await asyncio.gather(given_up, return_exceptions=True)
    await state.close()
    assert [note for _, note in await kept(path)] == [b"newer"]


async def test_closed_during_an_exchange_nobody_waits_and_the_file_is_closed_behind_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = SqliteNotes(path)
    await state.exchange({M: b""})
    release = threading.Event()
    monkeypatch.setattr(state._file, "_run", lambda *_: release.wait(5.0))
    given_up = asyncio.create_task(state.exchange({M: NOTE}))
    await asyncio.sleep(0)
    given_up.cancel()
    await state.close()
    assert not release.is_set()
    assert state._file._connection is not None
    release.set()
    await asyncio.gather(given_up, return_exceptions=True)
    await asyncio.to_thread(state._file._thread.shutdown)
    assert state._file._connection is None
