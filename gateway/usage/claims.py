"""Whether what was proved of the configuration in force comes true.

Requests are judged as `sluice prove` judges simulated ones, by what the proof says of their
entitlement.
"""

from collections.abc import Callable, Mapping
from typing import Final, Literal

import msgspec

from gateway.metrics import Metrics
from gateway.records.decision import DECISION_SCHEMA, DecisionRecord
from gateway.records.entitlement import FAILED, OWN_LIMITS
from gateway.records.proof import Claim, Proof, ProofEvent

_LOAD: Final = frozenset({429, 503})
_UNPROVED: Final = frozenset({"budget", "budget_reserved", "key_requests", "key_concurrency"})
"""Refusals for what is not simulated."""
RESULTS_PROVED: Final = ("kept", "lost", "limited")
"""Results of `judged`."""


def judged(record: DecisionRecord, claim: Claim) -> Literal["kept", "lost", "limited"] | None:
    """Whether an entitlement's claim was kept; None if the request counts as nothing.

    Items of batches do: they take what others leave, and come back.
    """
    outcome, timing = record.outcome, record.timing
    if record.batch is not None:
        return None
    if outcome == "refused":
        if record.status not in _LOAD or record.reason in _UNPROVED:
            return None
        if record.reason in OWN_LIMITS:
            return "limited"
        return None if claim.backfill else "lost"
    if outcome in FAILED:
        return None if claim.backfill and outcome == "evicted" else "lost"
    if outcome not in ("ok", "disconnected"):
        return None
    left = outcome == "disconnected" and timing.ttft_s is None
    first_s = (timing.duration_s if left else timing.ttft_s) or 0.0
    late = 0 < claim.slo_ms < 1000 * first_s
    late = late or 0 < claim.slo_tpot_ms < 1000 * (timing.tpot_s or 0.0)
    return "lost" if late else None if left else "kept"


class Claims:
    """The proof that is attached to the configuration in force, if there is one."""

    def __init__(
        self, config_sha256: str, metrics: Metrics, log: Callable[[msgspec.Struct], None] | None
    ) -> None:
        """`config_sha256`: of the file in force. `log` takes lines of the request log."""
        self.proof: Proof | None = None
        self.since_unix_s = 0.0
        self.entitlements: Mapping[str, Claim] = {}
        """What it says of those that were simulated."""
        self._config_sha256 = config_sha256
        self._counter = metrics.proved_requests
        self._log = log

    def use(self, config_sha256: str, proof: Proof | None, unix_s: float) -> None:
        """A file is in force, with this proof of it, or the one that it has."""
        gone = self.proof is not None and config_sha256 != self._config_sha256
        self._config_sha256 = config_sha256
        if gone:
            self.proof, self.entitlements = None, {}
        if proof is not None:
            self.follow(proof, unix_s)
        if (gone or proof is not None) and self._log is not None:
            event = ProofEvent(
                schema=DECISION_SCHEMA, unix_s=unix_s, config_sha256=config_sha256, proof=proof
            )
            self._log(event)

    def follow(self, proof: Proof, unix_s: float) -> None:
        """Count from now on; nothing if it is of another file, or not newer."""
        if proof.config_sha256 == self._config_sha256 and unix_s > self.since_unix_s:
            self.proof, self.since_unix_s = proof, unix_s
            self._counter.values.clear()
            of_entitlements = [claim for claim in proof.findings if claim.kind == "entitlement"]
            self.entitlements = {claim.name: claim for claim in of_entitlements if claim.kept}

    def append(self, record: msgspec.Struct) -> None:
        """Count a request that ended."""
        if self.entitlements and isinstance(record, DecisionRecord):
            claim = self.entitlements.get(record.entitlement or "")
            if claim is not None and record.time_unix_s >= self.since_unix_s:
                result = judged(record, claim)
                if result is not None:
                    self._counter.add(claim.name, result)
