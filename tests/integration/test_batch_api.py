"""Files and batches over real sockets, with the official client; no engine answers here."""

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bench.common.fleet import MODEL, Fleet
from gateway.batches.contents import Contents
from gateway.records.batch import Batch, Part
from gateway.store.backends import open_documents
from tests.asking import bearer, entitlement, until
from tests.running import sluice

MAX_FILE_BYTES = 64 << 20


def line(number: int, text: str = "hello", **more: Any) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    asked = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions"}
    return json.dumps({**asked, "body": body, **more}) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches") / "files"


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[Fleet]:
    batches = {
        "url": f"file://{folder}",
        "max_file_bytes": MAX_FILE_BYTES,
        "max_files": 4,
        "max_open": 2,
    }
    config = {
        "state": {"url": f"sqlite:///{folder.parent}/sluice.db"},
        "batches": batches,
        "entitlements": [entitlement(name) for name in "abcdef"],
    }
    with Fleet(short=1, long=0, config=config) as made:
        made.kill_engine(made.engines[0])  # batches wait
        yield made


def client_of(fleet: Fleet, name: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=fleet.url + "/v1",
        api_key=f"sk-{name}",
        max_retries=0,
        _strict_response_validation=True,
    )


def upload(client: openai.OpenAI, text: str, **more: Any) -> openai.types.FileObject:
    return client.files.create(file=("in.jsonl", text.encode()), purpose="batch", **more)


def create(client: openai.OpenAI, file: str, **more: Any) -> openai.types.Batch:
    """A batch that nothing is promised about: no engine is there."""
    asked: Any = {"completion_window": "24h", "endpoint": "/v1/chat/completions", **more}
    late = {"sluice": {"accept_late": True}}
    return client.batches.create(input_file_id=file, extra_body=late, **asked)


def test_files_as_the_official_client_sees_them(fleet: Fleet) -> None:
    text = "".join(line(n) for n in range(30))
    with client_of(fleet, "a") as client:
        files = [upload(client, text) for _ in range(3)]
        first = client.files.retrieve(files[0].id)
        assert first == files[0]
        assert (first.bytes, first.filename, first.status) == (len(text), "in.jsonl", "processed")
        assert first.expires_at == first.created_at + 30 * 86_400
        ids = [file.id for file in files]
        assert [file.id for file in client.files.list()] == ids[::-1]
        assert [file.id for file in client.files.list(order="asc", limit=1)] == ids
        assert client.files.list(purpose="batch_output").data == []
        content = client.files.content(ids[0])
        assert content.text == text
        part = client.files.content(ids[0], extra_headers={"range": "bytes=10-19"})
        assert (part.response.status_code, part.text) == (206, text[10:20])
        end = client.files.content(ids[0], extra_headers={"range": "bytes=-7"})
        assert end.text == text[-7:]
        assert end.response.headers["content-range"].endswith(f"/{len(text)}")
        path = f"{fleet.url}/v1/files/{ids[0]}/content"
        head = httpx.head(path, headers={**bearer("sk-a"), "range": "bytes=5-"}, trust_env=False)
        assert (head.status_code, head.headers["content-length"]) == (206, str(len(text) - 5))
        with pytest.raises(openai.APIStatusError) as beyond:
            client.files.content(ids[0], extra_headers={"range": f"bytes={len(text)}-"})
        assert beyond.value.status_code == 416
        for name in ids:
            assert client.files.delete(name).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(ids[0])
        assert client.files.list().data == []
        week = {"anchor": "created_at", "seconds": 7 * 86_400}
        kept = upload(client, text, expires_after=week)
        assert kept.expires_at == kept.created_at + 7 * 86_400
        client.files.delete(kept.id)


def test_batches_as_the_official_client_sees_them(fleet: Fleet) -> None:
    with client_of(fleet, "b") as client:
        file = upload(client, line(1) + "\n" + line(2))
        batch = create(client, file.id, completion_window="90m", metadata={"job": "nightly"})
        assert (batch.status, batch.errors, batch.model) == ("validating", None, MODEL)
        assert batch.expires_at == batch.created_at + 90 * 60
        assert batch.request_counts is not None
        assert batch.request_counts.total == 2
        again = client.batches.retrieve(batch.id)
        assert (again.id, again.metadata) == (batch.id, {"job": "nightly"})
        with pytest.raises(openai.ConflictError, match="unfinished batch reads"):
            client.files.delete(file.id)
        other = create(client, file.id)
        with pytest.raises(openai.RateLimitError, match="2 unfinished batches"):
            create(client, file.id)
        assert [b.id for b in client.batches.list(limit=1)] == [other.id, batch.id]
        assert client.batches.cancel(batch.id).status in {"cancelling", "cancelled"}
        assert client.batches.cancel(batch.id).status in {"cancelling", "cancelled"}


