"""Live demand over days: the weeks of two Azure services, and synthetic shifts.

Source: the LLM inference trace of 2024 (AzurePublicDataset, CC BY 4.0; DynamoLLM, arXiv
2408.00741), as figures of its requests by hour (UTC): the ratio of peak to trough of each day, and
how much less a day of the weekend has. Between them the logarithm of the rate is a cosine with its
trough at 8 UTC. A week says nothing of how weeks differ, so days and hours vary by a log-normal
factor.
"""

from typing import Final, Literal

import numpy as np

from simulator.fleet.traffic import Floats, Random

Scenario = Literal["code", "conversation", "shifts", "growth", "young"]
SCENARIOS: Final[tuple[Scenario, ...]] = ("code", "conversation", "shifts", "growth", "young")
PEAK_TO_TROUGH: Final = {
    "code": (10.0, 11.3, 11.1, 9.1, 8.6, 7.0, 5.9),
    "conversation": (1.8, 1.9, 2.0, 2.0, 2.2, 1.7, 1.8),
}
"""Monday to Sunday."""
WEEKEND: Final = {"code": 0.319, "conversation": 0.568}
"""Requests of a day of the weekend over those of another day."""
TROUGH_HOUR: Final = 8
DAY_SPREAD: Final = 0.08
HOUR_SPREAD: Final = 0.06
SHIFT_EVERY_DAYS: Final = 5
SHIFT: Final = 1.35
GROWTH_A_DAY: Final = 1.015
FIRST_HOUR: Final = 96
"""An hour since 1970 at which a Monday begins."""


def hourly(scenario: Scenario, days: int, peak: float, random: Random) -> Floats:
    """Demand by hour, from a Monday on; `peak` is a weekday's mean highest hour."""
    name = "conversation" if scenario == "conversation" else "code"
    shape = np.concatenate([_day(name, day % 7) for day in range(days)])
    shape *= peak / np.concatenate([_day(name, day) for day in range(5)]).max()
    shape *= np.exp(random.normal(0, DAY_SPREAD, days)).repeat(24)
    shape *= np.exp(random.normal(0, HOUR_SPREAD, 24 * days))
    if scenario == "shifts":
        changes = random.random(24 * days) < 1 / (24 * SHIFT_EVERY_DAYS)
        levels = np.cumsum(np.where(changes, random.choice([-1.0, 1.0], 24 * days), 0.0))
        shape *= SHIFT ** (np.abs((levels + 1) % 4 - 2) - 1)  # up and down within a range of two
    if scenario == "growth":
        shape *= GROWTH_A_DAY ** (np.arange(24 * days) / 24 - days)
    return np.asarray(shape)


def _day(name: str, weekday: int) -> Floats:
    swing = np.log(PEAK_TO_TROUGH[name][weekday]) / 2
    shape = np.exp(-swing * np.cos(2 * np.pi * (np.arange(24) - TROUGH_HOUR) / 24))
    mean = WEEKEND[name] if weekday > 4 else 1.0
    return np.asarray(mean * shape / shape.mean())
