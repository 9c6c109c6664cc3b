"""What one run of `bench everything` shows, live or simulated."""

import msgspec
import numpy as np

from bench.everything.scene import SLOTS, TENANTS, TraceRequest
from simulator.fleet.traffic import Floats


class TenantFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant."""

    attained: float
    """Share of all that it asked with its first token within the SLO."""
    refused: float
    """Share that was not served."""
    p99_ttft_s: float
    """Of what was served."""


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One system on the trace."""

    tenants: tuple[TenantFigures, ...]
    p99_ttft_s: float
    """Of every served request."""
    tokens_per_s: float
    """Prompt and answer tokens of served requests over the whole run."""
    utilisation: float
    """Share of slot-time in use, over the whole run."""
    compressed: int
    lag_s: float = 0.0
    """How late a live mock engine wrote its tokens, P99."""

    @property
    def promised(self) -> float:
        """The least attainment of a tenant that is promised capacity."""
        found = zip(self.tenants, TENANTS, strict=True)
        return min(t.attained for t, tenant in found if tenant.service_class != "spot")


def figures(
    requests: list[TraceRequest],
    ttft_s: Floats,
    *,
    busy_s: float,
    length_s: float,
    workers: int,
    compressed: int,
    lag_s: float = 0.0,
) -> RunFigures:
    """`ttft_s` is NaN for requests that were not served; `busy_s` sums their times in engines."""
    owner = np.array([request.tenant for request in requests])
    tokens = np.array([request.prompt_tokens + request.output_tokens for request in requests])
    served = ~np.isnan(ttft_s)
    return RunFigures(
        tenants=tuple(
            _tenant(ttft_s[owner == index], tenant.slo_ms / 1000)
            for index, tenant in enumerate(TENANTS)
        ),
        p99_ttft_s=_p99(ttft_s[served]),
        tokens_per_s=float(tokens[served].sum()) / length_s,
        utilisation=busy_s / (workers * SLOTS * length_s),
        compressed=compressed,
        lag_s=lag_s,
    )


def _tenant(ttft_s: Floats, slo_s: float) -> TenantFigures:
    served = ttft_s[~np.isnan(ttft_s)]
    return TenantFigures(
        attained=float((served <= slo_s).sum()) / max(1, len(ttft_s)),
        refused=1 - len(served) / max(1, len(ttft_s)),
        p99_ttft_s=_p99(served),
    )


def _p99(values: Floats) -> float:
    return float(np.quantile(values, 0.99)) if len(values) else float("nan")
