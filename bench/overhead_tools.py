"""Measuring tools of `bench overhead`: C engine and load generator, CPU and memory accounting."""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from bench.overhead_peers import KEY

NATIVE = Path(__file__).parent / "native"


def build_tools(folder: Path) -> tuple[Path, Path] | None:
    """Compile the engine and the load generator; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    built = []
    for name in ("engine", "load"):
        out = folder / name
        command = [compiler, "-O2", "-o", str(out), str(NATIVE / f"{name}.c")]
        subprocess.run(command, check=True, capture_output=True)
        built.append(out)
    return built[0], built[1]


def bodies(folder: Path, model: str) -> dict[str, Path]:
    """Request bodies of about 2 KB: `whole` and `stream`."""
    text = "The quick brown fox jumps over the lazy dog while seven wise owls watch the river. "
    body: dict[str, Any] = {
        "model": model,
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": text * 22},
        ],
        "max_tokens": 64,
    }
    found = {}
    for kind in ("whole", "stream"):
        body["stream"] = kind == "stream"
        found[kind] = folder / f"{kind}.json"
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


class Load:
    """One run of the load generator."""

    def __init__(self, tool: Path, port: int, body: Path) -> None:
        self._command = [str(tool), str(port)]
        self._body = [str(body), f"authorization: Bearer {KEY}"]

    def start(self, connections: int, seconds: float, rate: float = 0) -> subprocess.Popen[str]:
        """Begin; read its one line of JSON with `finish`."""
        return subprocess.Popen(
            [*self._command, str(connections), str(seconds), str(rate), *self._body],
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, connections: int, seconds: float, rate: float = 0) -> dict[str, float]:
        """Run to the end."""
        with self.start(connections, seconds, rate) as process:
            out, _ = process.communicate(timeout=seconds + 60)
        found: dict[str, float] = json.loads(out)
        return found


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for tools, bodies and configurations."""
    return tempfile.TemporaryDirectory(prefix="sluice-overhead-")
