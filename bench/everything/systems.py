"""The configurations of `bench everything`: all on, all off, and all on but one."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from bench.common.fleet import MODEL
from bench.everything.scene import (
    BOUNDARY_TOKENS,
    SLOTS,
    TENANTS,
    WINDOW_TOKENS,
    TenantLoad,
    key_hash,
)

ALL: Final = "all on"
OFF: Final = "all off"


class Switches(msgspec.Struct, frozen=True, kw_only=True):
    """Which systems are on."""

    pools: bool = True
    """Two pools with a boundary (token-budget routing)."""
    compression: bool = True
    """Prompts above the boundary are compressed below it (FleetOpt)."""
    token_pools: bool = True
    """Entitlements have classes and baselines."""
    quartz: bool = True
    """QUARTZ for engines of their own; else round robin."""
    bfio: bool = True
    """BF-IO for ranks; else round robin."""


SYSTEMS: Final[dict[str, Switches]] = {
    ALL: Switches(),
    "without pools": Switches(pools=False, compression=False, bfio=False),
    "without compression": Switches(compression=False),
    "without token pools": Switches(token_pools=False),
    "without QUARTZ": Switches(quartz=False),
    "without BF-IO": Switches(bfio=False),
    OFF: Switches(pools=False, compression=False, token_pools=False, quartz=False, bfio=False),
}


def config_of(
    switches: Switches, replicas: Sequence[str], ranked: Sequence[str], ranks: int
) -> dict[str, Any]:
    """The configuration, before these engines; `ranked` are URLs of engines with ranks."""
    spread = "quartz" if switches.quartz else "round-robin"
    own = list(replicas)
    grouped: list[Any] = [{"url": url, "ranks": ranks} for url in ranked]
    model: dict[str, Any] = {"name": MODEL, "output_prior_tokens": 128}
    if switches.pools:
        model |= {
            "boundary": {"b_short": BOUNDARY_TOKENS, "gamma": 1.5},
            # Whenever a prompt is in the window: the flood fills the long pool within seconds.
            "compression": {"enabled": switches.compression, "only_when_busy": False},
            "pools": {
                "short": _pool(4 * BOUNDARY_TOKENS, own, spread),
                "long": _pool(WINDOW_TOKENS, grouped, "bfio" if switches.bfio else "round-robin"),
            },
        }
    else:
        model["pools"] = {"all": _pool(WINDOW_TOKENS, [*own, *grouped], spread)}
    return {
        "version": 1,
        "models": [model],
        "entitlements": [_entitlement(tenant, switches) for tenant in TENANTS],
    }


def _pool(window: int, workers: Sequence[Any], policy: str) -> dict[str, Any]:
    return {
        "max_model_len": window,
        "max_num_seqs": SLOTS,
        "workers": list(workers),
        "scheduling": {"policy": policy},
    }


def _entitlement(tenant: TenantLoad, switches: Switches) -> dict[str, Any]:
    """Every tenant has a key; with token pools also what it was promised."""
    found: dict[str, Any] = {
        "name": tenant.name,
        "tenant": tenant.name,
        "model": MODEL,
        "api_keys": [key_hash(tenant.name)],
    }
    if not switches.token_pools:
        return found
    found |= {"service_class": tenant.service_class, "slo_target_ms": tenant.slo_ms}
    short, long = tenant.concurrency
    if not short + long:
        return found
    both = {name: n for name, n in (("short", short), ("long", long)) if n}
    return found | {"concurrency": both if switches.pools else short + long}
