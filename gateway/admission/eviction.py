"""Chooses leases to evict for protected requests: preemptible work, lowest weight first.

Among equal weights the youngest goes first, because it loses the least work. Spot and spilled
leases are evicted only if the model sets `reclaim: cancel`. A victim keeps its lease until its
owner has cancelled it. Leases of an entitlement that has since moved to a better class are spared.
"""

from heapq import nsmallest

from gateway.admission.terms import LeaseRecord
from gateway.admission.token_pool import TokenPool


def victims(token_pool: TokenPool, pool: int, sequences: int) -> list[LeaseRecord]:
    """Leases of a pool that together free at least `sequences`, as far as there are any."""
    candidates = [
        h
        for h in token_pool.pools[pool].evictable.values()
        if not h.evicted and token_pool.gives_way(token_pool.accounts[h.entitlement], h)
    ]
    chosen: list[LeaseRecord] = []
    freed = 0
    for record in nsmallest(sequences, candidates, key=lambda h: (h.weight, -h.issued_s, h.id)):
        if freed >= sequences:
            break
        chosen.append(record)
        freed += record.sequences
    return chosen


def evict(token_pool: TokenPool, pool: int, sequences: int) -> list[LeaseRecord]:
    """Mark victims, so that none is chosen twice.

    Evicts no more than what the pool holds beyond its slots after earlier victims have left.
    """
    state = token_pool.pools[pool]
    leaving = sum(h.sequences for h in state.evictable.values() if h.evicted)
    over = state.inflight - leaving - token_pool.terms.slots[pool]
    chosen = victims(token_pool, pool, max(0, min(sequences, over)))
    for record in chosen:
        record.evicted = True
    return chosen
