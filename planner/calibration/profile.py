"""Turn a fit into profile files: the planner's node and the simulator's engine."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from planner.calibration.check import Check
from planner.calibration.fit import Fit
from planner.profile import MeasuredRange, NodeProfile
from simulator.engine.engine import EngineProfile

_UNMET_SLOTS: Final = 256
"""vLLM's default max_num_seqs, used when no plateau was reached."""
_UNMET_CHUNK: Final = 2048
"""vLLM's default token budget, used unless a longer prompt took a single iteration."""


class StatedValues(msgspec.Struct, frozen=True, kw_only=True):
    """Facts stated by the engine or the user, not measured."""

    name: str
    model: str
    gpu: str = "unknown"
    gpus: int = 1
    usd_per_gpu_hour: float = 0.0
    window_tokens: int
    kv_tokens: int
    """K; if nobody states it, the most tokens seen resident."""
    block_tokens: int = 16
    caches_prefixes: bool = False


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Measured limits; None where the load did not reach one."""

    slots: int | None = None
    chunk_tokens: int | None = None
    longest_prompt_tokens: int = 0
    """Longest prompt that was timed."""
    most_sequences: int = 1
    """Most sequences that ran at once."""

    @property
    def slots_used(self) -> int:
        """The plateau, or vLLM's default."""
        return self.slots or _UNMET_SLOTS

    @property
    def chunk_used(self) -> int:
        """The chunk, or the longest prompt known to fit in one."""
        return self.chunk_tokens or max(_UNMET_CHUNK, self.longest_prompt_tokens)


def engine_profile(fit: Fit, stated: StatedValues, limits: EngineLimits) -> EngineProfile:
    """The fitted engine for the simulator and the mock; a prefix cache has all free blocks."""
    blocks = max(
        stated.kv_tokens // stated.block_tokens, -(-stated.window_tokens // stated.block_tokens)
    )
    slots = limits.slots_used
    return EngineProfile(
        name=stated.name,
        w_s=fit.w_s,
        h_s=fit.h_s,
        h_s_per_token=fit.h_s_per_token if fit.timing == "kv" else -1.0,
        timing=fit.timing,
        prefill="packed",
        prefill_s_per_token=fit.prefill_s_per_token,
        attention_s_per_pair=fit.attention_s_per_pair,
        max_num_batched_tokens=max(limits.chunk_used, slots),
        chunk_tokens=limits.chunk_used,
        kv_blocks=blocks,
        block_tokens=stated.block_tokens,
        max_model_len=stated.window_tokens,
        max_num_seqs=slots,
        prefix_cache_tokens=None if stated.caches_prefixes else 0,
    )


def node_profile(
    fit: Fit,
    stated: StatedValues,
    limits: EngineLimits,
    *,
    tokens_per_sequence: float,
    verified: bool,
    source: str,
) -> NodeProfile:
    """The planner's node, which knows cost by resident token only.

    H of a `slots` engine is therefore spread over `tokens_per_sequence`, the mean of the held-out
    load.
    """
    per_token_s = fit.h_s_per_token
    if fit.timing == "slots":
        per_token_s = fit.h_s / max(tokens_per_sequence, 1.0)
        source += f"; H spread over {tokens_per_sequence:.0f} resident tokens a sequence"
    return NodeProfile(
        name=stated.name,
        gpu=stated.gpu,
        model=stated.model,
        gpus=stated.gpus,
        w_s=fit.w_s,
        h_s_per_token=per_token_s,
        prefill_s_per_token=fit.prefill_s_per_token,
        attention_s_per_pair=fit.attention_s_per_pair,
        chunk_tokens=limits.chunk_used,
        kv_tokens=stated.kv_tokens,
        block_tokens=stated.block_tokens,
        max_num_seqs=limits.slots_used,
        max_num_batched_tokens=limits.chunk_used,
        usd_per_gpu_hour=stated.usd_per_gpu_hour,
        source=source,
        verified=verified,
        measured=MeasuredRange(
            longest_prompt_tokens=limits.longest_prompt_tokens,
            most_sequences=limits.most_sequences,
        ),
    )


def profile_document(
    node: NodeProfile,
    engine: EngineProfile,
    fit: Fit,
    checks: Sequence[Check],
    provenance: Mapping[str, Any],
) -> dict[str, Any]:
    """The profile file: the node's fields, `engine` (for the mock) and `provenance`."""
    load = "h_s" if fit.timing == "slots" else "h_s_per_token"
    names = ("w_s", load, "prefill_s_per_token", "attention_s_per_pair")
    document: dict[str, Any] = msgspec.to_builtins(node)
    return {
        **document,
        "engine": msgspec.to_builtins(engine),
        "provenance": {
            **provenance,
            "timing": fit.timing,
            "windows": len(fit.residuals),
            "residual_median": fit.median_residual,
            "residual_p95": fit.p95_residual,
            "residual_median_other_timing": fit.other_residual,
            "standard_errors": {
                name: error if error == error else None  # noqa: PLR0124 - NaN
                for name, error in zip(names, fit.errors, strict=True)
            },
            "held_out": [
                {
                    "name": check.name,
                    "measured": check.measured,
                    "modelled": check.modelled,
                    "off": check.off,
                    "bounds": check.bounds,
                    "holds": check.holds,
                }
                for check in checks
            ],
        },
    }
