"""Sets that sources name: bounded, and taken in steps that let requests run; files of engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from gateway.background_task import BackgroundTasks
from gateway.fleet import discovery as runner
from gateway.fleet.discovery import Engine, Source, engines_of, sets_of_file
from gateway.ports import DiscoveryFailure, Sets
from gateway.records.attempt import FoundEngine
from gateway.settings.worker import WorkerConfig
from tests.unit.gateway.fleet.test_rotation import Bench


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.prober.close()


async def named(*engines: FoundEngine) -> Sets:
    """One set."""
    yield engines
    await asyncio.Event().wait()


def source_of(bench: Bench, *engines: FoundEngine) -> Source:
    worker = WorkerConfig(discover="file:///unused")
    apply = partial(bench.rotation.apply_to, "m", "only", "test://s")
    return Source("m", "only", "test://s", partial(named, *engines), worker.addresses_for, apply)


def engine(number: int, **more: object) -> FoundEngine:
    url = f"http://10.{number >> 16}.{number >> 8 & 255}.{number & 255}:80"
    return FoundEngine(urls=(url,), **more)  # type: ignore[arg-type]


async def followed(bench: Bench, source: Source) -> None:
    running = BackgroundTasks()
    running.start(source.run())
    await source.first.wait()
    await running.close()


async def test_a_source_names_only_so_many_workers_and_ranks_count(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MAX_WORKERS", 8)
    source = source_of(bench, engine(1, ranks=4), engine(2, ranks=5))
    await followed(bench, source)
    assert "over 8 workers" in source.failing
    assert bench.names == []


async def test_a_source_that_names_too_much_is_asked_less_and_less_often(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
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
async def test_what_no_engine_can_be_is_left_out(bench: Bench, odd: FoundEngine) -> None:
    await followed(bench, source_of(bench, odd, engine(1)))
    assert bench.names == ["10.0.0.1:80"]


async def test_two_thousand_engines_at_once_let_requests_run(bench: Bench) -> None:
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


async def test_a_secret_in_a_url_that_is_refused_is_not_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    urls = ("http://me:secret@h:80", "http://:secret@h", "http://h:80?token=secret")
    await followed(bench, source_of(bench, *(FoundEngine(urls=(url,)) for url in urls)))
    assert "//***@h" in caplog.text
    assert "secret" not in caplog.text


def test_urls_and_mappings_are_engines() -> None:
    text = b"workers:\n  - http://a:1\n  - {url: 'https://b:2', model: org/m, ranks: 4}\n"
    assert engines_of(text) == (
        FoundEngine(urls=("http://a:1",)),
        FoundEngine(urls=("https://b:2",), model="org/m", ranks=4),
    )
    assert engines_of(b"[]") == engines_of(b"workers: []") == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", r"empty: write \[\]"),
        (b"# none\n", "empty"),
        (b"workers:\n", "empty"),
        (b"{", "not YAML"),
        (b"a: b", "not a list"),
        (b"[1]", "entry 1 is no URL"),
        (b"[http://a:1, {uri: x}]", "entry 2 is no URL"),
        (b"[{url: a:1}]", "entry 1: url"),
        (b"[{url: 'http://a:1', ranks: many}]", "entry 1: model"),
        (b"[{url: 'http://a:1', ranks: 999}]", "entry 1: model"),
    ],
)
def test_what_is_no_list_of_engines_is_a_failure_that_names_the_entry(
    text: bytes, why: str
) -> None:
    with pytest.raises(DiscoveryFailure, match=why):
        engines_of(text)


async def test_a_swapped_link_is_a_change_and_a_touched_file_is_none(tmp_path: Path) -> None:
    link = tmp_path / "workers.yaml"
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"[http://{name}:1]")
    link.symlink_to(tmp_path / "a")
    seen = []
    async with asyncio.timeout(10), aclosing(sets_of_file(str(link), every_s=0.01)) as sets:
        async for found in sets:
            seen.append(found[0].urls[0])
            if len(seen) == 2:
                break
            (tmp_path / "a").touch()
            await asyncio.sleep(0.05)
            (tmp_path / "new").symlink_to(tmp_path / "b")
            (tmp_path / "new").rename(link)
    assert seen == ["http://a:1", "http://b:1"]


async def test_a_file_that_is_being_written_takes_no_engine_out(tmp_path: Path) -> None:
    """A half that lasts is a failure of the source, which keeps its engines."""
    path = tmp_path / "workers.yaml"
    path.write_text("[http://a:1, http://b:1]")
    seen: list[int] = []
    began = asyncio.Event()

    async def follow() -> None:
        while 3 not in seen:
            with suppress(DiscoveryFailure):
                async with aclosing(sets_of_file(str(path), every_s=0.01)) as sets:
                    while 3 not in seen:
                        seen.append(len(await anext(sets)))
                        began.set()

    async with asyncio.timeout(10):
        following = asyncio.create_task(follow())
        await began.wait()
        for text in ("", "[http://a:1", "[http://a:1, http://b:1, http://c:1]"):
            path.write_text(text)
            await asyncio.sleep(0.02)
        await following
    assert set(seen) == {2, 3}
