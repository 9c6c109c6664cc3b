"""Fields of a body that steer an engine: clients may not set them, and the gateway removes them.

They choose scheduling, cache, rank, session, request id, another engine to fetch from, labels of
the engine's metrics, or code to run. The names are those of the engines' request classes; the
test beside this module lists all fields of those classes, each with what becomes of it.
"""

from collections.abc import Iterable
from typing import Final

ADAPTER_FIELD: Final = "lora_path"
"""SGLang's second name of the model: the LoRA adapter that answers. The gateway reads it, checks
it against the key's rights as it does `model`, and writes its own."""

_BOTH: Final = ("priority", "cache_salt", "data_parallel_rank", "request_id", "session_id")
_VLLM: Final = ("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "logits_processors")
_SGLANG: Final = (
    *("rid", "session_params", "extra_key", "routed_dp_rank", "disagg_prefill_dp_rank"),
    *("custom_logit_processor", "custom_params", "custom_labels", ADAPTER_FIELD),
)
STEERING_FIELDS: Final = frozenset((*_BOTH, *_VLLM, *_SGLANG))
_STEERING_PREFIXES: Final = ("bootstrap_", "x-gateway-")


def steering(names: Iterable[str]) -> tuple[str, ...]:
    """The top-level names that steer an engine, in the body's order."""
    joined = "\n" + "\n".join(names)
    if (
        STEERING_FIELDS.isdisjoint(names)
        and "\nbootstrap_" not in joined
        and "\nx-gateway-" not in joined
    ):
        return ()
    return tuple(n for n in names if n in STEERING_FIELDS or n.startswith(_STEERING_PREFIXES))
