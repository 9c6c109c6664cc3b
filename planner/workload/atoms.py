"""A workload as atoms: groups of requests of about one length, sorted by length.

A trace's atoms are its requests. A distribution is cut at its breakpoints, 32 times between
them, and wherever the caller will ask for a sum; an atom stands for the whole lengths within.
"""

from fractions import Fraction
from typing import Final, NamedTuple

import numpy as np

from planner.errors import PlanError
from planner.workload.distribution import Cdf
from planner.workload.workload import Floats, Workload

_CELLS: Final = 32


class Atoms(NamedTuple):
    """Requests of about one length each; sorted by `upper`."""

    upper: Floats
    """The longest total length of the atom."""
    total: Floats
    prompt: Floats
    answer: Floats
    weight: Floats
    squeezable: Floats | None = None
    """Share of each atom that may be compressed; None if all may."""


def atoms_of(workload: Workload, cuts: Floats) -> Atoms:
    """The requests of a trace, or cells of a distribution with `cuts` among their edges."""
    if workload.cdf is not None:
        return _cells(workload.cdf, workload.input_share, cuts)
    pairs = workload.pairs
    if pairs is None:
        raise PlanError(f"{workload.name} has no lengths", "give a distribution or a trace")
    totals = pairs.totals
    # Radix sort of sixteen bits is five times as fast.
    narrow = totals.max() < 2**16 and bool((totals == np.floor(totals)).all())
    order = np.argsort(totals.astype(np.uint16) if narrow else totals, kind="stable")
    total = totals[order]
    squeezable = None if workload.squeezable is None else workload.squeezable[order]
    ordered = (pairs.prompts[order], pairs.answers[order], pairs.weights[order])
    return Atoms(total, total, *ordered, squeezable)


def _cells(cdf: Cdf, input_share: float, cuts: Floats) -> Atoms:
    ends = np.array((0, *cdf.tokens), dtype=np.float64)
    inner = ends[:-1, None] + np.diff(ends)[:, None] * (np.arange(_CELLS) / _CELLS)
    edges = np.unique(np.concatenate((np.floor(inner.ravel()), cuts, ends)))
    edges = edges[edges <= ends[-1]]
    low, high = edges[:-1], edges[1:]
    mass = np.diff(np.interp(edges, ends, (0.0, *cdf.shares)))
    # The mean of whole lengths low + 1 ... high, and of int(share x length) over them.
    total = (low + high + 1) / 2
    lost = _mean_fraction(input_share)
    wide = high - low >= 5
    prompt = np.where(wide, input_share * total - lost, np.floor(input_share * total + 1e-9))
    prompt = np.maximum(prompt, 1.0)
    return Atoms(high, total, prompt, np.maximum(total - prompt, 1.0), mass)


def _mean_fraction(share: float) -> float:
    """Mean loss over whole lengths from rounding share x length down."""
    denominator = Fraction(share).limit_denominator(1000).denominator
    return (denominator - 1) / (2 * denominator)
