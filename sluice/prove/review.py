"""Compares a proof with what came of it, by a request log or by a gateway's own counts.

An entitlement's requests are judged as the gateway judges them (`gateway.usage.claims`); a pool
loses those that find no place in it. Attempts at one body within the wait that its client was told
are one request, by the first of them: simulated clients do not come back.
"""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from gateway.estimate.live_demand import RETRY_SLACK_S
from gateway.records.decision import DecisionRecord
from gateway.records.entitlement import FAILED
from gateway.records.proof import Claim, Interval, Proof, ProofEvent, Verdict
from gateway.usage.claims import judged
from planner.errors import PlanError
from sluice.operate.admin_client import AdminClient
from sluice.prove.verdict import PROMISED, wilson, words_of

Result = Literal["agreed", "wrong", "cannot tell", "not proved"]
Subject = tuple[str, str | None, str | None]
"""Kind, model (of a pool) and name."""

MORE_DEMAND: Final = 1.1
"""Demand beyond (or below, inverted) which a verdict says nothing."""
_POOL_LOSSES: Final = frozenset({"queue_full", "queue_timeout", "no_worker_ready"})
_LOAD: Final = frozenset({429, 503})
_ATTACH: Final = "attach it with `sluice reload --proof FILE`"


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One verdict beside reality."""

    kind: str
    name: str
    model: str
    verdict: Verdict
    kept: Interval | None
    measured: Interval | None
    """Share that was kept; None without requests."""
    requests: int
    demand: float
    """Times the demand that it was proved for: its own or its model's, whichever is more."""
    result: Result
    words: str


class Review(msgspec.Struct, frozen=True, kw_only=True):
    """All of them."""

    id: str
    since_unix_s: float
    until_unix_s: float
    result: Result
    compared: tuple[Compared, ...]


def review_log(wanted: str, log: Path) -> Review:
    """By a log from the newest time at which the proof was attached; PlanError for bad input."""
    proof_id, found = _id_of(wanted), None
    try:
        with log.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    if b'"event":"proof"' in line[:40]:  # what clients send comes later
                        event = msgspec.json.decode(line, type=ProofEvent)
                        if event.proof is not None and event.proof.id == proof_id:
                            found = _Tally(event.proof, event.unix_s)
                        elif found is not None and event.config_sha256 != found.proof.config_sha256:
                            found.until_s = min(found.until_s, event.unix_s)
                    elif found is not None and b'"event"' not in line[:40]:
                        found.add(msgspec.json.decode(line, type=DecisionRecord))
                except msgspec.MsgspecError as error:
                    if line.endswith(b"\n"):  # else it is being written
                        raise PlanError(f"{log}, line {number}: {error}", "mend it") from None
    except OSError as error:
        raise PlanError(f"{log}: {error}", "give the gateway's request log") from None
    if found is None:
        raise PlanError(f"{log} does not say since when proof {proof_id} is in force", _ATTACH)
    until_s = min(found.until_s, found.last_s)
    return review(found.proof, found.counts, found.since_s, until_s)


def review_gateway(wanted: str, client: AdminClient) -> Review:
    """By the counts of a running gateway, which has none of pools; PlanError for bad input."""
    shown = client.call("GET", "proof")
    proof = msgspec.convert(shown, Proof)
    if (proof_id := _id_of(wanted)) != proof.id:
        raise PlanError(f"the gateway has proof {proof.id}, not {proof_id}", _ATTACH)
    counts: dict[Subject, Mapping[str, int]] = {
        ("entitlement", None, name): counted for name, counted in shown["counts"].items()
    }
    return review(proof, counts, shown["since_unix_s"], time.time())


def _id_of(wanted: str) -> str:
    """The id of a proof by its file, or as given."""
    if re.fullmatch("[0-9a-f]{12}", wanted):
        return wanted
    try:
        return msgspec.json.decode(Path(wanted).read_bytes(), type=Proof).id
    except (OSError, ValueError) as error:
        problem = f"--review {wanted}: {error}"
        raise PlanError(problem, "give a proof's id, or what `prove --out` wrote") from None


