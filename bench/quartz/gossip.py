"""Gossip between several gateways of one simulation, by the shipped notes.

`SchedulerNotes` over a board in memory, in virtual time, with the delays of Redis: every
half second, give or take a tenth, a gateway publishes its notes and at once reads the others',
each as old as its last exchange.
"""

from collections.abc import Sequence
from random import Random
from typing import Final

from gateway.estimate.estimator import LengthEstimator
from gateway.fleet.model_runtime import ModelAdmission, ModelFleet, ModelRuntime, ModelScheduling
from gateway.records.attempt import HealthRules
from gateway.replicas.notes import SchedulerNotes
from gateway.routing.conversations import ResponseAffinity
from gateway.routing.routing import PoolShape, Routing
from gateway.scheduling.prefix_index import PrefixIndex
from gateway.store.redis.exchange import RedisExchange
from simulator.experiments.scheduling import WORKER, SimulatedGateway

_APART: Final = (0.9 * RedisExchange.every_s, 1.1 * RedisExchange.every_s)
"""Seconds from one exchange of a board to the next."""


class _GossipBoard:
    """One gateway's: what it put up, and what it heard at its last exchange."""

    def __init__(self, place: int, told: dict[int, dict[str, bytes]]) -> None:
        self._place = place
        self._told = told
        self._mine: dict[str, bytes] = {}
        self._theirs: list[dict[str, bytes]] = []

    def publish(self, name: str, payload: bytes) -> None:
        self._mine[name] = payload

    def peers(self, name: str) -> list[bytes]:
        return [notes[name] for notes in self._theirs if name in notes]

    def exchange(self) -> None:
        self._told[self._place] = dict(self._mine)
        self._theirs = [notes for place, notes in self._told.items() if place != self._place]


class Gossip:
    """Call it at each tick."""

    def __init__(
        self, gateways: Sequence[SimulatedGateway], seed: int, *, prefixes: bool = True
    ) -> None:
        """`prefixes`: whether each hears of the others' prompts."""
        self._random = Random(f"gossip/{seed}")
        self._now_s = 0.0
        told: dict[int, dict[str, bytes]] = {}
        self._boards = [_GossipBoard(place, told) for place in range(len(gateways))]
        self._notes = [
            SchedulerNotes(
                [_served(gateway, prefixes)],
                board,
                str(place),
                lambda _: len(gateways),
                lambda: self._now_s,
            )
            for place, (gateway, board) in enumerate(zip(gateways, self._boards, strict=True))
        ]
        self._due_s = [RedisExchange.every_s * self._random.random() for _ in gateways]

    def __call__(self, now_s: float) -> None:
        """Do what is due."""
        self._now_s = now_s
        while (due_s := min(self._due_s)) <= now_s:
            place = self._due_s.index(due_s)
            for _ in self._notes[place].send():
                pass
            self._boards[place].exchange()
            for _ in self._notes[place].receive():
                pass
            self._due_s[place] += self._random.uniform(*_APART)


def _served(gateway: SimulatedGateway, prefixes: bool) -> ModelRuntime:
    index = gateway.prefixes
    if not (prefixes and isinstance(index, PrefixIndex)):
        index = PrefixIndex(len(gateway.pool.workers))  # nobody asks it
    return ModelRuntime(
        name="m",
        routing=Routing(
            pools=(
                PoolShape(name="pool", window_tokens=WORKER.max_model_len, boundary_tokens=None),
            )
        ),
        estimator=LengthEstimator(),
        fleet=ModelFleet(
            pools=(gateway.pool,),
            workers=([],),
            health=HealthRules(),
            response_affinity=ResponseAffinity(),
        ),
        admission=ModelAdmission(spill_queue=0),
        scheduling=ModelScheduling(
            schedulers=(gateway.scheduler,),
            predictors=() if gateway.predictor is None else (gateway.predictor,),
            prefixes=(index,),
            prefix_gossip=(gateway.prefix_gossip,),
        ),
    )
