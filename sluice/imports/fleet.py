"""Models and their engines, gathered from an imported file, and the sections made of them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from gateway.settings.worker import is_source
from sluice.imports.sections import ASSUMED_SEQUENCES, ASSUMED_WINDOW, Row, label, literal


@dataclass
class Engine:
    """One engine: a worker of one pool."""

    url: str
    """Without a final /v1; or a source of engines; may be a reference to the environment."""
    served: str
    """The model's name at the engine."""
    api_key: str | None = None
    """A reference to the environment."""
    window: int | None = None
    sequences: int | None = None

    def section(self, name: str) -> str | Row:
        """The worker; a bare URL where nothing else is to be said."""
        found = Row({"discover" if is_source(self.url) else "url": self.url})
        if self.api_key is not None:
            found["api_key"] = self.api_key
        if self.served != name:
            found["model"] = literal(self.served)
        return found if len(found) > 1 else self.url


@dataclass
class Model:
    """One model under the name that clients send."""

    name: str
    engines: list[Engine] = field(default_factory=list)
    aliases: list[str] = field(default_factory=list)
    loras: list[str] = field(default_factory=list)
    """LoRA adapters, which are served under their own names."""
    fallbacks: list[str] = field(default_factory=list)
    kind: str = ""
    """What it is asked for where that is no chat: `embedding`, `rerank` and others."""
    first_byte_s: float | None = None
    price: dict[str, float] | None = None
    """`input`, `output`, and where known `cached_input`, per million tokens."""

    @property
    def served(self) -> set[str]:
        """Names that its engines know it by."""
        return {engine.served for engine in self.engines}

    @property
    def slots(self) -> int:
        """Sequences that its engines run at once, as far as known."""
        return sum(engine.sequences or ASSUMED_SEQUENCES for engine in self.engines)

    def section(self) -> dict[str, Any]:
        """The model in sluice.yaml, in observe mode."""
        found: dict[str, Any] = {"name": literal(self.name), "mode": "observe"}
        if self.aliases:
            found["aliases"] = [literal(alias) for alias in self.aliases]
        if self.loras:
            found["loras"] = [literal(name) for name in self.loras]
        if self.fallbacks:
            found["fallbacks"] = [literal(name) for name in self.fallbacks]
        if self.first_byte_s is not None:
            found["timeouts"] = Row(first_byte_s=self.first_byte_s)
        if self.price is not None:
            order = ("input", "cached_input", "output")
            found["price"] = Row({name: self.price[name] for name in order if name in self.price})
        found["pools"] = {
            f"window-{window}" if len(self._windows()) > 1 else "main": {
                "max_model_len": window,
                "max_num_seqs": min(e.sequences or ASSUMED_SEQUENCES for e in engines),
                "workers": [engine.section(self.name) for engine in engines],
            }
            for window, engines in self._windows().items()
        }
        return found

    def _windows(self) -> dict[int, list[Engine]]:
        found: dict[int, list[Engine]] = {}
        for engine in self.engines:
            found.setdefault(engine.window or ASSUMED_WINDOW, []).append(engine)
        return dict(sorted(found.items()))


def closed(models: Iterable[Model]) -> list[Row]:
    """An entitlement for each model, which close the gateway to all but the keys of one tenant."""
    taken: set[str] = set()
    found = []
    for model in models:
        name = label(model.name, taken)
        taken.add(name)
        found.append(Row(name=name, tenant="imported", model=literal(model.name)))
    return found
