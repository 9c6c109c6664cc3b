"""A file of engines: what it may hold, and that only its content counts."""

import asyncio
from contextlib import aclosing, suppress
from pathlib import Path

import pytest

from gateway.fleet.discovery import engines_of, sets_of_file
from gateway.ports import DiscoveryFailure
from gateway.records.attempt import FoundEngine


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


async def test_a_missing_file_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(DiscoveryFailure, match="No such file"):
        async with aclosing(sets_of_file(str(tmp_path / "none"))) as sets:
            await anext(sets)


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
