"""Requests of a log that a file turns away before any capacity counts, and why."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from gateway.admission.entitlement_terms import instant
from gateway.records.endpoint import matches
from gateway.records.proof import Verdict
from gateway.records.tenancy import fingerprint
from gateway.settings import Config
from gateway.settings.tenants import EntitlementConfig, TenantConfig, TenantKeyConfig
from sluice.simulated.recorded import RecordedTraffic

_NO_TENANT: Final = TenantConfig(name="none")


def turned_away(
    config: Config, entitlement: EntitlementConfig, recorded: RecordedTraffic
) -> Iterator[tuple[Verdict, str, int]]:
    """Why so many requests of an entitlement are refused, or why nobody can tell of them."""
    mine = [i for i, owner in enumerate(recorded.entitlements) if owner == entitlement.name]
    owners = (entry for entry in config.tenants if entry.name == entitlement.tenant)
    tenant = next(owners, _NO_TENANT)
    if tenant.suspended:
        yield "breaks", "suspended in the file", len(mine)
    own = {fingerprint(key.removeprefix("sha256:")) for key in entitlement.api_keys}
    named, names = {key.name: key for key in tenant.keys}, _names(config, entitlement.model)
    ended_unix_s = recorded.first_unix_s + float(recorded.at_s[-1])
    asked_by = Counter((recorded.keys[i], recorded.asked_models[i]) for i in mine)
    for (name, asked), count in asked_by.items():
        if asked and names and not any(matches(known, asked) for known in names):
            yield "breaks", f"asked for model {asked}, which the file does not have", count
        if (key := named.get(name)) is not None:
            for verdict, why in _shut(key, tenant, entitlement, asked, ended_unix_s):
                yield verdict, why, count
        elif name and name not in own:  # it may have been made at run time
            yield "cannot tell", f"the file does not have key {name}", count
    if recorded.body_bytes is not None:
        most = config.server.max_body_bytes
        large = int((recorded.body_bytes[mine] > most).sum())
        yield "breaks", f"larger than server.max_body_bytes ({most:,})", large


def _names(config: Config, name: str) -> set[str]:
    """All names that may stand for a model; none if its engines tell further ones."""
    model = next(entry for entry in config.models if entry.name == name)
    if model.discover_loras:
        return set()
    split = {alias.name for alias in config.aliases if name in alias.split}
    return {name, *model.aliases, *model.loras, *split}


def _shut(
    key: TenantKeyConfig,
    tenant: TenantConfig,
    entitlement: EntitlementConfig,
    asked: str,
    ended_unix_s: float,
) -> Iterator[tuple[Verdict, str]]:
    """Why a key of the file does not open an entitlement, or not for long."""
    if key.suspended:
        yield "breaks", "suspended in the file"
    if key.models is not None and {entitlement.model, asked}.isdisjoint(key.models):
        yield "breaks", f"of key {key.name}, which does not open model {entitlement.model}"
    opened = tenant.entitlements if key.entitlements is None else key.entitlements
    if opened is not None and entitlement.name not in opened:
        yield "breaks", f"of key {key.name}, which does not list entitlement {entitlement.name}"
    if key.expires_at is not None:
        ended = instant(key.expires_at) <= ended_unix_s
        verdict: Verdict = "breaks" if ended else "cannot tell"
        yield verdict, f"of key {key.name}, which expires at {key.expires_at}"
