"""Token budgets: predict a request's input and output tokens, and learn from reported usage.

One `LengthEstimator` per model (token-budget paper, section 2.1). Rules:
- A request teaches only its own tenant's figures. Estimates for a tenant with enough
  observations use that tenant's figures alone; a newer tenant gets the tenants' median
  (`ByTenant`). No tenant controls the estimates of another.
- L_in = ceil(bytes / c*) + template, c* = c - gamma sigma: overestimating is the safe side.
- The template's fixed tokens and the ratio are fitted separately: prompts under
  SMALL_PROMPT_TOKENS teach the template, longer ones the ratio. (If every prompt is longer, the
  ratio absorbs the template.) Media and token ids stay out of the ratio.
- Three output figures: the client's cap, the expected q_out, and L_out = min(cap, q_out)
  (or the cap itself under `output_estimate: cap`). `default_max_tokens` replaces a missing cap.
- Impossible values in reported usage are counted and ignored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any, Final, Literal

from gateway.estimate.learners import (
    HIGHEST_RATIO,
    LOWEST_RATIO,
    MAX_TOKENS,
    PRIOR_TOKENS,
    ByTenant,
    OutputLengths,
    Pair,
    Part,
    Ratio,
    TwoTermFit,
    median,
)
from gateway.payload.counting import MEDIA_TOKENS
from gateway.records.endpoint import ENDPOINTS, Endpoint
from gateway.records.estimate import LengthEstimate, Observation
from gateway.records.request import CATEGORIES, BodyFacts, Category, Measure

OutputMode = Literal["predicted", "cap"]


@dataclass(frozen=True, kw_only=True)
class EstimatorProfile:
    """How an estimator starts and learns."""

    name: str
    priors: dict[str, float]
    """Bytes per token by category before anything was observed."""
    gamma: float = 1.0
    """Spreads by which the conservative ratio is below the mean."""
    beta: float = 0.95
    """Decay of the ratio's average per observation."""
    bias_corrected: bool = True
    fit_template: bool = True
    output_mode: OutputMode = "predicted"


# Cautious means over common vocabularies of 100,000 to 200,000 entries.
DEFAULT: Final = EstimatorProfile(
    name="default",
    priors={"prose": 4.0, "code": 3.5, "json": 3.9, "cjk": 3.4, "other-script": 4.8, "mixed": 3.5},
)
PAPER: Final = EstimatorProfile(
    name="paper",
    priors=dict.fromkeys(CATEGORIES, 4.0),
    bias_corrected=False,
    fit_template=False,
    output_mode="cap",
)
PROFILES: Final = {profile.name: profile for profile in (DEFAULT, PAPER)}

TemplateKind = Literal["chat", "tools", "plain", "pair"]

# Not Final: compiled by mypyc 2.4, a Final tuple here raised that it was not set.
MAX_TEMPLATE = (512.0, 64.0)
"""Upper clamps of t0 (tokens per prompt) and t1 (per message)."""
MAX_MEDIA = (16384.0, 64.0)
"""Upper clamps of tokens per media part and of tokens per guessed token."""

_RETAINED = 16
_RETAINED_OUTPUTS = 8
"""The most recently taught tenants whose figures are stored and published to replicas.

With all endpoints and categories in use these are 400 parts, fewer than
`gateway.estimate.merge.MAX_PARTS`.
"""


ENDPOINTS_BY_NAME: Final = {endpoint.name: endpoint for endpoint in ENDPOINTS.values()}


SMALL_PROMPT_TOKENS: Final = 128

_UNSEEN_NOISE = 0.35
_MIN_NOISE = 0.02
_PAIRED = frozenset({"rerank", "score"})


def template_kind(endpoint: str, measure: Measure) -> TemplateKind:
    """Which kind of template applies: fixed tokens differ with tools, and for plain prompts."""
    if measure.messages:
        return "tools" if measure.tools else "chat"
    return "pair" if endpoint in _PAIRED else "plain"


def _most_template(measure: Measure) -> int:
    """Most fixed tokens that chat templates are believed to add."""
    return int(MAX_TEMPLATE[0] * measure.prompts + MAX_TEMPLATE[1] * measure.messages)


def _fits(prior: Pair, deviation: Pair, limits: Pair) -> ByTenant[TwoTermFit]:
    return ByTenant(lambda: TwoTermFit(prior, deviation, limits), TwoTermFit.agree)


def _fitted(fits: ByTenant[TwoTermFit]) -> tuple[float, float, int]:
    """Both coefficients as medians over tenants, and the number of observations behind them."""
    learned = [own for _, own in fits.latest() if own.observations] or [fits.of("")]
    a, b = median([own.a for own in learned]), median([own.b for own in learned])
    return a, b, sum(own.observations for own in learned)