def test_a_batch_fails_with_the_number_and_the_reason_of_each_bad_line(fleet: Fleet) -> None:
    lines = [
        line(1),
        "{not json\n",
        line(3, method="GET"),
        line(4, url="/v1/moderations"),
        json.dumps({"custom_id": "x", "url": "/v1/chat/completions"}) + "\n",
        line(6, body={"model": "another"}),
        line(1),
        line(8, body={"model": MODEL, "stream": True}),
    ]
    with client_of(fleet, "c") as client:
        file = upload(client, "".join(lines))
        assert file.status == "error"
        batch = create(client, file.id)
        assert batch.status == "failed"
        assert batch.errors is not None
        assert [(e.line, e.code) for e in batch.errors.data or ()] == [
            (2, "invalid_json_line"),
            (3, "invalid_method"),
            (4, "invalid_url"),
            (5, "missing_required_parameter"),
            (6, "mismatched_model"),
            (7, "duplicate_custom_id"),
            (8, "invalid_value"),
        ]
        good = upload(client, line(1))
        wrong = create(client, good.id, endpoint="/v1/embeddings")
        assert wrong.errors is not None
        assert [e.code for e in wrong.errors.data or ()] == ["mismatched_url"]
        refused: list[tuple[dict[str, Any], str]] = [
            ({"completion_window": "soon"}, "completion_window"),
            ({"endpoint": "/v1/images"}, "endpoint"),
            ({"metadata": {"k": "v" * 513}}, "metadata"),
        ]
        for more, param in refused:
            with pytest.raises(openai.BadRequestError) as bad:
                create(client, good.id, **more)
            assert param in str(bad.value.param)
        stranger = upload(client, line(1, body={"model": "nobody's"}))
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            create(client, stranger.id)


