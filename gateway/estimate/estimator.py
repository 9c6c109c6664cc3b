"""Token budgets: predict a request's input and output tokens, and learn from reported usage.

One `LengthEstimator` per model (token-budget paper, section 2.1). Rules:
- A request teaches only its own tenant's figures. Estimates for a tenant with enough
  observations use that tenant's figures alone; a newer tenant gets the tenants' median
  (`gateway.estimate.by_tenant`). No tenant controls the estimates of another.
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

from gateway.estimate.by_tenant import ByTenant, median
from gateway.estimate.input_lengths import HIGHEST_RATIO, LOWEST_RATIO, Ratio, TwoTermFit
from gateway.estimate.merge import EstimatorPart
from gateway.estimate.quantile import MAX_TOKENS, PRIOR_TOKENS, OutputLengths
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
    priors={
        "prose": 4.0,
        "code": 3.5,
        "json": 3.9,
        "cjk": 3.4,
        "other-script": 4.8,
        "mixed": 3.5,
    },
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


class TenantFigures:
    """Ratios, template and media fits, output lengths."""

    __slots__ = ("media", "outputs", "ratios", "templates")

    def __init__(
        self, profile: EstimatorProfile, media_tokens: int, output_prior_tokens: int
    ) -> None:
        """Start from the settings (see LengthEstimator)."""
        beta, gamma, corrected = profile.beta, profile.gamma, profile.bias_corrected

        def ratio(category: str) -> Callable[[], Ratio]:
            prior = profile.priors[category]
            return lambda: Ratio(prior, beta=beta, gamma=gamma, corrected=corrected)

        self.ratios: Final = {
            category: ByTenant(ratio(category), Ratio.agree) for category in CATEGORIES
        }
        self.templates: Final[dict[str, ByTenant[TwoTermFit]]] = {
            "chat": _fits((3.0, 4.0), (32.0, 4.0), MAX_TEMPLATE),
            "tools": _fits((3.0, 4.0), (96.0, 4.0), MAX_TEMPLATE),
            "plain": _fits((1.0, 0.0), (4.0, 0.0), MAX_TEMPLATE),
            "pair": _fits((3.0, 0.0), (8.0, 0.0), MAX_TEMPLATE),
        }
        self.media: Final = _fits((0.0, media_tokens / MEDIA_TOKENS), (128.0, 0.5), MAX_MEDIA)
        self.outputs: Final = OutputLengths(prior_tokens=output_prior_tokens)

    def parts(self) -> dict[str, EstimatorPart]:
        """`FIGURE@TENANT` -> that tenant's learner, for the last taught tenants."""
        found: dict[str, EstimatorPart] = {}
        for category, ratios in self.ratios.items():
            for tenant, ratio in ratios.latest(_RETAINED):
                found[f"ratio.{category}@{tenant}"] = ratio
        for kind, fits in self.templates.items():
            for tenant, fit in fits.latest(_RETAINED):
                found[f"template.{kind}@{tenant}"] = fit
        for tenant, fit in self.media.latest(_RETAINED):
            found[f"media@{tenant}"] = fit
        for name, histogram in self.outputs.histograms(_RETAINED_OUTPUTS):
            found[f"output.{name}"] = histogram
        return found

    def part(self, name: str) -> EstimatorPart | None:
        """The learner of that name; names without a tenant are unknown."""
        figure, apart, tenant = name.partition("@")
        if not apart:
            return None
        group, _, key = figure.partition(".")
        if group == "ratio" and key in CATEGORIES:
            return self.ratios[key].part(tenant)
        if group == "template" and key in self.templates:
            return self.templates[key].part(tenant)
        if group == "output":
            found, slash, category = key.partition("/")
            endpoint = ENDPOINTS_BY_NAME.get(found)
            known = category in CATEGORIES if slash else not category
            if endpoint is not None and endpoint.generates and known:
                return self.outputs.part(found, category, tenant)
        return self.media.part(tenant) if figure == "media" else None

    def snapshot(self) -> dict[str, Any]:
        """Each figure as the median over the taught tenants."""
        return {
            "categories": {name: _shown(ratios) for name, ratios in self.ratios.items()},
            "templates": {
                kind: {"request_tokens": a, "message_tokens": b, "n": n}
                for kind, fits in self.templates.items()
                for a, b, n in (_fitted(fits),)
            },
            "media": dict(
                zip(("part_tokens", "guess_scale", "n"), _fitted(self.media), strict=True)
            ),
            "expected_output_tokens": self.outputs.snapshot(),
        }


def _fits(
    prior: tuple[float, float], deviation: tuple[float, float], limits: tuple[float, float]
) -> ByTenant[TwoTermFit]:
    return ByTenant(lambda: TwoTermFit(prior, deviation, limits), TwoTermFit.agree)


def _shown(ratios: ByTenant[Ratio]) -> dict[str, Any]:
    """A category's figures: medians over the taught tenants; without any, the start."""
    states = [own.state() for _, own in ratios.latest() if own.weight]
    if not states:
        return {**ratios.of("").state(), "tenants": 0}
    shown = {name: median([state[name] for state in states]) for name in states[0]}
    return {**shown, "n": sum(state["n"] for state in states), "tenants": len(states)}


