"""Read traces with arrival times, for `--arrivals recorded` and for replay."""

from itertools import pairwise
from math import isfinite, nan
from operator import attrgetter
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from gateway.routing.routing import CATEGORIES
from planner.errors import PlanError
from planner.readers.demand import read_demand
from planner.readers.fields import parse_field_map
from planner.readers.traces import records_in
from simulator.fleet.arrivals import recorded
from simulator.fleet.traffic import Floats, Ints
from simulator.pipeline.prompts import Digests, joined


class RecordedTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by time, refused ones included; columns of equal length."""

    at_s: Floats
    """Seconds from the first request."""
    prompts: Ints
    answers: Ints
    categories: tuple[str, ...]
    """Category of each request; empty if not known."""
    entitlements: tuple[str, ...] = ()
    """Entitlement of each request; empty if not known."""
    text_bytes: Floats | None = None
    """Bytes of each prompt's text, NaN if not known; None if no record tells."""
    asked: Floats | None = None
    """Limit that each request set for its answer, NaN for none; None if no record tells."""
    models: tuple[str, ...] = ()
    """Model of each request; "" if not known."""
    keys: tuple[str, ...] = ()
    """Name, or fingerprint, of the key of each request; "" if not known."""
    asked_models: tuple[str, ...] = ()
    """As clients wrote the model's name; "" if not known."""
    body_bytes: Floats | None = None
    """NaN if not known; None if no record tells."""
    uncut: NDArray[np.bool_] | None = None
    """Whether it was served as its client sent it; None for all."""
    cut: Floats | None = None
    """1 or 0: its prompt was cut, or could not be; NaN where it was not in a window."""
    limited: NDArray[np.bool_] | None = None
    """Whether its entitlement's own limits refused an attempt at it when it was recorded."""
    comes_back: bool = True
    """Whether clients come back after a refusal; assumed where the log does not tell."""
    digests: Digests | None = None
    """Of prompts' beginnings; None if no record tells."""
    cached: Floats | None = None
    """Prompt tokens that an engine had cached, NaN if not known; None if no record tells."""
    cut_shares: tuple[tuple[float, float, float], ...] = ()
    """p_c by length: (shortest, longest total, share that was cut), ascending.

    Of prompts of categories that a compressor takes: a simulated gateway leaves out the others.
    """
    batched: NDArray[np.bool_] | None = None
    """Whether it was an item of a batch; None for no request."""
    leftovers: NDArray[np.bool_] | None = None
    """Whether it was one that got only what requests leave; None for no request."""
    first_unix_s: float = 0.0
    """Time of the first request, as the log has it."""
    kv_tokens_per_s: float | None = None
    """How fast prompts' KV went to the engines that answered; None if no record tells."""
    left_out: int = 0
    """Requests without lengths or times."""

    def compressible(self) -> Floats:
        """p_c of each request: its own, else by its total; NaN where the log does not tell."""
        totals, p_c = self.prompts + self.answers, np.full(len(self.prompts), nan)
        for shortest, longest, share in self.cut_shares:
            p_c[(totals >= shortest) & (totals <= longest)] = share
        return p_c if self.cut is None else np.where(np.isnan(self.cut), p_c, self.cut)

    def of(self, index: Ints, at_s: Floats) -> "RecordedTraffic":
        """Some of its requests, at other times."""
        picked = index.tolist()
        return msgspec.structs.replace(
            self,
            at_s=at_s,
            prompts=self.prompts[index],
            answers=self.answers[index],
            categories=tuple(self.categories[i] for i in picked) if self.categories else (),
            entitlements=tuple(self.entitlements[i] for i in picked) if self.entitlements else (),
            text_bytes=None if self.text_bytes is None else self.text_bytes[index],
            asked=None if self.asked is None else self.asked[index],
            models=tuple(self.models[i] for i in picked) if self.models else (),
            keys=tuple(self.keys[i] for i in picked) if self.keys else (),
            asked_models=tuple(self.asked_models[i] for i in picked) if self.asked_models else (),
            body_bytes=None if self.body_bytes is None else self.body_bytes[index],
            uncut=None if self.uncut is None else self.uncut[index],
            cut=None if self.cut is None else self.cut[index],
            limited=None if self.limited is None else self.limited[index],
            digests=None if self.digests is None else self.digests.of(index),
            cached=None if self.cached is None else self.cached[index],
            batched=None if self.batched is None else self.batched[index],
            leftovers=None if self.leftovers is None else self.leftovers[index],
        )

    @property
    def shows_caches(self) -> bool:
        """Whether it tells what prompts share, and engines reported cached tokens."""
        cached = 0.0 if self.cached is None else np.nansum(self.cached)
        return self.digests is not None and bool(cached)


