"""Read distributions and traces as workloads, by the field names of their format."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from planner.errors import PlanError
from planner.readers.demand import Demand, Demanded, read_demand
from planner.readers.fields import FieldMap, readable
from planner.workload.distribution import cdf_from_json
from planner.workload.rate import rate_of
from planner.workload.workload import Compressible, Workload, from_cdf, from_lengths

_EDGE: Final = 0.01


def read_workload(
    text: str, *, name: str, fields: FieldMap | None = None, model: str = ""
) -> Workload:
    """Read a distribution (JSON) or a trace (CSV, JSON lines, a JSON list of objects).

    Of a log that has requests of `model` among others, only these are read.
    """
    stripped = _stripped(text, name)
    if stripped[0] in "[{":
        document = _whole_json(stripped)
        records_only = isinstance(document, list) and all(isinstance(r, dict) for r in document)
        if document is not None and not records_only:
            return from_cdf(cdf_from_json(document), name=name)
    records = list(records_of(text, name))
    own = [record for record in records if model and record.get("model") == model]
    return workload_of(read_demand(own or records, name, fields), name)


def records_of(text: str, name: str) -> Iterator[Mapping[str, Any]]:
    """The records of a trace: CSV, JSON lines, or a JSON list of objects."""
    stripped = _stripped(text, name)
    if stripped[0] not in "[{":
        return iter(csv.DictReader(io.StringIO(stripped)))
    document = _whole_json(stripped)
    lines = stripped.splitlines()
    return map(readable, _json_lines(lines, name) if document is None else iter(document))


def records_in(path: Path) -> Iterator[Mapping[str, Any]]:
    """The same of a file; JSON lines are read one by one, as a day's log needs much memory.

    A last line that is being written is left out. Raises OSError, UnicodeDecodeError.
    """
    with path.open(encoding="utf-8-sig") as file:
        if not file.readline().lstrip().startswith('{"'):
            yield from records_of(path.read_text(encoding="utf-8-sig"), path.name)
            return
        file.seek(0)
        whole = (line for line in file if line.rstrip("\r ").endswith(("\n", "}")))
        yield from map(readable, _json_lines(whole, path.name))


def workload_of(demand: Demand, name: str) -> Workload:
    """The lengths and the times of a demand; raises PlanError if no request has lengths."""
    measured = [request for request in demand.requests if request.measured]
    if not measured:
        raise PlanError(
            f"{name} has no requests with both lengths", "give a trace with requests in it"
        )
    rows = [(r.prompt, r.answer, r.asked) for r in measured]
    prompts, answers, asked = np.array(rows, dtype=np.float64).T
    times = np.array([request.time_s for request in demand.requests])
    times = np.sort(times[np.isfinite(times)])
    timed = len(times) > 1 and times[-1] > times[0]
    categories = tuple(r.category for r in measured) if demand.fields.category else None
    entitlements = tuple(r.entitlement for r in measured)
    models = sorted({r.model for r in demand.requests if r.model})
    several = (f"requests of {len(models)} models are planned as one: {', '.join(models)}",)
    workload = from_lengths(
        prompts,
        answers,
        name=name,
        source=demand.source + (", prompts as clients sent them" if demand.fields.outcome else ""),
        asked=asked if np.isfinite(asked).any() else None,
        cached_share=None if demand.fields.cached is None else _cached_share(measured),
        rate_per_s=rate_of(times).per_s if timed else None,
        categories=categories,
        notes=demand.notes if len(models) < 2 else (*several, *demand.notes),
    )
    return msgspec.structs.replace(
        workload,
        times_s=times if timed else None,
        entitlements=entitlements if any(entitlements) else None,
        compressible=_compressible(demand, measured),
        model=models[0] if len(models) == 1 else "",
    )


def _stripped(text: str, name: str) -> str:
    stripped = text.lstrip("\ufeff \t\r\n")
    if not stripped:
        raise PlanError(f"{name} is empty", "give a distribution or a trace with requests in it")
    return stripped


def _whole_json(text: str) -> Any:
    try:
        document = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
    # A line of JSON lines is also a valid JSON object.
    return [document] if isinstance(document, dict) and "cdf" not in document else document


def _json_lines(lines: Iterable[str], name: str) -> Iterator[Mapping[str, Any]]:
    decoder = msgspec.json.Decoder(dict[str, Any])
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                record = decoder.decode(line)
            except msgspec.DecodeError:
                raise PlanError(
                    f"{name}, line {number} is not a JSON object", "remove or mend the line"
                ) from None
            # The gateway's log also has lines about token pools; they are not requests.
            if not {"schema", "event", "unix_s"} <= record.keys():
                yield record


def _compressible(demand: Demand, requests: Sequence[Demanded]) -> Compressible | None:
    """p_c over all prompts in the gateway's window, whoever refused them; None without any.

    It is known for lengths of that window alone. Nearly all of them give its ends: a gateway takes
    single requests for longer or shorter than they turn out.
    """
    looked_at = [request for request in requests if isfinite(request.cut)]
    if not looked_at:
        return None
    cut = sum(request.cut for request in looked_at)
    totals = np.array([request.prompt + request.answer for request in requests])
    low, high = np.quantile([r.prompt + r.answer for r in looked_at], (_EDGE, 1 - _EDGE))
    share = cut / len(looked_at)
    return Compressible(
        share=share,
        said=f"{cut:.0f} of {len(looked_at)} prompts in the log's compression window, "
        f"{low:.0f} to {high:.0f} tokens with the answer, were cut; no others are taken to be",
        when=demand.when,
        by_request=np.where((totals >= low) & (totals <= high), share, 0.0),
    )


def _cached_share(requests: Sequence[Demanded]) -> float:
    served = [request for request in requests if request.served]
    total = sum(request.prompt for request in served)
    cached = float(np.nansum([request.cached for request in served]))
    return cached / total if total > 0 else 0.0
