"""The specification of a simulated fleet."""

from collections.abc import Sequence

import msgspec

from gateway.routing.routing import PoolShape, Routing
from simulator.engine.profiles import EngineProfile
from simulator.fleet.dispatch import DISPATCHERS
from simulator.fleet.routing import RoutedTraffic, route
from simulator.fleet.traffic import Ints, Random


class PrefillSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The instances that compute a pool's prompts, and the hand-over."""

    instances: int
    profile: EngineProfile
    transfer_s_per_token: float


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One pool of identical instances; its window is the profile's `max_model_len`."""

    name: str
    instances: int
    """>= 1."""
    profile: EngineProfile
    boundary_tokens: int | None = None
    """Largest expected total that belongs here; None for the last pool."""
    prefill: PrefillSpec | None = None
    """Its instances then decode alone; only `simulator.fleet.tandem` runs such a pool."""


class FleetSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Pools by ascending window, and the policies that place requests."""

    pools: tuple[PoolSpec, ...]
    gamma: float = 1.0
    """Totals up to gamma x boundary may be compressed below it."""
    compressible: float = 1.0
    """p_c: the share of them that can be compressed."""
    max_cut: float = 1.0
    """The largest share of a prompt that compression removes."""
    dispatch: str = "jsq"
    """One of `simulator.fleet.dispatch.DISPATCHERS`."""
    spill_queue: int | None = None
    """Requests queued beyond a pool's slots before it spills; None for no spillover."""
    block_exact: bool = False
    """Use the full engine even where a closed form applies."""

    def __post_init__(self) -> None:
        windows = [pool.profile.max_model_len for pool in self.pools]
        if not self.pools or windows != sorted(windows):
            raise ValueError("a fleet has at least one pool, ordered by window")
        for pool in self.pools:
            if pool.instances < 1:
                raise ValueError(f"pool {pool.name} needs at least one instance")
            if pool.boundary_tokens is None and pool is not self.pools[-1]:
                raise ValueError(f"pool {pool.name} needs a boundary: only the last has none")
        if self.dispatch not in DISPATCHERS:
            known = ", ".join(sorted(DISPATCHERS))
            raise ValueError(f"dispatch {self.dispatch} is unknown; there are {known}")

    @property
    def routing(self) -> Routing:
        """The gateway's routing table for these pools."""
        shapes = (
            PoolShape(
                name=pool.name,
                window_tokens=pool.profile.max_model_len,
                boundary_tokens=pool.boundary_tokens,
            )
            for pool in self.pools
        )
        return Routing(pools=tuple(shapes))


def moved(spec: FleetSpec, boundaries: Sequence[int]) -> FleetSpec:
    """The same fleet with other boundaries, one for each pool but the last."""
    given = (*boundaries, None)
    pools = (
        msgspec.structs.replace(pool, boundary_tokens=tokens)
        for pool, tokens in zip(spec.pools, given, strict=True)
    )
    return msgspec.structs.replace(spec, pools=tuple(pools))


def routed(spec: FleetSpec, prompts: Ints, outputs: Ints, random: Random) -> RoutedTraffic:
    """The pools of requests of these lengths, and what compression leaves of their prompts."""
    return route(
        spec.routing,
        prompts,
        outputs,
        gamma=spec.gamma,
        compressible=spec.compressible,
        max_cut=spec.max_cut,
        random=random,
    )
