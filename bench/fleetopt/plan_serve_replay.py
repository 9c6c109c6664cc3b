"""`python -m bench plan-serve-replay`: log, plan, serve, replay (docs/plan/from-log-to-fleet.md).

Real processes on this machine: mock engines whose constants the planner knows (NODE), a gateway,
and an operator's commands. From a log of the gateway's own traffic a fleet is planned for a
higher rate; the log is replayed against that fleet, and against one with an engine fewer. The
first has to hold the SLO, the second to violate it. A figure counts only if the mocks wrote their
tokens on time: their P99 lag is within a tenth of it.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, Self

import yaml
from rich.console import Console
from rich.progress import Progress

from bench.common.fleet import read_metrics
from bench.common.report import Report, Row, at_least
from sluice.children import Children, free_ports
from sluice.hash_key import hashed_key

NODE: Final[dict[str, Any]] = {
    "name": "mock-node",
    "gpu": "mock",
    "model": "demo-model",
    "gpus": 1,
    "w_s": 0.04,
    "h_s_per_token": 5e-7,
    "kv_tokens": 131_072,
    "max_num_seqs": 8,
    "engine": {
        "name": "mock-node",
        "timing": "kv",
        "w_s": 0.04,
        "h_s_per_token": 5e-7,
        "kv_blocks": 8192,
        "max_num_seqs": 8,
        "max_model_len": 8192,
    },
}
"""The planner's fields, and the engine that the mocks run: eight sequences, 40 ms an iteration.
Few tokens a second, so that two cores carry five engines, the gateway and the client."""
MODEL: Final = "demo-model"
WINDOW: Final = 8192
TRAFFIC: Final = "synthetic:prompt=600,answer=40,spread=0.6"
LOG_RATE, LOG_S = 2.5, 60.0
RATE: Final = 13.0
SLO_MS: Final = 2500
MIN_ENGINES: Final = 4
MAX_CHUNKS_PER_S: Final = 3000.0
_LAG_SHARE: Final = 0.1

_KEYS: Final = {
    "SLUICE_ADMIN_KEY": "sk-admin",
    "SLUICE_KEY": "sk-everybody",
    "SLUICE_KEY_HASH": hashed_key("sk-everybody"),
}
"""Environment of the planned file, and the client's key."""


def run(plot: Path | None = None, duration_s: float = 120.0) -> Report:
    """The sequence; `plot` is a folder for the plots of both replays."""
    stderr = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as bars,
    ):
        task = bars.add_task("a log of some traffic", total=4)
        lab = CommandLab(Path(folder))
        lab.record()
        bars.update(task, advance=1, description="planning")
        planned = lab.plan(RATE)
        engines = int(planned["total_nodes"])
        bars.update(task, advance=1, description=f"replaying against {engines} engines")
        whole = lab.replay(engines, duration_s, plot)
        bars.update(task, advance=1, description=f"replaying against {engines - 1} engines")
        smaller = lab.replay(engines - 1, duration_s, plot)
    rows = [
        at_least(
            f"engines planned for {RATE:g} requests/s, from a log of {LOG_RATE:g}",
            engines,
            MIN_ENGINES,
            _planned_note(planned),
        ),
        *_judged("the planned fleet", whole, holds=True),
        *_judged("one engine fewer", smaller, holds=False),
    ]
    detail = {"plan": planned, "planned": whole, "smaller": smaller}
    return Report(name="plan-serve-replay", rows=rows, detail=detail)


class CommandLab:
    """The commands, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._node = folder / "node.json"
        self._node.write_text(json.dumps(NODE), encoding="utf-8")
        self._log = folder / "requests.jsonl"
        self._plan = folder / "plan.yaml"

    def record(self) -> None:
        """Light traffic through a gateway before one engine: its log."""
        config = {
            "name": MODEL,
            "pools": {"all": {"max_model_len": WINDOW, "max_num_seqs": 8, "workers": []}},
        }
        with _Fleet(self._node, 1) as fleet:
            config["pools"]["all"]["workers"] = fleet.engines  # type: ignore[index]
            file = self._serve(fleet, {"version": 1, "models": [config]}, log=True)
            args = ("--workload", TRAFFIC, "--rate", LOG_RATE, "--duration", LOG_S)
            _sluice("replay", "--url", fleet.gateway, *args, "--slo-ttft-ms", 60_000)
            fleet.end_gateway()
        assert file.is_file()

    def plan(self, rate: float) -> dict[str, Any]:
        """The fleet for that log at another rate, as JSON and as the gateway's file."""
        args = ("--workload", self._log, "--rate", rate, "--slo-ttft-ms", SLO_MS)
        node = ("--profile", self._node, "--max-model-len", WINDOW, "-o", self._plan)
        found: dict[str, Any] = _sluice("plan", *args, *node)
        return found

    def replay(self, engines: int, duration_s: float, plot: Path | None) -> dict[str, Any]:
        """What the client saw of that many engines behind the planned file."""
        config = yaml.safe_load(self._plan.read_text(encoding="utf-8"))
        pools = config["models"][0]["pools"]
        wanted = [name for name, pool in pools.items() for _ in pool["workers"]]
        # One engine fewer: of the pool that has most.
        while len(wanted) > engines:
            wanted.remove(max(set(wanted), key=wanted.count))
        with _Fleet(self._node, engines) as fleet:
            for name, pool in pools.items():
                pool["workers"] = [
                    u for u, of in zip(fleet.engines, wanted, strict=True) if of == name
                ]
            self._serve(fleet, config)
            args = ["--log", self._log, "--rate", RATE, "--arrivals", "poisson"]
            args += ["--api-key-env", "SLUICE_KEY"]
            args += ["--duration", duration_s, "--slo-ttft-ms", SLO_MS]
            if plot is not None:
                args += ["--plot", plot / f"plan-serve-replay-{engines}"]
            found: dict[str, Any] = _sluice("replay", "--url", fleet.gateway, *args)
            found["mock_lag_p99_s"] = fleet.lag_s()
            found["chunks_per_s"] = fleet.tokens() / found["duration_s"]
            return found

    def _serve(self, fleet: "_Fleet", config: dict[str, Any], *, log: bool = False) -> Path:
        config["server"] = {"host": "127.0.0.1", "port": fleet.port}
        config["request_log"] = {"path": str(self._log if log else self._folder / "served.jsonl")}
        file = self._folder / f"sluice-{fleet.port}.yaml"
        file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        fleet.start_gateway(file)
        return file


