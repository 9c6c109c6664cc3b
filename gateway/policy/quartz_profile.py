"""The parameters of QUARTZ: what the paper's Table 3 names, and what its text leaves open."""

from typing import Final, Literal

import msgspec


class QuartzProfile(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Parameters of one pool's scheduler; times in seconds. ValueError when out of range."""

    aging: float = 0.5
    """lambda, no unit (seconds of key per second of waiting), >= 0: a request can be overtaken
    only by those that arrive within (difference of their size proxies) / lambda."""
    fairness_s_per_kilotoken: float = 0.1
    """beta, >= 0: seconds of key per kilotoken of the client's recent uncached prompts."""
    fairness_tau_s: float = 10.0
    """What a client was served fades by 1/e in this time; > 0."""
    locality_price: float = 4.0
    """mu, >= 0: how many times its own duration an uncached prefill costs in the score.
    Without it, spreading load destroys the cache hits that make the load small."""
    writes_tau_s: float = 10.0
    """That price is times the worker's part of the uncached tokens that all were assigned in
    about this time, over an even part; > 0. It keeps caches equally full."""
    kv_threshold: float = 0.85
    """Share of the KV cache in use above which a worker is avoided."""
    kv_price_s: float = 2.0
    """Seconds of score for the whole KV cache above the threshold."""
    candidates: Literal["best", "random"] = "best"
    """best: the worker with the longest cached prefix and the one with the least backlog.
    random: two drawn at random (section 3.3)."""
    compare_all_up_to: int = 16
    """With so few workers all are candidates (`best` only)."""
    gate_steps: float = 2.0
    """Prefill sent ahead of a worker's first tokens, in scheduling steps of its engine; > 0."""
    chunk_tokens: int = 2048
    """Prefill tokens of one such step: the engine's budget, configured or calibrated; >= 1."""
    gates_ahead: float = 16.0
    """Prefill sent and not seen answered, in gates, at which a late gateway's clock opens the
    gate no more; >= 0, and up to 1 the clock never opens it."""
    quantile: bool = True
    """False: the mean in place of the quantile, in scores and keys (the paper's PointPred)."""
    order: Literal["size", "arrival"] = "size"
    """arrival: queues are first come, first served (the paper's routing-only ablation)."""
    route: Literal["score", "least-loaded"] = "score"
    """least-loaded: the score is not used (the paper's queueing-only ablation)."""
    locality: bool = True
    """False: expected prefix hits are not looked at (the paper's ablation)."""
    fallback: bool = True
    """False: never (the paper's No Calibration has none)."""
    fallback_enter: float = 0.10
    """Share of prefills above their predicted quantile, over the predictor's last 400."""
    fallback_leave: float = 0.075
    stall_least_s: float = 2.0
    stall_factor: float = 8.0
    """A worker stalls when its oldest prefill takes longer than `stall_least_s` and than this
    times its predicted quantile."""

    def __post_init__(self) -> None:
        if min(self.fairness_tau_s, self.writes_tau_s, self.gate_steps, self.chunk_tokens) <= 0:
            raise ValueError(
                "fairness_tau_s, writes_tau_s, gate_steps and chunk_tokens must be above 0"
            )
        if min(self.aging, self.fairness_s_per_kilotoken, self.locality_price) < 0:
            raise ValueError("aging, fairness and locality price must not be negative")
        if not self.gates_ahead >= 0:
            raise ValueError("gates_ahead must not be negative")
        if not self.fallback_leave <= self.fallback_enter:
            raise ValueError("fallback_leave must not be above fallback_enter")


PROFILES: Final = {
    "default": QuartzProfile(),
    # The paper's Table 3, to the letter.
    "paper": QuartzProfile(aging=0.02, locality_price=0.0, candidates="random"),
}
