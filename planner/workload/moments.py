"""Prepare a workload for a search: sums over its requests at every boundary and reach.

Rules:
- a workload becomes atoms (planner.workload.atoms), cut at every boundary B and reach int(gamma B);
- twelve sums are kept of each atom (ROWS), so a pool over any range of lengths is a difference
  of prefix sums, and a sweep over B x gamma touches no requests;
- a compressed request keeps its answer; its prompt becomes B - answer (FleetOpt, eq. 15), if
  that leaves a token and cuts no more than `max_cut` of the prompt;
- prompts are also counted by length, so that P99 prefill is a look-up.
"""

import math
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from planner.errors import PlanError
from planner.workload.atoms import Atoms, atoms_of
from planner.workload.workload import GRID_TOKENS, Floats, Workload

GAMMAS: Final = tuple(round(1 + step / 10, 1) for step in range(11))
"""1.0 ... 2.0, as Algorithm 1 sweeps them."""

ROWS: Final = 12
(
    MASS,
    STEPS,
    STEP_TOKENS,
    STEPS2,
    STEPS2_TOKENS,
    STEPS2_TOKENS2,
    STEP_TOKENS2,
    PROMPT,
    PROMPT2,
    PROMPT3,
    PROMPT4,
    HELD,
) = range(ROWS)
"""Sums of p times: 1, it, it L, it^2, it^2 L, it^2 L^2, it L^2, L_in to L_in^4, resident
token-iterations.

it = chunks + L_out. A prompt's tokens are resident from admission on, an answer's as they come.
"""

Indices = NDArray[np.intp]

_MAX_LEVELS: Final = 160
_MARK_TOKENS: Final = 512
_MIN_BOUNDARY: Final = 512


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Sums at every boundary (axis 1) and gamma (axis 2); axis 0 is the row, or the level.

    `prompts_*` count requests with prompts of at most `levels[k]` tokens.
    """

    boundaries: tuple[int, ...]
    gammas: tuple[float, ...]
    chunk_tokens: int
    longest_tokens: int
    whole: Floats
    """Sums over all requests, shape (ROWS,)."""
    below: Floats
    """Totals up to B, shape (ROWS, B)."""
    reached: Floats
    """Totals up to gamma B, shape (ROWS, B, gamma)."""
    before: Floats
    """Compressible requests of the compression window, uncompressed, shape (ROWS, B, gamma)."""
    after: Floats
    """The same requests compressed to B."""
    levels: Floats
    """Marks of prompt length, tokens: chunks, or quarters of a chunk of 2,048."""
    prompts_whole: Floats
    prompts_below: Floats
    prompts_reached: Floats
    prompts_before: Floats
    prompts_after: Floats


def boundaries_of(workload: Workload, window_tokens: int) -> tuple[int, ...]:
    """Boundaries worth trying: 512 tokens and up, with requests on both sides."""
    cdf = workload.cdf
    grid = GRID_TOKENS if cdf is None else cdf.tokens
    inside = [b for b in grid if _MIN_BOUNDARY <= b < window_tokens]
    return tuple(b for b in inside if 0 < workload.share(b) < 1)


def prepare(
    workload: Workload,
    *,
    boundaries: Sequence[int],
    gammas: Sequence[float] = GAMMAS,
    chunk_tokens: int = 512,
    max_cut: float = 1.0,
) -> Prepared:
    """Sums for a search; `max_cut` is the largest share of a prompt that may be removed."""
    if any(gamma < 1 for gamma in gammas):
        raise PlanError("gamma is below 1", "give 1 (no compression) or more")
    if any(b < 2 for b in boundaries):
        raise PlanError("a boundary is below 2 tokens", "give a larger --b-short")
    count = len(boundaries)
    edges = np.array(boundaries, dtype=np.float64)
    reach = np.array([[int(g * b) for g in gammas] for b in boundaries], dtype=np.float64)
    reach = reach.reshape(count, len(gammas))
    atoms = atoms_of(workload, np.concatenate((edges, reach.ravel())))
    chunks = np.ceil(atoms.prompt / chunk_tokens)
    ruler = _Ruler(atoms.prompt, chunk_tokens)
    rows = _rows(atoms.weight, atoms.total, atoms.prompt, atoms.answer, chunks)
    at_b = np.searchsorted(atoms.upper, edges, "right")
    at_reach = np.searchsorted(atoms.upper, reach, "right")
    ends = np.concatenate((at_b, at_reach.ravel(), [atoms.upper.size]))
    sums = _sums_before(ends, rows)
    counted = _counted_before(ends, ruler.level(atoms.prompt), atoms.weight, ruler.count)
    below, prompts_below = sums[:, :count], counted[:, :count]
    reached = sums[:, count:-1].reshape(ROWS, *reach.shape)
    prompts_reached = counted[:, count:-1].reshape(ruler.count, *reach.shape)
    priority_class = _WindowMoments(atoms, edges, at_b, at_reach, max_cut)
    cut = np.ceil(priority_class.prompt_after / chunk_tokens)
    return Prepared(
        boundaries=tuple(boundaries),
        gammas=tuple(gammas),
        chunk_tokens=chunk_tokens,
        longest_tokens=workload.longest_tokens,
        whole=sums[:, -1],
        below=below,
        reached=reached,
        before=reached - below[:, :, None] - priority_class.left_sums(rows),
        after=priority_class.sums_after(cut),
        levels=ruler.levels,
        prompts_whole=counted[:, -1],
        prompts_below=prompts_below,
        prompts_reached=prompts_reached,
        prompts_before=prompts_reached
        - prompts_below[:, :, None]
        - priority_class.left_prompts(ruler.level(atoms.prompt), ruler.count),
        prompts_after=priority_class.prompts_after(
            ruler.level(priority_class.prompt_after), ruler.count
        ),
    )


class _Ruler:
    """At most about _MAX_LEVELS marks of prompt length; a length counts at the next higher mark.

    A chunk is a whole number of marks, or a mark a whole number of chunks.
    """

    def __init__(self, prompts: Floats, chunk_tokens: int) -> None:
        longest = float(prompts.max())
        mark = chunk_tokens / max(1, chunk_tokens // _MARK_TOKENS)
        self._mark = mark * max(1, math.ceil(longest / mark / _MAX_LEVELS))
        self.count = math.ceil(longest / self._mark)
        self.levels: Floats = np.arange(1.0, self.count + 1.0) * self._mark

    def level(self, prompts: Floats) -> Indices:
        """Index of a prompt's mark."""
        return np.ceil(prompts / self._mark).astype(np.intp) - 1


