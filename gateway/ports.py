"""Protocols for everything that does I/O. Decisions need no port: they are plain functions.

Each port has a shipped implementation and a fake in `tests/fakes.py`.
One contract suite tests both.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Literal, Protocol, TypeVar

import msgspec

from gateway.admission.terms import AdmissionRequest, Denial, Terms
from gateway.errors import Refusal, SluiceError
from gateway.records.attempt import FoundEngine, PhaseTimeouts, Usage, WorkerAddress
from gateway.records.entitlement import Entitlement
from gateway.records.lease import Lease
from gateway.records.limit import Limit, LimitView
from gateway.records.record import Document, Record
from gateway.records.tenancy import DirectoryChange, DirectoryState, TokenIdentity, Written

D = TypeVar("D", bound=Document)
Lines = bytes
"""Headers in wire format, each line ending in CRLF (`gateway.payload.head`)."""


class UpstreamCall(Record, frozen=True, kw_only=True):
    """One HTTP request to an engine. `lines` holds its headers except host, length and API key."""

    method: str
    path: str
    lines: Lines
    body: bytes
    rest: tuple[bytes | memoryview, ...] = ()
    """Pieces of the body that follow `body`, so that a large body need not be joined."""
    timeouts: PhaseTimeouts = PhaseTimeouts()

    @property
    def size(self) -> int:
        """Length of the whole body in bytes."""
        return len(self.body) + sum(map(len, self.rest))


class UpstreamResponse(Protocol):
    """A response whose head has arrived. The reader must reach the end or call `abort`."""

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
        """The whole body, once, if all of it has arrived; otherwise None, and nothing is taken."""

    async def relay(self, sink: Callable[[bytes], bool]) -> bool:
        """Hand the body's bytes to `sink` as they arrive, without a task switch for each.

        Returns True at the body's end, and False when the sink returned False to pause; call
        again to continue. The sink must not raise. Raises UpstreamFailure as `read` does.
        """

    def expect_end(self) -> None:
        """The answer is whole: give the engine only a moment to end its body."""

    def abort(self) -> None:
        """Close the connection, so that the engine stops generating. Idempotent."""


class Upstream(Protocol):
    """Sends requests to workers."""

    async def open(self, worker: WorkerAddress, call: UpstreamCall) -> UpstreamResponse:
        """Send the call and return once the response's head has arrived.

        Cancelling it closes the connection. Raises UpstreamFailure(head_received=False).
        """

    async def close(self) -> None:
        """Close idle connections and abort active ones."""


class DiscoveryFailure(Exception):
    """A source could not say which engines there are; the message says why, without secrets."""


Sets = AsyncGenerator[tuple[FoundEngine, ...], None]
"""What a source of engines gives: the whole current set, and again after each change; a set may
come twice. Never ends. Raises DiscoveryFailure when the source does not answer or makes no sense;
the caller then keeps the last set, and asks again later."""


class Settlement(Record, frozen=True, kw_only=True):
    """The outcome of a request. Without `usage` its reservation is refunded in full."""

    usage: Usage | None
    dispatched: bool
    """Whether it used its place among the requests of a minute: it was sent to an engine, and no
    other model's turn follows, which takes a place of its own."""
    unix_s: float = 0.0
    """Time of the end by the gateway's clock; 0 for now. A store may use its own clock instead."""
    money: int = 0
    """Cost of the usage in nano-units; 0 where no budget is in money."""


class ClientReply(Protocol):
    """The response to one client, in the dialect of its endpoint."""

    @property
    def started(self) -> bool:
        """Whether the head was sent. After that, errors can only be sent in-band."""

    async def start(self, status: int, lines: Lines, *, events: bool = True) -> None:
        """Send the head of a streamed response; `events`: it consists of server-sent events."""

    async def write(self, data: bytes) -> None:
        """Send part of a streamed response; waits while the client is slow."""

    def write_now(self, data: bytes) -> bool:
        """Send part of a streamed response without waiting; after False, call `drain` first."""

    async def drain(self) -> None:
        """Wait until a slow client has read enough."""

    async def finish(self) -> None:
        """End a streamed response."""

    async def send(self, status: int, lines: Lines, body: bytes) -> None:
        """Send a whole response."""

    async def refuse(self, refusal: Refusal, lines: Lines) -> None:
        """Send a refusal in the endpoint's error shape; once started, as `break_off` does."""

    async def break_off(self, refusal: Refusal) -> None:
        """End a started stream with an in-band error event; without events, cut the connection."""