class _Tally:
    """Counts of requests since a proof was attached."""

    def __init__(self, proof: Proof, since_s: float) -> None:
        self.proof = proof
        self.since_s, self.until_s, self.last_s = since_s, inf, since_s
        self.counts: dict[Subject, Counter[str]] = {
            _subject(claim): Counter() for claim in proof.findings if claim.kept is not None
        }
        self._claims = {_subject(claim): claim for claim in proof.findings}
        self._refused: dict[Any, float] = {}
        """Body -> until when a retry may come."""

    def add(self, record: DecisionRecord) -> None:
        at_s, body = record.time_unix_s, record.request
        if not self.since_s <= at_s <= self.until_s or record.batch is not None:
            return
        self.last_s = max(self.last_s, at_s)
        refused = record.outcome == "refused" and record.status in _LOAD
        if body.body_digest is not None:
            key = (record.entitlement, body.body_digest, body.body_bytes)
            retry = at_s <= self._refused.pop(key, -inf)
            if refused:
                self._refused[key] = at_s + (record.retry_after_s or 0.0) + RETRY_SLACK_S
            if retry:
                return
        owner: Subject = ("entitlement", None, record.entitlement)
        if owner in self.counts and (result := judged(record, self._claims[owner])):
            self.counts[owner][result] += 1
        pool: Subject = ("pool", record.model, record.pool or record.plan.pool)
        if pool in self.counts and (refused or record.outcome in {"ok", "disconnected", *FAILED}):
            lost = record.outcome in FAILED - {"evicted"} or record.reason in _POOL_LOSSES
            self.counts[pool]["lost" if lost else "kept"] += 1


def _subject(claim: Claim) -> Subject:
    return claim.kind, claim.model if claim.kind == "pool" else None, claim.name


def review(
    proof: Proof, counts: Mapping[Subject, Mapping[str, int]], since_s: float, until_s: float
) -> Review:
    """Each verdict beside the counts of its requests."""
    span_s = max(until_s - since_s, 1e-9)
    proved: dict[str, float] = defaultdict(float)
    measured = Counter[str]()
    findings = [
        claim for claim in proof.findings if claim.kept is not None and _subject(claim) in counts
    ]
    for claim in findings:
        if claim.kind == "entitlement":
            proved[claim.model] += claim.requests_per_s
            measured[claim.model] += sum(counts[_subject(claim)].values())
    compared = []
    for claim in findings:
        own = counts[_subject(claim)]
        ratios = [
            requests / span_s / per_s
            for requests, per_s in (
                (sum(own.values()), claim.requests_per_s),
                (measured[claim.model], proved[claim.model]),
            )
            if per_s > 0
        ]
        compared.append(_compared(claim, own, ratios))
    results = {claim.result for claim in compared} - {"not proved"}
    overall: Result = "wrong" if "wrong" in results else "cannot tell"
    return Review(
        id=proof.id,
        since_unix_s=since_s,
        until_unix_s=until_s,
        result="agreed" if results == {"agreed"} else overall,
        compared=tuple(compared),
    )


def _compared(claim: Claim, counts: Mapping[str, int], ratios: list[float]) -> Compared:
    requests = sum(counts.values())
    excused = min(counts.get("limited", 0), claim.excused * requests)
    found, now, base = None, "cannot tell", requests - excused
    if base >= 1:
        found = wilson(counts.get("kept", 0) / base, base)
        now = "holds" if found.low >= PROMISED else "breaks" if found.high < PROMISED else now
    more, less = max(ratios, default=1.0), min(ratios, default=1.0)
    by_slots = claim.kept is not None and claim.verdict == "breaks" and claim.kept.high >= PROMISED
    result: Result = "cannot tell"
    if claim.verdict == "cannot tell":
        result, why = "not proved", f"now it {now}" if now != "cannot tell" else ""
    elif found is None:
        why = "no request since"
    elif now == "cannot tell":
        why = "too few, or too near 99 %, to tell"
    elif by_slots:
        why = "it breaks for want of slots, which this does not tell"
    elif now == claim.verdict:
        result, why = "agreed", _figures(claim.kept, found)
    elif now == "breaks" and more > MORE_DEMAND:
        why = "it breaks at more demand than was proved"
    elif now == "holds" and less < 1 / MORE_DEMAND:
        why = "it holds at less demand than was proved"
    else:
        result, why = "wrong", f"it {now}"
    proved = "" if claim.kept is None else f", {words_of(claim.kept)}"
    told = "" if found is None else f"; measured {words_of(found)} of {requests:,} requests"
    demand = more if now == "breaks" else less
    times = f", {demand:.2g} times the demand" if ratios and found is not None else ""
    return Compared(
        kind=claim.kind,
        name=claim.name,
        model=claim.model,
        verdict=claim.verdict,
        kept=claim.kept,
        measured=found,
        requests=requests,
        demand=demand,
        result=result,
        words=f"proved: {claim.verdict}{proved}{told}{times}{why and f': {why}'}",
    )


def _figures(proved: Interval | None, found: Interval) -> str:
    if proved is None or (proved.low <= found.high and found.low <= proved.high):
        return "as proved"
    return "better than proved" if found.value > proved.value else "worse than proved"
