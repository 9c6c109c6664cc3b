"""The demand that a log records: every request that asked for capacity, once.

A fleet in shortage serves less than it is asked for. Demand is what was served and what was
refused for load (429, 503, a full queue), gave way, failed at an engine or left before its end.
A client that is refused asks again: attempts of one body within their retry-after are one demand.
A prompt that the gateway cut counts as the client sent it: the next fleet gets it uncut.

Refused requests have no usage. Their lengths are the gateway's estimates, corrected by what its
estimates of served requests turned out to be.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from math import isfinite, nan
from sys import intern
from typing import Any, Final, Literal, NamedTuple

import msgspec

from gateway.estimate.live_demand import RETRY_SLACK_S, wants_capacity
from gateway.records.decision import NO_COMPRESSION, CompressionSection
from gateway.records.entitlement import OWN_LIMITS
from gateway.scheduling.prefix_index import MAX_LOGGED
from planner.errors import PlanError
from planner.readers.fields import FieldMap, recognised
from simulator.pipeline.prompts import packed

_COMPRESSION: Final = ("kept_share", "not_compressed", "when")


class Demanded(NamedTuple):
    """One request as it was asked for; NaN for unknown values."""

    time_s: float
    prompt: float
    answer: float
    asked: float
    cached: float
    category: str
    entitlement: str
    text_bytes: float
    model: str
    cut: float
    """1 or 0: its prompt was cut, or could not be; NaN where it was not in a window."""
    served: bool
    limited: bool = False
    """Whether its entitlement's own limits refused an attempt at it."""
    transfer_s: float = nan
    """Of a prompt that another engine computed: until the first token of the one that answered."""
    key: str = ""
    """Name, or fingerprint, of the API key that it came with."""
    digests: int = 0
    """Where in `Demand.digests` those of its prompt are: first byte << 16 | bytes."""
    asked_model: str = ""
    """The model's name as the client wrote it."""
    body_bytes: float = nan
    of_batch: Literal["", "leftovers", "urgent"] = ""
    """The capacity that it gets as an item of a batch; "" for a request of its own."""

    @property
    def measured(self) -> bool:
        """Whether both lengths are known."""
        return isfinite(self.prompt) and isfinite(self.answer)


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """All requests, in order of time where times are known."""

    source: str
    """Name of the format."""
    fields: FieldMap
    requests: tuple[Demanded, ...]
    unserved: int
    """Requests among them that were not served."""
    retries: int
    """Further attempts at the same demand, which do not count."""
    left_out: int
    """Records that are no demand: bad requests, and those without lengths."""
    digests: bytearray
    """Of prompts' beginnings, as `simulator.pipeline.prompts` packs them; in one piece, since small
    objects of a million requests would keep the memory of all that is read beside them."""
    tells_retries: bool
    when: str
    """The `compression.when` of the gateway."""

    @property
    def notes(self) -> tuple[str, ...]:
        """How the requests were counted."""
        notes = []
        if self.left_out:
            notes.append(f"{self.left_out} records without lengths were left out")
        if self.unserved:
            notes.append(
                f"{self.unserved} of {len(self.requests)} requests were refused or not served, and "
                f"count as demand; {self.retries} retries of refused requests do not"
            )
            if not self.tells_retries:
                notes.append("this log does not tell retries apart: every refusal counts")
        return tuple(notes)


class _Attempt(NamedTuple):
    """A record of the log, before retries are joined."""

    request: Demanded
    key: int | None
    """Hash of entitlement and body; None where the log does not tell."""
    retry_s: float
    """The wait that the client was told."""


def read_demand(
    records: Iterable[Mapping[str, Any]], name: str, fields: FieldMap | None = None
) -> Demand:
    """Read every record; raises PlanError for one that is damaged, or of no known format."""
    field_map = fields
    attempts: list[_Attempt] = []
    whens: set[str | None] = set()
    left_out, digests = 0, bytearray()
    for number, record in enumerate(records, 1):
        if field_map is None:
            field_map = recognised(record, name)
        compression = _compression(record, name, number) if field_map.outcome else NO_COMPRESSION
        whens.add(compression.when)
        attempt = _attempt(record, field_map, compression, name, number, digests)
        if attempt is None:
            left_out += 1
        else:
            attempts.append(attempt)
    if field_map is None:
        raise PlanError(
            f"{name} has no requests with both lengths", "give a trace with requests in it"
        )
    if all(isfinite(attempt.request.time_s) for attempt in attempts):
        attempts.sort(key=lambda attempt: attempt.request.time_s)
    requests, retries = _joined(attempts)
    return Demand(
        source=field_map.name,
        fields=field_map,
        requests=tuple(_corrected(requests)),
        unserved=sum(not request.served for request in requests),
        retries=retries,
        left_out=left_out,
        digests=digests,
        tells_retries=any(attempt.key is not None for attempt in attempts),
        when=next(filter(None, sorted(map(str, whens - {None}))), "asked"),
    )


def _compression(record: Mapping[str, Any], name: str, number: int) -> CompressionSection:
    """What the gateway's log says of compression; lengths and p_c are read with it."""
    given = {field: record.get(f"compression.{field}") for field in _COMPRESSION}
    try:
        return msgspec.convert(given, CompressionSection)
    except msgspec.ValidationError as error:
        raise PlanError(
            f"{name}, record {number}: compression: {error}", "remove or mend the line"
        ) from None


