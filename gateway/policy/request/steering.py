"""Fields of a body that steer an engine: no client's to set, so they are removed.

They choose its scheduling, cache, rank, session, request id or code to run.
"""

from collections.abc import Iterable
from typing import Final

STEERING_FIELDS: Final = frozenset(
    {
        "priority",
        "cache_salt",
        "data_parallel_rank",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
        "kv_transfer_params",
        "request_id",
        "rid",
        "session_params",
        "custom_logit_processor",
        "vllm_xargs",
    }
)
_PREFIXES: Final = ("bootstrap_", "x-gateway-")


def steering(names: Iterable[str]) -> tuple[str, ...]:
    """Those of a body's top-level names that steer an engine, in order."""
    joined = "\n" + "\n".join(names)
    if (
        STEERING_FIELDS.isdisjoint(names)
        and "\nbootstrap_" not in joined
        and "\nx-gateway-" not in joined
    ):
        return ()
    return tuple(n for n in names if n in STEERING_FIELDS or n.startswith(_PREFIXES))
