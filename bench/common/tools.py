"""Measuring tools of `bench overhead`: C engine and load generator, CPU and memory accounting."""

import json
import math
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from bench.common.everything_on import KEY
from sluice.children import Children, free_ports

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
        in_flight: int = 0,
        warm_up_s: float = 0,
    ) -> LoadRun:
        """Connect. `in_flight` requests at once of a closed loop (rate 0); 0: all connections."""
        options = ["-f", str(in_flight)] if in_flight else []
        options += ["-w", str(warm_up_s)] if warm_up_s else []
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
