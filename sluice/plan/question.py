"""What `plan` and `whatif` are asked: the workload, the question, the file with the tenants."""

import json
import os
from collections.abc import Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

import httpx
import msgspec
import yaml

from gateway.admission.entitlement_terms import GIB
from gateway.settings import Config, ConfigError, parse
from planner.errors import PlanError
from planner.goals import Goals
from planner.profile import NodeProfile, profile_for, profile_from_json
from planner.readers import histograms
from planner.readers.fields import FieldMap, parse_field_map
from planner.readers.traces import read_workload
from planner.records import Phases, Question, Reserved
from planner.search import Mode
from planner.workload.library import SHIPPED
from planner.workload.rate import Rate, given, rate_of
from planner.workload.synthetic import synthetic
from planner.workload.workload import Compressible, Workload, by_category

_TIMEOUT_S = 10.0
_PROM_RANGE = "7d"
_FIX = "give a sluice.yaml, or a YAML file with `entitlements:`"
_ROOM = 1_000_000
"""Slots of the stand-in model by which entitlements alone are checked."""


class Kinds(msgspec.Struct, frozen=True, kw_only=True):
    """Kinds of node as named on the command line."""

    gpus: Sequence[str] = ()
    short: str | None = None
    long: str | None = None
    model: str = "llama-3-70b"
    gpus_per_node: int | None = None
    dtype: str | None = None
    usd_per_gpu_hour: float | None = None
    profile: Path | None = None

    def node(self, gpu: str) -> NodeProfile:
        """The node for a GPU's name."""
        return profile_for(
            gpu,
            self.model,
            gpus=self.gpus_per_node,
            dtype=self.dtype,
            usd_per_gpu_hour=self.usd_per_gpu_hour,
        )

    def nodes(self) -> tuple[NodeProfile, ...]:
        """Kinds that every pool may use; a measured profile wins over names."""
        if self.profile is not None:
            origin = str(self.profile)
            try:
                document = json.loads(self.profile.read_bytes())
            except (OSError, ValueError) as error:
                raise PlanError(f"{origin}: {error}", "give a profile as JSON") from None
            return (profile_from_json(document, origin=origin),)
        return tuple(self.node(gpu) for gpu in self.gpus or ("A100",))


def load_workload(
    source: str,
    *,
    fields: str | None = None,
    input_share: float | None = None,
    model: str | None = None,
) -> Workload:
    """Load a workload from a name, a file or URLs; PlanError says what to change.

    `model`: the one to read of a log that has several.
    """
    mapped: FieldMap | None = parse_field_map(fields) if fields else None
    kind, _, rest = source.partition(":")
    if source in SHIPPED:
        workload = SHIPPED[source].workload
    elif kind == "synthetic":
        workload = synthetic(rest)
    elif kind == "metrics" and rest:
        pages = [_get(_metrics_url(url)).text for url in rest.split(",")]
        workload = histograms.from_counts(histograms.parse_metrics(pages), name=source)
    elif kind == "prom" and rest:
        workload = histograms.from_counts(_ask_prometheus(rest), name=source)
    else:
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            known = ", ".join(SHIPPED)
            raise PlanError(f"{source}: {error}", f"give a file, or one of {known}") from None
        workload = read_workload(text, name=Path(source).name, fields=mapped, model=model or "")
    if input_share is None or workload.cdf is None:
        return workload
    if not 0 < input_share < 1:
        raise PlanError(f"an input share of {input_share:g}", "give one between 0 and 1")
    return msgspec.structs.replace(workload, input_share=input_share)


def make_question(
    workload: Workload,
    kinds: Kinds,
    *,
    rate: float | None,
    mode: Mode,
    slo_ttft_ms: float,
    slo_tpot_ms: float | None,
    b_short: str = "auto",
    gamma: str = "auto",
    pc: str | None = None,
    max_cut: float = 0.5,
    window_tokens: int | None = None,
    most_pools: int = 3,
    spare_nodes: int = 0,
    availability: float = 1.0,
    rate_quantile: float | None = None,
    extrapolate: bool = False,
    reserved: Reserved | None = None,
    phases: Phases | None = None,
    transfer_gb_per_s: float | None = None,
) -> Question:
    """Build the question from the command line; PlanError says what to change."""
    taken = _rate(workload, rate, rate_quantile)
    compressible = workload.compressible
    if pc is not None:
        share, by_kind = _compressible(pc)
        compressible = Compressible(share=share, said=f"--pc {pc}")
        if by_kind:
            workload = by_category(workload, by_kind)
    elif compressible is not None and mode not in {"paper", "exact"}:
        workload = msgspec.structs.replace(workload, squeezable=compressible.by_request)
        compressible = msgspec.structs.replace(compressible, share=1.0)
    return Question(
        workload=workload,
        goals=Goals(
            rate_per_s=taken.per_s,
            rate_said=taken.said,
            ttft_s=slo_ttft_ms / 1000,
            tpot_s=None if slo_tpot_ms is None else slo_tpot_ms / 1000,
            spare_nodes=spare_nodes,
            availability=availability,
        ),
        mode=mode,
        nodes=kinds.nodes(),
        short_node=kinds.node(kinds.short) if kinds.short else None,
        long_node=kinds.node(kinds.long) if kinds.long else None,
        window_tokens=window_tokens,
        b_short=_boundaries(b_short),
        gamma=_gamma(gamma),
        compressible=None if compressible is None else compressible.share,
        compressible_said="" if compressible is None else compressible.said,
        compress_when="any" if compressible is None else compressible.when,
        # The papers cut as much as is needed.
        max_cut=1.0 if mode in {"paper", "exact"} else max_cut,
        most_pools=most_pools,
        extrapolate=extrapolate,
        phases=phases or ("never" if transfer_gb_per_s is None else "auto"),
        transfer_bytes_per_s=None if transfer_gb_per_s is None else 1e9 * transfer_gb_per_s,
        reserved=reserved,
    )


