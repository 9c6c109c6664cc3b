"""What expires, what a killed process left, and what a batch takes from its file."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.batches.contents import UNFINISHED, Contents
from gateway.batches.intake import Bounds
from gateway.batches.rights import BatchModels
from gateway.batches.service import UPLOAD_S, BatchRequest, BatchService
from gateway.errors import BadRequest, NotFound
from gateway.records.batch import Batch, Part, StoredFile
from gateway.records.request import Principal
from gateway.routing.split_alias import SplitAlias
from gateway.store.backends import open_documents
from tests.builders import served_model

DAY_S = 86_400
MONTH_S = 30 * DAY_S
NOW_S = 1_900_000_000
FORM_TYPE = "multipart/form-data; boundary=B"
FORM = (
    b'--B\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--B\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
    b'{"custom_id": "1", "url": "/v1/completions", "body": {"model": "m"}}\r\n--B--'
)


class Clock:
    now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


class Place:
    """Documents and contents of a gateway."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = open_documents("memory://")
        self.contents = Contents(f"file://{folder}")

    def service(self, clock: Clock, **more: Any) -> BatchService:
        bounds = Bounds(
            max_file_bytes=1 << 20, max_line_bytes=1 << 10, max_files=9, max_open=9, keep_s=MONTH_S
        )
        about = {"models": BatchModels({}, {}), **more}
        return BatchService(self.store, self.contents, bounds, wall_clock=clock, **about)

    def names(self) -> set[str]:
        """Of all contents."""
        there = self.folder.rglob("*")
        return {str(path.relative_to(self.folder)) for path in there if path.is_file()}


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    place = Place(tmp_path / "files")
    yield place
    place.contents.close()
    await place.store.close()


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    for at in range(len(data)):  # the worst way to send it
        yield data[at : at + 1]


async def uploaded(service: BatchService) -> StoredFile:
    return await service.upload("t", FORM_TYPE, pieces(FORM), lambda size: None)


def batch_of(number: int, **more: object) -> Batch:
    fields = {
        "tenant": "t",
        "entitlement": "e",
        "endpoint": "/v1/completions",
        "model": "m",
        "input_file": "",
        "completion_window": "1h",
        "status": "completed",
        "created_unix_s": NOW_S,
        "expires_unix_s": NOW_S + 3600,
        "keep_s": 30 * DAY_S,
    }
    return Batch(id=f"batch_{number:032x}", **{**fields, **more})  # type: ignore[arg-type]


async def test_a_file_goes_when_it_expires_unless_a_batch_reads_it(place: Place) -> None:
    clock = Clock()
    service = place.service(clock)
    free, read = await uploaded(service), await uploaded(service)
    await place.store.put(batch_of(1, input_file=read.id, status="in_progress"), 0)
    clock.now_s += 30 * DAY_S
    for stored in (free, read):
        with pytest.raises(NotFound):
            await service.own(StoredFile, "t", stored.id)
    await service.tend()
    assert await place.store.get(StoredFile, free.id) is None
    assert place.names() == {read.id}


async def test_an_output_is_its_batchs_parts_in_order_and_goes_with_them(place: Place) -> None:
    clock = Clock()
    service = place.service(clock)
    parts = (
        Part(epoch=1, number=1, lines=2, bytes=6, error_lines=1, error_bytes=3),
        Part(epoch=1, number=2, error_lines=1, error_bytes=2),
        Part(epoch=2, number=1, lines=1, bytes=4),
    )
    batch = batch_of(1, parts=parts)
    for part, answers, errors in ((0, b"abcdef", b"xyz"), (1, b"", b"uv"), (2, b"ghij", b"")):
        await place.contents.write(batch.part_name(parts[part], "out"), answers)
        await place.contents.write(batch.part_name(parts[part], "err"), errors)
    await place.store.put(batch, 0)
    out, err = batch.outputs(now_unix_s=NOW_S)
    for output in (out, err):
        await place.store.put(output, 0)
    assert (out.bytes, err.bytes) == (10, 5)

    async def read(stored: StoredFile, start: int, end: int) -> bytes:
        return b"".join([piece async for piece in service.content(stored, start, end)])

    assert await read(out, 0, 10) == b"abcdefghij"
    assert await read(out, 4, 8) == b"efgh"
    assert await read(err, 2, 5) == b"zuv"
    gone = Part(epoch=1, number=1, unposted="the ledger of a host that is gone")
    await place.store.put(batch_of(2, parts=(gone,), input_file=err.id), 0)
    await service.delete_file("t", err.id)
    assert not any(name.endswith("err") for name in place.names())
    assert await read(out, 0, 10) == b"abcdefghij"
    clock.now_s += 31 * DAY_S
    await service.tend()
    assert await place.store.get(StoredFile, out.id) is None


