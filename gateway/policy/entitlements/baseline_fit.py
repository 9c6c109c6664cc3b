"""Whether a reserved baseline can ever be kept: with all others', at the most replicas."""

from collections.abc import Iterable

from gateway.policy.entitlements.entitlement import Entitlement
from gateway.policy.entitlements.terms import GIB, BadTerms, ModelShape


def check_fit(terms: Entitlement, model: ModelShape, others: Iterable[Entitlement]) -> None:
    """Whether a reserved baseline fits with the `others` that reserve, at the most replicas.

    Beyond today's slots but within the most is fine: it is pending until there are more.
    Raises BadTerms.
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
