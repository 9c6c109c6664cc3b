"""`python -m bench fleetopt replay`: log, plan, serve, replay (docs/plan/from-log-to-fleet.md).

Real processes on this machine: mock engines whose constants the planner knows (NODE), a gateway,
and an operator's commands. From a log of the gateway's own traffic a fleet is planned for a
higher rate; the log is replayed against that fleet, and against one with an engine fewer. The
first has to hold the SLO, the second to violate it. A figure counts only if the mocks wrote their
tokens on time: their P99 lag is within a tenth of it.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import yaml

from bench.common.fleet import MODEL, Fleet
from bench.common.raw_client import lag_s
from bench.common.report import Report, Row, at_least, at_most, bars, judged, scaled_s
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
WINDOW: Final = 8192
TRAFFIC: Final = "synthetic:prompt=600,answer=40,spread=0.6"
LOG_RATE, LOG_S = 2.5, scaled_s(60.0, 20.0)
RATE: Final = 12.5
"""Of 85 % of four engines it leaves 3 % to the sample: three are past saturation."""
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


def run(duration_s: float = scaled_s(120.0, 90.0)) -> Report:
    """The sequence."""
    with tempfile.TemporaryDirectory() as folder, bars() as bar:
        lab = CommandLab(Path(folder))
        step = bar("log, plan, replay, replay", 4)
        lab.record()
        step()
        planned = lab.plan(RATE)
        engines = int(planned["total_nodes"])
        step()
        whole = lab.replay(engines, duration_s)
        step()
        smaller = lab.replay(engines - 1, duration_s)
    note = "; ".join(
        f"{name}: {pool['nodes']} at {100 * pool['utilisation']:.0f} % of their slots, P99 TTFT "
        f"{1000 * pool['ttft_p99_s']:.0f} ms"
        for name, pool in planned["pools"].items()
    )
    metric = f"engines planned for {RATE:g} requests/s, from a log of {LOG_RATE:g}"
    rows = [
        at_least(metric, engines, MIN_ENGINES, note),
        *_judged("the planned fleet", whole, holds=True),
        *_judged("one engine fewer", smaller, holds=False),
    ]
    detail = {"plan": planned, "planned": whole, "smaller": smaller}
    return Report(name="fleetopt replay", rows=rows, detail=detail)


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
        with self._fleet(1, {"request_log": {"path": str(self._log)}}) as fleet:
            args = ("--workload", TRAFFIC, "--rate", LOG_RATE, "--duration", LOG_S)
            _sluice("replay", "--url", fleet.url, *args, "--slo-ttft-ms", 60_000)
            fleet.kill_replica(fleet.replicas[0], signal.SIGTERM, 30.0)  # its log is whole then

    def plan(self, rate: float) -> dict[str, Any]:
        """The fleet for that log at another rate, as JSON and as the gateway's file."""
        args = ("--workload", self._log, "--rate", rate, "--slo-ttft-ms", SLO_MS)
        node = ("--profile", self._node, "--max-model-len", WINDOW, "-o", self._plan)
        found: dict[str, Any] = _sluice("plan", *args, *node)
        return found

    def replay(self, engines: int, duration_s: float) -> dict[str, Any]:
        """What the client saw of that many engines behind the planned file."""
        planned = yaml.safe_load(self._plan.read_text(encoding="utf-8"))
        pools = planned["models"][0]["pools"]
        planned["models"][0]["name"] = MODEL
        wanted = [name for name, pool in pools.items() for _ in pool["workers"]]
        # One engine fewer: of the pool that has most.
        while len(wanted) > engines:
            wanted.remove(max(set(wanted), key=wanted.count))
        fleet = self._fleet(engines, planned)
        for name, pool in pools.items():
            pairs = zip(fleet.engines, wanted, strict=True)
            pool["workers"] = [engine.url for engine, of in pairs if of == name]
        with fleet:
            args = ["--log", self._log, "--rate", RATE, "--arrivals", "poisson"]
            args += ["--api-key-env", "SLUICE_KEY"]
            args += ["--duration", duration_s, "--slo-ttft-ms", SLO_MS]
            found: dict[str, Any] = _sluice("replay", "--url", fleet.url, *args)
            pages = [engine.metrics() for engine in fleet.engines]
        found["mock_lag_p99_s"] = lag_s(pages)
        series = (pair for page in pages for pair in page.items())
        written = sum(v for k, v in series if k.startswith("vllm:generation_tokens_total"))
        found["chunks_per_s"] = written / found["duration_s"]
        return found

    def _fleet(self, engines: int, config: dict[str, Any]) -> Fleet:
        mock = ("--profile-file", str(self._node), "--prefix-cache-tokens", "0")
        fleet = Fleet(short=engines, long=0, short_window=WINDOW, short_slots=8, mock=mock)
        gateway = fleet.replicas[0]
        gateway.env = _KEYS
        log = {"path": str(self._folder / "served.jsonl")}
        server = {"host": "127.0.0.1", "port": fleet.port}
        gateway.config = {**gateway.config, "request_log": log, **config, "server": server}
        return fleet


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
    lag, late_s = found["mock_lag_p99_s"], found["late_p99_s"]
    note = (
        f"{found['requests']} requests at {found['rate_per_s']:.3g}/s, {found['failed']} failed; "
        f"client late by {1000 * late_s:.2g} ms at P99"
    )
    # A violation counts only beyond what may be the client's own lateness.
    own = first_s is None or 1000 * (first_s - late_s) > SLO_MS
    on_time = first_s is not None and lag <= _LAG_SHARE * first_s
    void = "" if on_time else "the figure above is void: this machine was too busy"
    return [
        judged(
            f"{name}: P99 time to first token, ms",
            None if first_s is None else 1000 * first_s,
            f"{'<=' if holds else '>'} {SLO_MS} (SLO {'held' if holds else 'violated'})",
            found["holds"] == holds and (holds or own),
            note,
        ),
        judged(f"{name}: mocks' P99 lag, ms", 1000 * lag, "<= a tenth of the P99", on_time, void),
        at_most(f"{name}: tokens written a second", found["chunks_per_s"], MAX_CHUNKS_PER_S),
    ]
