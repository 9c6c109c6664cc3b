"""What the gateway costs, beside its peers, in the same rounds on the same machine.

Asked (everything of the gateway on, embedded state): CPU per whole answer <= 1.6 times
sglang-router's, per 64-chunk stream <= 1.5 times; added time to first byte at 50 requests/s no
higher than sglang-router's; 5,000 slow streams at <= 40 KiB each.

CPU is the kernel's accounting of the process tree, so that waiting does not count. Rounds are
interleaved and each ratio is taken within its round; a round in which the gateway was not
saturated (utilisation < .9 of one core) does not count for whole answers. Streams are paced
by the engine (64 chunks, one every 2 ms), so their rounds are not saturated by design.
"""

import contextlib
import json
import os
import resource
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from rich.progress import Progress

from bench.overhead_peers import MAKERS, MODEL, ROOT, Peer
from bench.overhead_profile import profile_rows
from bench.overhead_tools import Load, bodies, build_tools, cpu_ns, rss_kib, scratch
from bench.report import Report, Row, at_most
from sluice.children import Children, free_ports

ROUNDS = int(os.environ.get("SLUICE_BENCH_ROUNDS", "5"))
"""Rounds that count; up to three times as many are run to get them."""
ONLY = os.environ.get("SLUICE_BENCH_PEERS", "").split()
"""Peers to measure, `sluice` always; empty for all."""
CHUNKS, GAP_US = 64, 2000
WHOLE_CONNECTIONS, STREAM_CONNECTIONS = 64, 128
RUN_S, SLOW_RUN_S, RATE_PER_S = 2.0, 4.0, 50
SLOW_STREAMS = 5000
LEAST_UTILISATION = 0.9
HISTORY = ROOT / "bench" / "out" / "overhead.jsonl"

Figures = dict[str, float]


def run(plot: Path | None = None, *, profile: bool = False) -> Report:
    """All contenders that are installed, or with `profile` the cost of each stage."""
    with scratch() as name:
        folder = Path(name)
        if profile:
            body = bodies(folder, MODEL)["whole"].read_bytes().replace(MODEL.encode(), b"m")
            return Report(name="overhead --profile", rows=profile_rows(body))
        tools = build_tools(folder)
        if tools is None:
            row = Row(metric="not measured", measured=None, note="needs a C compiler (cc or gcc)")
            return Report(name="overhead", rows=[row])
        engine, load = tools
        with Children() as children:
            rounds, missing, idle_rss = _measure(folder, engine, load, children)
        memory = _slow_streams(folder, engine, load)
    report = Report(
        name="overhead",
        rows=[*_rows(rounds, idle_rss), *memory, *_missing_rows(missing)],
        detail={"rounds": rounds},
    )
    _remember(report)
    if plot is not None:
        _plot(rounds, plot)
    return report


def _measure(
    folder: Path, engine: Path, load: Path, children: Children
) -> tuple[list[dict[str, Figures]], list[str], Figures]:
    ports = free_ports(len(MAKERS) + 1)
    engine_port = ports[-1]
    children.start([str(engine), str(engine_port), str(CHUNKS), str(GAP_US)])
    body = bodies(folder, MODEL)
    running: dict[str, tuple[int, int]] = {}
    missing = []
    for (name, make), port in zip(MAKERS.items(), ports, strict=False):
        if ONLY and name not in (*ONLY, "sluice"):
            continue
        peer = make(folder, port, engine_port)
        started = None if peer is None else _start(children, peer, port)
        if started is None:
            missing.append(name)
        else:
            running[name] = (port, started.pid)
    rounds = []
    with Progress(transient=True) as progress:
        task = progress.add_task("rounds", total=(ROUNDS + 1) * len(running))
        saturated = 0
        for number in range(1 + 3 * ROUNDS):
            if saturated == ROUNDS:
                break
            figures: dict[str, Figures] = {}
            direct = _added(load, engine_port, body)
            for name, (port, pid) in running.items():
                figures[name] = _one(load, port, pid, body, direct)
                progress.advance(task)
            if number:  # the first round warms everybody up
                rounds.append(figures)
                saturated += figures["sluice"]["whole_utilisation"] >= LEAST_UTILISATION
    return rounds, missing, {name: rss_kib(pid) / 1024 for name, (_, pid) in running.items()}


