"""One LLM engine with continuous batching, iteration by iteration; the clock is an argument.

A batch is planned when it changes and holds for the following iterations (`batch`); a formula
gives their end times (`timeline`). Real time steps through them and virtual time jumps over
them, with the same result.

Rules:
- A sequence emits its first token at the end of the iteration that completes its prefill,
  then one token per iteration. (The papers count one more iteration: ask for one more token.)
- Requests join at the next iteration boundary. The order of calls decides, times only measure:
  in virtual time, call `run_until(t)` before `submit(request, t)`.
- An aborted sequence frees its blocks at once; the open iteration still ends at its stated time.
"""

from typing import Literal

from simulator.engine.batch import BatchScheduler
from simulator.engine.kv_blocks import PrefixCache
from simulator.engine.profiles import PROFILES, EngineProfile
from simulator.engine.records import Emission, EngineRequest, Iteration
from simulator.engine.sequence import Sequence
from simulator.engine.timeline import Timeline

__all__ = ["PROFILES", "Emission", "Engine", "EngineProfile", "EngineRequest", "Iteration"]


class Engine:
    """One engine. Use either `begin` and `finish`, or `run_until`; not thread-safe."""

    def __init__(self, profile: EngineProfile) -> None:
        self.profile = profile
        self.prompt_tokens_total = 0
        self.generation_tokens_total = 0
        self._sched = BatchScheduler(profile)
        self._live: dict[str, Sequence] = {}
        self._submitted = 0
        self._v = 0  # iterations ended
        self._clock = 0.0  # when the last one ended
        self._open = False
        self._blocked = False  # nothing fits beside the blocks that ended sequences hold
        self._changed = True  # the batch must be planned anew at the next boundary
        self._open_end_s = 0.0
        self._time = Timeline()

    # State

    @property
    def running(self) -> int:
        """Sequences that hold a slot; at most max_num_seqs."""
        return len(self._sched.running)

    @property
    def waiting(self) -> int:
        """Sequences in the queue, preempted ones included."""
        return len(self._sched.waiting)

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use, 0..1; idle cached blocks are free."""
        return self._sched.pool.used / self._sched.pool.total

    @property
    def kv_tokens(self) -> int:
        """Tokens of the running sequences, each counting its whole prefix.

        With `load: reserved`, their final lengths. Shared prefixes can put it above the capacity.
        """
        return self._sched.resident

    @property
    def preemptions_total(self) -> int:
        """How often a sequence lost its blocks and had to be computed again."""
        return self._sched.preemptions_total

    @property
    def prefix_queries_total(self) -> int:
        """Prompt tokens looked up in the prefix cache; each request counts once."""
        return self._sched.prefix_queries_total

    @property
    def prefix_hits_total(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return self._sched.prefix_hits_total

    @property
    def remote_hits_total(self) -> int:
        """Prompt tokens that came from other engines and were not in the prefix cache."""
        return self._sched.remote_hits_total

    @property
    def held(self) -> int:
        """Ended sequences whose blocks wait for another engine."""
        return len(self._sched.held)

    @property
    def prefix_cache(self) -> PrefixCache:
        """What it really holds; read it, and set its `on_evict`."""
        return self._sched.pool.prefix

    # Requests

    def submit(self, request: EngineRequest, now_s: float) -> None:
        """Queue a request; raises ValueError if its id is in use or it can never be served."""
        if request.id in self._live or request.id in self._sched.held:
            raise ValueError(f"request id {request.id!r} is in use")
        if not 1 <= request.prompt_tokens < self.profile.max_model_len:
            raise ValueError(
                f"a prompt has 1 to {self.profile.max_model_len - 1} tokens, "
                f"not {request.prompt_tokens}"
            )
        if request.output_tokens < 1:
            raise ValueError(f"output_tokens must be at least 1, not {request.output_tokens}")
        seq = Sequence(request, self.profile, self._submitted, now_s)
        self._submitted += 1
        self._live[request.id] = seq
        # If the first in line does not fit, a new arrival behind it changes nothing.
        if not self._sched.waiting or self.profile.scheduling == "priority":
            self._changed = True
            self._blocked = False
        self._sched.enqueue(seq)
        if not self._open and now_s > self._clock:
            self._clock = now_s

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its blocks at once; False if it is unknown."""
        seq = self._live.pop(request_id, None)
        if seq is None:
            return False
        self._sched.remove(seq)
        self._changed, self._blocked = True, False
        return True

    def release(self, request_id: str) -> bool:
        """Free the blocks of an ended sequence that holds them; False if none does."""
        found = self._sched.held.pop(request_id, None)
        if found is None:
            return False
        self._sched.pool.give(*found)
        self._changed, self._blocked = True, False
        return True

    # Real time: one iteration after the other

    def begin(self, now_s: float) -> Iteration | None:
        """Schedule one iteration and return its end time; None if there is nothing to do.

        Raises RuntimeError while another iteration is open.
        """
        if self._open:
            raise RuntimeError("an iteration is open: finish it first")
        if not self._start(now_s):
            return None
        return Iteration(
            start_s=now_s,
            end_s=self._open_end_s,
            prefill_tokens=self._sched.prefill_tokens(self._v),
            decode_sequences=self._sched.decoding,
        )

    def finish(self) -> list[Emission]:
        """End the open iteration; returns its tokens in order of admission.

        Raises RuntimeError if no iteration is open.
        """
        if not self._open:
            raise RuntimeError("no iteration is open: begin one first")
        return self._complete(self._v + 1, self._open_end_s, every_token=True)

    # Virtual time: from event to event

    def run_until(
        self, until_s: float, *, every_token: bool = False
    ) -> list[tuple[float, Emission]]:
        """Run all iterations that end by `until_s`; the one in progress stays open.

        Returns first and last tokens with their times, or every token if asked.
        """
        out: list[tuple[float, Emission]] = []
        sched, time = self._sched, self._time
        while self._open or (self._clock < until_s and self._start(self._clock)):
            end_s = self._open_end_s
            if end_s > until_s:
                break
            v = self._v + 1
            if not (every_token or self._changed):
                v = sched.next_change_v()
                end_s = time.end_s(v)
                if end_s > until_s:
                    v = time.last_ended(until_s, self._v + 1, v)
                    end_s = time.end_s(v)
            for emission in self._complete(v, end_s, every_token=every_token):
                out.append((end_s, emission))  # noqa: PERF401 - mostly one or none
        if self._blocked:
            self._clock = until_s
        return out

    def next_event_s(self) -> float | None:
        """Earliest time of the next first or last token; None when idle or blocked.

        Exact while the batch is known not to change, else a lower bound: run_until(next_event_s())
        always makes progress, but may find no event.
        """
        if not self._live or self._blocked:
            return None
        sched, v = self._sched, self._v
        if self._open:
            if not self._changed:
                v = sched.next_change_v()
                end_s = self._time.end_s(v)
                return end_s if sched.is_due(v) else end_s + self.profile.w_s
            if sched.is_due(v + 1):
                return self._open_end_s
            v, boundary_s = v + 1, self._open_end_s
        elif not self._changed and v < sched.lapse_v:
            return self._time.end_s(sched.next_change_v())
        else:
            boundary_s = self._clock
        # The next batch is not planned yet. It is no faster than the present one without growth.
        if sched.fixed:
            return boundary_s + (sched.earliest_event_v(v) - v) * self._iteration_s()
        return boundary_s + self.profile.w_s

    # One mechanism for both

    def _start(self, now_s: float) -> bool:
        """Open the iteration after `_v`; False when idle or blocked."""
        sched = self._sched
        if not self._changed and self._v < sched.lapse_v:
            sched.extend(1)
            self._time.shift(self._v, now_s)
            self._open, self._open_end_s = True, self._time.end_s(self._v + 1)
            return True
        if not sched.plan(self._v, now_s):
            self._blocked = bool(self._live)
            return False
        profile = self.profile
        prefill = 0 if sched.fixed else sched.prefill_tokens(self._v)
        length_s = self._iteration_s() + profile.prefill_s_per_token * prefill
        growth_s = 0.0
        if sched.growing and profile.timing == "kv":
            growth_s = profile.h_s_per_token * (sched.decoding + prefill)
        if prefill and profile.attention_s_per_pair:
            pairs, more = sched.attention_pairs()
            length_s += profile.attention_s_per_pair * pairs
            growth_s += profile.attention_s_per_pair * more
        self._time.anchor(self._v, now_s, length_s, growth_s)
        self._open, self._open_end_s = True, now_s + length_s
        self._changed = False
        return True

    def _iteration_s(self) -> float:
        """Iteration time of the sequences that run now, without prefill tokens."""
        profile = self.profile
        if profile.timing == "slots":
            return profile.w_s + profile.h_s * len(self._sched.running)
        return profile.w_s + profile.h_s_per_token * self._sched.resident

    def _complete(self, v: int, end_s: float, *, every_token: bool) -> list[Emission]:
        """End all iterations up to v; no event lies before it."""
        sched = self._sched
        if v - self._v > 1:
            sched.extend(v - self._v - 1)
        self.generation_tokens_total += (v - self._v) * sched.decoding
        self._v, self._clock, self._open = v, end_s, False
        due = sched.due(v)
        if not every_token:
            return [e for seq in due if (e := self._emit(seq)).finished or e.index == 1]
        ending = set(due)
        return [
            self._emit(seq) for seq in list(sched.running.values()) if seq.decoding or seq in ending
        ]

    def _emit(self, seq: Sequence) -> Emission:
        """Emit the sequence's token of iteration `_v` and update its state."""
        sched = self._sched
        starts = not seq.decoding
        if starts:
            sched.start_decoding(seq, self._v)
            self.generation_tokens_total += 1
            if not seq.emitted:
                self.prompt_tokens_total += seq.prompt_tokens
            self._changed = self._changed or not sched.fixed
        index = self._v + seq.index_offset
        reason: Literal["stop", "length"] | None = None
        finished = index >= seq.limit
        if finished:
            reason = "length" if seq.limit < seq.output_tokens else "stop"
            sched.finish(seq)
            del self._live[seq.id]
            self._changed = True
        elif starts:
            sched.expect_finish(seq)
        return Emission(
            id=seq.id,
            index=index,
            finished=finished,
            reason=reason,
            cached_tokens=seq.cached_tokens,
            queue_s=seq.queue_s,
        )