class NothingTimedError(PlanError):
    """A trace in which no request has both lengths and a time."""


LENGTHS: Final = 4
ENOUGH_CUT: Final = 50
"""Prompts in the compression window of about one length, from which its p_c is known."""
ENOUGH: Final = 20
"""Requests that were not served at last from which the log tells whether clients come back.

Of clients that come back twice, a request that is not served has two retries, and others have some.
"""
_FIX = "name its fields: --fields prompt=FIELD,answer=FIELD,time=FIELD"


def scaled(found: RecordedTraffic, name: str, rate_per_s: float | None) -> Floats:
    """The recording's times, at another rate if one is given; raises PlanError for a bad one."""
    try:
        return recorded(found.at_s, rate_per_s=rate_per_s)
    except ValueError as error:
        raise PlanError(f"{name}: {error}", "give --rate above 0, or none") from None


def read_recorded(
    path: Path, *, fields: str | None = None, requests: int | None = None
) -> RecordedTraffic:
    """A trace's demand in order of time, from its first request on.

    Requests whose lengths or times are not known are left out. Raises PlanError if none is left.
    """
    mapped = parse_field_map(fields) if fields else None
    try:
        demand = read_demand(records_in(path), path.name, mapped)
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: {error}", "give a trace: CSV or JSON lines") from None
    timed = [r for r in demand.requests if r.measured and np.isfinite(r.time_s)]
    if not timed:
        raise NothingTimedError(f"{path.name} has no requests with lengths and times", _FIX)
    rows = sorted(timed, key=attrgetter("time_s"))[:requests]
    at_s = np.array([r.time_s for r in rows])
    categories = tuple(r.category for r in rows)
    entitlements = tuple(r.entitlement for r in rows)
    handed = [r for r in rows if r.transfer_s > 0]
    packed, places = memoryview(demand.digests), np.array([r.digests for r in rows])
    traffic = RecordedTraffic(
        at_s=at_s - at_s[0],
        prompts=_tokens([r.prompt for r in rows]),
        answers=_tokens([r.answer for r in rows]),
        categories=categories if any(categories) else (),
        entitlements=entitlements if any(entitlements) else (),
        text_bytes=_known([r.text_bytes for r in rows]),
        asked=_known([r.asked for r in rows]),
        models=tuple(r.model for r in rows),
        keys=tuple(r.key for r in rows),
        asked_models=tuple(r.asked_model for r in rows),
        body_bytes=_known([r.body_bytes for r in rows]),
        uncut=np.array([r.served and r.cut != 1 for r in rows]),
        cut=_known([r.cut for r in rows]),
        limited=np.array([r.limited for r in rows]),
        cached=_known([r.cached for r in rows]),
        batched=np.array([r.of_batch != "" for r in rows]),
        leftovers=np.array([r.of_batch == "leftovers" for r in rows]),
        comes_back=not demand.tells_retries
        or demand.unserved < ENOUGH
        or demand.retries > demand.unserved / 2,
        cut_shares=_by_length(
            [
                (r.prompt + r.answer, r.cut)
                for r in rows
                if isfinite(r.cut) and (r.category or "prose") in CATEGORIES
            ]
        ),
        first_unix_s=rows[0].time_s,
        kv_tokens_per_s=sum(r.prompt for r in handed) / sum(r.transfer_s for r in handed)
        if handed
        else None,
        left_out=len(demand.requests) - len(timed),
    )
    if not packed:
        return traffic
    del demand, timed, rows, handed  # digests of a day's log need as much again
    begins, sizes = (places >> 16).tolist(), (places & 0xFFFF).tolist()
    own = (packed[begin : begin + size] for begin, size in zip(begins, sizes, strict=True))
    return msgspec.structs.replace(traffic, digests=joined(own))


def _by_length(cut: list[tuple[float, float]]) -> tuple[tuple[float, float, float], ...]:
    """Shares of prompts of about one length, that meet; () where too few are known.

    At most LENGTHS of them, with ENOUGH_CUT prompts each.
    """
    cut = sorted(cut)
    parts = min(LENGTHS, len(cut) // ENOUGH_CUT)
    at = [len(cut) * part // parts for part in range(parts + 1)] if parts else [0]
    found = []
    for first, last in pairwise(at):
        share = sum(was_cut for _, was_cut in cut[first:last]) / (last - first)
        found.append((cut[first][0], cut[min(last, len(cut) - 1)][0], share))
    return tuple(found)


def _tokens(values: list[float]) -> Ints:
    return np.maximum(1, np.rint(values)).astype(np.int64)


def _known(values: list[float]) -> Floats | None:
    found = np.array(values)
    return found if np.isfinite(found).any() else None
