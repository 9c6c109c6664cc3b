"""Amounts of a pool's capacity: whole tokens per second, MiB of KV cache, and sequences.

Both allocators count in these units, since extended resources of Kubernetes are whole numbers.
A request is rounded up, a replica's capacity down.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from math import ceil
from typing import Any, Final

from controller.records import GROUP

Amounts = tuple[int, int, int]
"""Tokens per second, MiB, sequences."""
NOTHING: Final[Amounts] = (0, 0, 0)
FIELDS: Final = ("tokensPerSecond", "kvCacheGiB", "concurrency")
"""As TokenPool and TokenEntitlement name them."""
EXTENDED: Final = (
    f"{GROUP}/tokens-per-second",
    f"{GROUP}/kv-cache-mib",
    f"{GROUP}/concurrency",
)
"""As resources of a node."""
MIB_PER_GIB: Final = 1024
_QUANTITY: Final = re.compile(r"([+-]?[\d.]+)([KMGTPE]i?|[numk]|[eE][+-]?\d{1,3})?")
_SCALES: Final = {
    **{f"{sign}i": Fraction(1 << 10 * power) for power, sign in enumerate("KMGTPE", start=1)},
    **{sign: Fraction(f"1e{3 * power}") for power, sign in enumerate("num kMGTPE", -3)},
}


@lru_cache(maxsize=4096)  # a plan reads few different ones, each of many pods
def parse_quantity(value: object) -> Fraction:
    """The number that a Kubernetes quantity spells, such as "1k", "1.5Gi", "2e3" or 7.

    Raises ValueError for anything else.
    """
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise ValueError(f"not a quantity: {value!r}")
    digits, unit = match.groups("")
    return Fraction(digits) * (_SCALES.get(unit) or Fraction(f"1{unit}"))


def amounts_of(resources: Mapping[str, Any]) -> Amounts:
    """What stated resources require, rounded up; absent ones require nothing."""
    rate, kv_gib, sequences = (resources.get(field) or 0 for field in FIELDS)
    return ceil(rate), ceil(kv_gib * MIB_PER_GIB), ceil(sequences)


def resources_of(amounts: Amounts) -> dict[str, int | float]:
    """Amounts as an object's fields, without those that are 0."""
    rate, kv_mib, sequences = amounts
    kv_gib = kv_mib // MIB_PER_GIB if kv_mib % MIB_PER_GIB == 0 else kv_mib / MIB_PER_GIB
    stated = zip(FIELDS, (rate, kv_gib, sequences), strict=True)
    return {field: amount for field, amount in stated if amount}


def add(left: Amounts, right: Amounts) -> Amounts:
    """The sum, by dimension."""
    return left[0] + right[0], left[1] + right[1], left[2] + right[2]


def subtract(left: Amounts, right: Amounts) -> Amounts:
    """The difference, by dimension."""
    return left[0] - right[0], left[1] - right[1], left[2] - right[2]


def smaller(left: Amounts, right: Amounts) -> Amounts:
    """The smaller amount of each dimension."""
    return min(left[0], right[0]), min(left[1], right[1]), min(left[2], right[2])


def within(left: Amounts, right: Amounts) -> bool:
    """Whether no dimension of `left` is above that of `right`."""
    return left[0] <= right[0] and left[1] <= right[1] and left[2] <= right[2]


def times(amounts: Amounts, count: int) -> Amounts:
    """So many of it."""
    return amounts[0] * count, amounts[1] * count, amounts[2] * count


def only(amounts: Amounts, enforced: Amounts) -> Amounts:
    """The amounts in dimensions where `enforced` is not 0, and 0 in others."""
    return (
        amounts[0] if enforced[0] else 0,
        amounts[1] if enforced[1] else 0,
        amounts[2] if enforced[2] else 0,
    )
