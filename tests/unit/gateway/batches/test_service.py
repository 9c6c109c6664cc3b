"""What expires, what a killed process left, and what a batch takes from its file."""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.batches.batch_store import BatchStore
from gateway.batches.contents import TEMPORARY, Contents
from gateway.batches.service import ORPHANED_S, BatchRequest, BatchService, Bounds, window_of
from gateway.errors import BadRequest, NotFound
from gateway.records.batch import Batch, Part, StoredFile
from gateway.records.request import Principal
from gateway.routing.split_alias import SplitAlias
from gateway.store.backends import open_documents
from tests.builders import served_model

DAY_S = 86_400
NOW_S = 1_900_000_000
FORM = (
    b'--B\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--B\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
    b'{"custom_id": "1", "url": "/v1/completions", "body": {"model": "m"}}\r\n--B--'
)


class Clock:
    now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[BatchStore]:
    made = BatchStore(open_documents("memory://"), Contents(f"file://{tmp_path}/files"))
    yield made
    await made.close()


def service_of(store: BatchStore, clock: Clock, **more: Any) -> BatchService:
    bounds = Bounds(
        max_file_bytes=1 << 20, max_line_bytes=1 << 10, max_files=9, max_open=9, keep_s=30 * DAY_S
    )
    about = {"models": {}, "splits": {}, **more}
    return BatchService(store, bounds, wall_clock=clock, **about)


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    for at in range(len(data)):  # the worst way to send it
        yield data[at : at + 1]


async def uploaded(service: BatchService) -> StoredFile:
    form = "multipart/form-data; boundary=B"
    return await service.upload("t", form, pieces(FORM), lambda size: None)


def batch_of(number: int, **more: object) -> Batch:
    fields = {
        "tenant": "t",
        "entitlement": "e",
        "endpoint": "/v1/completions",
        "model": "m",
        "input_file": "",
        "completion_window": "1h",
        "window_s": 3600,
        "status": "completed",
        "created_unix_s": NOW_S,
        "expires_unix_s": NOW_S + 3600,
        "keep_s": 30 * DAY_S,
    }
    return Batch(id=f"batch_{number:032x}", **{**fields, **more})  # type: ignore[arg-type]


async def test_a_file_goes_when_it_expires_unless_a_batch_reads_it(store: BatchStore) -> None:
    clock = Clock()
    service = service_of(store, clock)
    free, read = await uploaded(service), await uploaded(service)
    await store.put(batch_of(1, input_file=read.id, status="in_progress"), 0)
    clock.now_s += 30 * DAY_S
    for stored in (free, read):
        with pytest.raises(NotFound):
            await service.file("t", stored.id)
    await service.tend()
    assert await store.get(StoredFile, free.id) is None
    assert set(await store.contents.names()) == {read.id}


async def test_an_output_is_its_batchs_parts_in_order_and_goes_with_them(store: BatchStore) -> None:
    clock = Clock()
    service = service_of(store, clock)
    parts = (
        Part(epoch=1, number=1, lines=2, bytes=6, error_lines=1, error_bytes=3),
        Part(epoch=1, number=2, error_lines=1, error_bytes=2),
        Part(epoch=2, number=1, lines=1, bytes=4),
    )
    batch = batch_of(1, parts=parts)
    for part, answers, errors in ((0, b"abcdef", b"xyz"), (1, b"", b"uv"), (2, b"ghij", b"")):
        await store.contents.write(batch.part_name(parts[part], "out"), answers)
        await store.contents.write(batch.part_name(parts[part], "err"), errors)
    await store.put(batch, 0)
    out, err = batch.outputs(now_unix_s=NOW_S)
    for output in (out, err):
        await store.put(output, 0)
    assert (out.bytes, err.bytes) == (10, 5)

    async def read(stored: StoredFile, start: int, end: int) -> bytes:
        return b"".join([piece async for piece in service.content(stored, start, end)])

    assert await read(out, 0, 10) == b"abcdefghij"
    assert await read(out, 4, 8) == b"efgh"
    assert await read(err, 2, 5) == b"zuv"
    gone = Part(epoch=1, number=1, unposted="the ledger of a host that is gone")
    await store.put(batch_of(2, parts=(gone,), input_file=err.id), 0)
    await service.delete_file("t", err.id)
    assert not any(name.endswith("err") for name in await store.contents.names())
    assert await read(out, 0, 10) == b"abcdefghij"
    clock.now_s += 31 * DAY_S
    await service.tend()
    assert await store.get(StoredFile, out.id) is None