async def test_what_a_killed_process_left_of_an_upload_goes_after_a_day(place: Place) -> None:
    clock = Clock()
    service = place.service(clock)
    strangers = {"notes.txt", f"file-{0:032x}"}  # of a gateway whose state is another one
    for name in strangers:
        await place.contents.write(name, b"x")

    async def stuck() -> AsyncIterator[bytes]:
        yield FORM[:-30]
        await asyncio.Event().wait()

    upload = asyncio.create_task(service.upload("t", FORM_TYPE, stuck(), lambda size: None))
    async with asyncio.timeout(10):
        while place.names() == strangers:  # noqa: ASYNC110 - a thread creates it
            await asyncio.sleep(0.01)
    (name,) = place.names() - strangers
    assert name.endswith(UNFINISHED)
    assert await service.files("t", "", 9, oldest_first=False, purpose=None) == []
    for later_s in (UPLOAD_S - 60, 120):
        assert place.names() > strangers
        with pytest.raises(NotFound):
            await service.own(StoredFile, "t", name.removesuffix(UNFINISHED))
        clock.now_s += later_s
        await service.tend()
    assert place.names() == strangers
    assert await place.store.open_names(StoredFile) == []
    upload.cancel()
    await asyncio.wait([upload])
    assert place.names() == strangers


@pytest.mark.parametrize(("text", "seconds"), [("24h", 86_400), ("90m", 5400), ("30d", 30 * DAY_S)])
async def test_a_window_is_any_duration(place: Place, text: str, seconds: int) -> None:
    service = place.service(Clock())
    stored = await uploaded(service)
    asked = {"input_file_id": stored.id, "endpoint": "/v1/embeddings", "completion_window": text}
    batch = await service.create(WHO, msgspec.convert(asked, BatchRequest), None)
    assert batch.expires_unix_s - batch.created_unix_s == seconds


@pytest.mark.parametrize("text", ["", "h", "0h", "1", "1s", "-1h", "31d", "999999h", "1h ", "1h\n"])
async def test_another_window_is_refused(place: Place, text: str) -> None:
    service = place.service(Clock())
    stored = await uploaded(service)
    asked = {"input_file_id": stored.id, "endpoint": "/v1/embeddings", "completion_window": text}
    with pytest.raises((BadRequest, msgspec.ValidationError)):
        await service.create(WHO, msgspec.convert(asked, BatchRequest), None)


async def test_a_tenants_ended_batches_are_bounded(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.service.MAX_BATCHES", 20)
    service = place.service(Clock())
    stored = await uploaded(service)
    unfinished = batch_of(1, status="in_progress")
    await place.store.put(unfinished, 0)
    ended = batch_of(2, parts=(Part(epoch=1, number=1, lines=1, bytes=1),))
    await place.store.put(ended, 0)
    (output,) = ended.outputs(now_unix_s=NOW_S)
    await place.store.put(output, 0)
    asked = BatchRequest(input_file_id=stored.id, endpoint="/v1/embeddings")  # another's: it fails
    for _ in range(50):
        assert (await service.create(WHO, asked, None)).status == "failed"
    kept = [batch for batch, _ in await place.store.page(Batch, "t", "", 99)]
    assert len(kept) <= 20
    assert unfinished in kept
    assert ended not in kept
    assert await place.store.get(StoredFile, output.id) is None


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
    place: Place, who: Principal, asked: str | None, used: str
) -> None:
    """Unless the client names one, or its token does: that opens what the batch was made with."""
    service = place.service(
        Clock(),
        models=BatchModels(
            {name: served_model(name=name) for name in ("m1", "m2")},
            {"m": SplitAlias("m", {"m1": 1, "m2": 1})},
        ),
    )
    stored = await uploaded(service)
    request = BatchRequest(input_file_id=stored.id, endpoint="/v1/completions")
    batch = await service.create(who, request, asked)
    assert (batch.status, batch.entitlement, batch.key) == ("validating", used, who.key)
