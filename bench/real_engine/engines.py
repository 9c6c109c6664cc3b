"""Real vLLM engines as child processes."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any, Final

import httpx

from sluice.children import ChildDied, Children, free_ports

BASE: Final = "tiny"
ADAPTER: Final = "tiny-lora"
START_S: Final = 300.0
NAMES: Final = (BASE, "gpt-6-astra", "gpt-3.5-turbo-instruct", "text-embedding-3-small", "model")
"""The base's name, and those that openai-python's tests ask for."""
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}


class RealEngine:
    """One vLLM, with its model and an adapter."""

    def __init__(
        self,
        children: Children,
        python: Path,
        model: Path,
        log: Path,
        *,
        window: int,
        slots: int,
        adapter: Path | None = None,
        api_key: str | None = None,
        most_tokens: int | None = None,
    ) -> None:
        """`most_tokens`: the longest answer, where a client may set no limit."""
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.id = f"127.0.0.1:{self.port}"
        self.log = log
        self.window, self.slots = window, slots
        self._children = children
        command = [
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--served-model-name", *NAMES, "--host", "127.0.0.1", "--port", str(self.port)),
            *("--max-model-len", str(window), "--max-num-seqs", str(slots)),
            *("--dtype", "bfloat16", "--enforce-eager", "--uvicorn-log-level", "warning"),
        ]
        if adapter is not None:
            command += ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"]
            command += ["--lora-modules", f"{ADAPTER}={adapter}"]
        if most_tokens is not None:
            limit = json.dumps({"max_new_tokens": most_tokens})
            command += ["--override-generation-config", limit]
        if api_key is not None:
            command += ["--api-key", api_key]
        self._process = children.start(command, env=_ENVIRONMENT, quiet=True, log=log)

    def wait(self) -> None:
        """Wait until it serves. Raises ChildDied."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            if self._process.poll() is not None:
                tail = self.log.read_text("utf-8", "replace").strip().splitlines()[-1:]
                raise ChildDied(f"vLLM ended: {''.join(tail)}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            time.sleep(0.5)
        raise ChildDied(f"vLLM did not serve within {START_S:g} s")

    def ask(self, model: str, text: str, **more: Any) -> dict[str, Any]:
        """One completion, asked of the engine itself."""
        return completion(self.url, model, text, **more)


def completion(url: str, model: str, text: str, key: str = "none", **more: Any) -> dict[str, Any]:
    """One completion with the likeliest tokens, so that answers can be compared."""
    body = {"model": model, "prompt": text, "max_tokens": 24, "temperature": 0, **more}
    answer = httpx.post(
        f"{url}/v1/completions",
        json=body,
        headers={"authorization": f"Bearer {key}"},
        timeout=120,
        trust_env=False,
    )
    found: dict[str, Any] = answer.json()
    return {**found, "status": answer.status_code, "worker": answer.headers.get("x-sluice-worker")}
