"""A request's entry in the prefix index of the pool where it is bound.

Made when it is bound, not when it is sent: those that come while it waits would else not know
of it and scatter one prompt over all workers. Taken back when it is not served there.
"""

from gateway.pipeline.walk import Walk, found
from gateway.policy.model_runtime import ServedModel


def enter(walk: Walk, served: ServedModel, pool: int) -> None:
    """Its job is bound in the pool: enter the prompt, once for each worker it is bound to."""
    points = walk.prefix.points
    if not points:
        return
    job = found(walk.job)
    place = (pool, job.worker)
    if walk.expected is not None:
        if walk.expected_at == place:
            return
        withdraw(walk, served)
    tokens_per_byte = job.prompt_tokens / points[-1][0]
    walk.expected = expected = served.prefixes[pool].insert(points, job.worker, tokens_per_byte)
    walk.expected_at = place
    if served.news:
        served.news[pool].sent(points, job.worker, tokens_per_byte, expected.hit_tokens)


def withdraw(walk: Walk, served: ServedModel) -> None:
    """It gets no first token there, so the worker does not hold the prompt. Idempotent."""
    expected, walk.expected = walk.expected, None
    if expected is not None:
        points, (pool, worker) = walk.prefix.points, walk.expected_at
        tokens_per_byte = found(walk.job).prompt_tokens / points[-1][0]
        served.prefixes[pool].withdraw(points, worker, expected, tokens_per_byte)
