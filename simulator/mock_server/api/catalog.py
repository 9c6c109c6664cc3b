"""What one mock engine serves now: its model's name, and LoRA adapters that come and go."""

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from simulator.mock_server.api import problems
from simulator.mock_server.api.requests import Body


class Catalog:
    """The names that requests may ask for. One engine's, changed by its routes."""

    def __init__(self, model: str, loras: Iterable[str] = (), max_loras: int = 1) -> None:
        self.model = model
        self.asleep = False
        """In vLLM's sleep mode: nothing is served."""
        self.running: Counter[str] = Counter()
        """Adapter -> its requests in flight."""
        self.max_loras = max_loras
        self.loras = dict.fromkeys(loras)
        """Loaded adapters, in order."""
        self.created = int(time.time())

    def check(self, body: Body) -> str:
        """The name that a request is for; absent means the model. Raises vLLM's 404."""
        if self.asleep:
            raise problems.unavailable()
        name = body.get("model")
        if name is None:
            return self.model
        if name != self.model and name not in self.loras:
            raise problems.model_not_found(str(name))
        return str(name)

    def load(self, body: Body) -> None:
        """Load an adapter, as vLLM's /v1/load_lora_adapter does."""
        name = body.get("lora_name")
        if not isinstance(name, str) or not name or not isinstance(body.get("lora_path"), str):
            raise problems.invalid("Both 'lora_name' and 'lora_path' must be provided.")
        if name in self.loras:
            raise problems.invalid(f"The lora adapter '{name}' has already been loaded.")
        self.loras[name] = None

    def unload(self, body: Body) -> None:
        """Unload an adapter, as vLLM's /v1/unload_lora_adapter does."""
        name = body.get("lora_name")
        if not isinstance(name, str) or name not in self.loras:
            raise problems.adapter_not_found(str(name))
        del self.loras[name]

    def cards(self, window: int) -> dict[str, Any]:
        """The /v1/models page."""
        common = {"object": "model", "created": self.created, "owned_by": "vllm", "permission": []}
        base: dict[str, Any] = {
            "id": self.model,
            "root": self.model,
            "parent": None,
            "max_model_len": window,
        }
        adapters: list[dict[str, Any]] = [
            {"id": name, "root": f"/loras/{name}", "parent": self.model, "max_model_len": None}
            for name in self.loras
        ]
        return {"object": "list", "data": [{**common, **card} for card in (base, *adapters)]}

    def lora_info(self, now_s: float) -> tuple[str, float]:
        """Labels and value of vllm:lora_requests_info."""
        running = ",".join(sorted(name for name, n in self.running.items() if n))
        most = f'max_lora="{self.max_loras}"'
        return f'{most},running_lora_adapters="{running}",waiting_lora_adapters=""', now_s
