"""Chooses the connections that give way when there are too many of them.

Whoever holds most gives way first, so one address cannot keep the others out.
"""

from collections.abc import Iterable
from heapq import heapify, heappop, heapreplace
from operator import itemgetter
from typing import TypeVar

T = TypeVar("T")


def giving_way(waiting: Iterable[tuple[str, float, T]], count: int) -> list[T]:
    """At most `count` of `waiting`: (address, waiting since, which).

    Each is the oldest one of the address that holds most of what is left.
    """
    held: dict[str, list[tuple[float, T]]] = {}
    for address, since_s, which in waiting:
        held.setdefault(address, []).append((since_s, which))
    for group in held.values():
        group.sort(key=itemgetter(0), reverse=True)
    most = [(-len(group), address) for address, group in held.items()]
    heapify(most)
    found: list[T] = []
    while most and len(found) < count:
        size, address = most[0]
        found.append(held[address].pop()[1])
        if size < -1:
            heapreplace(most, (size + 1, address))
        else:
            heappop(most)
    return found
