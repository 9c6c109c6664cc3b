"""Models, their LoRA adapters, pools and workers, as clients, operators and the dashboard see."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from gateway.control.surface import Control
from gateway.fleet import fleet, members
from gateway.fleet.model_runtime import ModelRuntime
from gateway.ports import PoolView
from gateway.records.request import Principal

SHOWN: Final = 100
"""Most workers named for an adapter."""


def describe_fleet(
    served: ModelRuntime, counted: Sequence[PoolView], now_s: float
) -> dict[str, Any]:
    """Pools and workers of a model: windows, load, health and admission's counters."""
    pools = []
    for index, (shape, pool) in enumerate(
        zip(served.routing.pools, served.fleet.pools, strict=True)
    ):
        sound = set(fleet.available(pool, now_s))
        workers = [
            {
                "id": worker,
                "in_rotation": i in sound,
                "up": pool.engine_of[i].up,
                "not_ready": pool.engine_of[i].why_down or None,
                "remark": pool.engine_of[i].remark or None,
                "draining": pool.draining[i] or pool.engine_of[i].leaving,
                "ejected_for_s": max(0.0, pool.engine_of[i].ejected_until_s - now_s),
                "active_sequences": pool.active[i],
                "reserved_tokens": pool.tokens[i],
            }
            for i, worker in members.present(pool)
        ]
        pools.append(
            {
                "name": pool.name,
                "max_model_len": shape.window_tokens,
                "beyond_window_tokens": pool.beyond_window_tokens,
                "b_short": shape.boundary_tokens,
                "max_num_seqs": pool.slots_per_worker,
                "inflight": pool.inflight,
                "ready_slots": fleet.ready_slots(pool, now_s),
                "admission": msgspec.structs.asdict(counted[index]) if counted else None,
                "workers": workers,
            }
        )
    return {
        "model": served.name,
        "mode": "observe" if served.routing.observe else "enforce",
        "adapters": {
            name: {
                pool.name: [pool.workers[i] for i in served.adapters.workers(name, pool)[:SHOWN]]
                for pool in served.fleet.pools
            }
            for name in served.adapters.names
        },
        "pools": pools,
    }


def model_card(control: Control, name: str, model: str) -> dict[str, Any]:
    """An entry of /v1/models."""
    served = next(s for s in control.models if s.name == model)
    return {
        "id": name,
        "object": "model",
        "created": control.created_unix_s,
        "owned_by": "sluice",
        "root": model,
        "max_model_len": served.routing.pools[-1].window_tokens,
    }


def anthropic_models(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The entries of /v1/models as Anthropic's clients read them: all of them on one page."""
    found = [
        {
            "type": "model",
            "id": card["id"],
            "display_name": card["id"],
            "created_at": datetime.fromtimestamp(card["created"], UTC).isoformat(),
            "max_input_tokens": card["max_model_len"],
        }
        for card in cards
    ]
    ids = [model["id"] for model in found] or [None]
    return {"data": found, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}


def adapter_cards(control: Control, principal: Principal) -> Iterator[dict[str, Any]]:
    """The LoRA adapters that a key may use, each with its base as `parent`."""
    for served in control.models:
        for name in served.adapters.names:
            if name not in control.names and principal.opens(served.name, name):
                yield {**model_card(control, name, served.name), "parent": served.name}


def adapters_ready(models: Sequence[ModelRuntime], now_s: float) -> dict[str, Any]:
    """The adapters of each model that a worker in the rotation has, and those that none has."""
    found: dict[str, dict[str, list[str]]] = {"adapters": {}, "adapters_missing": {}}
    for served in models:
        for name in served.adapters.names:
            ready = served.adapters.ready(name, served.fleet.pools, now_s)
            key = "adapters" if ready else "adapters_missing"
            found[key].setdefault(served.name, []).append(name)
    return {key: named for key, named in found.items() if named}
