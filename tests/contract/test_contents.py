"""The contract of contents: a directory, and a bucket on a real S3 server (moto's)."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest

from gateway.batches.contents import PART_BYTES, ContentGone, Contents
from gateway.errors import StateFailure
from sluice.children import Children, free_ports


def address(url: str) -> dict[str, str]:
    """As an operator of a store like S3 tells it."""
    return {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}


@pytest.fixture(scope="module")
def bucket() -> Iterator[Contents]:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with Children() as children, pytest.MonkeyPatch.context() as environment:
        children.start([sys.executable, "-m", "moto.server", "-p", str(port)], quiet=True)
        deadline = time.monotonic() + 60
        while True:
            try:
                urlopen(f"{url}/moto-api/").close()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        for name, value in address(url).items():
            environment.setenv(name, value)
        contents = Contents("s3://bucket/some/prefix")
        contents.system.mkdir("bucket")
        yield contents
        contents.close()


@pytest.fixture(params=["directory", "bucket"])
def contents(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Contents]:
    if request.param == "bucket":
        made: Contents = request.getfixturevalue("bucket")
        yield made
        if made.system.exists(made.root):
            made.system.rm(made.root, recursive=True)
        return
    made = Contents(f"file://{tmp_path}/files/")
    yield made
    made.close()


async def test_a_content_is_read_by_ranges(contents: Contents) -> None:
    await contents.write("batch_1/part-1-1.out", b"0123456789")
    assert await contents.read("batch_1/part-1-1.out", 0, 10) == b"0123456789"
    assert await contents.read("batch_1/part-1-1.out", 3, 5) == b"34"
    assert await contents.read("batch_1/part-1-1.out", 8, 99) == b"89"
    assert await contents.read("batch_1/part-1-1.out", 10, 99) == b""
    assert await contents.read("batch_1/part-1-1.out") == b"0123456789"
    await contents.write("batch_1/part-1-1.out", b"new")
    assert await contents.read("batch_1/part-1-1.out", 0, 10) == b"new"
    with pytest.raises(ContentGone):
        await contents.read("batch_1/never", 0, 1)


def names(contents: Contents) -> list[str]:
    """All that is there, unfinished ones too."""
    there = contents.system.find(contents.root) if contents.system.exists(contents.root) else []
    return sorted(path.partition(contents.root.lstrip("/") + "/")[2] for path in there)


@pytest.mark.parametrize("size", [10, PART_BYTES + 7])
async def test_a_content_appears_whole_or_not_at_all(contents: Contents, size: int) -> None:
    data = bytes(i % 251 for i in range(1000)) * (size // 1000) + b"x" * (size % 1000)
    async with contents.open("file-1") as write:
        for at in range(0, size, 1 << 20):
            await write(data[at : at + (1 << 20)])
        with pytest.raises(StateFailure):
            await contents.read("file-1", 0, 1)
    assert await contents.read("file-1", 0, size + 1) == data
    with suppress(KeyError):
        async with contents.open("file-2") as write:
            await write(data)
            raise KeyError
    assert names(contents) == ["file-1"]


async def test_what_is_written_while_its_caller_goes_is_discarded(contents: Contents) -> None:
    with suppress(KeyError):
        async with contents.open("file-1") as write:
            call = asyncio.ensure_future(write(b"x" * (PART_BYTES + 1)))
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            raise KeyError
    assert names(contents) == []


async def test_names_are_deleted_with_all_below(contents: Contents) -> None:
    for name in ("batch_1/part-1-1.out", "batch_1/part-1-1.err", "file-1"):
        await contents.write(name, b"x")
    await contents.delete("batch_1")
    await contents.delete("batch_1")
    assert names(contents) == ["file-1"]
    await contents.delete("file-1")
    assert names(contents) == []


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    """In a process whose files may have 1 MiB: the system's answer is as on a full disk."""
    code = f"""
import asyncio, os, resource, signal
from gateway.batches.contents import ContentGone, Contents
from gateway.errors import StorageFull
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
async def main():
    contents = Contents("file://{tmp_path}/files")
    try:
        await contents.write("file-1", bytes(3 << 20))
    except StorageFull as full:
        print(full)
    print(os.listdir("{tmp_path}/files"))
asyncio.run(main())
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    full, left = ran.stdout.splitlines()
    assert "storage of batches" in full
    assert left == "[]"


async def test_a_store_that_is_away_is_a_state_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    for name, value in address(f"http://127.0.0.1:{port}").items():
        monkeypatch.setenv(name, value)
    away = Contents("s3://bucket/p")
    (tmp_path / "file").write_text("")
    no_folder = Contents(f"file://{tmp_path}/file/below")
    for contents in (away, no_folder):
        with pytest.raises(StateFailure):
            await contents.write("file-1", b"x")
        contents.close()
