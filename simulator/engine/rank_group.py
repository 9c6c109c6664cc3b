"""Data-parallel ranks of one engine behind a barrier; the clock is an argument.

Ranks hold their own sequences, blocks and prefix cache, and compute one iteration together:
it lasts as long as the slowest rank's, dt = max_g (W + h L_g) with `timing: kv`. A rank without
work computes an empty pass of W and waits for the others, since expert layers need all ranks.

Rules:
- Requests name their rank and join it at the next barrier.
- Real time steps with `begin` and `finish`; virtual time calls `run_until`, which steps too:
  a change of one rank's batch moves the barrier of all, so jumping would gain little.
"""

from collections.abc import Sequence

from simulator.engine.engine import Engine
from simulator.engine.profiles import EngineProfile
from simulator.engine.records import Emission, EngineRequest, Iteration

RankEmission = tuple[int, Emission]
"""(rank, emission)."""


class RankGroupEngine:
    """Use either `begin` and `finish`, or `run_until`; not thread-safe."""

    def __init__(self, profile: EngineProfile, ranks: int) -> None:
        """Each rank gets the profile's slots and blocks; ValueError unless ranks >= 1."""
        if ranks < 1:
            raise ValueError(f"a group has at least one rank, not {ranks}")
        self.engines = tuple(Engine(profile) for _ in range(ranks))
        self.waited_s = [0.0] * ranks
        """Seconds that each rank has waited at the barrier for slower ranks."""
        self._profile = profile
        self._clock_s = 0.0
        self._ends_s: Sequence[float | None] = ()
        self._end_s = 0.0
        self._start_s = 0.0
        self._open = False

    @property
    def waiting(self) -> int:
        """Sequences queued, over all ranks."""
        return sum(engine.waiting for engine in self.engines)

    def submit(self, rank: int, request: EngineRequest, now_s: float) -> None:
        """Queue a request on a rank; ValueError as `Engine.submit`."""
        self.engines[rank].submit(request, now_s)
        if not self._open and now_s > self._clock_s:
            self._clock_s = now_s

    def abort(self, rank: int, request_id: str) -> bool:
        """Drop a request of a rank at once; False if it is unknown there."""
        return self.engines[rank].abort(request_id)

    def release(self, rank: int, request_id: str) -> bool:
        """Free the blocks that an ended request holds; False if none does."""
        return self.engines[rank].release(request_id)

    def begin(self, now_s: float) -> Iteration | None:
        """Schedule one iteration of all ranks and return the slowest one's end; None when idle.

        Raises RuntimeError while another iteration is open.
        """
        if self._open:
            raise RuntimeError("an iteration is open: finish it first")
        steps = [engine.begin(now_s) for engine in self.engines]
        working = [step for step in steps if step is not None]
        if not working:
            return None
        self._open, self._start_s = True, now_s
        self._ends_s = [None if step is None else step.end_s for step in steps]
        self._end_s = max(step.end_s for step in working)
        return Iteration(
            start_s=now_s,
            end_s=self._end_s,
            prefill_tokens=sum(step.prefill_tokens for step in working),
            decode_sequences=sum(step.decode_sequences for step in working),
        )

    def finish(self) -> list[RankEmission]:
        """End the open iteration; returns its tokens, rank by rank.

        Raises RuntimeError if no iteration is open.
        """
        if not self._open:
            raise RuntimeError("no iteration is open: begin one first")
        self._open = False
        self._clock_s = self._end_s
        out: list[RankEmission] = []
        empty_end_s = self._start_s + self._profile.w_s
        for rank, end_s in enumerate(self._ends_s):
            own_end_s = empty_end_s if end_s is None else end_s
            self.waited_s[rank] += self._end_s - own_end_s
            if end_s is not None:
                out += [(rank, emission) for emission in self.engines[rank].finish()]
        return out

    def run_until(
        self, until_s: float, *, every_token: bool = False
    ) -> list[tuple[float, int, Emission]]:
        """Run all iterations that end by `until_s`; the one in progress stays open.

        Returns (time, rank, emission) of first and last tokens, or of every token if asked.
        """
        out: list[tuple[float, int, Emission]] = []
        while self._open or (self._clock_s < until_s and self.begin(self._clock_s) is not None):
            if self._end_s > until_s:
                break
            out += [
                (self._end_s, rank, emission)
                for rank, emission in self.finish()
                if every_token or emission.finished or emission.index == 1
            ]
        if not self._open and self.waiting:  # blocked by what ended sequences hold
            self._clock_s = until_s
        return out

    def next_event_s(self) -> float | None:
        """A lower bound of the next barrier's time; None when idle."""
        if self._open:
            return self._end_s
        if all(engine.next_event_s() is None for engine in self.engines):
            return None
        return self._clock_s + self._profile.w_s
