"""Extracts training rows from a gateway's request log, one for each prefill."""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, Final

import msgspec

from predictor.features import features

SERVED: Final = ("ok", "disconnected", "evicted")
"""Outcomes whose first token, if any, is representative of a normal request."""
_SECTIONS: Final = ("estimate", "usage", "compression", "scheduling")
_MAX_TOKENS: Final = 1 << 32
_MAX_S: Final = 3600.0


class PrefillRow(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One prefill: the features when the request was bound, and the time it took."""

    x: tuple[float, ...]
    prefill_s: float
    worker: str = ""


class LogRows(msgspec.Struct, kw_only=True):
    """The rows of a log, and counts of the lines that were not usable."""

    rows: dict[tuple[str, str], list[PrefillRow]] = {}
    """By model and pool, in the log's order."""
    lines: int = 0
    unreadable: int = 0
    other: int = 0
    """Lines that are no requests, were not served, or are of another model or pool."""
    lacking: int = 0
    """Served requests that lack a required field."""

    @property
    def count(self) -> int:
        """Rows of all pools."""
        return sum(map(len, self.rows.values()))


def read_rows(
    lines: Iterable[bytes],
    *,
    model: str | None = None,
    pool: str | None = None,
    into: LogRows | None = None,
) -> LogRows:
    """The rows of a request log, one JSON object a line; unusable lines are counted.

    `into`: adds to the result of earlier files.
    """
    log_rows = LogRows() if into is None else into
    for line in lines:
        if not line.strip():
            continue
        log_rows.lines += 1
        try:
            record = msgspec.json.decode(line)
        except (msgspec.MsgspecError, RecursionError):
            log_rows.unreadable += 1
            continue
        if not isinstance(record, dict):
            log_rows.unreadable += 1
            continue
        _take(record, log_rows, model, pool)
    return log_rows


def _take(
    record: Mapping[str, Any], log_rows: LogRows, model: str | None, pool: str | None
) -> None:
    wanted = (model in {None, record.get("model")}) and (pool in {None, record.get("pool")})
    if not wanted or record.get("outcome") not in SERVED:
        log_rows.other += 1
        return
    row = row_of(record)
    if row is None:
        log_rows.lacking += 1
        return
    name = str(record.get("model") or "?"), str(record.get("pool") or "?")
    log_rows.rows.setdefault(name, []).append(row)


def row_of(record: Mapping[str, Any]) -> PrefillRow | None:
    """One record's row; None when a field is missing or out of range.

    The prompt's length is the router's estimate, unless the prompt was compressed after it.
    """
    values = _figures(record)
    estimated = values.get("input_tokens")
    compressed = values.get("compressed", "none") != "none"
    prompt = values.get("prompt_tokens") if compressed or estimated is None else estimated
    tokens = [
        prompt,
        values.get("expected_hit_tokens", 0),
        values.get("output_tokens", 0),
        values.get("backlog_tokens"),
        values.get("worker_active"),
    ]
    usage = values.get("worker_kv_usage")
    usage = 0.0 if usage is None else usage
    prefill_s, cap = values.get("prefill_s"), values.get("cap_tokens")
    if not all(_number(value, _MAX_TOKENS) for value in tokens) or not tokens[0]:
        return None
    if not _number(usage, 1e6) or not _number(prefill_s, _MAX_S) or not prefill_s:
        return None
    if cap is not None and not _number(cap, _MAX_TOKENS):
        return None
    prompt, hit, output, backlog, active = (int(value) for value in tokens)
    x = features(
        prompt_tokens=prompt,
        hit_tokens=hit,
        cap_tokens=cap,
        output_tokens=output,
        stream=bool(record.get("stream", False)),
        active=active,
        backlog_tokens=backlog,
        kv_usage=float(usage),
    )
    return PrefillRow(x=x, prefill_s=float(prefill_s), worker=str(record.get("worker") or ""))


def _figures(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of all sections in one mapping."""
    values: dict[str, Any] = {}
    for section in _SECTIONS:
        fields = record.get(section)
        if isinstance(fields, dict):
            values |= fields
    return values


def _number(value: object, most: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isfinite(value) and 0 <= value <= most
