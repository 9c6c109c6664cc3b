"""Growth of sampled memory, by windows."""

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
    warm = statistics.median(s.rss_kib for s in window(samples, duration_s, WARM))
    last = statistics.median(s.rss_kib for s in window(samples, duration_s, LAST))
    return last / warm - 1


def memory_row(samples: Sequence[GatewaySample], duration_s: float) -> Row:
    """What memory did."""
    grown = growth(samples, duration_s)
    first, last = samples[0], samples[-1]
    note = (
        f"RSS of the process tree {first.rss_kib / 1024:.0f} MiB at first, "
        f"{last.rss_kib / 1024:.0f} at last"
    )
    metric = "memory: median of the last tenth over that after warm-up, less 1"
    return judged(metric, grown, f"< {MAX_GROWTH:g}", grown < MAX_GROWTH, note)


def most(samples: Sequence[GatewaySample]) -> GatewaySample:
    """The largest of each figure."""
    return msgspec.structs.replace(
        samples[0],
        leases=max(s.leases for s in samples),
        waiting=max(s.waiting for s in samples),
        fds=max(s.fds for s in samples),
    )
