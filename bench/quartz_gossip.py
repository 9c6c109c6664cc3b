"""What several gateways of one simulation tell one another, by the shipped notes.

`SchedulerNotes` over a board in memory, in virtual time, as late as over Redis: at a tick of its
schedulers, once a second, a gateway puts up its notes and reads those that it has; every .9 to
1.1 s its board brings them to the others and takes theirs along. The gateways' seconds begin
apart. So the news is some 1.5 s old when it is heard, 3.3 s at most.
"""

from collections.abc import Sequence
from random import Random
from typing import Final

from gateway.adapters.scheduler_notes import EVERY_S, SchedulerNotes
from gateway.policy.budget import LengthEstimator
from gateway.policy.health_rules import HealthRules
from gateway.policy.homes import ResponseHomes
from gateway.policy.prefix_index import PrefixIndex
from gateway.policy.routing import PoolShape, Routing
from gateway.policy.served import ServedModel
from simulator.experiments.scheduling import WORKER, Gateway

_APART: Final = (0.9, 1.1)
"""Seconds from one exchange of a board to the next, of `redis_board.EVERY_S`."""


class _Board:
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

    def __init__(self, gateways: Sequence[Gateway], seed: int, *, prefixes: bool = True) -> None:
        """`prefixes`: whether each hears of the others' prompts."""
        self._random = Random(f"gossip/{seed}")
        told: dict[int, dict[str, bytes]] = {}
        self._boards = [_Board(place, told) for place in range(len(gateways))]
        self._notes = [
            SchedulerNotes([_served(gateway, prefixes)], board, str(place), lambda _: len(gateways))
            for place, (gateway, board) in enumerate(zip(gateways, self._boards, strict=True))
        ]
        self._board_due_s = [self._random.random() for _ in gateways]
        self._note_due_s = [EVERY_S * self._random.random() for _ in gateways]

    def __call__(self, now_s: float) -> None:
        """Do what is due."""
        while (due_s := min(self._board_due_s)) <= now_s:
            place = self._board_due_s.index(due_s)
            self._boards[place].exchange()
            self._board_due_s[place] += self._random.uniform(*_APART)
        for place, notes in enumerate(self._notes):
            if now_s >= self._note_due_s[place]:
                self._note_due_s[place] = now_s + EVERY_S
                for _ in notes.exchange(now_s):
                    pass


def _served(gateway: Gateway, prefixes: bool) -> ServedModel:
    index = gateway.prefixes
    if not (prefixes and isinstance(index, PrefixIndex)):
        index = PrefixIndex(len(gateway.pool.workers))  # nobody asks it
    return ServedModel(
        name="m",
        routing=Routing(
            pools=(
                PoolShape(name="pool", window_tokens=WORKER.max_model_len, boundary_tokens=None),
            )
        ),
        estimator=LengthEstimator(),
        pools=(gateway.pool,),
        workers=((),),
        health=HealthRules(),
        homes=ResponseHomes(),
        spill_queue=0,
        schedulers=(gateway.scheduler,),
        predictors=() if gateway.predictor is None else (gateway.predictor,),
        prefixes=(index,),
        news=(gateway.news,),
    )
