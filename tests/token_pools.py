"""Builders for tests of token pools; each states only what matters."""

from typing import Any

import msgspec

from gateway.admission import admission
from gateway.admission.terms import AdmissionRequest, Denial, Grant, Terms
from gateway.admission.token_pool import TokenPool
from gateway.records.entitlement import Entitlement, ServiceClass

NOW_S = 1_700_000_000.0


def entitled(name: str = "e", service_class: ServiceClass = "elastic", **terms: Any) -> Entitlement:
    """An entitlement of model "m"; `baseline` may be one number, of the first pool."""
    if isinstance(terms.get("baseline"), int):
        terms["baseline"] = (terms["baseline"],)
    return Entitlement(name=name, model="m", service_class=service_class, **terms)


def pool(*entitlements: Entitlement, slots: tuple[int, ...] = (4,), **terms: Any) -> TokenPool:
    """A model's pools with these entitlements, created in this order unless they say."""
    token_pool = TokenPool(Terms(slots=slots, **terms))
    for number, each in enumerate(entitlements, start=1):
        token_pool.define(each if each.created else msgspec.structs.replace(each, created=number))
    return token_pool


def request(lease_id: str = "a", entitlement: str = "e", **more: Any) -> AdmissionRequest:
    """A request of 100 tokens and one sequence to the first pool."""
    known: dict[str, Any] = {"pool": 0, "estimate_tokens": 100, **more}
    return AdmissionRequest(lease_id=lease_id, entitlement=entitlement, **known)


def admit(
    token_pool: TokenPool,
    lease_id: str = "a",
    entitlement: str = "e",
    *,
    at: float = NOW_S,
    observe: bool = False,
    **more: Any,
) -> Grant | Denial:
    """Ask for a lease."""
    return admission.admit(token_pool, request(lease_id, entitlement, **more), at, observe=observe)


def granted(
    token_pool: TokenPool, lease_id: str = "a", entitlement: str = "e", **more: Any
) -> Grant:
    """A lease that must be given."""
    found = admit(token_pool, lease_id, entitlement, **more)
    assert isinstance(found, Grant), found
    return found


def denied(
    token_pool: TokenPool, lease_id: str = "a", entitlement: str = "e", **more: Any
) -> Denial:
    """A lease that must be refused."""
    found = admit(token_pool, lease_id, entitlement, **more)
    assert isinstance(found, Denial), found
    return found


def fill(token_pool: TokenPool, name: str, count: int, **asked: Any) -> None:
    """So many leases of an entitlement, named after it and numbered."""
    for number in range(count):
        granted(token_pool, f"{name}{number}", name, **asked)
