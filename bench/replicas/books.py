"""A model's token pool as stored in Redis, and the ledger against exported usage."""

import asyncio
import contextlib
import hashlib
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any, Final, Self

import msgspec
from redis import Redis

from bench.common.fleet import MODEL, Fleet, GatewayProcess, RedisServer
from bench.common.raw_client import RawClient
from bench.common.report import Row, equals
from gateway.store.redis.scripts import Calls, Scripts, record


def entitlement(name: str, service_class: str, **more: Any) -> dict[str, Any]:
    """An entry of the file; its key is `key-of-NAME`."""
    digest = hashlib.sha256(f"key-of-{name}".encode()).hexdigest()
    return {
        "name": name,
        "tenant": f"tenant-{name}",
        "model": MODEL,
        "service_class": service_class,
        "api_keys": [f"sha256:{digest}"],
        **more,
    }


def fleet_of(
    entitlements: Sequence[Mapping[str, Any]],
    gateways: Sequence[Mapping[str, Any]],
    *,
    window_tokens: int = 2048,
    slots: int = 32,
    server: Mapping[str, Any] | None = None,
) -> Fleet:
    """Two engines, and a gateway for each of what `gateways` adds to their files."""
    first, *further = gateways
    return Fleet(
        short=2,
        long=0,
        short_window=window_tokens,
        short_slots=slots,
        mock=("--prefix-cache-tokens", "0"),
        config={"entitlements": list(entitlements), **first},
        further=[{"entitlements": list(entitlements), **more} for more in further],
        server=server,
    )


@contextlib.contextmanager
def on_redis(
    entitlements: Sequence[Mapping[str, Any]],
    gateways: int,
    *,
    env: Mapping[str, str] | None = None,
    **more: Any,
) -> Iterator[tuple[Fleet, list[Path], "Books"]]:
    """So many gateways on a Redis of their own, and their exports.

    `env`: of every second gateway; `more`: of `fleet_of`.
    """
    with (
        RedisServer() as redis,
        tempfile.TemporaryDirectory() as folder,
        redis.client() as client,
    ):
        told, files = exports_in(Path(folder), gateways)
        fleet = fleet_of(entitlements, [{**t, "state": {"url": redis.url}} for t in told], **more)
        for replica in fleet.replicas[1::2]:
            replica.env = env
        with fleet:
            yield fleet, files, Books(client)


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """In flight at one moment."""

    pool: int
    leases: int
    tenants: dict[str, int]


class Books:
    """The keys of the bench's model on one server."""

    def __init__(self, client: Redis) -> None:
        """`client` is not closed here."""
        self._client = client
        calls = Calls(Scripts(), MODEL, 1)
        self.key = calls.key
        state, _, accounts, leases, *_ = calls.all_keys()
        self._state, self._accounts, self._leases = state, accounts, leases

    def snapshot(self) -> Snapshot:
        """One moment: a transaction."""
        pipe = self._client.pipeline(transaction=True)
        pipe.hget(self._state, "book")
        pipe.hgetall(self._accounts)
        pipe.hlen(self._leases)
        book, accounts, leases = pipe.execute()
        return Snapshot(
            pool=sum(p["inflight"] for p in record("book", book)["pools"]),
            leases=leases,
            tenants={k.decode(): record("account", v)["total"] for k, v in accounts.items()},
        )

    def leases(self) -> dict[str, dict[str, Any]]:
        """Leases in force, by id."""
        found: dict[bytes, bytes] = self._client.hgetall(self._leases)  # type: ignore[assignment]
        return {k.decode(): record("lease", v) for k, v in found.items()}


class SnapshotWatch:
    """Snapshots one after another while the block runs, on a thread."""

    def __init__(self, token_pools: Books, every_s: float = 0.01) -> None:
        self.taken: list[Snapshot] = []
        self._books = token_pools
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            self.taken.append(self._books.snapshot())


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One entitlement's ledger, and what export files say it was charged."""

    name: str
    debited: int
    refunded: int
    used: int
    depth: int
    exported: int

    @property
    def off(self) -> int:
        """Tokens by which the ledger does not balance."""
        return abs(self.debited - self.refunded - self.used)