def _rows(p: Floats, total: Floats, prompt: Floats, answer: Floats, chunks: Floats) -> Floats:
    rows = np.empty((ROWS, p.size))
    steps = chunks + answer
    rows[MASS] = p
    np.multiply(p, steps, out=rows[STEPS])
    np.multiply(rows[STEPS], total, out=rows[STEP_TOKENS])
    np.multiply(rows[STEPS], steps, out=rows[STEPS2])
    np.multiply(rows[STEPS2], total, out=rows[STEPS2_TOKENS])
    np.multiply(rows[STEPS2_TOKENS], total, out=rows[STEPS2_TOKENS2])
    np.multiply(rows[STEP_TOKENS], total, out=rows[STEP_TOKENS2])
    np.multiply(p, prompt, out=rows[PROMPT])
    for power in (PROMPT2, PROMPT3, PROMPT4):
        np.multiply(rows[power - 1], prompt, out=rows[power])
    np.multiply(rows[STEPS], prompt, out=rows[HELD])
    rows[HELD] += p * (answer * answer / 2)
    return rows


def _sums_before(ends: Indices, rows: Floats) -> Floats:
    """Sums of the rows' columns before each end; (rows, ends)."""
    sums = np.zeros((rows.shape[0], rows.shape[1] + 1))
    np.cumsum(rows, axis=1, out=sums[:, 1:])
    return np.asarray(sums[:, ends])


def _counted_before(ends: Indices, level: Indices, weight: Floats, levels: int) -> Floats:
    """Requests before each end with prompts up to each level, shape (levels, ends)."""
    order = np.argsort(ends)
    sizes = ends[order]
    sizes[1:] -= sizes[:-1].copy()
    cell = np.repeat(np.arange(ends.size), sizes)
    flat = np.bincount(cell * levels + level, weight, ends.size * levels)
    table = flat.reshape(ends.size, levels).cumsum(axis=0).cumsum(axis=1)
    counted = np.empty((levels, ends.size))
    counted[:, order] = table.T
    return counted