def test_a_tenant_finds_nothing_of_another_one(fleet: Fleet, folder: Path) -> None:
    with client_of(fleet, "b") as owner, client_of(fleet, "d") as other:
        file, batch = owner.files.list().data[0], owner.batches.list().data[0]
        inside = next(folder.glob("file-*")).name
        calls: list[Callable[[], object]] = [
            lambda: other.files.retrieve(file.id),
            lambda: other.files.content(file.id),
            lambda: other.files.delete(file.id),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: create(other, file.id),
            lambda: other.files.content(f"../files/{inside}"),
            lambda: other.files.content("..%2Fsluice.db"),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                call()
        assert not other.files.list(after=file.id).data
        assert not other.batches.list(after=batch.id).data
        assert owner.files.retrieve(file.id) == file


def test_the_bounds_of_files_are_told_and_nothing_more_is_kept(fleet: Fleet, folder: Path) -> None:
    with client_of(fleet, "d") as client:
        head = {**bearer("sk-d"), "content-type": "multipart/form-data; boundary=B"}
        chunks = [FORM, *[line(1, "x" * (8 << 20)).encode()] * 9]  # of no announced length
        for big in (iter(chunks), b"".join(chunks)):
            answer = httpx.post(f"{fleet.url}/v1/files", content=big, headers=head, trust_env=False)
            assert answer.status_code == 413
        for text, param in (("", "empty_file"), (line(1), "")):
            file = upload(client, text)
            if param:
                found = create(client, file.id).errors
                assert found is not None
                assert [e.code for e in found.data or ()] == [param]
        for _ in range(2):
            upload(client, line(1))
        before = sorted(folder.iterdir())
        with pytest.raises(openai.RateLimitError, match="4 files"):
            upload(client, line(1))
        client.files.delete(client.files.list().data[0].id)
        with pytest.raises(openai.BadRequestError, match="purpose"):
            client.files.create(file=b"x", purpose="vision")
        with pytest.raises(openai.BadRequestError, match="3600"):
            upload(client, line(1), expires_after={"anchor": "created_at", "seconds": 60})
        assert len(sorted(folder.iterdir())) == len(before) - 1


def head_of(fleet: Fleet, key: str, length: int) -> bytes:
    return (
        f"POST /v1/files HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {key}\r\n"
        f"content-type: multipart/form-data; boundary=B\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


FORM = b'--B\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'


def test_a_wrong_key_is_refused_before_the_body(fleet: Fleet) -> None:
    with socket.create_connection(("127.0.0.1", fleet.port), 10) as raw:
        raw.sendall(head_of(fleet, "sk-nobody", 1 << 30))
        assert b" 401 " in raw.recv(4096).split(b"\r\n")[0]


def test_of_an_interrupted_upload_nothing_stays(fleet: Fleet, folder: Path) -> None:
    before = set(folder.iterdir())
    with socket.create_connection(("127.0.0.1", fleet.port), 10) as raw:
        raw.sendall(head_of(fleet, "sk-e", 9 << 20) + FORM + line(1).encode() * 30_000)
        until(lambda: set(folder.iterdir()) - before)
    until(lambda: set(folder.iterdir()) == before)
    with client_of(fleet, "e") as client:
        assert client.files.list().data == []


def peak_bytes(fleet: Fleet) -> int:
    assert fleet.gateway is not None
    status = Path(f"/proc/{fleet.gateway.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def test_a_large_file_passes_through_little_memory(fleet: Fleet) -> None:
    many = 25_000
    text = "".join(line(n, "word " * 400) for n in range(many)).encode()
    assert len(text) > 48 << 20
    with client_of(fleet, "e") as client:
        upload(client, line(1))
        before = peak_bytes(fleet)
        file = client.files.create(file=("big.jsonl", text), purpose="batch")
        assert client.files.content(file.id).read() == text
        assert peak_bytes(fleet) - before < 24 << 20
        assert create(client, file.id).request_counts == openai.types.BatchRequestCounts(
            completed=0, failed=0, total=many
        )


def alive(fleet: Fleet) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{fleet.url}/health", trust_env=False).is_success
    return False


def test_what_is_kept_outlives_the_process(fleet: Fleet) -> None:
    with client_of(fleet, "b") as client:
        files, batches = client.files.list().data, client.batches.list().data
        fleet.kill_replica(fleet.replicas[0])
        fleet.start_replica(fleet.replicas[0])
        until(lambda: alive(fleet))
        assert client.files.list().data == files
        assert [b.id for b in client.batches.list().data] == [b.id for b in batches]
        assert client.files.content(files[0].id).text == line(1) + "\n" + line(2)


def test_without_the_section_the_routes_say_how_to_turn_them_on() -> None:
    with Fleet(short=1, long=0) as off:
        for path in ("/v1/files", "/v1/batches/batch_1"):
            answer = httpx.get(off.url + path, headers=bearer("sk-any"), trust_env=False)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "batches_off")
            assert "batches.url" in answer.json()["error"]["message"]


def test_the_command_submits_lists_cancels_and_tells_of_bad_lines(
    fleet: Fleet, tmp_path: Path
) -> None:
    own = {"SLUICE_API_KEY": "sk-f", "SLUICE_URL": fleet.url}
    file = tmp_path / "requests.jsonl"
    file.write_text(line(1) + line(2))
    made = sluice("batch", "submit", file, "--window", "6h", "--accept-late", "--json", **own)
    assert made.exit_code == 0, made.output
    batch = json.loads(made.stdout)
    assert (batch["endpoint"], batch["request_counts"]["total"]) == ("/v1/chat/completions", 2)
    assert batch["completion_window"] == "6h"
    listed = sluice("batch", "list", **own)
    assert batch["id"] in listed.stdout
    early = sluice("batch", "fetch", batch["id"], **own)
    assert (early.exit_code, "sluice batch watch" in early.output) == (1, True)
    assert sluice("batch", "cancel", batch["id"], **own).exit_code == 0
    file.write_text(line(1) + "oops\n")
    bad = sluice("batch", "submit", file, **own)
    assert bad.exit_code == 1
    assert "line 2: The line is not a JSON object." in bad.stdout
    file.write_text("oops\n")
    assert sluice("batch", "submit", file, **own).exit_code == 2
    own["SLUICE_API_KEY"] = "sk-nobody"
    assert sluice("batch", "list", **own).exit_code == 2


def test_the_command_fetches_what_a_batch_wrote(fleet: Fleet, folder: Path, tmp_path: Path) -> None:
    """A batch that has ended, as a runner leaves it."""
    part = Part(epoch=1, number=1, lines=2, bytes=8, error_lines=1, error_bytes=3)
    ended = Batch(
        id=f"batch_{7:032x}",
        tenant="tenant-f",
        entitlement="f",
        endpoint="/v1/chat/completions",
        model=MODEL,
        input_file="",
        completion_window="1h",
        status="completed",
        created_unix_s=int(time.time()),
        expires_unix_s=int(time.time()) + 3600,
        total=3,
        parts=(part,),
    )

    async def leave() -> None:
        url = f"sqlite:///{folder.parent}/sluice.db"
        store, contents = open_documents(url), Contents(f"file://{folder}")
        await contents.write(ended.part_name(part, "out"), b"one\ntwo\n")
        await contents.write(ended.part_name(part, "err"), b"no\n")
        for output in ended.outputs(now_unix_s=ended.created_unix_s):
            await store.put(output, 0)
        await store.put(ended, 0)
        await store.close()
        contents.close()

    asyncio.run(leave())
    own = {"SLUICE_API_KEY": "sk-f", "SLUICE_URL": fleet.url}
    watched = sluice("batch", "watch", ended.id, **own)
    assert (watched.exit_code, "2 answered, 1 failed of 3" in watched.stdout) == (0, True)
    out, err = tmp_path / "out.jsonl", tmp_path / "err.jsonl"
    fetched = sluice("batch", "fetch", ended.id, "-o", out, "--errors", err, "--json", **own)
    assert json.loads(fetched.stdout) == {"output": str(out), "error": str(err)}
    assert (out.read_text(), err.read_text()) == ("one\ntwo\n", "no\n")
    with client_of(fleet, "f") as client:
        found = client.batches.retrieve(ended.id)
        assert found.output_file_id is not None
        assert client.files.retrieve(found.output_file_id).purpose == "batch_output"
        assert client.files.content(found.output_file_id).text == "one\ntwo\n"
