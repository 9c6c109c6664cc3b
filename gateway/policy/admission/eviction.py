"""Who gives way when protected traffic would wait: preemptible work, lowest weight first.

Of equals the youngest: the work that loses least. Spot, and what was spilled in, only where the
model says `reclaim: cancel`. Victims keep their lease until their owner has cancelled them.
Whoever was of such a class and is of a better one now has nothing more to fear.
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
    """Mark the victims, so that nobody is asked twice.

    No more than the pool holds beyond its slots once those leave that were asked before.
    """
    state = book.pools[pool]
    leaving = sum(h.sequences for h in state.evictable.values() if h.evicted)
    over = state.inflight - leaving - book.terms.slots[pool]
    chosen = victims(book, pool, max(0, min(sequences, over)))
    for held in chosen:
        held.evicted = True
    return chosen
