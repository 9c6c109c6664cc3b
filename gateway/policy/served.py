"""One model as the gateway serves it: routing table, estimator, and the state of its pools."""

from typing import Literal

import msgspec

from gateway.domain import PhaseTimeouts, WorkerAddress
from gateway.policy.band import CompressionRules
from gateway.policy.budget import LengthEstimator
from gateway.policy.conversations import Conversations
from gateway.policy.entitlements import PROFILES, AdmissionProfile
from gateway.policy.fleet import HealthRules, PoolState
from gateway.policy.homes import ResponseHomes
from gateway.policy.pools import Routing


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What the stages need to know of a model. The states inside are mutable."""

    name: str
    routing: Routing
    estimator: LengthEstimator
    pools: tuple[PoolState, ...]
    workers: tuple[tuple[WorkerAddress, ...], ...]
    """By pool, in the order of `pools[i].workers`."""
    health: HealthRules
    homes: ResponseHomes
    spill_queue: int
    timeouts: PhaseTimeouts = PhaseTimeouts()
    max_attempts: int = 3
    kv_bytes_per_token: int = 0
    """0 where KV is not enforced."""
    admission: AdmissionProfile = PROFILES["default"]
    reclaim_s: float = 0.5
    """How long a protected request waits for its first byte before others give way."""
    engine_priority: Literal["none", "vllm", "sglang"] = "none"
    """Whose `priority` field the engines understand."""
    compression: CompressionRules | None = None
    """None where it is not enabled."""
    conversations: Conversations = msgspec.field(default_factory=Conversations)
    observe_admission: bool = False
    """Admission is computed and counted, not applied (so it is where all of the model is)."""

    @property
    def observe(self) -> bool:
        """Decisions are computed and counted, not applied."""
        return self.routing.observe
