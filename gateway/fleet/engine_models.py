"""Read an engine's pages: the names it serves, which wanted one is missing, whether it sleeps."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

_SHOWN = 5
"""Most names in a message."""


class EngineModel(NamedTuple):
    """One name that an engine serves."""

    name: str
    window_tokens: int | None
    parent: str | None
    """The base model of a LoRA adapter; None for a model of its own."""


def read_models(body: bytes) -> list[EngineModel]:
    """The listed models; [] if the body is not such a list."""
    try:
        reported: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return []
    cards: Any = reported.get("data") if isinstance(reported, dict) else None
    found = []
    for card in cards if isinstance(cards, list) else ():
        name: Any = card.get("id") if isinstance(card, dict) else None
        if isinstance(name, str):
            window, parent = card.get("max_model_len"), card.get("parent")
            found.append(
                EngineModel(
                    name,
                    window if isinstance(window, int) else None,
                    parent if isinstance(parent, str) and parent != name else None,
                )
            )
    return found


def not_served(models: Sequence[EngineModel], name: str) -> str:
    """Why an engine with these models cannot serve `name`; "" if it can or lists nothing."""
    names = [model.name for model in models]
    if not names or name in names:
        return ""
    shown = ", ".join(f"'{known[:80]}'" for known in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"it serves {shown}{more}, not '{name}': set the worker's `model`"


def adapters(models: Sequence[EngineModel]) -> list[str]:
    """The LoRA adapters among them."""
    return [model.name for model in models if model.parent is not None]


def is_asleep(body: bytes) -> bool:
    """Whether an engine's /is_sleeping page says that it sleeps (vLLM's sleep mode)."""
    try:
        reported: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(reported, dict) and reported.get("is_sleeping") is True
