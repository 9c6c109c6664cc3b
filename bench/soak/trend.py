"""Growth of sampled memory: windows and a robust slope."""

import itertools
import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

from bench.common.report import Row, judged
from bench.soak.gateway import GatewaySample

WARM: Final = (1 / 6, 8 / 30)
"""Of the load's duration: minutes 5 to 8 of 30. What is bounded was filled before it began."""
LAST: Final = (0.9, 1.0)
"""Minutes 27 to 30."""
MAX_GROWTH: Final = 0.03
_MAX_POINTS: Final = 400
"""Of the regression, whose pairs grow by the square."""


def window(
    samples: Sequence[GatewaySample], duration_s: float, part: tuple[float, float]
) -> list[GatewaySample]:
    """The samples of a part of the duration; at least the nearest one."""
    low, high = part[0] * duration_s, part[1] * duration_s
    found = [sample for sample in samples if low <= sample.at_s <= high]
    middle = (low + high) / 2
    return found or [min(samples, key=lambda sample: abs(sample.at_s - middle))]


def growth(samples: Sequence[GatewaySample], duration_s: float) -> float:
    """Median memory of the last part over that after warm-up, less one."""
    warm = statistics.median(_kib(s) for s in window(samples, duration_s, WARM))
    last = statistics.median(_kib(s) for s in window(samples, duration_s, LAST))
    return last / warm - 1


def slope_mib_per_day(samples: Sequence[GatewaySample], duration_s: float) -> float:
    """Theil-Sen: the median of all pairs' slopes after warm-up begins; outliers do not count."""
    after = window(samples, duration_s, (WARM[0], 1.0))
    step = -(-len(after) // _MAX_POINTS)
    points = [(s.at_s, _kib(s)) for s in after[::step]]
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for number, earlier in enumerate(points)
        for later in points[number + 1 :]
        if later[0] > earlier[0]
    ]
    return statistics.median(slopes) * 86_400 / 1024 if slopes else 0.0


def memory_rows(samples: Sequence[GatewaySample], duration_s: float) -> list[Row]:
    """What memory did."""
    grown = growth(samples, duration_s)
    first, last = samples[0], samples[-1]
    note = (
        f"RSS of the process tree {first.rss_kib / 1024:.0f} MiB at first, "
        f"{last.rss_kib / 1024:.0f} at last; PSS {last.pss_kib / 1024:.0f}"
    )
    metric = "memory: median of the last tenth over that after warm-up, less 1"
    return [
        judged(metric, grown, f"< {MAX_GROWTH:g}", grown < MAX_GROWTH, note),
        Row(
            "memory: slope after warm-up, MiB a day",
            slope_mib_per_day(samples, duration_s),
            "median of all pairs' slopes",
        ),
    ]


def most(samples: Sequence[GatewaySample]) -> GatewaySample:
    """The largest of each figure."""
    return msgspec.structs.replace(
        samples[0],
        leases=max(s.leases for s in samples),
        waiting=max(s.waiting for s in samples),
        fds=max(s.fds for s in samples),
    )


def drift(samples: Sequence[GatewaySample]) -> float:
    """How much the CPU of tenths of the load differs: most over least."""
    marks = samples[:: max(1, len(samples) // 10)]
    rates = [
        (later.cpu_s - earlier.cpu_s) / (later.at_s - earlier.at_s)
        for earlier, later in itertools.pairwise(marks)
    ]
    return max(rates) / max(1e-9, min(rates)) if rates else 1.0


def _kib(sample: GatewaySample) -> float:
    return float(sample.rss_kib)