def _fitted(fits: ByTenant[TwoTermFit]) -> tuple[float, float, int]:
    """Both coefficients as medians over tenants, and the number of observations behind them."""
    found = [own for _, own in fits.latest() if own.observations] or [fits.of("")]
    a, b = median([own.a for own in found]), median([own.b for own in found])
    return a, b, sum(own.observations for own in found)


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


class LengthEstimator:
    """Estimates lengths for one model, and learns from served requests."""

    __slots__ = (
        "_figures",
        "_fit_template",
        "ignored",
        "observations",
        "output_mode",
        "profile",
    )

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
        self._figures: Final = TenantFigures(profile, media_tokens, output_prior_tokens)

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
        ratio = self._figures.ratios[category].of(tenant)
        longest_bytes = measure.longest_text_bytes
        exact = measure.longest_exact_tokens
        template = 0
        if self._fit_template and not exact:
            fit = self._figures.templates[template_kind(endpoint.name, measure)].of(tenant)
            template = ceil(fit.a + fit.b * measure.messages)
        longest = ceil(longest_bytes / ratio.conservative) + template + exact
        media = 0
        if measure.media_parts:
            fit = self._figures.media.of(tenant)
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
            expected = self._figures.outputs.expected(endpoint.name, category, tenant)
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
        self._learn_output(observation)

    def _learn_input(self, observation: Observation) -> None:
        measure, tenant = observation.measure, observation.tenant
        if not observation.learn_ratio:
            self._ignore("prompt_changed")
            return
        tokens = self._reported(observation, "prompt_tokens")
        if tokens is None or measure.exact_tokens:
            return
        ratio = self._figures.ratios[measure.category].begun(tenant)
        kind = template_kind(observation.endpoint, measure)
        fixed = 0.0
        if self._fit_template:
            fit = self._figures.templates[kind].begun(tenant)
            fixed = fit.value(measure.prompts, measure.messages)
        size = measure.text_bytes
        if measure.media_parts:
            text = size / ratio.mean
            media = tokens - fixed - text
            if media > MAX_MEDIA[0] * measure.media_parts or media < -0.5 * text:
                self._ignore("prompt_tokens_out_of_range")
                return
            noise = _noise(ratio, text) + (0.1 * measure.media_tokens) ** 2
            fit = self._figures.media.taught(tenant)
            fit.add(measure.media_parts, measure.media_tokens, media, noise)
            return
        if not size:
            return
        if not self._possible(size, tokens, fixed, measure):
            self._ignore("prompt_tokens_out_of_range")
            return
        # Each observation teaches only one of the two. If prompts of similar lengths taught both,
        # an error of one would be taken for the other, and both would drift.
        if tokens < SMALL_PROMPT_TOKENS * measure.prompts:
            if self._fit_template:
                text = size / ratio.mean
                fit = self._figures.templates[kind].taught(tenant)
                noise = _noise(ratio, text)
                fit.add(measure.prompts, measure.messages, tokens - text, noise)
        else:
            text = tokens - fixed
            own = self._figures.ratios[measure.category].taught(tenant)
            own.add(size / text, text / measure.prompts)

    def _possible(self, size: int, tokens: int, fixed: float, measure: Measure) -> bool:
        """Whether a token count can be true: bytes per token within [0.5, 16].

        A small prompt may be mostly template, so its count may exceed that by MAX_TEMPLATE.
        """
        if size > HIGHEST_RATIO * tokens:
            return False
        if tokens < SMALL_PROMPT_TOKENS * measure.prompts:
            return tokens <= size / LOWEST_RATIO + _most_template(measure)
        text = tokens - fixed
        return LOWEST_RATIO * text <= size <= HIGHEST_RATIO * text

    def _learn_output(self, observation: Observation) -> None:
        endpoint = ENDPOINTS_BY_NAME.get(observation.endpoint)
        if endpoint is None or not endpoint.generates:
            return
        tokens = self._reported(observation, "completion_tokens")
        if tokens is None:
            return
        each = ceil(tokens / max(observation.sequences, 1))
        if each > MAX_TOKENS:
            self._ignore("completion_tokens_out_of_range")
            return
        self._figures.outputs.add(
            observation.endpoint,
            observation.measure.category,
            observation.tenant,
            each,
            cut=observation.output_censored,
        )

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
        """All learned figures, for the admin endpoint and the metrics."""
        return {
            "profile": self.profile.name,
            "output_mode": self.output_mode,
            "observations": self.observations,
            "ignored": dict(self.ignored),
            **self._figures.snapshot(),
        }

    def parts(self) -> dict[str, EstimatorPart]:
        return self._figures.parts()

    def part(self, name: str) -> EstimatorPart | None:
        return self._figures.part(name)


def _noise(ratio: Ratio, text_tokens: float) -> float:
    """Variance of a count around bytes / c, in tokens squared."""
    seen = ratio.observations
    relative = max(ratio.spread / ratio.mean, _MIN_NOISE) if seen else _UNSEEN_NOISE
    return 1.0 + (relative * text_tokens) ** 2
