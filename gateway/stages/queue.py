"""Stage 8, queue: the order in which bound requests reach their worker.

Before the scheduler exists the engines' own queues keep the order (first come, first
served), so nothing waits here.
"""


async def queue() -> float:
    """Wait for the bound worker's gate; seconds waited."""
    return 0.0
