"""The central pool in front of a rank group: who waits, in what order, for which rank.

Jobs stand by (band, key, order of arrival). Those that must go to one rank (a stored response
lives there) stand in a line of their own, so that nobody waits behind them. Insertion and
removal move a block of pointers: a microsecond for some thousands of jobs.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from gateway.policy.scheduling.scheduler import BAND_NAMES, Job

_Entry = tuple[float, int, Job]
"""Orders are unique: jobs are never compared."""


class RankLine:
    """Every job in it has state `waiting`."""

    __slots__ = ("_bands", "_homed", "total", "waiting")

    def __init__(self) -> None:
        self._bands: list[list[_Entry]] = [[] for _ in BAND_NAMES]
        self._homed: dict[int, list[list[_Entry]]] = {}
        self.waiting = [0] * len(BAND_NAMES)
        """Jobs that wait, by band."""
        self.total = 0

    def put(self, job: Job) -> None:
        """Let a job wait; key, band and home must not change until it leaves."""
        job.state = "waiting"
        insort(self._line(job), (job.key, job.order, job))
        self.waiting[job.band] += 1
        self.total += 1

    def take(self, job: Job) -> None:
        """Remove a job."""
        line = self._line(job)
        del line[bisect_left(line, (job.key, job.order))]
        self.waiting[job.band] -= 1
        self.total -= 1

    def first(self, band: int, count: int) -> list[Job]:
        """The first of a band that may go to any rank."""
        return [entry[2] for entry in self._bands[band][:count]]

    def homed(self, rank: int, band: int, count: int) -> list[Job]:
        """The first of a band that must go to this rank."""
        lines = self._homed.get(rank)
        return [entry[2] for entry in lines[band][:count]] if lines else []

    def release(self, rank: int) -> None:
        """A rank is away: who waited for it may go to any other."""
        for line in self._homed.pop(rank, ()):
            for entry in line:
                entry[2].home = -1
                insort(self._bands[entry[2].band], entry)

    @property
    def homes(self) -> list[int]:
        """Ranks that somebody waits for."""
        return [rank for rank, lines in self._homed.items() if any(lines)]

    def all(self) -> Iterator[Job]:
        """Everyone, in no order; the line must not change meanwhile."""
        for line in (*self._bands, *(one for lines in self._homed.values() for one in lines)):
            for entry in line:
                yield entry[2]

    def _line(self, job: Job) -> list[_Entry]:
        if job.home < 0:
            return self._bands[job.band]
        return self._homed.setdefault(job.home, [[] for _ in BAND_NAMES])[job.band]
