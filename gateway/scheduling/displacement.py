"""Chooses the request that makes room in a full queue."""

from collections.abc import Callable

from gateway.scheduling.scheduler import Job


def newest_of_largest(jobs: list[Job]) -> Job:
    """The newest request of whoever holds most for its share, in the lowest class.

    `jobs` in order of arrival.
    """
    priority_class = max(job.priority_class for job in jobs)
    lowest = [job for job in jobs if job.priority_class == priority_class]
    largest = _largest(lowest, lambda job: job.tenant)
    return _largest(largest, lambda job: job.client)[-1]


def _largest(jobs: list[Job], holder: Callable[[Job], str]) -> list[Job]:
    """The jobs of those who hold most for their share."""
    held: dict[str, float] = {}
    for job in jobs:
        held[holder(job)] = held.get(holder(job), 0.0) + 1.0 / job.share
    most = max(held.values())
    return [job for job in jobs if held[holder(job)] >= most]
