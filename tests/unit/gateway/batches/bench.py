"""Batches over fakes in virtual time: storage that fails or is killed at any of its calls."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import orjson

from gateway.batches.contents import ContentGone
from gateway.batches.rights import BatchModels
from gateway.batches.run import Around
from gateway.batches.runner import Runner
from gateway.errors import StateFailure
from gateway.http.problems import error_body
from gateway.metrics import Metrics
from gateway.pipeline.pipeline import Pipeline
from gateway.ports import Changed, D, Documents, UpstreamCall, UpstreamResponse
from gateway.records.attempt import WorkerAddress
from gateway.records.batch import Batch, Promise, StoredFile, output_id
from gateway.records.record import Document
from gateway.records.usage import UsageLine
from gateway.tenancy.keyring import Keyring
from tests.builders import answer_body, chat_body, served_model
from tests.fakes import Answer, FakeStore, FakeUpstream, Script, whole

T = TypeVar("T")
TENANT = "open"


class Faults:
    """Counts calls; at one of them the process ends, or from one on storage is away."""

    def __init__(self, *, dies_at: int = -1, away: Callable[[int], bool] = lambda _: False) -> None:
        self.calls = 0
        self.dead = asyncio.Event()
        self._dies_at = dies_at
        self._away = away

    async def around(self, work: Callable[[], Awaitable[T]]) -> T:
        """A call: the process may end before it, or after it took effect."""
        self._point()
        if self._away(self.calls):
            raise StateFailure("scripted: away")
        await asyncio.sleep(0.01)
        done = await work()
        self._point()
        return done

    def _point(self) -> None:
        self.calls += 1
        if self.calls == self._dies_at:
            self.dead.set()
        if self.dead.is_set():
            raise asyncio.CancelledError


class World:
    """What outlives a process: documents, contents and the ledger."""

    def __init__(self) -> None:
        self.documents: dict[tuple[type, str], tuple[Any, int]] = {}
        """With their versions."""
        self.contents: dict[str, bytes] = {}
        self.ledger: dict[str, list[UsageLine]] = {}

    def batch(self, name: str = "batch_1") -> Batch:
        """As its document says."""
        batch: Batch = self.documents[Batch, name][0]
        return batch

    def file(self, suffix: str, name: str = "batch_1") -> StoredFile:
        """The record of the output (out) or the errors (err)."""
        file: StoredFile = self.documents[StoredFile, output_id(name, suffix)][0]
        return file

    def lines(self, suffix: str, name: str = "batch_1") -> list[Any]:
        """The output or the errors, as they are downloaded."""
        batch = self.batch(name)
        data = b"".join(
            self.contents[batch.part_name(part, suffix)]
            for part in batch.parts
            if part.size(suffix)
        )
        assert len(data) == batch.output_bytes(suffix)
        return [orjson.loads(line) for line in data.splitlines()]

    async def create(
        self, items: int = 10, *, name: str = "batch_1", window_s: int = 3600, **more: Any
    ) -> None:
        """Upload a file of so many requests, and make a batch of it."""
        data = b"".join(
            orjson.dumps(
                {
                    "custom_id": f"item {n}",
                    "method": "POST",
                    "url": "/v1/chat/completions",
                    "body": orjson.loads(chat_body(f"{n % 3} {n}")),
                }
            )
            + b"\n"
            for n in range(items)
        )
        file = StoredFile(
            id=f"file-{name}",
            tenant=TENANT,
            purpose="batch",
            filename="in.jsonl",
            bytes=len(data),
            created_unix_s=0,
            expires_unix_s=1 << 40,
            lines=items,
            model="m",
        )
        fields: dict[str, Any] = {
            "tenant": TENANT,
            "entitlement": "open",
            "endpoint": "/v1/chat/completions",
            "model": "m",
            "input_file": file.id,
            "completion_window": "1h",
            "created_unix_s": 0,
            "expires_unix_s": window_s,
            "total": items,
            "forecast": more.get("promise"),
        }
        self.contents[file.id] = data
        store = Process(self)
        await store.put(file, 0)
        await store.put(Batch(id=name, **fields | more), 0)


class Engines(FakeUpstream):
    """Each answer takes `answer_s` seconds; `most` is how many they had at once."""

    answer_s = 1.5
    now = most = 0
    asked: tuple[str, ...] = ()
    """Prompts in the order in which they came."""

    async def open(self, worker: WorkerAddress, call: UpstreamCall) -> UpstreamResponse:
        """See Upstream."""
        self.now += 1
        self.asked = (*self.asked, orjson.loads(call.body)["messages"][0]["content"])
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.answer_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.now -= 1
        return await super().open(worker, call)


class Process:
    """One gateway of it."""

    change = Documents.change

    def __init__(
        self,
        world: World,
        *script: Script,
        name: str = "a",
        faults: Faults | None = None,
        slots: int = 8,
        keyring: Keyring | None = None,
        leases: Any = None,
        ledger: str = "ledger",
    ) -> None:
        self.world, self.faults = world, faults or Faults()
        self.id = ledger
        self.served = served_model(workers=(1, 1), slots=slots, max_attempts=1)
        default: Answer = whole(200, answer_body(prompt=11, completion=5))
        self.upstream = Engines(list(script) or [default])
        self.leases, self.metrics = leases or FakeStore(), Metrics()
        clock = asyncio.get_running_loop().time
        self.draining = False
        ids = iter(range(1 << 30))

        keyring = keyring or Keyring()
        self.pipeline = Pipeline(
            models={"m": self.served},
            keyring=keyring,
            store=self.leases,
            upstream=self.upstream,
            metrics=self.metrics,
            records=lambda record: self.runner.note(record),  # noqa: PLW0108 - made below
            clock=clock,
            wall_clock=clock,
        )
        self.runner = Runner(
            Around(
                pipeline=self.pipeline,
                keyring=keyring,
                models=BatchModels({"m": self.served}, {}),
                store=self,  # type: ignore[arg-type]
                contents=self,  # type: ignore[arg-type]
                export=self,  # type: ignore[arg-type]
                metrics=self.metrics,
                error_body=error_body,
                new_id=lambda: f"{name}-{next(ids)}",
                clock=clock,
                wall_clock=clock,
                owner=name,
                currency="",
                forecaster=self,  # type: ignore[arg-type]
            ),
            lambda: self.draining,
        )

    async def run_until(self, done: Callable[[], bool], most_s: float = 7200.0) -> None:
        """Run batches until so, or until the process is killed."""
        self.runner.start()
        loop = asyncio.get_running_loop()
        until_s = loop.time() + most_s
        while not done() and not self.faults.dead.is_set():
            assert loop.time() < until_s, self.world.batch()
            await asyncio.sleep(0.25)
        await self.runner.close()

    # -- documents

    async def get(self, kind: type[D], name: str) -> tuple[D, int] | None:
        async def work() -> tuple[D, int] | None:
            return self.world.documents.get((kind, name))

        return await self.faults.around(work)

    async def put(self, document: Document, version: int, *, most: int = 0) -> int:
        async def work() -> int:
            key = type(document), document.id
            if self.world.documents.get(key, (None, 0))[1] != version:
                raise Changed
            self.world.documents[key] = document, version + 1
            return version + 1

        return await self.faults.around(work)

    async def open_names(self, kind: type[Document]) -> list[str]:
        async def work() -> list[str]:
            there = self.world.documents.values()
            return [d.id for d, _ in there if type(d) is kind and d.is_open]

        return await self.faults.around(work)

    # -- contents

    async def write(self, name: str, data: bytes) -> None:
        async def work() -> None:
            self.world.contents[name] = data

        await self.faults.around(work)

    async def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        async def work() -> bytes:
            if name not in self.world.contents:
                raise ContentGone(f"no {name}")
            return self.world.contents[name][start:end]

        return await self.faults.around(work)

    async def delete(self, name: Any, version: int = 0) -> None:
        async def work() -> None:
            self.world.contents.pop(name, None)

        await self.faults.around(work)

    # -- the forecaster

    async def forecast(self, batch: Batch) -> Promise | None:
        return batch.forecast

    async def learn(self, _: Batch) -> None: ...

    # -- the ledger

    async def post(self, part: str, lines: list[bytes]) -> None:
        async def work() -> None:
            decoded = [msgspec.json.decode(line, type=UsageLine) for line in lines]
            self.world.ledger.setdefault(f"{self.id} {part}", decoded)

        await self.faults.around(work)
