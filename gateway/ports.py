"""Protocols for what awaits the outside. Ports exist for I/O only; decisions are functions.

Each port has a shipped implementation in `gateway.adapters` and a fake in `tests/fakes.py`;
one contract suite holds both.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from gateway.errors import Refusal
from gateway.policy.entitlements.entitlement import Entitlement
from gateway.policy.estimate.merge import Learned, Peer
from gateway.policy.token_pool.terms import Terms
from gateway.records.attempt import PhaseTimeouts, Usage, WorkerAddress
from gateway.records.endpoint import Endpoint
from gateway.records.lease import Ask, Lease
from gateway.records.record import Record
from gateway.records.request import BodyFacts

Lines = bytes
"""Headers as they are written, each line with its end (`gateway.policy.request.header_lines`)."""


class UpstreamCall(Record, frozen=True, kw_only=True):
    """One HTTP request to an engine. `lines` are its headers but for host, length and key."""

    method: str
    path: str
    lines: Lines
    body: bytes
    rest: tuple[bytes | memoryview, ...] = ()
    """What follows `body`: a large one is not copied into one piece."""
    timeouts: PhaseTimeouts = PhaseTimeouts()

    @property
    def size(self) -> int:
        """Of the whole body, in bytes."""
        return len(self.body) + sum(map(len, self.rest))


class UpstreamResponse(Protocol):
    """An answer that has begun. The reader must reach the end or call `abort`."""

    @property
    def status(self) -> int:
        """HTTP status."""

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Response headers, names in lower case."""

    async def read(self) -> bytes:
        """All body bytes that arrived since the last read; b"" at the end.

        Raises UpstreamFailure(head_received=True) when the connection breaks or idles out.
        """

    def take_whole(self) -> bytes | None:
        """The whole body, once, where all of it has arrived; else None, and nothing is taken."""

    async def relay(self, sink: Callable[[bytes], bool]) -> bool:
        """Hand the body's bytes to `sink` as they arrive, without a task switch for each.

        True at the body's end; False when the sink returned False (enough for now): call
        again to go on. The sink must not raise. Raises UpstreamFailure as `read` does.
        """

    def abort(self) -> None:
        """Close the connection, so that the engine stops generating. Idempotent."""


class Upstream(Protocol):
    """The one way to a worker's data plane."""

    async def open(self, worker: WorkerAddress, call: UpstreamCall) -> UpstreamResponse:
        """Send the call and return once the response's head has arrived.

        Cancelling it closes the connection. Raises UpstreamFailure(head_received=False).
        """

    async def close(self) -> None:
        """Close idle connections; running ones are aborted."""


class Settlement(Record, frozen=True, kw_only=True):
    """What is known when a request ends. `usage` None: charge the estimate, or refund."""

    usage: Usage | None
    dispatched: bool
    """False when no engine saw it: a full refund."""
    unix_s: float = 0.0
    """When, by the gateway's clock; 0 for now. A store with a clock of its own goes by that."""


class ClientReply(Protocol):
    """The answer to one client, in the dialect of its endpoint."""

    @property
    def started(self) -> bool:
        """Whether the head was sent: from then on errors can only be in-band."""

    async def start(self, status: int, lines: Lines) -> None:
        """Send the head of a streamed answer."""

    async def write(self, data: bytes) -> None:
        """Send part of a streamed answer; waits while the client is slow."""

    def write_now(self, data: bytes) -> bool:
        """Send part of a streamed answer without waiting; False: `drain` before the next."""

    async def drain(self) -> None:
        """Wait until a slow client has read enough."""

    async def finish(self) -> None:
        """End a streamed answer."""

    async def send(self, status: int, lines: Lines, body: bytes) -> None:
        """Send a whole answer."""

    async def refuse(self, refusal: Refusal, lines: Lines) -> None:
        """Send a refusal in the endpoint's error shape."""

    async def break_off(self, refusal: Refusal) -> None:
        """End a started stream with an in-band error event."""