def ledger(
    replica: GatewayProcess, exports: Iterable[Path], *, since_unix_s: float = 0.0
) -> list[Entry]:
    """Every entitlement's, as the admin API tells it; exported is what was settled since then."""
    charged = exported(exports, since_unix_s=since_unix_s)
    found = []
    for shown in replica.admin("/admin/entitlements").raise_for_status().json()["data"]:
        usage = shown["usage"]
        found.append(
            Entry(
                name=shown["name"],
                debited=usage["debited_tokens"],
                refunded=usage["refunded_tokens"],
                used=usage["used_tokens"],
                depth=usage["bucket_depth_tokens"],
                exported=charged.get(shown["name"], 0),
            )
        )
    return found


def exported(files: Iterable[Path], *, since_unix_s: float = 0.0) -> dict[str, int]:
    """Tokens charged by entitlement; the first line of each id counts."""
    lines: dict[str, dict[str, Any]] = {}
    for file in files:
        for raw in file.read_bytes().splitlines() if file.exists() else ():
            line = msgspec.json.decode(raw)
            lines.setdefault(line["id"], line)
    charged: dict[str, int] = {}
    for line in lines.values():
        if line["time_unix_s"] < since_unix_s:
            continue
        name = line["entitlement"]
        charged[name] = charged.get(name, 0) + line["charge_tokens"]
    return charged


def settled(fleet: Fleet, token_pools: Books, limit_s: float) -> Snapshot:
    """Wait until nothing is in flight anywhere and exports are written; what Redis has then.

    What is left after `limit_s` is returned, not raised: it is a finding.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        now = token_pools.snapshot()
        if not now.leases and not fleet.leases() and not any(e.running() for e in fleet.engines):
            break
        time.sleep(0.05)
    time.sleep(1.0)  # exports are written twice a second
    return token_pools.snapshot()


def exports_in(folder: Path, count: int) -> tuple[list[dict[str, Any]], list[Path]]:
    """What each of so many gateways is told of its export, and the files."""
    files = [folder / f"usage-{n}.jsonl" for n in range(count)]
    return [{"usage_export": {"path": str(file)}} for file in files], files


def books_rows(name: str, after: Snapshot, entries: Sequence[Entry]) -> Iterator[Row]:
    """Nothing is left, and the ledger balances."""
    yield equals(f"{name}: leases left, and sequences counted", after.leases + after.pool, 0)
    debited, refunded, used = (
        sum(getattr(e, figure) for e in entries) for figure in ("debited", "refunded", "used")
    )
    metric, note = "tokens that debited - refunded - used is off", f"{debited:,} - {refunded:,}"
    yield equals(f"{name}: {metric}", sum(e.off for e in entries), 0, f"{note} = {used:,}")


def exported_row(name: str, entries: Sequence[Entry]) -> Row:
    """What was charged is what was exported for billing."""
    off = sum(abs(e.used - e.exported) for e in entries)
    return equals(f"{name}: tokens that used differs from what was exported", off, 0)


# -- load on several gateways: closed-loop clients, and the result of every request


CHAT: Final = "/v1/chat/completions"
HUNG_S: Final = 30.0
"""Nobody waits longer for an answer; such a request hangs."""
_TEXT: Final = "The river rose in the night and by morning the lower road was gone. "


class SentRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `at_s` monotonic; status 0: broken or hung, -1: its client left."""

    tenant: str
    gateway: int
    at_s: float
    length_s: float
    status: int
    reason: str

    @property
    def end_s(self) -> float:
        """When it was over."""
        return self.at_s + self.length_s


