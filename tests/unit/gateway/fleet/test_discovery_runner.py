"""Sets that sources name: bounded, and taken in steps that let requests run."""

import asyncio
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest

from gateway.background_task import BackgroundTasks
from gateway.fleet import discovery as runner
from gateway.fleet.discovery import Engine, Source
from gateway.ports import Sets
from gateway.records.attempt import FoundEngine
from gateway.settings.worker import WorkerConfig
from tests.unit.gateway.fleet.test_rotation import Bench


async def named(*engines: FoundEngine) -> Sets:
    """One set."""
    yield engines
    await asyncio.Event().wait()


def source_of(bench: Bench, *engines: FoundEngine) -> Source:
    worker = WorkerConfig(discover="file:///unused")
    apply = partial(bench.rotation.apply_to, "m", "only", "test://s")
    return Source("m", "only", "test://s", partial(named, *engines), worker.found, apply)


def engine(number: int, **more: object) -> FoundEngine:
    url = f"http://10.{number >> 16}.{number >> 8 & 255}.{number & 255}:80"
    return FoundEngine(urls=(url,), **more)  # type: ignore[arg-type]


async def followed(bench: Bench, source: Source) -> None:
    running = BackgroundTasks()
    running.start(source.run())
    await source.first.wait()
    await running.close()


async def test_a_source_names_only_so_many_workers_and_ranks_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "MAX_WORKERS", 8)
    bench = Bench()
    source = source_of(bench, engine(1, ranks=4), engine(2, ranks=5))
    await followed(bench, source)
    assert "over 8 workers" in source.failing
    assert bench.names == []
    await bench.prober.close()


async def test_a_source_that_names_too_much_is_asked_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    source = source_of(bench, engine(1), engine(2))
    slept: list[float] = []

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)
        if len(slept) == 4:
            raise asyncio.CancelledError

    monkeypatch.setattr(runner, "MAX_WORKERS", 1)
    monkeypatch.setattr(runner, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(runner, "random", SimpleNamespace(uniform=max))
    with pytest.raises(asyncio.CancelledError):
        await source.run()
    assert slept == [0.5, 1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    "odd",
    [
        FoundEngine(urls=("http://169.254.169.254/latest",)),
        FoundEngine(urls=("http://[fe80::1]:80",)),
        FoundEngine(urls=("http://[::ffff:169.254.169.254]:80",)),
        FoundEngine(urls=("http://0.0.0.0:80",)),
        FoundEngine(urls=("http://2852039166",)),
        FoundEngine(urls=("http://0xA9FEA9FE:80",)),
        FoundEngine(urls=("http://169.254.43518:80",)),
        FoundEngine(urls=("http://0251.0376.0251.0376:80",)),
        FoundEngine(urls=("http://169.254.169.254.:80",)),
        FoundEngine(urls=("http://a:80/" + "x" * 3000,)),
        FoundEngine(urls=("http://a:80",), model="x" * 300),
        FoundEngine(urls=("http://user:key@a:80",)),
    ],
)
async def test_what_no_engine_can_be_is_left_out(odd: FoundEngine) -> None:
    bench = Bench()
    await followed(bench, source_of(bench, odd, engine(1)))
    assert bench.names == ["10.0.0.1:80"]
    await bench.prober.close()


async def test_two_thousand_engines_at_once_let_requests_run() -> None:
    bench = Bench()
    source = source_of(bench, *(engine(number) for number in range(2000)))
    read: list[FoundEngine] = []
    engine_of = source._engine_of

    def counted(found: FoundEngine) -> Engine:
        read.append(found)
        return engine_of(found)

    source._engine_of = counted
    turns: list[tuple[int, int]] = []

    async def look() -> None:
        while len(bench.joined) < 2000:
            turns.append((len(read), len(bench.joined)))
            await asyncio.sleep(0)

    looking = asyncio.ensure_future(look())
    await followed(bench, source)
    await looking
    assert max(after[0] - before[0] for before, after in pairwise(turns)) == runner.SLICE
    assert max(after[1] - before[1] for before, after in pairwise(turns)) == 1
    await bench.prober.close()


async def test_a_secret_in_a_url_that_is_refused_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    urls = ("http://me:secret@h:80", "http://:secret@h", "http://h:80?token=secret")
    await followed(bench, source_of(bench, *(FoundEngine(urls=(url,)) for url in urls)))
    assert "//***@h" in caplog.text
    assert "secret" not in caplog.text
    await bench.prober.close()