class LeaseStore(Protocol):
    """Admission's atomic state: one lease per request, settled exactly once."""

    async def admit(self, ask: Ask) -> Lease:
        """Take a lease in `ask.pool` or, when that is overloaded, in an alternate.

        Raises Refusal (429, 503, 400). A known lease id returns its earlier lease.
        """

    async def transfer(self, lease: Lease, pool: int, *, force: bool = True) -> Lease:
        """Move a lease to another pool atomically.

        Without `force` it must be admissible there; the old one stays in force on Refusal.
        """

    def resize(self, lease: Lease, cost_tokens: int, kv_bytes: int) -> None:
        """Change what a lease reserves: down after compression, up as tokens stream past it.

        Takes effect at once or soon, never waits, never raises, never refuses.
        """

    async def reclaim(self, lease: Lease) -> None:
        """A protected lease waits: have others of its pool give way (see `on_evict`)."""

    def on_evict(self, evict: Callable[[str], None]) -> None:
        """Whom to tell that a lease of this process must end; it is settled as usual."""

    def settle(self, lease: Lease, settlement: Settlement) -> None:
        """Release the lease and post its usage; a lease that was settled before is a no-op.

        Takes effect at once or soon, never waits and never raises: it runs while a
        cancelled request unwinds.
        """


class AccountView(Record, frozen=True, kw_only=True):
    """One entitlement's counters, for people and metrics."""

    name: str
    state: str
    """bound, pending, degraded, expired or suspended."""
    inflight: tuple[int, ...]
    kv_bytes: int
    level_tokens: float
    depth_tokens: float
    debt: float
    burst: float
    weight: float
    debited: int
    refunded: int
    used: int


class PoolView(Record, frozen=True, kw_only=True):
    """One pool's counters."""

    slots: int
    inflight: int
    kv_capacity_bytes: int
    kv_bytes: int
    idle_dedicated: int
    service_s: float
    desired_replicas: int
    """0 where the configuration gives no bounds."""
    denied: int = 0
    """Requests refused for its sake in the last tick, as far as they are remembered."""


class TokenPools(Protocol):
    """The other side of a LeaseStore: who is entitled to what, and how much there is."""

    async def define(self, terms: Entitlement) -> None:
        """Add an entitlement or change its terms at once; counters stay."""

    async def remove(self, model: str, name: str) -> bool:
        """Forget an entitlement; False while it has anything in flight."""

    async def view(self, model: str, names: Sequence[str]) -> list[AccountView]:
        """Counters of these entitlements, unknown ones left out."""

    async def pools(self, model: str) -> list[PoolView]:
        """Counters of a model's pools."""


class Upkeep(Protocol):
    """What a store needs done now and then, off the request path. Nothing here raises."""

    async def change(self, model: str, terms: Terms) -> None:
        """Take over a model's capacity and rules (of several gateways, the leader's count)."""

    async def renew(self) -> None:
        """Renew every lease that this process holds, in one batch a model."""

    async def tick(self) -> None:
        """Reap; run the tick where it is due; hand over what was evicted here."""


class EntitlementEntry(Record, frozen=True, kw_only=True):
    """An entitlement as it is kept: its terms and who may use it."""

    terms: Entitlement
    key_sha256: tuple[str, ...] = ()
    """Hex digests of its live keys, two at most."""
    origin: Literal["file", "admin"] = "file"
    file_digest: str = ""
    """Of the configuration's section it came from: the file wins when that changes."""
    file_unix_s: float = 0.0
    """When the file was modified that the section is of; an older file changes nothing."""
    id: str = ""
    """Tells it from a namesake that was deleted. Empty: of a version that gave none."""
    version: int = 0
    """The directory's revision of its last write; 0: not kept. A write is based on it."""
    changed: int = 0
    """Grows with every change of its content: when an admin made it, Unix ms, where that is more
    than one more; a restored entry keeps it."""
    standing: int = 0
    """When it was last suspended or resumed, Unix ms; at least above what it was before."""
    expiring: int = 0
    """When it was last given an expiry, or none, likewise."""
    revoked_sha256: tuple[str, ...] = ()
    """Digests of keys that an admin revoked, newest last: no older copy brings them back."""


class Removal(Record, frozen=True, kw_only=True):
    """What a deleted entitlement leaves behind, so that it stays deleted."""

    name: str
    id: str
    revision: int = 0
    file_unix_s: float = 0.0
    """When the file was modified that no longer had it; 0: an admin deleted it."""


