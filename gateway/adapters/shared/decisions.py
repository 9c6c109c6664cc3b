"""Asks, decisions on them and settlements as they travel between a worker and the parent."""

from collections.abc import Sequence
from typing import Any, Final

from gateway.domain import Ask, Lease, Limits, Usage
from gateway.policy.decision import Denial
from gateway.ports import Settlement

DENIED: Final = 7
"""Values of a denial; a lease has more."""


def denied(denial: Denial) -> tuple[object, ...]:
    """A denial as it travels."""
    return (
        denial.reason,
        denial.wait_s,
        denial.limit,
        denial.used,
        denial.requested,
        denial.unit,
        denial.of_pool,
    )


def denial_of(told: list[Any]) -> Denial:
    """What `denied` made of it."""
    reason, wait_s, limit, used, requested, unit, of_pool = told
    return Denial(
        reason=reason,
        wait_s=wait_s,
        limit=limit,
        used=used,
        requested=requested,
        unit=unit,
        of_pool=of_pool,
    )


def granted(lease: Lease) -> tuple[object, ...]:
    """What an ask does not say of its lease."""
    limits = lease.limits
    return (
        lease.pool,
        lease.spilled,
        lease.weight,
        lease.contended,
        lease.protected,
        lease.would_deny,
        lease.issued_unix_s,
        None
        if limits is None
        else (
            limits.sequences,
            limits.sequences_free,
            limits.sequences_reset_s,
            limits.tokens,
            limits.tokens_free,
            limits.tokens_reset_s,
        ),
    )


def lease_of(ask: Ask, told: list[Any]) -> Lease:
    """The lease that `granted` told of."""
    pool, spilled, weight, contended, protected, would_deny, issued_unix_s, limits = told
    found = None
    if limits is not None:
        sequences, free, reset_s, tokens, tokens_free, tokens_reset_s = limits
        found = Limits(
            sequences=sequences,
            sequences_free=free,
            sequences_reset_s=reset_s,
            tokens=tokens,
            tokens_free=tokens_free,
            tokens_reset_s=tokens_reset_s,
        )
    return Lease(
        id=ask.lease_id,
        model=ask.model,
        entitlement=ask.entitlement,
        pool=pool,
        spilled=spilled,
        cost_tokens=ask.cost_tokens,
        sequences=ask.sequences,
        kv_bytes=ask.kv_bytes,
        weight=weight,
        contended=contended,
        protected=protected,
        would_deny=would_deny,
        limits=found,
        issued_unix_s=issued_unix_s,
    )


def used_of(settlement: Settlement) -> tuple[int, int, int] | None:
    """What was used, as it travels; None: nothing is charged."""
    usage = settlement.usage
    if usage is None:
        return None
    return (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


def ask_told(ask: Ask) -> tuple[Any, ...]:
    """An ask as it travels."""
    return (
        ask.lease_id,
        ask.model,
        ask.entitlement,
        ask.pool,
        ask.alternates,
        ask.cost_tokens,
        ask.sequences,
        ask.kv_bytes,
    )


def ask_of(message: list[Any]) -> Ask:
    """What is asked for, or was taken, after two values of another kind."""
    _, _, lease_id, model, entitlement, pool, alternates, cost, sequences, kv = message
    return Ask(
        lease_id=lease_id,
        model=model,
        entitlement=entitlement,
        pool=pool,
        alternates=tuple(alternates),
        cost_tokens=cost,
        sequences=sequences,
        kv_bytes=kv,
    )


def usage_of(used: Sequence[int] | None) -> Usage | None:
    """What `used_of` made of it."""
    if used is None:
        return None
    prompt, completion, cached = used
    return Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)
