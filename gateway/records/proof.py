"""What `sluice prove` says of a configuration."""

from typing import Annotated, Literal

import msgspec

from gateway.records.record import Record

Verdict = Literal["holds", "breaks", "cannot tell"]
Kind = Literal["entitlement", "pool", "budget", "limit", "model", "setting", "tenant", "tokens"]


class Interval(Record, frozen=True, kw_only=True):
    """An estimate with its bounds (95 %)."""

    value: float
    low: float
    high: float


class Claim(Record, frozen=True, kw_only=True):
    """The verdict on one subject, and by what its requests are judged."""

    kind: Kind
    name: str
    model: str = ""
    verdict: Verdict
    reason: str
    kept: Interval | None = None
    """Share of its demand that was kept; None where nothing was simulated."""
    requests_per_s: float = 0.0
    """Its demand."""
    excused: float = 0.0
    """Share of its demand that its own limits refuse before."""
    slo_ms: float = 0.0
    """To the first token; 0 for none."""
    slo_tpot_ms: float = 0.0
    backfill: bool = False
    """Whether it is promised no capacity."""


class Proof(Record, frozen=True, kw_only=True):
    """The verdicts on one file."""

    schema: Literal[1] = 1
    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{12}$")]
    config_sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    """Of the file's content."""
    verdict: Verdict
    findings: tuple[Claim, ...]


class ProofEvent(Record, frozen=True, kw_only=True):
    """A line of the request log: a proof was attached, or none is any more."""

    schema: int
    event: Literal["proof"] = "proof"
    unix_s: float
    config_sha256: str
    """Of the file in force from then on."""
    proof: Proof | None