def _joined(attempts: Sequence[_Attempt]) -> tuple[list[Demanded], int]:
    """One request for all attempts at the same body: the time of the first, the end of the last."""
    requests: list[Demanded] = []
    refused: dict[int, tuple[int, float]] = {}
    """Key -> (index of its request, until when a retry may come)."""
    retries = 0
    for request, key, retry_s in attempts:
        index, until_s = refused.pop(key, (-1, -1.0)) if key is not None else (-1, -1.0)
        if request.time_s <= until_s:
            retries += 1
            first = requests[index]
            limited = first.limited or request.limited
            requests[index] = request._replace(time_s=first.time_s, limited=limited)
        else:
            index = len(requests)
            requests.append(request)
        if key is not None and not request.served:
            refused[key] = (index, request.time_s + retry_s + RETRY_SLACK_S)
    return requests, retries


def _attempt(
    record: Mapping[str, Any],
    fields: FieldMap,
    compression: CompressionSection,
    name: str,
    number: int,
    digests: bytearray,
) -> _Attempt | None:
    """Read one record, and add its digests to the others; None if it is no demand."""
    outcome = "ok" if fields.outcome is None else str(record.get(fields.outcome))
    served = outcome == "ok"
    if not wants_capacity(outcome, record.get("status"), record.get("batch")):
        return None
    request = Demanded(
        time_s=_time_s(record, fields),
        prompt=_sent(compression, _length(record, fields.prompt, name, number)),
        answer=_length(record, fields.answer, name, number),
        asked=_optional(record, fields.asked),
        cached=_sent(compression, _optional(record, fields.cached)),  # the same share of it
        category=_name(record, fields.category),
        entitlement=_name(record, "entitlement" if fields.outcome else None),
        text_bytes=_optional(record, "request.text_bytes" if fields.outcome else None),
        model=_name(record, "model" if fields.outcome else None),
        cut=nan if compression.cut is None else float(compression.cut),
        served=served,
        limited=outcome == "refused" and record.get("reason") in OWN_LIMITS,
        transfer_s=_optional(record, "prefill.transfer_s"),
        key=_name(record, "key" if fields.outcome else None),
        digests=_digests(record, name, number, digests),
        asked_model=_name(record, "asked_model" if fields.outcome else None),
        body_bytes=_optional(record, "request.body_bytes"),
        of_batch=_of_batch(record),
    )
    if served and not request.measured:
        return None
    if not served:
        # A stream that broke tells less than the answer; the estimate tells what was wanted.
        request = request._replace(
            prompt=_sent(compression, _optional(record, "estimate.input_tokens")),
            answer=_optional(record, "estimate.output_tokens"),
        )
    digest, size = record.get("request.body_digest"), record.get("request.body_bytes")
    body = (request.entitlement, int(digest), int(size or 0)) if digest is not None else None
    key = None if body is None else hash(body)  # a day's log has a million of them
    retry_s = _optional(record, "retry_after_s")
    return _Attempt(request, key, retry_s if isfinite(retry_s) else 0.0)


def _of_batch(record: Mapping[str, Any]) -> Literal["", "leftovers", "urgent"]:
    if record.get("batch") is None:
        return ""
    return "urgent" if record.get("batch.urgent") else "leftovers"


def _digests(record: Mapping[str, Any], name: str, number: int, read: bytearray) -> int:
    given = record.get("request.prompt_digests", ())
    place = len(read) << 16
    try:
        read += packed(given[:MAX_LOGGED])
    except (TypeError, ValueError, OverflowError) as error:
        problem = f"{name}, record {number}: request.prompt_digests: {error}"
        raise PlanError(problem, "remove or mend the line") from None
    return place | len(read) - (place >> 16)


def _sent(compression: CompressionSection, tokens: float) -> float:
    return float(compression.sent_tokens(int(tokens))) if isfinite(tokens) else nan


def _corrected(requests: Sequence[Demanded]) -> Iterable[Demanded]:
    """Refused requests' answers as served ones had them on average, where any were served.

    The estimate of an answer is a high quantile, or the client's limit: taken as it is, it would
    plan answers that nobody writes.
    """
    served = [r for r in requests if r.served]
    answer = sum(r.answer for r in served) / len(served) if served else nan
    for request in requests:
        if request.served or not request.measured or not served:
            yield request
        else:
            most = request.asked if isfinite(request.asked) else request.answer
            yield request._replace(answer=max(1.0, min(answer, most)))


def _length(record: Mapping[str, Any], field: str, name: str, number: int) -> float:
    """A number of tokens, NaN if absent; raises PlanError for anything else."""
    value = record.get(field)
    if value is None or value == "":
        return nan
    try:
        tokens = float(value)
    except (TypeError, ValueError):
        tokens = -1.0
    if not 0 <= tokens < 1e9:
        raise PlanError(
            f"{name}, record {number}: {field} is {value!r}", "lengths are numbers of tokens >= 0"
        )
    return tokens


def _name(record: Mapping[str, Any], field: str | None) -> str:
    """A text that many records share; interned, since a day has a million records."""
    return intern(str((record.get(field) if field is not None else None) or ""))


def _optional(record: Mapping[str, Any], field: str | None) -> float:
    value = record.get(field) if field is not None else None
    try:
        return float(value) if value not in {None, ""} else nan
    except (TypeError, ValueError):
        return nan


def _time_s(record: Mapping[str, Any], fields: FieldMap) -> float:
    """Seconds of a number of units, or of a date and time; NaN for anything else."""
    value = record.get(fields.time) if fields.time is not None else None
    if value is None or value == "":
        return nan
    try:
        return float(value) * fields.time_unit_s
    except (TypeError, ValueError):
        pass
    try:
        # Azure writes seven digits of a second; Python parses at most six.
        whole, _, fraction = str(value).partition(".")
        return datetime.fromisoformat(f"{whole}.{fraction[:6]}" if fraction else whole).timestamp()
    except ValueError:
        return nan