def _rate(workload: Workload, rate: float | None, quantile: float | None) -> Rate:
    """The rate to plan for, and what it is."""
    if rate is not None:
        if quantile is not None:
            raise PlanError("--rate and --rate-quantile", "give one of them")
        return given(rate)
    if workload.times_s is not None:
        return rate_of(workload.times_s, quantile)
    if workload.rate_per_s is None or quantile is not None:
        raise PlanError("the workload has no times", "give --rate, in requests/s")
    return Rate(per_s=workload.rate_per_s, said=workload.rate_said)


def _boundaries(text: str) -> tuple[int, ...]:
    if text == "auto":
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise PlanError(f"--b-short {text}", "give auto, tokens, or tokens,tokens") from None


def _compressible(text: str) -> tuple[float, dict[str, float]]:
    """p_c for all requests, or by category."""
    try:
        if "=" not in text:
            return float(text), {}
        pairs = (part.split("=", 1) for part in text.split(","))
        return 1.0, {name: float(share) for name, share in pairs}
    except ValueError:
        raise PlanError(f"--pc {text}", "give a share, or prose=1,code=0") from None


def _gamma(text: str) -> float | None:
    if text == "auto":
        return None
    try:
        return float(text)
    except ValueError:
        raise PlanError(f"--gamma {text}", "give auto or a number of at least 1") from None


def _metrics_url(url: str) -> str:
    return url if url.rstrip("/").endswith("/metrics") else url.rstrip("/") + "/metrics"


def _ask_prometheus(url: str) -> histograms.Counts:
    answers: dict[str, Any] = {}
    for name in histograms.HISTOGRAMS:
        query = f"sum by (le) (increase({name}_bucket[{_PROM_RANGE}]))"
        answers[name] = _query(url, query)
    for name in histograms.COUNTERS:
        answers[name] = _query(url, f"sum(increase({name}[{_PROM_RANGE}]))")
    return histograms.parse_prometheus(answers)


def _query(url: str, query: str) -> Any:
    page = _get(url.rstrip("/") + "/api/v1/query", query=query)
    try:
        return page.json()
    except ValueError:
        raise PlanError(f"{url} does not answer as Prometheus does", "give its base URL") from None


def _get(url: str, **params: str) -> httpx.Response:
    try:
        page = httpx.get(url, params=params or None, timeout=_TIMEOUT_S, follow_redirects=True)
        page.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PlanError(f"{url}: {error}", "check that the URL answers") from None
    return page


class PlannedTenants(msgspec.Struct, frozen=True, kw_only=True):
    """The model of a file that is planned, and its entitlements."""

    text: str
    """The file, which `-o` changes."""
    model: str
    reserved: Reserved


def load_tenants(path: Path, model: str | None) -> PlannedTenants:
    """The entitlements of one model of a file; PlanError says what to change."""
    text, config = _config(path)
    models = {e.model for e in config.entitlements} or {m.name for m in config.models}
    if model is None and len(models) > 1:
        raise PlanError(
            f"{path} has entitlements of {len(models)} models",
            f"give --serves with one of: {', '.join(sorted(models))}",
        )
    planned = model or models.pop()
    if planned not in {m.name for m in config.models}:
        raise PlanError(f"{path} has no model {planned}", _FIX)
    found = [e for e in config.entitlements if e.model == planned]
    return PlannedTenants(
        text=text,
        model=planned,
        reserved=Reserved(
            entitlements=sum(e.reserves for e in found),
            sequences=sum(e.baseline for e in found if e.reserves),
            kv_bytes=round(GIB * sum(e.kv_cache_gib or 0.0 for e in found if e.reserves)),
            tokens_per_s=sum(e.tokens_per_second or 0.0 for e in found if e.reserves),
        ),
    )


def _config(path: Path) -> tuple[str, Config]:
    """The file, read with a stand-in for each model where it has entitlements alone."""
    try:
        text = path.read_text(encoding="utf-8")
        document = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PlanError(f"{path}: {error}", _FIX) from None
    if not isinstance(document, dict):
        raise PlanError(f"{path} is no mapping", _FIX)
    if not document.get("entitlements") and "models" not in document:
        raise PlanError(f"{path} has no entitlements", _FIX)
    complete = text
    if "models" not in document:
        listed = document.get("entitlements")
        rows = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
        names = sorted({str(row["model"]) for row in rows if "model" in row})
        complete += "" if "version" in document else "\nversion: 1"
        complete += "\nmodels:\n" + "".join(starmap(_stand_in, enumerate(names)))
    try:
        return text, parse(complete, str(path), os.environ)
    except ConfigError as error:
        raise PlanError(str(error), _FIX) from None


def _stand_in(number: int, model: str) -> str:
    window = f"max_model_len: {_ROOM}, max_num_seqs: {_ROOM}"
    return (
        f"  - {{name: {model!r}, kv_bytes_per_token: 1, pools: "
        f"{{all: {{{window}, workers: ['http://planned-{number}.invalid']}}}}}}\n"
    )
