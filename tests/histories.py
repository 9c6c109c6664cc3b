"""How many histories state machines live through."""

import os

from hypothesis import settings


def histories(count: int, *, steps: int = 30) -> settings:
    """As many as every run has time for, the same in every run.

    SLUICE_HISTORIES=N asks for so many new ones: a hunt finds what is for a commit of its own.
    """
    asked = int(os.environ.get("SLUICE_HISTORIES", "0"))
    return settings(
        max_examples=asked or count,
        stateful_step_count=steps,
        deadline=None,
        derandomize=not asked,
        report_multiple_bugs=False,
    )
