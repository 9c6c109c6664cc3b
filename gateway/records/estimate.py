"""The length estimate of a request, its routing plan, and what the estimator learns from it."""

from gateway.records.record import Record
from gateway.records.request import Category, Measure


class LengthEstimate(Record, frozen=True, kw_only=True):
    """Estimated prompt and output lengths, in tokens (docs/concepts/pipeline.md)."""

    category: Category
    text_bytes: int
    ratio: float
    """c-hat, mean bytes per token of the category."""
    ratio_conservative: float
    """c* = c-hat - gamma sigma-hat (token-budget paper, eq. 5)."""
    template_tokens: int
    input_tokens: int
    """Conservative L_in of the longest single prompt, template and media included."""
    input_tokens_total: int
    """L_in summed over the batch."""
    input_tokens_lowest: int
    """Lowest plausible L_in of the longest prompt: bytes/(c + 3 sigma). Refusals compare this."""
    cap_tokens: int | None
    """The client's own output limit; None if absent (the rest of the window)."""
    expected_output_tokens: int
    """q_out: online 0.95 quantile of completion tokens."""
    output_tokens: int
    """L_out = min(cap, q_out), or the cap itself under `output_estimate: cap`."""
    fit_tokens: int
    """L_fit = longest prompt + L_out; compared with the boundary."""
    cost_tokens: int
    """L_cost = sum of prompts + sequences x L_out."""
    sequences: int
    most_input_tokens: int | None = None
    """Tokens of all prompts at most, whatever was learned; None where only the window tells."""
    limit_tokens: int | None = None
    """Limit of one answer that the engine gets: the client's own or the default; None for none."""


class Plan(Record, frozen=True, kw_only=True):
    """The pool for the request. Pools are indices in ascending order of window."""

    pool: int
    alternates: tuple[int, ...]
    """Other pools that can serve the request, best first (load-aware spillover)."""
    reason: str
    compress: bool = False


class Observation(Record, frozen=True, kw_only=True):
    """Figures of a served request from which the estimator learns (settle stage)."""

    endpoint: str
    tenant: str
    measure: Measure
    prompt_tokens: int | None
    """usage.prompt_tokens as reported, unchecked; None if missing."""
    completion_tokens: int | None
    sequences: int
    output_censored: bool
    """True if the answer was cut short (client left, cap reached); the length is a lower bound."""
    learn_ratio: bool = True
    """False for compressed requests, which must not move the bytes-per-token mean."""


class PartState(Record, frozen=True, kw_only=True):
    """What one part of an estimator learned: decayed sums by name."""

    epoch: int
    """How often the part was restarted."""
    n: int
    """Observations of this epoch, at least 1."""
    rate: float = 0.0
    """Recent observations: each counts exp(-age / RATE_MEMORY_S)."""
    sums: dict[str, float]


class PeerRecord(Record, frozen=True, kw_only=True):
    """A record of another replica, or one stored before a restart."""

    age_s: float
    """Since it was published."""
    parts: dict[str, PartState]
