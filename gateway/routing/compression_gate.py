"""Reasons against compression that need no look at the prompt's text.

- The API's contract: the client gets its prompt back (`echo`), relies on each of its tokens
  (`prompt_logprobs`), or has the model continue it (`suffix`, `continue_final_message`), or a cache
  holds it (`cache_control`).
- The model's rules: only requests that ask for it (`when: header`), and only while the larger pool
  has no room for another sequence (`only_when_busy`).
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Raw

from gateway.fleet.engine_telemetry import STALE_S, TelemetryView
from gateway.fleet.fleet import PoolState, ready_slots
from gateway.routing.routing_table import CompressionRules

_PROMISES: Final = {
    "echo": "echo",
    "return_token_ids": "echo",
    "suffix": "suffix",
    "prompt_logprobs": "prompt_logprobs",
    "continue_final_message": "prefill",
    "cache_control": "cache_control",
}
"""Member of a body -> reason; in vLLM and SGLang `return_token_ids` gives the prompt's, too."""
_UNSET: Final = frozenset({b"null", b"false", b'""'})


def promised(members: Mapping[str, Raw]) -> str:
    """The promise of the API that a shorter prompt would break; "" if there is none."""
    for name, reason in _PROMISES.items():
        value = members.get(name)
        if value is not None and bytes(value) not in _UNSET:
            return reason
    return ""


def requested(rules: CompressionRules, *, header: bool | None) -> bool:
    """Whether the request may be compressed; `header`: its x-sluice-compress, None if absent."""
    return header is not False and (rules.when != "header" or header is True)


def has_room(pool: PoolState, view: TelemetryView | None, now_s: float) -> bool:
    """Whether one more sequence would run at once in the pool.

    Engines' own figures count where they are read, because other gateways' requests are in them.
    """
    reported = 0.0
    if view is not None:
        for sample, stamped_s in zip(view.samples, view.stamped_s, strict=True):
            if now_s - stamped_s <= STALE_S:
                reported += (sample.running or 0.0) + (sample.waiting or 0.0)
    return max(float(pool.inflight), reported) < ready_slots(pool, now_s)