async def test_what_a_killed_process_left_goes_after_a_day(
    store: BatchStore, tmp_path: Path
) -> None:
    clock = Clock()
    service = service_of(store, clock)
    stored = await uploaded(service)
    part = Part(epoch=1, number=1, lines=1, bytes=1)
    batch = batch_of(1, parts=(part,), status="in_progress")
    await store.put(batch, 0)
    kept = {stored.id, *(batch.part_name(part, suffix) for suffix in ("out", "idx", "use"))}
    fenced = batch.part_name(Part(epoch=1, number=2), "out")
    left = {
        f"file-{0:032x}",
        f"{stored.id}.ab{TEMPORARY}",
        fenced,
        batch_of(2).id + "/part-1-1.out",
    }
    strangers = {"notes.txt", "file-of-somebody"}
    for name in (*kept, *left, *strangers):
        if name != stored.id:
            await store.contents.write(name, b"x")
    for age_s, there in ((60, kept | left | strangers), (ORPHANED_S + 1, kept | strangers)):
        for name in await store.contents.names():
            os.utime(tmp_path / "files" / name, (NOW_S - age_s, NOW_S - age_s))
        await service.tend()
        assert set(await store.contents.names()) == there


@pytest.mark.parametrize(("text", "seconds"), [("24h", 86_400), ("90m", 5400), ("30d", 30 * DAY_S)])
def test_a_window_is_any_duration(text: str, seconds: int) -> None:
    assert window_of(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "0h", "1", "1s", "-1h", "31d", "999999h", "1h ", "1.5h"])
def test_another_window_is_refused(text: str) -> None:
    with pytest.raises(BadRequest):
        window_of(text)


async def test_a_tenants_ended_batches_are_bounded(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.service.MAX_BATCHES", 20)
    service = service_of(store, Clock())
    stored = await uploaded(service)
    unfinished = batch_of(1, status="in_progress")
    await store.put(unfinished, 0)
    ended = batch_of(2, parts=(Part(epoch=1, number=1, lines=1, bytes=1),))
    await store.put(ended, 0)
    (output,) = ended.outputs(now_unix_s=NOW_S)
    await store.put(output, 0)
    asked = BatchRequest(input_file_id=stored.id, endpoint="/v1/embeddings")  # another's: it fails
    for _ in range(50):
        assert (await service.create(WHO, asked, None)).status == "failed"
    kept = [batch for batch, _ in await store.page(Batch, "t", "", 99)]
    assert len(kept) <= 20
    assert unfinished in kept
    assert ended not in kept
    assert await store.get(StoredFile, output.id) is None


WHO = Principal(
    entitlement="",
    tenant="t",
    key="ci",
    choices={m: (Principal(entitlement=f"own-{m}", tenant="t", model=m),) for m in ("m1", "m2")},
)


@pytest.mark.parametrize(
    ("who", "asked", "used"),
    [
        (WHO, None, ""),
        (WHO, "own-m1", "own-m1"),
        (msgspec.structs.replace(WHO, key="jwt:ann"), None, "own-m1"),
    ],
)
async def test_items_of_a_split_alias_use_each_models_own_entitlement(
    store: BatchStore, who: Principal, asked: str | None, used: str
) -> None:
    """Unless the client names one, or its token does: that opens what the batch was made with."""
    service = service_of(
        store,
        Clock(),
        models={name: served_model(name=name) for name in ("m1", "m2")},
        splits={"m": SplitAlias("m", {"m1": 1, "m2": 1})},
    )
    stored = await uploaded(service)
    request = BatchRequest(input_file_id=stored.id, endpoint="/v1/completions")
    batch = await service.create(who, request, asked)
    assert (batch.status, batch.entitlement, batch.key) == ("validating", used, who.key)
