"""Chooses leases to evict for protected requests: preemptible work, lowest weight first.

Among equal weights the youngest goes first, because it loses the least work. Spot and spilled
leases are evicted only if the model sets `reclaim: cancel`. A victim keeps its lease until its
owner has cancelled it. Leases of an entitlement that has since moved to a better class are spared.
"""

from heapq import nsmallest

from gateway.policy.token_pool.terms import Held
from gateway.policy.token_pool.token_pool import TokenPool


def victims(book: TokenPool, pool: int, sequences: int) -> list[Held]:
    """Leases of a pool that together free at least `sequences`, as far as there are any."""
    candidates = [
        h
        for h in book.pools[pool].evictable.values()
        if not h.evicted and book.gives_way(book.accounts[h.entitlement], h)
    ]
    chosen: list[Held] = []
    freed = 0
    for held in nsmallest(sequences, candidates, key=lambda h: (h.weight, -h.issued_s, h.id)):
        if freed >= sequences:
            break
        chosen.append(held)
        freed += held.sequences
    return chosen


def evict(book: TokenPool, pool: int, sequences: int) -> list[Held]:
    """Mark victims, so that none is chosen twice.

    Evicts no more than what the pool holds beyond its slots after earlier victims have left.
    """
    state = book.pools[pool]
    leaving = sum(h.sequences for h in state.evictable.values() if h.evicted)
    over = state.inflight - leaving - book.terms.slots[pool]
    chosen = victims(book, pool, max(0, min(sequences, over)))
    for held in chosen:
        held.evicted = True
    return chosen
