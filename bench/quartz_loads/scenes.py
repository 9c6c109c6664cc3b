"""The grid of `bench quartz-loads`: workloads x load x size of the fleet.

A scene scales with its fleet: clients, burst size and arrivals grow with the workers. Load is a
share of the knee: the rate that the best of the compared policies completes when offered more.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from bench.quartz.workloads import CLIENTS, StreamShape, agents, mixed, mooncake, structured
from simulator.experiments.scheduling import Demand

HEAVY_SCENE: Final = "Heavy client"
LOADS: Final = (0.5, 0.8, 1.0, 1.2)
FLEETS: Final = (4, 16, 64)
_KNEES: Final[Mapping[int, Mapping[str, float]]] = {
    4: {
        "Chat": 29.1,
        "RAG": 8.0,
        "Structured": 30.7,
        "Mixed": 14.0,
        "Mixed Bursty": 14.0,
        "Agents": 7.4,
        "Mooncake": 8.5,
        "Heavy client": 13.7,
    },
    16: {
        "Chat": 112.5,
        "RAG": 32.2,
        "Structured": 120.5,
        "Mixed": 53.5,
        "Mixed Bursty": 53.1,
        "Agents": 28.7,
        "Mooncake": 34.1,
        "Heavy client": 52.8,
    },
}
"""Requests a second by workers and workload, as `python -m bench quartz-knees` measured them."""
_TRACED: Final = 12_000
"""Requests of the Mooncake trace."""
HEAVY: Final = "heavy"
"""The client of the scene `Heavy client` that asks for as much as all others together."""

Scene = Callable[[int, float, int, int, Path | None], list[Demand]]
"""From a seed, a rate a second of all workers, workers, requests, and a folder with traces."""


def _of(shape: StreamShape) -> Scene:
    def scene(
        seed: int, rate: float, workers: int, requests: int, data: Path | None
    ) -> list[Demand]:
        scale = workers / 4
        scaled = msgspec.structs.replace(
            shape,
            rate=rate,
            clients=int(CLIENTS * scale),
            burst=int(shape.burst * scale),
        )
        return mixed(seed, scaled, requests)

    return scene


def _heavy(seed: int, rate: float, workers: int, requests: int, data: Path | None) -> list[Demand]:
    clients = int(CLIENTS * workers / 4)
    shape = StreamShape(rate=rate / 2, heavy=rate / 2, clients=clients)
    return mixed(seed, shape, requests // 2)


def _structured(
    seed: int, rate: float, workers: int, requests: int, data: Path | None
) -> list[Demand]:
    return structured(seed, rate, requests, int(CLIENTS * workers / 4))


def _agents(seed: int, rate: float, workers: int, requests: int, data: Path | None) -> list[Demand]:
    return agents(seed, rate, requests, int(CLIENTS * workers / 4))


def _mooncake(
    seed: int, rate: float, workers: int, requests: int, data: Path | None
) -> list[Demand]:
    return mooncake(seed, rate, data, min(requests, _TRACED))


SCENES: Final[Mapping[str, Scene]] = {
    "Chat": _of(StreamShape(rag=0.0)),
    "RAG": _of(StreamShape(rag=1.0)),
    "Structured": _structured,
    "Mixed": _of(StreamShape()),
    "Mixed Bursty": _of(StreamShape(bursts=6.0)),
    "Agents": _agents,
    "Mooncake": _mooncake,
    HEAVY_SCENE: _heavy,
}


def knee(scene: str, workers: int) -> float:
    """Requests a second: as many a worker as of the largest fleet measured that is no larger."""
    measured = max((fleet for fleet in _KNEES if fleet <= workers), default=min(_KNEES))
    return _KNEES[measured][scene] * workers / measured


def requests(workers: int) -> int:
    """How many a run has: fewer for each worker of a larger fleet, whose figures vary less."""
    return {4: 3000, 16: 9000}.get(workers, 24_000)