class _Fleet:
    """Mock engines of NODE, and a gateway once it is told its file."""

    def __init__(self, node: Path, engines: int) -> None:
        self._children = Children()
        self._node = node
        self.port, *ports = free_ports(engines + 1)
        self.gateway = f"http://127.0.0.1:{self.port}"
        self.engines = [f"http://127.0.0.1:{port}" for port in ports]

    def __enter__(self) -> Self:
        self._children.__enter__()
        for url in self.engines:
            args = ("--port", url.rpartition(":")[2], "--model", MODEL)
            command = [sys.executable, "-m", "sluice", "mock", *args]
            more = ["--profile-file", str(self._node), "--prefix-cache-tokens", "0"]
            self._children.start([*command, *more], quiet=True)
        for url in self.engines:
            self._children.wait_for(f"{url}/health")
        return self

    def __exit__(self, *_: object) -> None:
        self._children.__exit__()

    def start_gateway(self, file: Path) -> None:
        """Serve this file."""
        command = [sys.executable, "-m", "sluice", "serve", "-c", str(file)]
        command += ["--log-level", "error"]
        self._serving = self._children.start(command, env=_KEYS, quiet=True)
        self._children.wait_for(f"{self.gateway}/ready")

    def end_gateway(self) -> None:
        """Its log is whole then."""
        self._children.forget(self._serving)
        self._serving.terminate()
        self._serving.wait(30.0)

    def lag_s(self) -> float:
        """The worst engine's P99."""
        pages = [read_metrics(url) for url in self.engines]
        return max(
            v for page in pages for k, v in page.items() if k.startswith("mock_lag_p99_seconds")
        )

    def tokens(self) -> float:
        """Written by all engines."""
        pages = [read_metrics(url) for url in self.engines]
        return sum(
            v for page in pages for k, v in page.items()
            if k.startswith("vllm:generation_tokens_total")
        )  # fmt: skip


def _sluice(verb: str, *arguments: object) -> Any:
    """What `sluice VERB --json` printed; a violated SLO is no failure here."""
    command = [sys.executable, "-m", "sluice", verb, "--json", *map(str, arguments)]
    env = {**os.environ, **_KEYS}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return json.loads(done.stdout)


def _judged(name: str, found: dict[str, Any], *, holds: bool) -> list[Row]:
    first_s = found["all"]["ttft_s"]["p99"]
    bound = "<=" if holds else ">"
    lag_s, late_s = found["mock_lag_p99_s"], found["late_p99_s"]
    note = (
        f"{found['requests']} requests at {found['rate_per_s']:.3g}/s, {found['failed']} failed; "
        f"client late by {1000 * late_s:.2g} ms at P99"
    )
    on_time = first_s is not None and lag_s <= _LAG_SHARE * first_s
    return [
        Row(
            f"{name}: P99 time to first token, ms",
            None if first_s is None else 1000 * first_s,
            target=f"{bound} {SLO_MS} (SLO {'held' if holds else 'violated'})",
            holds=found["holds"] == holds and (holds or first_s is None or _own(found) > SLO_MS),
            note=note,
        ),
        Row(
            f"{name}: mocks' P99 lag, ms",
            1000 * lag_s,
            target="<= a tenth of the P99",
            holds=on_time,
            note="" if on_time else "the figure above is void: this machine was too busy",
        ),
        Row(
            f"{name}: tokens written a second",
            found["chunks_per_s"],
            target=f"<= {MAX_CHUNKS_PER_S:g}",
            holds=found["chunks_per_s"] <= MAX_CHUNKS_PER_S,
        ),
    ]


def _own(found: dict[str, Any]) -> float:
    """P99, ms, less what may be the client's own lateness."""
    return float(1000 * (found["all"]["ttft_s"]["p99"] - found["late_p99_s"]))


def _planned_note(planned: dict[str, Any]) -> str:
    return "; ".join(
        f"{name}: {pool['nodes']} at {100 * pool['utilisation']:.0f} % of their slots, P99 TTFT "
        f"{1000 * pool['ttft_p99_s']:.0f} ms"
        for name, pool in planned["pools"].items()
    )
