"""Checked fields of an entitlement (file, admin body, stored row) <-> admission's record.

Fields are checked by their section (`gateway.settings.config.EntitlementConfig`), whoever sends
them; here is what they mean for a model, and what they cannot mean together. Messages name the
field and a fix. Rules:

- A field that is absent or None is not set. A single `concurrency` number is split over the
  model's pools by their slots; a mapping names the pools, and pools left out have none.
- The limit of a guaranteed entitlement is its baseline.
"""

import difflib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from math import ceil
from typing import Any

from gateway.records.entitlement import (
    BORROWING,
    Entitlement,
    ServiceClass,
    in_utc,
    split_baseline,
)
from gateway.records.record import Record

GIB = 1 << 30


class ModelShape(Record, frozen=True, kw_only=True):
    """The facts about a model that terms are checked against. Tuples by pool, windows ascending."""

    name: str
    pools: tuple[str, ...]
    """Names."""
    slots: tuple[int, ...]
    """Sequences that all configured workers run at once."""
    max_slots: tuple[int, ...] = ()
    """Slots at the most replicas; () where that is the same as `slots`."""
    max_kv_bytes: int = 0
    """KV cache of all pools at the most replicas; 0 where KV is not enforced."""
    max_tokens_per_s: float = 0.0
    """Token rate of all pools at the most replicas; 0 where it is not enforced."""


class BadTerms(ValueError):
    """Invalid terms; the message names the field and a fix."""

    def __init__(self, field: str, message: str, fix: str, *, part: str = "") -> None:
        super().__init__(f"{field}: {message}; {fix}")
        self.field = field
        """The field's name."""
        self.part = part
        """The pool inside `concurrency`, or ""."""
        self.message = message
        self.fix = fix


def terms_from(fields: Mapping[str, Any], model: ModelShape, created: int) -> Entitlement:
    """The terms that checked fields describe. Raises BadTerms for what they cannot mean."""
    service_class: ServiceClass = fields.get("service_class") or "elastic"
    guaranteed = service_class == "guaranteed"
    stated, baseline = fields.get("concurrency"), tuple[int, ...]()
    if isinstance(stated, Mapping):
        for pool in stated:
            if pool not in model.pools:
                near = difflib.get_close_matches(pool, model.pools, n=1)
                fix = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(model.pools)}"
                message = f"model `{model.name}` has no pool `{pool}`"
                raise BadTerms("concurrency", message, fix, part=pool)
        baseline = tuple(stated.get(pool, 0) for pool in model.pools)
    elif stated is not None:
        baseline = split_baseline(stated, model.slots)
    reserved, limit = sum(baseline), fields.get("max_concurrency") or 0
    kv_bytes, kv_bytes_limit = (
        max(1, round(size * GIB)) if (size := fields.get(field)) else 0
        for field in ("kv_cache_gib", "max_kv_cache_gib")
    )
    rate = float(fields.get("tokens_per_second") or 0.0)
    rate_limit = float(fields.get("max_tokens_per_second") or 0.0)
    for wrong, field, message, fix in (
        (0 < kv_bytes_limit < kv_bytes, "max_kv_cache_gib", "below kv_cache_gib", ""),
        (
            rate_limit and service_class not in BORROWING,
            "max_tokens_per_second",
            f"a {service_class} entitlement never goes above its own rate",
            "leave it out, or choose dedicated, elastic or spot",
        ),
        (0 < rate_limit < rate, "max_tokens_per_second", "below tokens_per_second", ""),
        (0 < limit < reserved, "max_concurrency", "below concurrency", ""),
        (
            guaranteed and not reserved,
            "concurrency",
            "a guaranteed entitlement without a baseline could never send anything",
            "give the sequences to reserve for it",
        ),
        (
            guaranteed and limit > reserved,
            "max_concurrency",
            f"a guaranteed entitlement never goes above its baseline, {reserved}",
            "leave it out, raise concurrency, or choose dedicated",
        ),
    ):
        if wrong:
            lower = f"raise {field} or lower {message.removeprefix('below ')}"
            raise BadTerms(field, message, fix or lower)
    return Entitlement(
        name=fields["name"],
        tenant=fields["tenant"],
        model=model.name,
        service_class=service_class,
        slo_ms=ceil(fields.get("slo_target_ms") or 0),
        slo_tpot_ms=fields.get("slo_tpot_ms") or 0.0,
        baseline=baseline,
        limit=reserved if guaranteed else limit,
        tokens_per_s=rate,
        tokens_per_s_limit=rate_limit,
        kv_bytes=kv_bytes,
        kv_bytes_limit=kv_bytes_limit,
        expires_unix_s=instant(fields.get("expires_at")),
        observe=fields.get("mode") == "observe",
        compress=fields.get("compression") != "refuse",
        trusted_usage=bool(fields.get("trusted_usage")),
        created=created,
    )


