"""Memory, rates and errors over the soak, as a picture."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.soak.gateway import GatewaySample


def plot_samples(samples: Sequence[GatewaySample], folder: Path) -> None:
    """Write soak.png."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    minutes = [sample.at_s / 60 for sample in samples]
    figure, axes = plt.subplots(4, 1, figsize=(10, 10), sharex=True)
    axes[0].plot(minutes, [s.rss_kib / 1024 for s in samples], label="RSS")
    axes[0].plot(minutes, [s.pss_kib / 1024 for s in samples], label="PSS")
    axes[0].set_ylabel("MiB, process tree")
    axes[0].set_ylim(bottom=0)
    axes[1].plot(minutes, _rate(samples, lambda s: s.requests), label="requests/s")
    axes[1].set_ylabel("requests/s")
    axes[1].set_ylim(bottom=0)
    busy = axes[1].twinx()
    busy.plot(minutes, _rate(samples, lambda s: s.cpu_s), color="#c2410c", label="cores")
    busy.set_ylabel("cores in use")
    busy.set_ylim(bottom=0)
    busy.legend(loc="lower right")
    axes[2].plot(minutes, _rate(samples, lambda s: s.errors), label="errors of engines/s")
    axes[2].set_ylabel("errors/s")
    axes[3].plot(minutes, [s.leases for s in samples], label="leases, twice")
    axes[3].plot(minutes, [s.waiting for s in samples], label="waiting")
    axes[3].plot(minutes, [s.fds for s in samples], label="open files")
    axes[3].set_xlabel("minutes")
    for axis in axes:
        axis.legend(loc="lower left")
    figure.tight_layout()
    figure.savefig(folder / "soak.png", dpi=110)
    plt.close(figure)


def _rate(
    samples: Sequence[GatewaySample], figure: Callable[[GatewaySample], float]
) -> list[float]:
    """By second, since the sample before."""
    found = [0.0]
    for earlier, later in itertools.pairwise(samples):
        passed_s = max(1e-9, later.at_s - earlier.at_s)
        found.append((figure(later) - figure(earlier)) / passed_s)
    return found
