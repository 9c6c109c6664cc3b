"""Links this replica with the others on its Redis; without Redis it is alone.

Part of the composition root. The stores themselves share leases and entitlements
(`gateway.wiring.token_pools`). This module adds the bus, with what travels on it, and questions
between replicas. In an SQLite file, the bus has only what the estimators of the past learned.
"""

import ipaddress
import logging
import random
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import urlsplit

import msgspec

from gateway.control.peers import understood
from gateway.estimate.estimator import LengthEstimator
from gateway.fleet.model_runtime import ModelRuntime, drain_worker
from gateway.replicas.bus import Bus, Presence, Seed
from gateway.replicas.calls import Address, ReplicaCalls
from gateway.replicas.notes import FleetNotes, LearnedNotes, SchedulerNotes
from gateway.scheduling import prefix_index as digests
from gateway.settings import Config
from gateway.store.backends import open_notes
from gateway.wiring.handover import own_address

_log = logging.getLogger("sluice.state")
_encode: Final = msgspec.json.Encoder().encode
_drain_asked: Final = msgspec.json.Decoder(tuple[str, bool]).decode
_hits: Final = msgspec.json.Decoder(int).decode


class Replicas:
    """Links of this replica to the others."""

    def __init__(
        self,
        config: Config,
        models: Sequence[ModelRuntime],
        clock: Callable[[], float],
        *,
        port: int,
        counted: Callable[[str], int],
        retiring: Sequence[ModelRuntime] = (),
    ) -> None:
        """`port` receives the other replicas' questions. Connects to nothing yet.

        `counted` returns the number of gateways that a model's lease store has heard of.
        `retiring`: models that a reload removed and whose requests still run.
        """
        self._models = models
        self._retiring = retiring
        self._counted = counted
        self._balanced = _balanced(config)
        self.peers = ReplicaCalls(lambda: [] if self._presence is None else self._presence.others())
        """The other replicas, for questions; none without Redis."""
        self._presence: Presence | None = None
        self._fleet: FleetNotes | None = None
        self._bus: Bus | None = None
        replica = secrets.token_hex(8)
        notes = open_notes(config.state.address, replica)
        if notes is None:
            return
        self._bus = bus = Bus(notes, replica=replica, clock=clock, chance=random.random)
        if config.state.shared:
            host = _asked_at(config)
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            self.peers.on("drain", lambda asked: _encode(self._drain(*_drain_asked(asked))))
            self._presence = Presence(
                bus,
                [model.name for model in models],
                address=Address(url, self.peers.token),
                seed=Seed(since_unix_s=time.time(), value=digests.seed()),
                on_seed=lambda seed: _digest_by(seed, models),
            )
            self._fleet = FleetNotes(models, bus.publish, bus.peers, clock, time.time, retiring)
            schedulers = SchedulerNotes(models, bus.publish, bus.peers, self._sharing, clock)
            for shared in (self._fleet, schedulers):
                bus.listen(shared.send, shared.receive)
        self._learned = LearnedNotes(bus, self._estimators(), clock)

    @property
    def up(self) -> bool:
        """Whether the bus's store answers, if there is one."""
        return self._bus is None or self._bus.up

    def count(self, model: str) -> int:
        """Replicas that serve a model, this one included; each gets an equal share of its gates."""
        counted = self._counted(model)
        return counted if self._presence is None else max(counted, self._presence.replicas(model))

    async def drain(self, worker: str, on: bool) -> int:  # noqa: FBT001
        """Take a worker out of the rotations of all replicas, or put it back.

        Returns the number of its pools, 0 if no replica has it. The others are asked at once: until
        their next exchange they would go on sending there. One of them may have it alone, because
        discovery told this replica first that it is going.
        """
        hits = self._drain(worker, on)
        answers = await self.peers.ask("drain", _encode((worker, on)))
        hits = max((hits, *understood(_hits, answers)))
        if hits and self._fleet is not None and self._bus is not None:
            self._fleet.drained(worker, on=on)  # for replicas that start later
            self._bus.hurry()
        return hits

    def joined(self, worker: str) -> None:
        """Note that a new engine is at a worker's address: an earlier one's drain is over."""
        if self._fleet is not None:
            self._fleet.joined(worker)

    def follow(self, config: Config) -> None:
        """Link the models as they are now."""
        self._balanced = _balanced(config)
        if self._bus is not None:
            self._learned.replace(self._estimators())
        if self._presence is not None and self._fleet is not None:
            self._presence.serve(model.name for model in self._models)
            self._fleet.follow()

    async def start(self) -> None:
        """Connect, and learn of the other replicas and drained workers; waits a few seconds."""
        if self._bus is not None:
            await self._bus.start()

    async def close(self) -> None:
        if self._bus is not None:
            await self._bus.close()
        await self.peers.close()

    def _drain(self, worker: str, on: bool) -> int:  # noqa: FBT001
        return drain_worker((*self._models, *self._retiring), worker, on=on)

    def _sharing(self, model: str) -> int:
        """`count` for schedulers; warns once if several replicas balance the same ranks."""
        count = self.count(model)
        if count > 1 and model in self._balanced:
            self._balanced.remove(model)
            _log.warning(
                "%d replicas serve %s: each balances only its own requests over the ranks; serve "
                "it by one replica, or by another policy than bfio (docs/adr/0008)",
                count,
                model,
            )
        return count

    def _estimators(self) -> dict[str, LengthEstimator]:
        """By the name under which each is stored."""
        return {f"{m.estimator.profile.name}:{m.name}": m.estimator for m in self._models}


def _digest_by(seed: int, models: Sequence[ModelRuntime]) -> None:
    """Digest prompts with a new seed; prefixes known by the old seed become invalid."""
    digests.use_seed(seed)
    for model in models:
        for pool in model.fleet.pools:
            if pool.prefixes is not None:
                for worker in range(pool.prefixes.workers):
                    pool.prefixes.forget(worker)


def _balanced(config: Config) -> list[str]:
    """Models whose ranks are balanced."""
    replicas = config.server.workers
    return [model.name for model in config.models if "bfio" in model.policies(replicas)]


def loopback_of_many(config: Config) -> str | None:
    """A warning if this replica registers a loopback address that other hosts cannot use."""
    host = _asked_at(config)
    redis = _host_of(config.state.address)
    if not config.state.shared or not _loopback(host) or _loopback(redis):
        return None
    return (
        f"replicas on other hosts cannot ask this one: it registers {host} on the Redis "
        f"of {redis}; set server.host to 0.0.0.0, or to an address that they reach"
    )


def _asked_at(config: Config) -> str:
    return own_address(config.server.host, _host_of(config.state.address))


def _loopback(host: str) -> bool:
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in addresses)


def _host_of(url: str) -> str:
    """The host of a checked `state.url`, or the first of several."""
    authority = url.partition("://")[2].partition("/")[0].rpartition("@")[2]
    return urlsplit("//" + authority.split(",")[0]).hostname or "127.0.0.1"
