"""What a request is expected to take, where it should go, and what it taught."""

from gateway.records.record import Record
from gateway.records.request import Category, Measure


class LengthEstimate(Record, frozen=True, kw_only=True):
    """The three output figures and what follows, in tokens (docs/concepts/pipeline.md)."""

    category: Category
    text_bytes: int
    ratio: float
    """c-hat, mean bytes per token of the category."""
    ratio_conservative: float
    """c* = c-hat - gamma sigma-hat (token-budget paper, eq. 5)."""
    template_tokens: int
    input_tokens: int
    """L_in of the longest single prompt, conservative, template and media included."""
    input_tokens_total: int
    """L_in summed over the batch."""
    input_tokens_lowest: int
    """Lowest plausible L_in of the longest prompt: bytes/(c + 3 sigma); refusing needs this."""
    cap_tokens: int | None
    """The client's own limit; None when absent (the window's rest)."""
    expected_output_tokens: int
    """q_out: online .95 quantile of completion tokens."""
    output_tokens: int
    """L_out = min(cap, q_out), or the cap itself under `output_estimate: cap`."""
    fit_tokens: int
    """L_fit = longest prompt + L_out: what the boundary compares."""
    cost_tokens: int
    """L_cost = sum of prompts + sequences x L_out."""
    sequences: int


class Plan(Record, frozen=True, kw_only=True):
    """Where the request should go, before any work. Pools are indices by window."""

    pool: int
    alternates: tuple[int, ...]
    """Pools that could serve it instead, best first (load-aware spillover)."""
    reason: str
    compress: bool = False


class Observation(Record, frozen=True, kw_only=True):
    """What a served request teaches the estimator (settle stage)."""

    endpoint: str
    tenant: str
    measure: Measure
    prompt_tokens: int | None
    """usage.prompt_tokens as reported, unchecked; None when missing."""
    completion_tokens: int | None
    sequences: int
    output_censored: bool
    """True when the answer was cut (client left, cap reached): only a lower bound."""
    learn_ratio: bool = True
    """False for compressed requests: they stay out of the EMA."""
