"""Converts entitlements between configuration (file, admin API) and admission's record.

The file and the admin API share this conversion and its checks; error messages name the field.
Rules:

- A field that is absent or None is not set. A single `concurrency` number is split over the
  model's pools by their slots; a mapping names the pools, and pools left out have none.
- The limit of a guaranteed entitlement is its baseline.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from math import ceil, isfinite
from typing import NoReturn, cast

from gateway.policy.entitlements.entitlement import (
    BORROWING,
    CLASSES,
    Entitlement,
    ServiceClass,
    split_baseline,
)
from gateway.policy.entitlements.expiry import INSTANT, in_utc
from gateway.records.record import Record

GIB = 1 << 30
MAX_VALUE = 1 << 53
FIELDS = (
    *("name", "tenant", "model", "service_class", "slo_target_ms"),
    *("tokens_per_second", "max_tokens_per_second", "kv_cache_gib", "max_kv_cache_gib"),
    *("concurrency", "max_concurrency", "mode", "compression", "trusted_usage", "expires_at"),
)
"""All fields of an entitlement except its API keys."""
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


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
        """One of `FIELDS`, or the unknown field's name."""
        self.part = part
        """The pool inside `concurrency`, or ""."""
        self.message = message
        self.fix = fix


def terms_from(fields: Mapping[str, object], model: ModelShape, created: int) -> Entitlement:
    """The terms that `fields` describe. Raises BadTerms for the first invalid field."""
    for name in fields:
        if name not in FIELDS:
            _unknown(name, FIELDS, "no such field")
    name, tenant = _label(fields, "name"), _label(fields, "tenant")
    if fields.get("model") != model.name:
        raise BadTerms("model", "not this model's entitlement", f"give `{model.name}`")
    service_class = _choice(fields, "service_class", CLASSES, "elastic")
    baseline = _baseline(fields.get("concurrency"), model)
    kv_bytes, kv_bytes_limit = _kv(fields, "kv_cache_gib"), _kv(fields, "max_kv_cache_gib")
    if 0 < kv_bytes_limit < kv_bytes:
        _below("max_kv_cache_gib", "kv_cache_gib")
    rate, rate_limit = _rates(fields, service_class)
    return Entitlement(
        name=name,
        tenant=tenant,
        model=model.name,
        service_class=cast("ServiceClass", service_class),
        slo_ms=ceil(_amount(fields, "slo_target_ms")),
        baseline=baseline,
        limit=_limit(fields, service_class, sum(baseline)),
        tokens_per_s=rate,
        tokens_per_s_limit=rate_limit,
        kv_bytes=kv_bytes,
        kv_bytes_limit=kv_bytes_limit,
        expires_unix_s=_instant(fields.get("expires_at")),
        observe=_choice(fields, "mode", ("enforce", "observe"), "enforce") == "observe",
        compress=_choice(fields, "compression", ("allow", "refuse"), "allow") == "allow",
        trusted_usage=_flag(fields, "trusted_usage"),
        created=created,
    )


def fields_from(terms: Entitlement, model: ModelShape) -> dict[str, object]:
    """Terms as configuration fields, None where not set; `terms_from` reads them back."""
    expires_s = terms.expires_unix_s
    follows = terms.service_class == "guaranteed" or not terms.limit
    return {
        "name": terms.name,
        "tenant": terms.tenant,
        "model": terms.model,
        "service_class": terms.service_class,
        "slo_target_ms": terms.slo_ms or None,
        "tokens_per_second": terms.tokens_per_s or None,
        "max_tokens_per_second": terms.tokens_per_s_limit or None,
        "kv_cache_gib": terms.kv_bytes / GIB if terms.kv_bytes else None,
        "max_kv_cache_gib": terms.kv_bytes_limit / GIB if terms.kv_bytes_limit else None,
        "concurrency": _shown_baseline(terms, model),
        "max_concurrency": None if follows else terms.limit,
        "mode": "observe" if terms.observe else "enforce",
        "compression": "allow" if terms.compress else "refuse",
        "trusted_usage": terms.trusted_usage,
        "expires_at": datetime.fromtimestamp(expires_s, UTC).isoformat() if expires_s else None,
    }


def _label(fields: Mapping[str, object], field: str) -> str:
    value = fields.get(field)
    if value is None:
        raise BadTerms(field, "missing", "give it")
    if not isinstance(value, str) or not _LABEL.match(value):
        raise BadTerms(
            field,
            "not a name",
            "use 1 to 64 letters, digits, `.`, `_` and `-`, none of the signs first",
        )
    return value


def _choice(
    fields: Mapping[str, object], field: str, choices: tuple[str, ...], default: str
) -> str:
    value = fields.get(field)
    if value is None:
        return default
    if not isinstance(value, str) or value not in choices:
        _unknown(str(value)[:64], choices, "no such value", field)
    return value


