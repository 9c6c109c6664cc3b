"""Batches: their files, what was promised, and what is written of their output."""

from collections.abc import Mapping
from typing import Final, Literal

from msgspec.structs import replace

from gateway.records.record import Document, Record

Purpose = Literal["batch", "batch_output"]
Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED: Final[frozenset[Status]] = frozenset({"failed", "completed", "expired", "cancelled"})
"""A batch of these states changes no more."""
LATE_S: Final = 7 * 86_400
"""How long a batch runs beyond its window that was accepted although it may be late."""
OUTPUTS: Final = ("out", "err")
"""Output lines and error lines: the suffixes of their parts."""


class LineProblem(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Why a line of an input file is refused."""

    code: str
    message: str
    line: int | None = None
    """From 1; None: of the whole file."""
    param: str | None = None


class StoredFile(Document, frozen=True, kw_only=True, omit_defaults=True):
    """An input file, with what its validation saw, or the output of a batch."""

    id: str
    """`file-` and 128 random bits, or for an output `output_id`."""
    purpose: Purpose
    filename: str
    """Empty until it is whole; such a file is not there for clients."""
    bytes: int
    created_unix_s: int
    expires_unix_s: int
    lines: int = 0
    """Requests: lines that are not blank."""
    endpoint: str = ""
    """The one path that its requests name, such as /v1/chat/completions."""
    model: str = ""
    """The one model that its requests name, as they name it."""
    problems: tuple[LineProblem, ...] = ()
    """The first of its bad lines; a batch of the file fails with them."""
    output_tokens: int = 0
    """Sum of its requests' output limits, of those that have one."""
    unlimited: int = 0
    """Requests without an output limit."""
    batch: str = ""
    """Of an output: the batch whose parts it consists of."""


class Part(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of a batch's output that is committed: `BATCH/part-EPOCH-NUMBER`."""

    epoch: int
    number: int
    """Its place among the batch's parts."""
    lines: int = 0
    bytes: int = 0
    """Of its output lines."""
    error_lines: int = 0
    error_bytes: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    """Of the input tokens."""
    output_tokens: int = 0
    slot_s: float = 0.0
    """Seconds in which its items held slots, in all tries."""
    unposted: str = ""
    """Id of the ledger that has to get its usage; empty once it has, or for none."""

    def size(self, suffix: str) -> int:
        """Bytes of its output lines (out) or error lines (err)."""
        return self.bytes if suffix == "out" else self.error_bytes


class Promise(Record, frozen=True, kw_only=True, omit_defaults=True):
    """When a batch will probably have ended, and what it will cost."""

    finish_p50_unix_s: int
    finish_p95_unix_s: int
    cost_nano: int = 0
    promised_by_unix_s: int | None = None
    """The time that the gateway stands for; None: for none."""


class Batch(Document, frozen=True, kw_only=True, omit_defaults=True):
    """A batch, from its creation to its end."""

    id: str
    """`batch_` and 128 random bits."""
    entitlement: str
    """Of its creator, for the model; empty where each item uses that of its own model."""
    key: str = ""
    """Name of its creator's key or token; empty for a key of the entitlement's own."""
    endpoint: str
    model: str
    """As its requests name it."""
    input_file: str
    completion_window: str
    """As it was asked for, such as 24h."""
    metadata: Mapping[str, str] | None = None
    keep_s: int = 30 * 86_400
    """How long the files of its output are kept."""
    accept_late: bool = False
    status: Status = "validating"
    created_unix_s: int
    expires_unix_s: int
    """The window's end."""
    reached_unix_s: Mapping[Status, int] = {}
    """When it came to each of its states."""
    total: int = 0
    problems: tuple[LineProblem, ...] = ()
    """Why it failed."""
    owner: str = ""
    """The replica that runs it; empty for none yet."""
    epoch: int = 0
    """Grows by one with each owner, so that a former owner's changes fail."""
    parts: tuple[Part, ...] = ()
    promise: Promise | None = None
    """As made when it was created; None: unpromised."""
    forecast: Promise | None = None
    """As it stands now."""
    planned_slot_s: float = 0.0
    """`Part.slot_s` of all its items, as expected when it was created."""
    message: str = ""
    """Why it waits, in words."""

    @property
    def completed(self) -> int:
        """Items that have a line in the output."""
        return sum(part.lines for part in self.parts)

    @property
    def failed(self) -> int:
        """Items that have a line in the errors."""
        return sum(part.error_lines for part in self.parts)

    @property
    def promised_by_unix_s(self) -> int | None:
        """When it is promised; None for unpromised."""
        return None if self.promise is None else self.promise.promised_by_unix_s

    @property
    def is_urgent(self) -> bool:
        """Whether leftovers alone will hardly keep its promise, by the middle of its forecast."""
        by, forecast = self.promised_by_unix_s, self.forecast
        if by is None:
            return False
        # No forecast: it expects no end on leftovers.
        return not forecast or forecast.finish_p50_unix_s + forecast.finish_p95_unix_s > 2 * by

    @property
    def is_open(self) -> bool:
        """Whether it has to be run, or its usage to be posted."""
        return self.status not in ENDED or any(part.unposted for part in self.parts)

    def is_over(self, now_unix_s: float) -> bool:
        """Whether it is cancelled, or its time is over, whatever is left of it."""
        ends_unix_s = self.expires_unix_s + (LATE_S if self.accept_late else 0)
        return self.status == "cancelling" or now_unix_s >= ends_unix_s

    def moved(self, status: Status, now_unix_s: float, message: str = "") -> "Batch":
        """It in another state from now on."""
        reached = {**self.reached_unix_s, status: int(now_unix_s)}
        return replace(self, status=status, reached_unix_s=reached, message=message)

    def with_part(self, part: Part) -> "Batch":
        """It with one part more, which it may have already."""
        there = len(self.parts) > part.number
        return self if there else replace(self, parts=(*self.parts, part))

    def posted(self, part: Part) -> "Batch":
        """It with no usage of this part to post any more."""
        parts = [replace(p, unposted="") if p == part else p for p in self.parts]
        return replace(self, parts=tuple(parts))

    def output_bytes(self, suffix: str) -> int:
        """Length of its output (out) or its errors (err) so far."""
        return sum(part.size(suffix) for part in self.parts)

    def part_name(self, part: Part, suffix: str) -> str:
        """Where a part is stored: out, err, idx (its items) and, until posted, use (its usage)."""
        return f"{self.id}/part-{part.epoch}-{part.number}.{suffix}"

    def outputs(self, *, now_unix_s: int) -> tuple[StoredFile, ...]:
        """The files of its output, without those that would be empty."""
        return tuple(
            StoredFile(
                id=output_id(self.id, suffix),
                tenant=self.tenant,
                purpose="batch_output",
                filename=f"{self.id}_{'output' if suffix == 'out' else 'error'}.jsonl",
                bytes=size,
                created_unix_s=now_unix_s,
                expires_unix_s=now_unix_s + self.keep_s,
                batch=self.id,
            )
            for suffix in OUTPUTS
            if (size := self.output_bytes(suffix))
        )


class BatchItem(Record, frozen=True, kw_only=True):
    """Which request of which batch a request is."""

    batch: str
    custom_id: str
    index: int
    """Among the requests of its input file, from 0."""
    urgent: bool = False
    """Its batch's promised time is near: it goes with its entitlement's own terms."""


def output_id(batch: str, suffix: str) -> str:
    """Id of a batch's output file (out) or error file (err)."""
    return f"file-{batch.removeprefix('batch_')}-{suffix}"