class Kept(Record, frozen=True, kw_only=True):
    """What a directory holds, or the part of it that changed."""

    revision: int
    """Number of the last write; a directory that lost writes goes on from what it is told."""
    mark: str
    """Name of the last write, unique: a directory that does not know it has lost that write."""
    entries: list[EntitlementEntry]
    removals: list[Removal]
    complete_since: int = 0
    """Every removal after this revision is among them."""


class Written(Record, frozen=True, kw_only=True):
    """What became of a write."""

    revision: int
    mark: str
    conflicts: tuple[str, ...] = ()
    """Names that were not written: they are not, or no longer, of the version given."""


class Directory(Protocol):
    """Where entitlements changed at run time are kept. Raises StateFailure."""

    async def load(self) -> Kept:
        """All that is kept."""

    async def changes(self, since: int, mark: str) -> Kept | None:
        """What changed after a revision; None where the write named `mark` is not known."""

    async def put(self, *entries: EntitlementEntry, floor: int = 0, after: str = "") -> Written:
        """Keep entries (500 at most), each in place of the version it names (0: of none).

        They get the write's revision, which is above `floor`, as their version. One whose name
        and id were deleted is a conflict; all are, where the write named `after` is not known.
        """

    async def delete(self, entry: EntitlementEntry, floor: int = 0, after: str = "") -> Written:
        """Forget an entry of this version; its `file_unix_s` is the removal's."""

    async def close(self) -> None:
        """Let go of files and connections."""


class BodyReads(Protocol):
    """Reads large bodies off the event loop."""

    async def read(
        self, endpoint: Endpoint, body: bytes, owner: str, content_types: Sequence[bytes] = ()
    ) -> BodyFacts:
        """The facts of a body; bodies of several owners take turns. Raises Refusal."""
        ...


class CompressTask(Record, frozen=True, kw_only=True):
    """A request body that should be made to fit. Plain values: it travels to another process."""

    endpoint: str
    """chat, completions, responses or messages."""
    body: bytes
    budget_tokens: int
    """T_c: what the prompt may have, template and media included."""
    bytes_per_token: float
    """The category's mean."""
    fixed_tokens: int = 0
    """Template and media: they are not text and cannot be cut."""
    category: str | None = None
    max_cut: float = 0.5
    tokenizer: str | None = None
    """Path of the model's tokenizer.json, for exact counts."""


class CompressResult(Record, frozen=True, kw_only=True):
    """A body that fits, or why there is none."""

    body: bytes | None = None
    """The client's own bytes but for the text that was cut."""
    reason: str = ""
    """Why not: one of the compressor's, or several_prompts, queue_full, timeout, failed."""
    text_bytes_before: int = 0
    text_bytes_after: int = 0
    tokens_after: int | None = None
    """Of the whole prompt, `fixed_tokens` too; exact, None without a tokenizer."""


class CompressRunner(Protocol):
    """Compresses off the event loop. Never raises but for cancellation."""

    async def compress(self, task: CompressTask) -> CompressResult:
        """The compressed body, or the reason there is none, within the time limit."""

    async def close(self) -> None:
        """End the worker processes."""


class RecordSink(Protocol):
    """Where decision records go (request log and the look-up ring)."""

    def append(self, record: msgspec.Struct) -> None:
        """Take one record; never blocks, never raises; drops are counted."""


class Heard(Record, frozen=True, kw_only=True):
    """What an exchange brought, by model."""

    peers: Mapping[str, tuple[Peer, ...]] = msgspec.field(default_factory=dict)
    """Records that others published since the last exchange; each is heard once."""
    missing: frozenset[str] = frozenset()
    """Models of which the store holds no record of this process."""


class EstimatorState(Protocol):
    """What estimators learned, kept beyond the process or shared with replicas."""

    @property
    def interval_s(self) -> float:
        """Seconds between two exchanges; 0 for never."""

    async def exchange(self, records: Mapping[str, Learned | None]) -> Heard:
        """Publish this process's record of each model (None: as before); hear of others.

        The first exchange loads: it hears all that is kept. A newer record replaces an older
        one of the same process. Raises StateFailure, after which it may be repeated.
        """

    async def close(self) -> None:
        """Let go of files and connections."""