def _start(children: Children, peer: Peer, port: int) -> subprocess.Popen[bytes] | None:
    process = children.start(peer.command, env=peer.env, quiet=True, silent=True)
    try:
        children.wait_for(f"http://127.0.0.1:{port}{peer.ready_path}")
    except Exception:  # noqa: BLE001 - a peer that does not start is reported, not required
        with contextlib.suppress(ValueError):
            children.forget(process)
        process.kill()
        return None
    time.sleep(peer.warm_up_s)
    return process


def _added(load: Path, port: int, body: dict[str, Path]) -> Figures:
    """First-byte times at a low rate, in us."""
    found = {}
    for kind in ("whole", "stream"):
        seen = Load(load, port, body[kind]).run(8, SLOW_RUN_S, RATE_PER_S)
        found[f"{kind}_p50_us"] = seen["first_p50_us"]
        found[f"{kind}_p99_us"] = seen["first_p99_us"]
    return found


def _one(load: Path, port: int, pid: int, body: dict[str, Path], direct: Figures) -> Figures:
    figures: Figures = {}
    for kind, connections in (("whole", WHOLE_CONNECTIONS), ("stream", STREAM_CONNECTIONS)):
        before = cpu_ns(pid)
        seen = Load(load, port, body[kind]).run(connections, RUN_S)
        spent = cpu_ns(pid) - before
        figures[f"{kind}_cpu_us"] = spent / 1000 / max(1.0, seen["requests"])
        figures[f"{kind}_rps"] = seen["rps"]
        figures[f"{kind}_errors"] = seen["errors"]
        figures[f"{kind}_utilisation"] = spent / 1e9 / seen["seconds"]
    for key, value in _added(load, port, body).items():
        figures[f"added_{key}"] = value - direct[key]
    return figures


