"""Measuring tools of `bench overhead`: C engine and load generator, CPU and memory accounting."""

import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Self

from sluice.children import Children, free_ports

# -- one gateway with every stage on, as the cost, scale and endurance benches run it


MODEL: Final = "bench-model"
KEY: Final = "sk-bench"
KEY_SHA256: Final = sha256(KEY.encode()).hexdigest()

_TENANTS: Final = f"""ledger: {{{{path: "{{folder}}/ledger-{{port}}.db"}}}}
tenants:
  - name: bench
    budgets: [{{{{tokens: 9000000000000}}}}, {{{{money: 9000000}}}}]
    keys:
      - name: app
        sha256: {KEY_SHA256}
        models: [{MODEL}]
        requests_per_minute: 1000000000
        max_concurrency: 1000000
"""


def everything(
    folder: Path,
    port: int,
    engine_urls: Sequence[str],
    *,
    state: str = "memory://",
    concurrency: int = 20_000,
    tenants: bool = False,
) -> Path:
    """Write the configuration to `folder`, give its path.

    The first half of the engines (at least two) serves the short pool, the rest the long one.
    `concurrency`: sequences that the entitlement may run at once,
    half of what each pool has; its limits of tokens/s and KV bytes are as wide. `state`: URL of
    the store. `tenants`: the key is a tenant's, with budgets, limits of its own, prices and ledger.
    """
    half = max(1, len(engine_urls) // 2)
    short, long = (
        ", ".join(f'"{url}"' for url in urls) for urls in (engine_urls[:half], engine_urls[half:])
    )
    slots = 2 * concurrency // half
    each = f"max_num_seqs: {slots}, tokens_per_second: 100000000, kv_cache_gib: {slots}"
    price = "price: {input: 0.6, cached_input: 0.15, output: 1.8}" if tenants else ""
    keys = "" if tenants else f'api_keys: ["sha256:{KEY_SHA256}"]'
    file = folder / f"sluice-{port}.yaml"
    file.write_text(
        f"""version: 1
server: {{host: 127.0.0.1, port: {port}, max_connections: 20000}}
state: {{url: "{state}"}}
request_log: {{path: "{folder}/requests-{port}.jsonl"}}
usage_export: {{path: "{folder}/usage-{port}.jsonl"}}
models:
  - name: {MODEL}
    kv_bytes_per_token: 131072
    {price}
    compression: {{enabled: true}}
    scheduling: {{policy: quartz}}
    admission: {{mode: enforce}}
    pools:
      short: {{max_model_len: 8192, {each}, workers: [{short}]}}
      long: {{max_model_len: 131072, {each}, workers: [{long}]}}
entitlements:
  - name: bench
    tenant: bench
    model: {MODEL}
    service_class: guaranteed
    tokens_per_second: 50000000
    kv_cache_gib: {concurrency}
    concurrency: {concurrency}
    {keys}
"""
        + (_TENANTS.format(folder=folder, port=port) if tenants else "")
    )
    return file


def serve_command(file: Path) -> list[str]:
    """Runs the gateway with this configuration."""
    return [sys.executable, "-m", "sluice", "serve", "-c", str(file), "--log-level", "error"]


NATIVE: Final = Path(__file__).parent / "native"
MARK: Final = "@@@@@@@@"
"""The load generator writes another number here in each request."""
_SENTENCE: Final = (
    "The quick brown fox jumps over the lazy dog while seven wise owls watch the river. "
)

Figures = dict[str, float]


class LoadFailed(Exception):
    """The load generator ended without an answer: nothing listened, or nothing was accepted."""


def build_tools(folder: Path) -> tuple[Path, Path] | None:
    """Compile the engine and the load generator; None without a C compiler."""
    engine, load = build(folder, "engine"), build(folder, "load")
    return None if engine is None or load is None else (engine, load)


def build(folder: Path, name: str) -> Path | None:
    """Compile one of the tools; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    out = folder / name
    command = [compiler, "-O2", "-o", str(out), str(NATIVE / f"{name}.c")]
    subprocess.run(command, check=True, capture_output=True)
    return out


def start_engines(children: Children, engine: Path, count: int, tick_us: int) -> list[int]:
    """Ports of engines whose ticks are spread evenly over one of `tick_us`."""
    ports = free_ports(count)
    for number, port in enumerate(ports):
        phase_us = number * tick_us // count
        children.start([str(engine), str(port), str(tick_us), str(phase_us)])
    return ports


def bodies(
    folder: Path, model: str, *, text_bytes: int = 1850, max_tokens: int = 64
) -> dict[str, Path]:
    """Request bodies about 150 bytes longer than their text: `whole` and `stream`.

    The first half of the text is the same in all requests; then comes `MARK`.
    """
    half = _SENTENCE * math.ceil(text_bytes / 2 / len(_SENTENCE))
    body: dict[str, Any] = {
        "model": model,
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": f"{half}{MARK} {half}"},
        ],
        "max_tokens": max_tokens,
    }
    found = {}
    for kind in ("whole", "stream"):
        body["stream"] = kind == "stream"
        found[kind] = folder / f"{kind}-{text_bytes}-{max_tokens}.json"
        found[kind].write_text(json.dumps(body))
    return found


def tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    found, queue = [], [pid]
    while queue:
        current = queue.pop()
        found.append(current)
        for path in Path(f"/proc/{current}/task").glob("*/children"):
            try:
                queue += [int(child) for child in path.read_text().split()]
            except OSError:
                continue
    return found


def cpu_ns(pid: int) -> int:
    """CPU time of a process tree by the kernel's scheduler statistics, in nanoseconds."""
    total = 0
    for process in tree(pid):
        for path in Path(f"/proc/{process}/task").glob("*/schedstat"):
            try:
                total += int(path.read_text().split()[0])
            except (OSError, IndexError):
                continue
    return total


def rss_kib(pid: int) -> int:
    """Resident memory of a process tree, in KiB."""
    total = 0
    for process in tree(pid):
        try:
            status = Path(f"/proc/{process}/status").read_text()
        except OSError:
            continue
        for line in status.splitlines():
            if line.startswith("VmRSS:"):
                total += int(line.split()[1])
    return total


class LoadRun:
    """One run of the load generator: made ready, told to begin, asked for what it found."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._found: Figures | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let it go: its connections are open until now."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        if self._found is None:
            self._process.kill()
        self._process.wait(60.0)
        self._process.stdout.close()

    def ready(self) -> None:
        """Wait until all connections are open."""
        self._line()

    def begin(self) -> None:
        """Let it send."""
        assert self._process.stdin
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError as gone:
            raise LoadFailed("the load generator could not connect") from gone

    def found(self) -> Figures:
        """Wait for the last answer."""
        while self._found is None:
            line = self._line()
            if line.startswith("{"):
                self._found = json.loads(line)
        return self._found

    def _line(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise LoadFailed("the load generator ended early")
        return line


class HttpLoad:
    """Requests of one kind to one or several ports of 127.0.0.1."""

    def __init__(self, tool: Path, ports: int | Sequence[int], body: Path) -> None:
        self._tool = str(tool)
        self._ports = str(ports) if isinstance(ports, int) else ",".join(map(str, ports))
        self._body = [str(body), f"authorization: Bearer {KEY}"]

    def start(
        self,
        connections: int,
        seconds: float,
        rate: float = 0,
        *,
        warm_up_s: float = 0,
    ) -> LoadRun:
        """Connect; a rate of 0 is a closed loop."""
        options = ["-w", str(warm_up_s)] if warm_up_s else []
        shape = [str(connections), str(seconds), str(rate)]
        return LoadRun([self._tool, *options, self._ports, *shape, *self._body])

    def run(self, connections: int, seconds: float, rate: float = 0) -> Figures:
        """Run to the end."""
        with self.start(connections, seconds, rate) as running:
            running.begin()
            return running.found()


def spent(run: LoadRun, pids: Mapping[str, int]) -> tuple[Figures, dict[str, float]]:
    """What a run found, and CPU seconds of each process tree from its begin to its end.

    Making and ending the connections is not in it.
    """
    run.ready()
    before = {name: cpu_ns(pid) for name, pid in pids.items()}
    run.begin()
    found = run.found()
    return found, {name: (cpu_ns(pid) - before[name]) / 1e9 for name, pid in pids.items()}


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for tools, bodies and configurations."""
    return tempfile.TemporaryDirectory(prefix="sluice-overhead-")
