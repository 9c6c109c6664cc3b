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
    locality_price: float = 8.0
    """mu, >= 0: how many times its own duration an uncached prefill costs in the score.
    Without it, spreading load destroys the cache hits that make the load small."""
    writes_tau_s: float = 10.0
    """That price is times the worker's part of the uncached tokens that all were assigned in
    about this time, over an even part; > 0. It keeps caches equally full."""
    request_price_s: float = 0.02
    """Seconds of score for each request that runs on a worker, >= 0: it slows the others."""
    gate_s: float = 0.5
    """Prefill that a worker may be sent behind the one in progress, >= 0; one request always. It
    covers an engine's step and the way there and back."""
    quantile: bool = True
    """False: the mean in place of the quantile, in scores and keys (the paper's PointPred)."""
    order: Literal["size", "arrival"] = "size"
    """arrival: queues are first come, first served (the paper's routing-only ablation)."""
    route: Literal["score", "least-loaded"] = "score"
    """least-loaded: the score is not used (the paper's queueing-only ablation)."""
    locality: bool = True
    """False: expected prefix hits are not looked at (the paper's ablation)."""

    def __post_init__(self) -> None:
        if min(self.fairness_tau_s, self.writes_tau_s) <= 0:
            raise ValueError("fairness_tau_s and writes_tau_s must be above 0")
        prices = (self.fairness_s_per_kilotoken, self.locality_price, self.request_price_s)
        if min(self.aging, self.gate_s, *prices) < 0:
            raise ValueError("aging, gate and prices must not be negative")


DEFAULT: Final = QuartzProfile()