def fields_from(terms: Entitlement, model: ModelShape) -> dict[str, object]:
    """Terms as configuration fields, None where not set; `terms_from` reads them back."""
    expires_s = terms.expires_unix_s
    follows = terms.service_class == "guaranteed" or not terms.limit
    concurrency: object = None
    if terms.baseline:
        baseline = tuple(terms.baseline_of(pool) for pool in range(len(model.pools)))
        concurrency = sum(baseline)
        if baseline != split_baseline(sum(baseline), model.slots):
            concurrency = dict(zip(model.pools, baseline, strict=True))
    return {
        "name": terms.name,
        "tenant": terms.tenant,
        "model": terms.model,
        "service_class": terms.service_class,
        "slo_target_ms": terms.slo_ms or None,
        "slo_tpot_ms": terms.slo_tpot_ms or None,
        "tokens_per_second": terms.tokens_per_s or None,
        "max_tokens_per_second": terms.tokens_per_s_limit or None,
        "kv_cache_gib": terms.kv_bytes / GIB if terms.kv_bytes else None,
        "max_kv_cache_gib": terms.kv_bytes_limit / GIB if terms.kv_bytes_limit else None,
        "concurrency": concurrency,
        "max_concurrency": None if follows else terms.limit,
        "mode": "observe" if terms.observe else "enforce",
        "compression": "allow" if terms.compress else "refuse",
        "trusted_usage": terms.trusted_usage,
        "expires_at": datetime.fromtimestamp(expires_s, UTC).isoformat() if expires_s else None,
    }


def instant(value: str | datetime | None) -> float:
    """Unix seconds of a checked time; 0 when absent. A time without an offset is UTC."""
    at = None if value is None else in_utc(value)
    return 0.0 if at is None else at.timestamp()


def check_fit(terms: Entitlement, model: ModelShape, others: Iterable[Entitlement]) -> None:
    """Raise BadTerms if a reserve does not fit beside the `others` at the most replicas.

    A reserve beyond the current slots is accepted: it is pending until there are more workers.
    """
    if not terms.reserves:
        return
    standing = [other for other in others if other.reserves and other.name != terms.name]
    for pool, most in enumerate(model.max_slots or model.slots):
        taken = sum(other.baseline_of(pool) for other in standing)
        if terms.baseline_of(pool) and taken + terms.baseline_of(pool) > most:
            raise BadTerms(
                "concurrency",
                f"{terms.baseline_of(pool)} in pool `{model.pools[pool]}` can never be reserved: "
                f"it has {most} slots at the most replicas, and {taken} are reserved",
                f"lower it to {max(0, most - taken)}, or add workers",
                part=model.pools[pool],
            )
    kv_taken = sum((other.kv_bytes for other in standing), 0.0)
    rate_taken = sum((other.tokens_per_s for other in standing), 0.0)
    for field, total, wanted, reserved, scale, unit, digits in (
        ("kv_cache_gib", model.max_kv_bytes, terms.kv_bytes, kv_taken, GIB, " GiB", 4),
        ("tokens_per_second", model.max_tokens_per_s, terms.tokens_per_s, rate_taken, 1, "", 6),
    ):
        if total and wanted > total - reserved:
            left = max(0.0, total - reserved) / scale
            raise BadTerms(
                field,
                f"{wanted / scale:g}{unit} can never be reserved: {left:.{digits}g}{unit} are "
                "left at the most replicas",
                "lower it, or add workers",
            )
