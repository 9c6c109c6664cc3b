"""One model's learned figures: every figure by tenant, and all parts by name."""

from typing import Any, Final, Literal

from gateway.estimate.by_tenant import ByTenant, median
from gateway.estimate.input_lengths import Ratio, TwoTermFit
from gateway.estimate.merge import EstimatorPart
from gateway.estimate.profile import EstimatorProfile
from gateway.estimate.quantile import OutputLengths
from gateway.payload.counting import MEDIA_TOKENS
from gateway.records.endpoint import ENDPOINTS
from gateway.records.request import CATEGORIES

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
        self.ratios: Final = {
            category: _ratios(profile, profile.priors[category]) for category in CATEGORIES
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
        """See Learner: `FIGURE@TENANT` -> that tenant's learner, for the last taught tenants."""
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
        """See Learner; names without a tenant are unknown."""
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


def _ratios(profile: EstimatorProfile, prior: float) -> ByTenant[Ratio]:
    def make() -> Ratio:
        return Ratio(
            prior, beta=profile.beta, gamma=profile.gamma, corrected=profile.bias_corrected
        )

    return ByTenant(make, Ratio.agree)


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
