"""Real worker processes: many tasks, limits, deaths, cancellation, and that none stays behind."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gateway.ports import CompressResult, CompressTask
from gateway.workers.child import NICENESS
from gateway.workers.compression_work import work
from gateway.workers.pool import CompressWorkers, WorkerGone
from tests.asking import eventually, gone
from tests.unit.compressor.texts import prose

PATIENCE_S = 30.0
AMPLE_S = 20.0
"""A time limit that no test means to reach."""


def task(seed: int = 0, **more: Any) -> CompressTask:
    text = prose(80, seed=seed) + "\n\nQuestion: Where is the lantern?"
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    return CompressTask(
        endpoint="chat", body=body, budget_tokens=1_300, bytes_per_token=4.0, when="any", **more
    )


def here(given: CompressTask) -> CompressResult:
    """What it gives in this process."""
    found = work(given)
    assert found.body is not None
    return found


@contextlib.asynccontextmanager
async def workers(
    processes: int = 1, time_limit_s: float = AMPLE_S, queue: int = 16
) -> AsyncIterator[CompressWorkers]:
    runner = CompressWorkers(processes, time_limit_s, queue)
    await runner.start()
    try:
        yield runner
    finally:
        await runner.close()
        assert runner.pids == ()


def is_reaped(pid: int) -> bool:
    """Not even a zombie."""
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_many_at_once_are_answered_as_in_this_process_on_either_loop(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    tasks = [task(seed) for seed in range(40)]

    async def main() -> None:
        async with workers(processes=2, queue=40) as runner:
            found = await asyncio.gather(*map(runner.compress, tasks))
            assert found == [here(each) for each in tasks]
            assert runner.taken == runner.replaced == 0
            pids = runner.pids
            assert len(pids) == 2
        assert all(map(is_reaped, pids))

    run(main())


async def test_a_body_larger_than_a_pipe_passes_both_ways() -> None:
    padding = json.dumps({"padding": "x" * 5_000_000}).encode()
    large = padding[:-1] + b"," + task().body[1:]
    given = CompressTask(
        endpoint="chat", body=large, budget_tokens=1_300, bytes_per_token=4.0, when="any"
    )
    async with workers() as runner:
        assert await runner.compress(given) == here(given)


async def test_one_more_than_there_are_places_is_turned_away_at_once() -> None:
    async with workers(queue=2) as runner:
        (pid,) = runner.pids
        os.kill(pid, signal.SIGSTOP)
        begun = [asyncio.create_task(runner.compress(task(seed))) for seed in range(3)]
        await eventually(lambda: runner.taken == 3)
        assert (await runner.compress(task(9))).reason == "queue_full"
        assert not any(each.done() for each in begun)
        os.kill(pid, signal.SIGCONT)
        assert await asyncio.gather(*begun) == [here(task(seed)) for seed in range(3)]
        assert await runner.compress(task(9)) == here(task(9))


async def test_a_worker_that_takes_too_long_is_replaced_while_the_other_goes_on() -> None:
    async with workers(processes=2, time_limit_s=1.5) as runner:
        stopped = runner.pids[0]
        os.kill(stopped, signal.SIGSTOP)
        begun = [asyncio.create_task(runner.compress(task(seed))) for seed in range(8)]
        found = await asyncio.gather(*begun)
        assert [each.reason for each in found].count("timeout") == 1
        assert sum(each.body is not None for each in found) == 7
        await eventually(lambda: stopped not in runner.pids and len(runner.pids) == 2)
        assert is_reaped(stopped)
        assert runner.replaced == 1
        assert await runner.compress(task()) == here(task())


async def test_a_call_that_timed_out_in_the_queue_costs_no_worker() -> None:
    async with workers(time_limit_s=1.0) as runner:
        (pid,) = runner.pids
        os.kill(pid, signal.SIGSTOP)
        first = asyncio.create_task(runner.compress(task(1)))
        await asyncio.sleep(0.5)
        late = [asyncio.create_task(runner.compress(task(seed))) for seed in range(2, 5)]
        assert (await first).reason == "timeout"
        found = await asyncio.gather(*late)
        # The replacement may or may not be warm in time; it is never killed for their sake.
        assert {each.reason for each in found} <= {"timeout", ""}
        await eventually(lambda: pid not in runner.pids and len(runner.pids) == 1)
        assert await runner.compress(task()) == here(task())
        assert runner.replaced == 1


async def test_a_worker_killed_on_a_task_fails_that_one_only() -> None:
    async with workers() as runner:
        (pid,) = runner.pids
        os.kill(pid, signal.SIGSTOP)
        first = asyncio.create_task(runner.compress(task(1)))
        second = asyncio.create_task(runner.compress(task(2)))
        await eventually(lambda: runner.taken == 2)
        os.kill(pid, signal.SIGKILL)
        assert (await first).reason == "failed"
        # None is ready: said at once rather than waited for.
        assert (await runner.compress(task(3))).reason == "failed"
        assert await second == here(task(2))
        assert is_reaped(pid)
        assert runner.replaced == 1


async def test_a_worker_killed_while_idle_is_replaced_before_it_is_needed() -> None:
    async with workers() as runner:
        (pid,) = runner.pids
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: runner.replaced == 1 and len(runner.pids) == 1)
        assert pid not in runner.pids
        assert await runner.compress(task()) == here(task())


async def test_a_cancelled_call_frees_its_place_and_its_answer_reaches_nobody() -> None:
    async with workers(queue=1) as runner:
        (pid,) = runner.pids
        os.kill(pid, signal.SIGSTOP)
        begun = [asyncio.create_task(runner.compress(task(seed))) for seed in (1, 2)]
        await eventually(lambda: runner.taken == 2)
        for each in begun:
            each.cancel()
        await asyncio.wait(begun)
        assert all(each.cancelled() for each in begun)
        assert runner.taken == 0
        third = asyncio.create_task(runner.compress(task(3)))
        await eventually(lambda: runner.taken == 1)
        os.kill(pid, signal.SIGCONT)
        assert await third == here(task(3))
        assert runner.pids == (pid,)


async def test_closing_answers_who_waits_and_leaves_no_process() -> None:
    async with workers(processes=2) as runner:
        pids = runner.pids
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        begun = [asyncio.create_task(runner.compress(task(seed))) for seed in range(5)]
        await eventually(lambda: runner.taken == 5)
        await runner.close()
        assert {each.reason for each in await asyncio.gather(*begun)} == {"failed"}
        assert all(map(is_reaped, pids))
        assert (await runner.compress(task())).reason == "failed"
        await runner.close()


async def test_closing_while_a_worker_is_replaced_leaves_no_process() -> None:
    before = children()
    async with workers() as runner:
        os.kill(runner.pids[0], signal.SIGKILL)
        await eventually(lambda: runner.replaced == 1)
        await eventually(lambda: bool(children() - before))
    assert children() - before == set()


def children() -> set[int]:
    """Child processes of this one, zombies too."""
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,comm="], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    return {int(pid) for pid, parent, name in rows if parent == str(os.getpid()) and name != "ps"}


def seen(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


async def test_a_worker_is_nicer_than_the_gateway_and_knows_none_of_its_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLUICE_KEY", "sk-secret")
    async with workers() as runner:
        (pid,) = runner.pids
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(nice + NICENESS, 19)
        assert b"sk-secret" not in seen(pid, "environ")
        assert b"OPENBLAS_NUM_THREADS=1" in seen(pid, "environ")
        assert b"\nThreads:\t1\n" in seen(pid, "status")
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        assert await runner.compress(task()) == here(task())
        assert runner.pids == (pid,)


async def test_a_start_that_is_cancelled_leaves_no_process() -> None:
    before = children()
    starting = asyncio.create_task(CompressWorkers(processes=2).start())
    await eventually(lambda: len(children() - before) == 2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert children() == before


async def test_a_start_that_fails_is_told_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('no numpy here')")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = children()
    with pytest.raises(WorkerGone):
        await CompressWorkers(processes=2).start()
    assert children() == before


GATEWAY = """
import asyncio, sys
from gateway.workers.pool import CompressWorkers
from gateway.ports import CompressTask

async def main():
    runner = CompressWorkers(processes=2, time_limit_s=3.0)
    await runner.start()
    task = CompressTask(
        endpoint="chat", body=b'{"messages":[]}', budget_tokens=9, bytes_per_token=4.0,
        tokenizer=sys.argv[1] or None,
    )
    call = asyncio.create_task(runner.compress(task))
    await asyncio.wait([call], timeout=0.5 if sys.argv[1] else 2.5)
    print(call.done(), *runner.pids, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("hung", [False, True])
def test_workers_end_when_the_gateway_is_killed_even_one_that_hangs(
    *, hung: bool, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    os.mkfifo(tokenizer)  # reading it waits for ever
    command = [sys.executable, "-c", GATEWAY, str(tokenizer) if hung else ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as gateway:
        assert gateway.stdout is not None
        done, *rest = gateway.stdout.readline().split()
        assert done == str(not hung)
        pids = [int(pid) for pid in rest]
        assert len(pids) == 2
        assert not any(map(gone, pids))
        gateway.kill()
        deadline = time.monotonic() + PATIENCE_S
        while not all(map(gone, pids)):
            assert time.monotonic() < deadline, f"workers {pids} outlive their gateway"
            time.sleep(0.05)