class _WindowMoments:
    """Requests above each boundary up to its widest reach; all boundaries concatenated."""

    def __init__(
        self, atoms: Atoms, edges: Floats, starts: Indices, reaches: Indices, max_cut: float
    ) -> None:
        self._shape = reaches.shape
        ends = np.concatenate((starts[:, None], reaches), axis=1)
        sizes = ends[:, 1:] - ends[:, :-1]
        total = sizes.sum(axis=1)
        shift = starts - np.concatenate(([0], np.cumsum(total)[:-1]))
        atom = np.arange(total.sum()) + np.repeat(shift, total)
        cell = np.repeat(np.arange(sizes.size), sizes.ravel())
        answer, prompt = atoms.answer[atom], atoms.prompt[atom]
        boundary = np.repeat(edges, total)
        room = boundary - answer
        fits = (room >= 1) & (prompt - room <= max_cut * prompt)
        share: Floats = fits.astype(np.float64)
        if atoms.squeezable is not None:
            share *= atoms.squeezable[atom]
        left = np.flatnonzero(share < 1)
        self._left_atom, self._left_cell, self._left_share = atom[left], cell[left], 1 - share[left]
        self._left_weight = atoms.weight[self._left_atom] * self._left_share
        self._weight = atoms.weight[atom] * share
        if left.size:
            positive = share > 0
            answer, room, cell = answer[positive], room[positive], cell[positive]
            self._weight = self._weight[positive]
        self._cell, self._answer, self._edges = cell, answer, edges
        self.prompt_after = room

    def left_sums(self, rows: Floats) -> Floats:
        """Rows of requests that cannot be compressed, up to each reach."""
        return self._by_reach(rows[:, self._left_atom] * self._left_share, self._left_cell)

    def left_prompts(self, level: Indices, levels: int) -> Floats:
        """Requests that cannot be compressed, by prompt length."""
        return self._by_level(self._left_cell, level[self._left_atom], self._left_weight, levels)

    def prompts_after(self, level: Indices, levels: int) -> Floats:
        """Compressed requests, by prompt length."""
        return self._by_level(self._cell, level, self._weight, levels)

    def sums_after(self, chunks: Floats) -> Floats:
        """Rows of compressed requests; their total length is the boundary."""
        p, steps = self._weight, chunks + self._answer
        run = p * steps
        held = run * self.prompt_after + p * (self._answer * self._answer / 2)
        prompts = [p * self.prompt_after**power for power in range(1, 5)]
        base = self._by_reach((p, run, run * steps, *prompts, held), self._cell)
        length = self._edges[:, None]
        rows = np.empty((ROWS, *self._shape))
        rows[[MASS, STEPS, STEPS2, PROMPT, PROMPT2, PROMPT3, PROMPT4, HELD]] = base
        rows[STEP_TOKENS] = rows[STEPS] * length
        rows[STEP_TOKENS2] = rows[STEP_TOKENS] * length
        rows[STEPS2_TOKENS] = rows[STEPS2] * length
        rows[STEPS2_TOKENS2] = rows[STEPS2_TOKENS] * length
        return rows

    def _by_reach(self, rows: Sequence[Floats] | Floats, cell: Indices) -> Floats:
        if cell.size == 0:
            return np.zeros((len(rows), *self._shape))
        size = self._shape[0] * self._shape[1]
        cells = np.array([np.bincount(cell, row, size) for row in rows])
        return cells.reshape(-1, *self._shape).cumsum(axis=2)

    def _by_level(self, cell: Indices, level: Indices, weight: Floats, levels: int) -> Floats:
        count, gammas = self._shape
        if cell.size == 0:
            return np.zeros((levels, count, gammas))
        flat = np.bincount(cell * levels + level, weight, count * gammas * levels)
        # A product with ones sums over gammas eight times as fast as cumsum along that axis.
        table = np.tril(np.ones((gammas, gammas))) @ flat.reshape(count, gammas, levels)
        return np.asarray(np.moveaxis(table.cumsum(axis=2), 2, 0))