def _slow_streams(folder: Path, engine: Path, load: Path) -> list[Row]:
    """Memory of many slow streams on one gateway process."""
    limit = SLOW_STREAMS * 2 + 1000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < limit:
        note = f"needs {limit} open files, the limit is {hard}"
        return [Row(metric=f"{SLOW_STREAMS} slow streams", measured=None, note=note)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
    port, engine_port = free_ports(2)
    with Children() as children:
        children.start([str(engine), str(engine_port), str(CHUNKS), "250000"])
        peer = MAKERS["sluice"](folder, port, engine_port)
        process = None if peer is None else _start(children, peer, port)
        if process is None:
            return [Row(metric=f"{SLOW_STREAMS} slow streams", measured=None, note="no gateway")]
        body = bodies(folder, MODEL)
        Load(load, port, body["stream"]).run(64, 1.0)
        idle = rss_kib(process.pid)
        with Load(load, port, body["stream"]).start(SLOW_STREAMS, 1.0) as running:
            most = 0
            while running.poll() is None:
                most = max(most, rss_kib(process.pid))
                time.sleep(0.5)
            seen = json.loads(running.communicate()[0])
    each = (most - idle) / SLOW_STREAMS
    return [
        Row(
            metric=f"{SLOW_STREAMS} slow streams: errors",
            measured=seen["errors"],
            target="= 0",
            holds=seen["errors"] == 0 and seen["requests"] >= SLOW_STREAMS,
            note=f"{seen['requests']:.0f} streams ended with [DONE]",
        ),
        at_most(f"{SLOW_STREAMS} slow streams: KiB each", each, 40.0),
    ]


def _rows(rounds: list[dict[str, Figures]], rss_mib: Figures) -> list[Row]:
    rows = []
    for name in rounds[0]:
        for metric in (
            "whole_cpu_us",
            "stream_cpu_us",
            "added_whole_p50_us",
            "added_stream_p50_us",
        ):
            values = [r[name][metric] for r in rounds]
            rows.append(
                Row(
                    metric=f"{name}: {metric}",
                    measured=statistics.median(values),
                    note=f"{min(values):.0f} to {max(values):.0f}"
                    + _p99(rounds, name, metric)
                    + _throughput(rounds, name, metric),
                )
            )
        rows.append(Row(metric=f"{name}: RSS MiB after the rounds", measured=rss_mib[name]))
    if "sglang-router" in rounds[0]:
        rows += [
            _ratio(rounds, "whole_cpu_us", 1.6),
            _ratio(rounds, "stream_cpu_us", 1.5),
            _ratio(rounds, "added_whole_p50_us", 1.0),
            _ratio(rounds, "added_stream_p50_us", 1.0),
        ]
    return rows


def _p99(rounds: list[dict[str, Figures]], name: str, metric: str) -> str:
    if "p50" not in metric:
        return ""
    worst = statistics.median(r[name][metric.replace("p50", "p99")] for r in rounds)
    return f"; p99 {worst:.0f}"


def _throughput(rounds: list[dict[str, Figures]], name: str, metric: str) -> str:
    if not metric.endswith("cpu_us"):
        return ""
    kind = metric.split("_", maxsplit=1)[0]
    rate = statistics.median(r[name][f"{kind}_rps"] for r in rounds)
    busy = statistics.median(r[name][f"{kind}_utilisation"] for r in rounds)
    errors = sum(r[name][f"{kind}_errors"] for r in rounds)
    return f"; {rate:.0f}/s at {busy:.2f} cores, {errors:.0f} errors"


def _ratio(rounds: list[dict[str, Figures]], metric: str, limit: float) -> Row:
    """The gateway over sglang-router, within each round; the median of those that count."""
    saturated = metric != "whole_cpu_us"
    counted = [
        r for r in rounds if saturated or r["sluice"]["whole_utilisation"] >= LEAST_UTILISATION
    ]
    label = f"sluice / sglang-router: {metric}"
    if not counted:
        return Row(metric=label, measured=None, note="no round was saturated")
    ratios = [r["sluice"][metric] / r["sglang-router"][metric] for r in counted]
    median = statistics.median(ratios)
    return Row(
        metric=label,
        measured=median,
        ratio=median,
        target=f"<= {limit:g}",
        holds=median <= limit,
        note=f"{len(counted)} rounds: " + " ".join(f"{r:.2f}" for r in sorted(ratios)),
    )


def _missing_rows(missing: list[str]) -> list[Row]:
    note = "not installed or did not start: make bench-peers"
    return [Row(metric=name, measured=None, note=note) for name in missing]


def _remember(report: Report) -> None:
    """Append the medians to the history file."""
    HISTORY.parent.mkdir(parents=True, exist_ok=True)
    figures = {row.metric: row.measured for row in report.rows}
    with HISTORY.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"unix_s": int(time.time()), "figures": figures}) + "\n")


def _plot(rounds: list[dict[str, Figures]], folder: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    names = list(rounds[0])
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.5))
    panels: tuple[tuple[Any, str, str], ...] = (
        (axes[0], "whole_cpu_us", "CPU per whole answer, us"),
        (axes[1], "stream_cpu_us", f"CPU per {CHUNKS}-chunk stream, us"),
        (axes[2], "added_whole_p50_us", f"Added first byte at {RATE_PER_S}/s, p50, us"),
    )
    for axis, metric, title in panels:
        values = [statistics.median(r[name][metric] for r in rounds) for name in names]
        bars = axis.barh(
            names, values, color=["#c2410c" if n == "sluice" else "#64748b" for n in names]
        )
        axis.bar_label(bars, fmt="%.0f", padding=3)
        axis.set_xscale("log")
        axis.set_title(title)
        axis.invert_yaxis()
        axis.margins(x=0.25)
    figure.tight_layout()
    figure.savefig(folder / "overhead.png", dpi=110)
    plt.close(figure)
