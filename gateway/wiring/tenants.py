"""Builds the tenants of one process: their file, their directory, and the admin operations."""

import time
from collections.abc import Callable, Collection, Mapping
from functools import partial

from gateway.adapters.records.audit import Audit
from gateway.adapters.store.backends import open_directory
from gateway.adapters.tenants.entries import FileTenant, TenantEntry, TenantFile
from gateway.adapters.tenants.fields import invalid
from gateway.adapters.tenants.keys import TenantKeyRegistry
from gateway.adapters.tenants.sync import LimitsObserver, TenantSync
from gateway.records.limit import KeyLimits
from gateway.records.request import TenantKey
from gateway.settings import Config, ConfigError
from gateway.settings.checking.key_limits import read_key_limits
from gateway.settings.token_pools import entitlements_by_tenant, tenant_keys
from gateway.stages.authenticate import Keyring


def tenant_file(config: Config) -> TenantFile:
    """The part of a configuration in tenants."""
    keys: dict[str, list[TenantKey]] = {}
    for key in tenant_keys(config):
        keys.setdefault(key.tenant, []).append(key)
    return TenantFile(
        tenants={
            tenant.name: FileTenant(
                display_name=tenant.display_name,
                labels=tenant.labels,
                entitlements=tenant.entitlements,
                keys=tuple(keys.get(tenant.name, ())),
            )
            for tenant in config.tenants
        },
        order=entitlements_by_tenant(config),
        currency=config.currency,
    )


def checked_limits(config: Config, fields: Mapping[str, object]) -> KeyLimits:
    """Limits of a key, checked as the file's are. Raises BadRequest, which says what to change."""
    try:
        return read_key_limits(config, fields)
    except ConfigError as error:
        found = error.problems[0]
        raise invalid(found.path, f"{found.path}: {found.message}; {found.fix}.") from None


def make_tenants(
    config: Config,
    keyring: Keyring,
    trail: Audit,
    clock: Callable[[], float],
    adapters: Callable[[str], Collection[str]],
    observer: LimitsObserver,
) -> tuple[TenantSync, TenantKeyRegistry]:
    """The tenants of the file, whose keys open at once, and what administers them.

    `observer` hears of the limits of keys, those of the file at once.
    """
    directory = open_directory(config.state.address, TenantEntry, "tenants")
    sync = TenantSync(directory, keyring, tenant_file(config), clock=clock, observer=observer)
    registry = TenantKeyRegistry(
        sync,
        trail,
        wall_clock=time.time,
        read_limits=partial(checked_limits, config),
        adapters=adapters,
    )
    return sync, registry
