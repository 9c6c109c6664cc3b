"""How many histories state machines live through."""

import os

from hypothesis import settings


def histories(count: int, *, steps: int = 30) -> settings:
    """So many as every run has time for; SLUICE_HISTORIES=N asks for others, for longer hunts."""
    asked = int(os.environ.get("SLUICE_HISTORIES", "0"))
    return settings(
        max_examples=asked or count,
        stateful_step_count=steps,
        deadline=None,
        report_multiple_bugs=False,
    )