class LeaseStore(Protocol):
    """Admission's atomic state: one lease per request, settled exactly once."""

    async def admit(self, ask: AdmissionRequest) -> Lease:
        """Take a lease in `ask.pool` or, when that pool is overloaded, in an alternate.

        Raises Refusal (429, 503, 400). For a known lease id, returns the existing lease.
        """

    async def quote(self, ask: AdmissionRequest, counted: Sequence[Limit]) -> Lease | Denial:
        """What `admit` would say now: the lease, which is not taken, or the denial.

        Nothing changes but that the quote counts in `counted`, limits of requests a minute.
        Raises Refusal (429) where it is beyond one of them itself, and then counts in none.
        """

    async def transfer(self, lease: Lease, pool: int, *, force: bool = True) -> Lease:
        """Move a lease to another pool atomically.

        Without `force` the new pool must admit the lease. On Refusal the old lease stays in force.
        """

    def resize(self, lease: Lease, cost_tokens: int, kv_bytes: int) -> None:
        """Change a lease's reservation: down after compression, up when the output exceeds it.

        Takes effect at once or soon; never waits, raises or refuses.
        """

    async def reclaim(self, lease: Lease) -> None:
        """Evict other leases from the pool of this waiting, protected lease (see `on_evict`)."""

    def on_evict(self, evict: Callable[[str], None]) -> None:
        """Register the callback for evictions: it gets the id of a lease of this process.

        The caller ends that request and settles its lease as usual.
        """

    def settle(
        self, lease: Lease, settlement: Settlement, *, heard: bool = False
    ) -> Awaitable[None] | None:
        """Release the lease and post its usage. Settling a lease again changes nothing.

        Takes effect at once or soon, never waits and never raises: it runs while a
        cancelled request unwinds. With `heard`, returns what to await until every admission
        anywhere counts it; None where that is so at once, or while nobody can tell.
        """


class Budgets(Protocol):
    """The administrative side of limits that span models. Raises StateFailure."""

    def know(self, limits: Mapping[str, Limit]) -> None:
        """Follow the levels of the limits in this mapping by id, for when the store is away."""

    async def levels(self, limits: Sequence[Limit]) -> list[LimitView]:
        """Counters of these limits, in their order."""

    async def add(self, limit: Limit, amount: int) -> LimitView:
        """Add to a limit's amount until its window ends; a negative amount takes away."""

    async def sweep(self, defined: Callable[[str], bool]) -> None:
        """Drop counters whose window is over and whose limit (by id) nobody defines any more."""


class AccountView(Record, frozen=True, kw_only=True):
    """One entitlement's counters, for the admin API and metrics."""

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
    """0 where the configuration sets no bounds."""
    refused_sequences: int = 0
    """Of requests refused for want of capacity, all since the start; the same of the next two."""
    refused_kv_bytes: int = 0
    refused_tokens: int = 0
    served_tokens: int = 0
    """Tokens of settled requests since the start."""


class TokenPools(Protocol):
    """The administrative side of a LeaseStore: entitlements, counters and pools."""

    async def define(self, terms: Entitlement) -> None:
        """Add an entitlement or change its terms at once; its counters stay."""

    async def remove(self, model: str, name: str) -> bool:
        """Forget an entitlement; False while it has anything in flight."""

    async def view(self, model: str, names: Sequence[str]) -> list[AccountView]:
        """Counters of these entitlements; unknown names are left out."""

    async def pools(self, model: str) -> list[PoolView]:
        """Counters of a model's pools."""


class Upkeep(TokenPools, Protocol):
    """Periodic maintenance of such a store, off the request path. None of it raises."""

    async def change(self, model: str, terms: Terms) -> None:
        """Apply a model's capacity and rules. Among several gateways only the leader's count."""

    async def renew(self) -> None:
        """Renew every lease that this process holds, in one batch per model."""

    async def tick(self) -> None:
        """Reap expired leases, run a due tick, and report this process's evictions."""