class LengthEstimator:
    """Estimates lengths for one model, and learns from served requests."""

    def __init__(
        self,
        profile: EstimatorProfile = DEFAULT,
        *,
        output_mode: OutputMode | None = None,
        output_prior_tokens: int = PRIOR_TOKENS,
        media_tokens: int = MEDIA_TOKENS,
    ) -> None:
        """Start from the settings.

        `output_mode` overrides the profile's (`output_estimate`). Until usage is learned, an
        answer is expected to take `output_prior_tokens` and a media part `media_tokens`.
        """
        self.profile: Final = profile
        self.output_mode: Final = output_mode or profile.output_mode
        self.observations = 0
        self.ignored: dict[str, int] = {}
        """Parts of observations that taught nothing, by reason."""
        self._fit_template: Final = profile.fit_template

        def ratio(category: str) -> Callable[[], Ratio]:
            prior, beta, gamma = profile.priors[category], profile.beta, profile.gamma
            corrected = profile.bias_corrected
            return lambda: Ratio(prior, beta=beta, gamma=gamma, corrected=corrected)

        self._ratios: Final = {
            category: ByTenant(ratio(category), Ratio.agree) for category in CATEGORIES
        }
        self._templates: Final[dict[str, ByTenant[TwoTermFit]]] = {
            "chat": _fits((3.0, 4.0), (32.0, 4.0), MAX_TEMPLATE),
            "tools": _fits((3.0, 4.0), (96.0, 4.0), MAX_TEMPLATE),
            "plain": _fits((1.0, 0.0), (4.0, 0.0), MAX_TEMPLATE),
            "pair": _fits((3.0, 0.0), (8.0, 0.0), MAX_TEMPLATE),
        }
        self._media: Final = _fits((0.0, media_tokens / MEDIA_TOKENS), (128.0, 0.5), MAX_MEDIA)
        self._outputs: Final = OutputLengths(prior_tokens=output_prior_tokens)
        self._by_figure: Final[dict[str, ByTenant[Any]]] = {
            **{f"ratio.{category}": ratios for category, ratios in self._ratios.items()},
            **{f"template.{kind}": fits for kind, fits in self._templates.items()},
            "media": self._media,
        }
        """All learners but those of outputs, by the name of their parts."""

    def estimate(
        self,
        endpoint: Endpoint,
        facts: BodyFacts,
        tenant: str,
        category: Category | None = None,
        default_max_tokens: int | None = None,
    ) -> LengthEstimate:
        """The budget of one request; `category` overrides the measured one.

        `default_max_tokens` is the limit that the gateway sends if the client set none.
        """
        measure = facts.measure
        category = category or measure.category
        ratio = self._ratios[category].of(tenant)
        longest_bytes = measure.longest_text_bytes
        exact = measure.longest_exact_tokens
        template = 0
        if self._fit_template and not exact:
            fit = self._templates[template_kind(endpoint.name, measure)].of(tenant)
            template = ceil(fit.a + fit.b * measure.messages)
        longest = ceil(longest_bytes / ratio.conservative) + template + exact
        media = 0
        if measure.media_parts:
            fit = self._media.of(tenant)
            media = ceil(fit.value(measure.media_parts, measure.media_tokens))
        prompts = measure.prompts
        if prompts == 1:
            longest += media
            total = longest
        else:
            total = (
                ceil(measure.text_bytes / ratio.conservative)
                + template * prompts
                + measure.exact_tokens
                + media
            )
            longest += min(media, ceil(2 * media / prompts))
        sequences = prompts * facts.sequences_per_prompt
        cap = facts.cap_tokens
        expected = output = 0
        limit: int | None = 0
        if endpoint.generates:
            limit = default_max_tokens if cap is None else cap
            expected = self._outputs.expected(endpoint.name, category, tenant)
            capped = limit is not None and (self.output_mode == "cap" or limit < expected)
            output = limit if limit is not None and capped else expected
        return LengthEstimate(
            category=category,
            text_bytes=longest_bytes,
            ratio=ratio.mean,
            ratio_conservative=ratio.conservative,
            template_tokens=template,
            input_tokens=longest,
            input_tokens_total=total,
            input_tokens_lowest=ceil(longest_bytes / ratio.plausible) + exact,
            cap_tokens=cap,
            expected_output_tokens=expected,
            output_tokens=output,
            fit_tokens=longest + output,
            cost_tokens=total + sequences * output,
            sequences=sequences,
            # No tokenizer needs more than one token for a byte of text.
            most_input_tokens=None
            if measure.media_parts
            else measure.text_bytes + measure.exact_tokens + _most_template(measure),
            limit_tokens=limit,
        )

    def learn(self, observation: Observation) -> None:
        """Learn from a served request's usage; impossible values are counted, not used."""
        self.observations += 1
        self._learn_input(observation)
        endpoint = ENDPOINTS_BY_NAME.get(observation.endpoint)
        if endpoint is None or not endpoint.generates:
            return
        tokens = self._reported(observation, "completion_tokens")
        if tokens is None:
            return
        length = ceil(tokens / max(observation.sequences, 1))
        if length > MAX_TOKENS:
            self._ignore("completion_tokens_out_of_range")
            return
        category, tenant = observation.measure.category, observation.tenant
        cut = observation.output_censored
        self._outputs.add(observation.endpoint, category, tenant, length, cut=cut)

    def _learn_input(self, observation: Observation) -> None:
        measure, tenant = observation.measure, observation.tenant
        if not observation.learn_ratio:
            self._ignore("prompt_changed")
            return
        tokens = self._reported(observation, "prompt_tokens")
        if tokens is None or measure.exact_tokens:
            return
        ratios = self._ratios[measure.category]
        templates = self._templates[template_kind(observation.endpoint, measure)]
        ratio = ratios.begun(tenant)
        fixed = 0.0
        if self._fit_template:
            fixed = templates.begun(tenant).value(measure.prompts, measure.messages)
        size = measure.text_bytes
        text = size / ratio.mean
        if measure.media_parts:
            media = tokens - fixed - text
            if media > MAX_MEDIA[0] * measure.media_parts or media < -0.5 * text:
                self._ignore("prompt_tokens_out_of_range")
                return
            noise = _noise(ratio, text) + (0.1 * measure.media_tokens) ** 2
            fit = self._media.taught(tenant)
            fit.add(measure.media_parts, measure.media_tokens, media, noise)
            return
        if not size:
            return
        # Bytes per token are within [0.5, 16]. A small prompt may be mostly template, so its
        # count may exceed that by the most that templates add.
        small = tokens < SMALL_PROMPT_TOKENS * measure.prompts
        least = LOWEST_RATIO * (tokens - (_most_template(measure) if small else fixed))
        most = HIGHEST_RATIO * (tokens if small else tokens - fixed)
        if not least <= size <= most or size > HIGHEST_RATIO * tokens:
            self._ignore("prompt_tokens_out_of_range")
        # Each observation teaches only one of the two. If prompts of similar lengths taught both,
        # an error of one would be taken for the other, and both would drift.
        elif not small:
            text = tokens - fixed
            ratios.taught(tenant).add(size / text, text / measure.prompts)
        elif self._fit_template:
            fit = templates.taught(tenant)
            fit.add(measure.prompts, measure.messages, tokens - text, _noise(ratio, text))

    def _reported(self, observation: Observation, field: str) -> int | None:
        """A count if it is a positive integer; `getattr`, for engines may break its annotation."""
        value: object = getattr(observation, field)
        if value is None:
            self._ignore(f"{field}_missing")
        elif type(value) is not int:
            self._ignore(f"{field}_not_an_integer")
        elif value < 1:
            self._ignore(f"{field}_not_positive")
        else:
            return value
        return None

    def _ignore(self, reason: str) -> None:
        self.ignored[reason] = self.ignored.get(reason, 0) + 1

    def snapshot(self) -> dict[str, Any]:
        """All learned figures, for the admin endpoint and the metrics: medians over the tenants."""
        categories: dict[str, dict[str, Any]] = {}
        for category, ratios in self._ratios.items():
            states = [own.state() for _, own in ratios.latest() if own.weight]
            shown = states or [ratios.of("").state()]
            categories[category] = {
                **{name: median([state[name] for state in shown]) for name in shown[0]},
                "n": sum(state["n"] for state in shown),
                "tenants": len(states),
            }
        templates = {}
        for kind, fits in self._templates.items():
            a, b, n = _fitted(fits)
            templates[kind] = {"request_tokens": a, "message_tokens": b, "n": n}
        a, b, n = _fitted(self._media)
        return {
            "profile": self.profile.name,
            "output_mode": self.output_mode,
            "observations": self.observations,
            "ignored": dict(self.ignored),
            "categories": categories,
            "templates": templates,
            "media": {"part_tokens": a, "guess_scale": b, "n": n},
            "expected_output_tokens": self._outputs.snapshot(),
        }

    def parts(self) -> dict[str, Part]:
        """`FIGURE@TENANT` -> that tenant's learner, for the last taught tenants."""
        parts: dict[str, Part] = {}
        for name, learners in self._by_figure.items():
            parts.update((f"{name}@{who}", part) for who, part in learners.latest(_RETAINED))
        for name, level in self._outputs.levels.items():
            for tenant, part in level.latest(_RETAINED_OUTPUTS):
                parts[f"output.{name}@{tenant}"] = part
        return parts

    def part(self, name: str) -> Part | None:
        """The part of that name, made if it does not exist; None for an unknown name."""
        figure, apart, tenant = name.partition("@")
        learners = self._by_figure.get(figure)
        if learners is None and apart and figure.startswith("output."):
            endpoint, slash, category = figure.removeprefix("output.").partition("/")
            known = ENDPOINTS_BY_NAME.get(endpoint)
            if known and known.generates and (category in CATEGORIES or not slash):
                learners = self._outputs.level(figure.removeprefix("output."))
        return learners.part(tenant) if learners is not None and apart else None


def _noise(ratio: Ratio, text_tokens: float) -> float:
    """Variance of a count around bytes / c, in tokens squared."""
    count = ratio.observations
    relative = max(ratio.spread / ratio.mean, _MIN_NOISE) if count else _UNSEEN_NOISE
    return 1.0 + (relative * text_tokens) ** 2