class LoadShape(msgspec.Struct, frozen=True, kw_only=True):
    """How clients ask."""

    output_tokens: int
    pause_s: tuple[float, float]
    """After a refusal, at random between these."""
    streamed: float = 0.25
    leaving: float = 0.0
    """Share of requests whose client leaves early."""


class ClientLoad:
    """Clients that each ask, wait for the answer and ask again, until told to stop."""

    def __init__(self, urls: Sequence[str], shape: LoadShape) -> None:
        """`urls` of the gateways."""
        self.sent: list[SentRequest] = []
        self.unfinished = 0
        self._urls = urls
        self._shape = shape
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, tenants: Iterable[tuple[str, int]]) -> None:
        """Add a client for each (entitlement, gateway)."""
        for tenant, gateway in tenants:
            draw = Random(f"{tenant}/{gateway}/{len(self._tasks)}")
            self._tasks.append(asyncio.create_task(self._client(tenant, gateway, draw)))

    async def stop(self) -> None:
        """Let every client finish what it has asked."""
        self._stop.set()
        await asyncio.gather(*self._tasks)

    def statuses(self, sent: Iterable[SentRequest] | None = None) -> Counter[str]:
        """How many ended how: `200`, `429 tokens`, ..."""
        chosen = self.sent if sent is None else sent
        return Counter(f"{s.status} {s.reason}".strip() for s in chosen)

    async def _client(self, tenant: str, gateway: int, draw: Random) -> None:
        shape = self._shape
        await asyncio.sleep(draw.uniform(0, 0.5))  # they do not come as one
        async with RawClient(self._urls[gateway], f"key-of-{tenant}") as client:
            while not self._stop.is_set():
                leaves = draw.random() < shape.leaving
                limit_s = draw.uniform(0.05, 0.6) if leaves else HUNG_S
                body = body_of(shape.output_tokens, stream=draw.random() < shape.streamed)
                found = await self._ask(client, tenant, gateway, body, limit_s)
                if found.status != 200:
                    with_pause = self._stop.wait()
                    try:
                        await asyncio.wait_for(with_pause, draw.uniform(*shape.pause_s))
                    except TimeoutError:
                        continue

    async def _ask(
        self, client: RawClient, tenant: str, gateway: int, body: bytes, limit_s: float
    ) -> SentRequest:
        at_s = time.monotonic()
        self.unfinished += 1
        try:
            async with asyncio.timeout(limit_s):
                answer = await client.post(CHAT, body)
        except TimeoutError:
            status, reason = (0, "hung") if limit_s == HUNG_S else (-1, "left")
        except (OSError, EOFError) as error:
            status, reason = 0, type(error).__name__
        else:
            status, reason = answer.status, answer.headers.get("x-sluice-reason", "")
            if status == 200 and not _whole(answer.body):
                status, reason = 0, "cut off"
        self.unfinished -= 1
        length_s = time.monotonic() - at_s
        found = SentRequest(
            tenant=tenant,
            gateway=gateway,
            at_s=at_s,
            length_s=length_s,
            status=status,
            reason=reason,
        )
        self.sent.append(found)
        return found


def body_of(output_tokens: int, *, stream: bool) -> bytes:
    """A chat of so many tokens."""
    return msgspec.json.encode(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": _TEXT * 3}],
            "max_tokens": output_tokens,
            "mock_output_tokens": output_tokens,
            "stream": stream,
        }
    )


def _whole(body: bytes) -> bool:
    """Whether an answer came to its end without an error."""
    if body.startswith(b"{"):
        return b'"choices"' in body
    return body.rstrip().endswith(b"data: [DONE]") and b'"error"' not in body


def most_at_once(sent: Iterable[SentRequest]) -> int:
    """Most requests that were served at the same time, as their clients saw it."""
    served = [one for one in sent if one.status == 200]
    moments = sorted((at_s, n) for one in served for at_s, n in ((one.at_s, 1), (one.end_s, -1)))
    return max(accumulate(n for _, n in moments), default=0)