class Directory(Protocol):
    """Rows and denials of tenancy, kept apart from the process. Methods raise StateFailure.

    Rows and denials are joined as `gateway.tenancy.known` does: gone stays gone.
    """

    async def read(self, since: int, mark: str) -> DirectoryState | None:
        """What changed after a revision; all of it for 0 and "".

        None: the directory does not know the write of this name, so it lost writes; or more is
        newer than one call can read.
        """

    async def write(self, change: DirectoryChange, *, floor: int, after: str) -> Written:
        """Write all of a change; nothing where a row has another revision, or a denial a later one.

        The new revision is above `floor`. `after`: the last write that the caller knows.
        """

    async def give_back(self, state: DirectoryState, *, floor: int) -> Written:
        """Join with what a caller knows of a directory that lost writes."""

    async def close(self) -> None:
        """Close files and connections. Idempotent."""


class Changed(SluiceError):
    """The document is of another version, or gone: somebody else changed it."""


class Full(SluiceError):
    """The tenant has as many open documents of this kind as it may."""


class Documents(Protocol):
    """Documents that change by compare-and-set, kept apart from the process.

    Their kinds are their classes; their ids have no blanks, and are never a client's words. Methods
    raise StateFailure; a change may have happened nevertheless, so read before trying it again.
    """

    async def get(self, kind: type[D], name: str) -> tuple[D, int] | None:
        """The document of this id, with its version, which grows with every change."""

    async def put(self, document: Document, version: int, *, most: int = 0) -> int:
        """Write a document based on a version (0: it is new), and return the new version.

        `most`: how many open ones of this kind its tenant may have, this one included; 0 for any
        number. Raises Changed, Full.
        """

    async def change(self, document: D, version: int, changed: Callable[[D], D]) -> tuple[D, int]:
        """Write what `changed` makes of the document as it is by now; returns that, as `get` does.

        `document`: as it was of that version. Raises Changed if it is gone, and what `changed`
        raises.
        """
        while True:
            after = changed(document)
            try:
                return after, await self.put(after, version)
            except Changed:
                newer = await self.get(type(document), document.id)
                if newer is None:
                    raise
                document, version = newer

    async def delete(self, document: Document, version: int) -> None:
        """Delete a document of this version. Raises Changed."""

    async def page(
        self, kind: type[D], tenant: str, after: str, limit: int, *, oldest_first: bool = False
    ) -> list[tuple[D, int]]:
        """A tenant's documents by creation, newest first, that follow one ("": from the start)."""

    async def count(self, kind: type[Document], tenant: str) -> int:
        """How many documents of a kind a tenant has."""

    async def open_names(self, kind: type[Document]) -> list[str]:
        """Ids of all tenants' open documents, oldest first."""

    def unix_s(self) -> float:
        """The time by the clock of all who share the documents, as heard with the last read."""

    async def close(self) -> None:
        """Close files and connections. Idempotent."""


class TokenVerifier(Protocol):
    """Verifies tokens (JWT) with their issuers' keys."""

    def verify(self, token: bytes) -> TokenIdentity:
        """A token's identity. Raises Unauthorized, and KeysAwaited if its keys are being read."""

    async def keys_read(self) -> None:
        """Wait until the keys that are being read are known, for a bounded time."""

    def on_change(self, changed: Callable[[], None]) -> None:
        """Have `changed` called when an issuer's keys are other ones."""


class CompressTask(Record, frozen=True, kw_only=True):
    """A request body to compress. Holds plain values, because it is sent to another process."""

    endpoint: str
    """chat, completions, responses or messages."""
    body: bytes
    budget_tokens: int
    """T_c: the most tokens that the prompt may have, including template and media."""
    bytes_per_token: float
    """Mean of the prompt's category."""
    fixed_tokens: int = 0
    """Tokens of template and media, which are not text and cannot be cut."""
    category: str | None = None
    max_cut: float = 0.5
    tokenizer: str | None = None
    """Path of the model's tokenizer.json, for exact counts."""
    when: Literal["asked", "any"] = "asked"
    """Only questions over retrieved passages, or any task."""
    mark: bool = True
    """Whether cuts are marked."""


class CompressResult(Record, frozen=True, kw_only=True):
    """A body that fits, or the reason why there is none."""

    body: bytes | None = None
    """The client's own bytes except for the text that was cut."""
    reason: str = ""
    """Why not: one of the compressor's reasons, several_prompts, queue_full, timeout, failed."""
    text_bytes_before: int = 0
    text_bytes_after: int = 0
    tokens_after: int | None = None
    """Exact tokens of the whole prompt, `fixed_tokens` included; None without a tokenizer."""


RecordSink = Callable[[msgspec.Struct], None]
"""Takes decision records, for example for the request log and the look-up ring. Never blocks or
raises; dropped records are counted."""