def _flag(fields: Mapping[str, object], field: str) -> bool:
    """A boolean; False when absent."""
    value = fields.get(field)
    if value is not None and not isinstance(value, bool):
        raise BadTerms(field, "not a boolean", "give true or false")
    return bool(value)


def _amount(fields: Mapping[str, object], field: str) -> float:
    """A positive number; 0 when absent."""
    value = fields.get(field)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadTerms(field, "not a number", "give a positive number")
    if not 0 < value <= MAX_VALUE or not isfinite(value):
        raise BadTerms(field, "out of range", "give a positive number, or leave it out for none")
    return float(value)


def _kv(fields: Mapping[str, object], field: str) -> int:
    size = _amount(fields, field)
    if size > MAX_VALUE / GIB:
        raise BadTerms(field, "out of range", f"give at most {MAX_VALUE // GIB}")
    return max(1, round(size * GIB)) if size else 0


def _rates(fields: Mapping[str, object], service_class: str) -> tuple[float, float]:
    rate = _amount(fields, "tokens_per_second")
    limit = _amount(fields, "max_tokens_per_second")
    if limit and service_class not in BORROWING:
        raise BadTerms(
            "max_tokens_per_second",
            f"a {service_class} entitlement never goes above its own rate",
            "leave it out, or choose dedicated, elastic or spot",
        )
    if 0 < limit < rate:
        _below("max_tokens_per_second", "tokens_per_second")
    return rate, limit


def _baseline(value: object, model: ModelShape) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        return split_baseline(_sequences(value, "concurrency"), model.slots)
    for pool in value:
        if pool not in model.pools:
            _unknown(
                str(pool)[:64], model.pools, f"model `{model.name}` has no pool", "concurrency"
            )
    return tuple(_sequences(value.get(pool, 0), "concurrency", pool) for pool in model.pools)


def _sequences(value: object, field: str, part: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_VALUE:
        where = f"`{part}` is not" if part else "not"
        fix = "give a whole number, 0 or more"
        if field == "concurrency" and not part:
            fix += ", or one by pool"
        raise BadTerms(field, f"{where} a number of sequences", fix, part=part)
    return value


def _limit(fields: Mapping[str, object], service_class: str, baseline: int) -> int:
    value = fields.get("max_concurrency")
    limit = 0 if value is None else _sequences(value, "max_concurrency")
    if value is not None and limit < max(1, baseline):
        if not limit:
            raise BadTerms("max_concurrency", "0", "give at least 1, or suspend the entitlement")
        _below("max_concurrency", "concurrency")
    if service_class != "guaranteed":
        return limit
    if not baseline:
        raise BadTerms(
            "concurrency",
            "a guaranteed entitlement without a baseline could never send anything",
            "give the sequences to reserve for it",
        )
    if limit > baseline:
        raise BadTerms(
            "max_concurrency",
            f"a guaranteed entitlement never goes above its baseline, {baseline}",
            "leave it out, raise concurrency, or choose dedicated",
        )
    return baseline


def _instant(value: object) -> float:
    """Unix seconds; 0 when absent. A time without an offset is UTC."""
    if value is None:
        return 0.0
    at = in_utc(value) if isinstance(value, str | datetime) else None
    if at is not None:
        return at.timestamp()
    raise BadTerms("expires_at", f"not {INSTANT}", "write it as 2030-12-31T23:59:59Z")


def _shown_baseline(terms: Entitlement, model: ModelShape) -> int | dict[str, int] | None:
    baseline = tuple(terms.baseline_of(pool) for pool in range(len(model.pools)))
    if not terms.baseline:
        return None
    if baseline == split_baseline(sum(baseline), model.slots):
        return sum(baseline)
    return dict(zip(model.pools, baseline, strict=True))


def _below(field: str, baseline: str) -> NoReturn:
    raise BadTerms(field, f"below {baseline}", f"raise {field} or lower {baseline}")


def _unknown(value: str, known: tuple[str, ...], message: str, field: str = "") -> NoReturn:
    near = difflib.get_close_matches(value, known, n=1)
    fix = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(known)}"
    if not field:
        raise BadTerms(value[:64], message, fix)
    raise BadTerms(field, f"{message} `{value}`", fix)


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
    kv_free = model.max_kv_bytes - sum(other.kv_bytes for other in standing)
    if model.max_kv_bytes and terms.kv_bytes > kv_free:
        raise BadTerms(
            "kv_cache_gib",
            f"{terms.kv_bytes / GIB:g} GiB can never be reserved: {max(0, kv_free) / GIB:.4g} GiB "
            "are left at the most replicas",
            "lower it, or add workers",
        )
    rate_free = model.max_tokens_per_s - sum(other.tokens_per_s for other in standing)
    if model.max_tokens_per_s and terms.tokens_per_s > rate_free:
        raise BadTerms(
            "tokens_per_second",
            f"{terms.tokens_per_s:g} can never be reserved: {max(0.0, rate_free):.6g} are left at "
            "the most replicas",
            "lower it, or add workers",
        )
