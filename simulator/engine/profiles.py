"""An engine's profile: its timing, its memory, and how it schedules.

`llama-3-70b-a100` holds the published FleetOpt constants (W = 8 ms, H = 0.65 ms a slot,
chunks of 512 tokens, 2**20 tokens of KV cache); comments on the other profiles say how they
differ.
"""

from typing import Literal

import msgspec

PAPER_WINDOW_TOKENS = 8192
"""The window for which the published H is stated: one token costs H / 8192."""


class EngineProfile(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Constants of one engine; raises ValueError if they are inconsistent."""

    name: str
    w_s: float = 0.008
    """W, seconds every iteration takes; > 0."""
    h_s: float = 0.00065
    """H, seconds per running sequence and iteration (`timing: slots`); >= 0."""
    h_s_per_token: float = -1.0
    """h, seconds per resident token and iteration (`timing: kv`); negative: h_s / 8192."""
    timing: Literal["slots", "kv"] = "slots"
    """slots: t = W + H n. kv: t = W + h (sum of resident tokens)."""
    prefill: Literal["packed", "shared", "independent"] = "packed"
    """packed: one token budget for decodes and chunks (vLLM). shared: one chunk per iteration
    for all prompts. independent: one chunk per iteration for each prompt (the papers).
    """
    max_num_batched_tokens: int = 2048
    """Token budget of `packed`, where it must be at least max_num_seqs."""
    chunk_tokens: int = 512
    """C, the chunk size of `shared` and `independent`."""
    kv_blocks: int = 65536
    block_tokens: int = 16
    max_model_len: int = 8192
    """Most prompt and output tokens of a request; must fit in the KV cache."""
    max_num_seqs: int = 128
    prefix_cache_tokens: int | None = None
    """Cached tokens that freed blocks may keep: None for all free blocks, 0 for no cache."""
    load: Literal["reserved", "growing"] = "growing"
    """reserved: a sequence takes its final length at admission. growing: block by block."""
    scheduling: Literal["fcfs", "priority"] = "fcfs"
    """priority: lower numbers first, ties by arrival."""
    prefill_s_per_token: float = 0.0
    """Seconds each prefill token adds to its iteration; >= 0."""
    attention_s_per_pair: float = 0.0
    """Seconds more for each pair of a prefill token and one before it in its prompt; >= 0. A prompt
    of n tokens has n**2 / 2 pairs: they are what its attention costs.
    """

    def __post_init__(self) -> None:
        if self.h_s_per_token < 0:
            msgspec.structs.force_setattr(self, "h_s_per_token", self.h_s / PAPER_WINDOW_TOKENS)
        if not self.w_s > 0:
            raise ValueError("w_s must be above 0: an iteration takes time")
        if min(self.h_s, self.prefill_s_per_token, self.attention_s_per_pair) < 0:
            raise ValueError(
                "h_s, prefill_s_per_token and attention_s_per_pair must not be negative"
            )
        sizes = (self.chunk_tokens, self.kv_blocks, self.block_tokens, self.max_num_seqs)
        if min(sizes) < 1 or self.max_model_len < 2:
            raise ValueError("sizes must be at least 1, max_model_len at least 2")
        if self.prefix_cache_tokens is not None and self.prefix_cache_tokens < 0:
            raise ValueError("prefix_cache_tokens must not be negative: 0 turns it off")
        if self.kv_blocks * self.block_tokens < self.max_model_len:
            raise ValueError(
                f"max_model_len {self.max_model_len} does not fit in "
                f"{self.kv_blocks} blocks of {self.block_tokens} tokens"
            )
        if self.prefill == "packed" and self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")


_LLAMA = EngineProfile(name="llama-3-70b-a100")

PROFILES: dict[str, EngineProfile] = {
    p.name: p
    for p in (
        _LLAMA,
        # As the papers count: final lengths reserved, no prefix cache, a chunk for each prompt.
        msgspec.structs.replace(
            _LLAMA,
            name="llama-3-70b-a100-reserved",
            load="reserved",
            prefill="independent",
            prefix_cache_tokens=0,
        ),
        # Invented figures: fast enough for manual tests, small enough to fill up.
        EngineProfile(
            name="demo",
            w_s=0.002,
            h_s=0.00005,
            kv_blocks=4096,
            max_num_seqs=64,
            prefill_s_per_token=0.000005,
        ),
        # The engines of `sluice demo`: prompts cost time, so that prefixes and queues show. With
        # ranks a step lasts by resident tokens, so that unequal ranks wait for the fullest.
        msgspec.structs.replace(_LLAMA, name="demo-replica", prefill_s_per_token=0.00005),
        EngineProfile(
            name="demo-ranks",
            w_s=0.004,
            h_s_per_token=1.07e-7,
            timing="kv",
            prefill_s_per_token=0.00005,
        ),
    )
}
