"""Configuration of one mock engine."""

from typing import Literal

import msgspec

from simulator.engine.engine import EngineProfile
from simulator.mock_server.api.faults import Faults

OverflowWording = Literal["v1", "v2", "v3", "v4", "sglang"]
KvTransferKind = Literal["none", "vllm", "sglang-prefill", "sglang-decode"]


class MockConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A mock engine: its model name, engine profile, and deviations."""

    model: str
    profile: EngineProfile
    speed: float = 1.0
    """Model seconds per real second; all durations are divided by it."""
    dp_ranks: int = 1
    """Data-parallel ranks in lockstep: an iteration ends when the slowest rank ends."""
    max_num_queued: int | None = None
    """Queue length from which it answers 503; None for no bound, as vLLM does by default."""
    loras: tuple[str, ...] = ()
    """LoRA adapters loaded at start."""
    max_loras: int = 1
    """Adapters that it says it can run at once."""
    api_key: str | None = None
    mean_output_tokens: float = 200.0
    """Mean of the natural answer length (lognormal, drawn from the prompt's hash)."""
    overflow_wording: OverflowWording = "v3"
    kv_transfer: KvTransferKind = "none"
    """What it does with KV of other engines. vllm: what a request says. none: ignores it."""
    kv_tokens_per_s: float = 150_000.0
    """How fast KV is sent, tokens of the prompt per model second; > 0."""
    kv_hold_s: float = 30.0
    """Model seconds: how long KV is held for a decode engine, and how long pairs wait; > 0."""
    kv_events: str | None = None
    """ZeroMQ endpoint where rank 0 publishes what its prefix cache stores and evicts."""
    recorded_requests: int = 256
    """How many received requests /mock/last remembers."""
    recorded_bytes: int = 64 << 20
    """Total size of their bodies; the oldest are forgotten first."""
    faults: Faults = Faults()
