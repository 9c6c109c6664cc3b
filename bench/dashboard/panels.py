"""`python -m bench.dashboard.panels URL FILE [MINUTES]`: Grafana's first panels as a picture.

Runs a Prometheus (which must be on PATH) with the shipped rules against the gateway at URL, then
asks it the shipped dashboard's own queries and draws each panel of the chosen rows where Grafana
puts it. The picture shows what the queries yield, not Grafana itself.
"""

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, PercentFormatter

from bench.common.browser import until
from bench.common.walk import ROOT
from sluice.children import free_ports

DASHBOARD: Final = ROOT / "deploy/grafana/dashboards/sluice.json"
RULES: Final = ROOT / "deploy/prometheus/rules.yml"
ROWS: Final = ("Tenants", "Token pools")
SCRAPE_S: Final = 2
RATE_S: Final = 20
LINES: Final = 10
"""Lines in one panel's legend."""

_INK: Final = "#d8d9da"
_PAPER: Final = "#181b1f"


def main(url: str, file: Path, minutes: float = 3.0) -> None:
    """Watch the gateway for some minutes, then draw."""
    with _prometheus(url) as prometheus:
        began = time.time()
        print(f"watching {url} for {minutes:g} minutes", file=sys.stderr)
        time.sleep(minutes * 60)
        _draw(prometheus, began + RATE_S, time.time(), file)


@contextlib.contextmanager
def _prometheus(url: str) -> Iterator[str]:
    """The address of a Prometheus that reads the gateway's metrics."""
    program = shutil.which("prometheus")
    if program is None:
        raise SystemExit("Prometheus is not on PATH: apt-get install prometheus")
    port = free_ports(1)[0]
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "prometheus.yml")
        target = {"static_configs": [{"targets": [urlsplit(url).netloc]}], "job_name": "sluice"}
        settings.write_text(
            yaml.safe_dump(
                {
                    "global": {
                        "scrape_interval": f"{SCRAPE_S}s",
                        "evaluation_interval": f"{SCRAPE_S}s",
                    },
                    "rule_files": [str(RULES)],
                    "scrape_configs": [target],
                }
            )
        )
        running = subprocess.Popen(
            [
                program,
                f"--config.file={settings}",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=error",
            ]
        )
        try:
            address = f"http://127.0.0.1:{port}"
            until(lambda: _ready(address), "Prometheus")
            yield address
        finally:
            running.terminate()
            running.wait()


def _ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/-/ready", trust_env=False).is_success
    except httpx.TransportError:
        return False


def _panels() -> list[dict[str, Any]]:
    """The panels of the chosen rows, moved up to where they follow one another."""
    row, bottom, top, found = "", 0, 0, []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        if panel["type"] == "row":
            row, top = panel["title"], place["y"]
            shift = top - bottom
        elif row in ROWS:
            found.append({**panel, "gridPos": {**place, "y": place["y"] - shift}})
            bottom = max(bottom, place["y"] - shift + place["h"])
    return found


def _draw(prometheus: str, start_s: float, end_s: float, file: Path) -> None:
    panels = _panels()
    height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels)
    figure = Figure(figsize=(16, height * 0.3), facecolor="#111217", layout=None)
    for panel in panels:
        place = panel["gridPos"]
        left, width = place["x"] / 24, place["w"] / 24
        bottom, tall = 1 - (place["y"] + place["h"]) / height, place["h"] / height
        axes = figure.add_axes(
            (left + 0.035, bottom + 0.30 * tall, width - 0.05, 0.55 * tall), facecolor=_PAPER
        )
        _panel(axes, panel, prometheus, start_s, end_s)
    figure.savefig(file, dpi=90, facecolor=figure.get_facecolor())


def _panel(
    axes: Axes, panel: dict[str, Any], prometheus: str, start_s: float, end_s: float
) -> None:
    axes.set_title(panel["title"], loc="left", fontsize=9, color=_INK)
    axes.tick_params(colors=_INK, labelsize=7)
    axes.grid(visible=True, color="#2c3235", linewidth=0.6)
    for spine in axes.spines.values():
        spine.set_visible(False)
    drawn = 0
    for target in panel["targets"]:
        for labels, seconds, values in _series(prometheus, target["expr"], start_s, end_s):
            axes.plot(seconds, values, linewidth=1.1, label=_legend(target, labels))
            drawn += 1
    _unit(axes, panel["fieldConfig"]["defaults"].get("unit", ""))
    axes.set_xlim(0, end_s - start_s)
    axes.set_ylim(min(0.0, axes.get_ylim()[0]), axes.get_ylim()[1] * 1.05)
    if drawn:
        legend = axes.legend(
            *(part[:LINES] for part in axes.get_legend_handles_labels()),
            loc="upper left",
            bbox_to_anchor=(0, -0.12),
            ncol=3,
            fontsize=6.5,
            frameon=False,
            labelcolor=_INK,
            columnspacing=1,
        )
        legend.set_in_layout(False)
    else:
        axes.text(0.5, 0.5, "No data", color=_INK, ha="center", transform=axes.transAxes)


def _series(
    prometheus: str, query: str, start_s: float, end_s: float
) -> Iterator[tuple[dict[str, str], list[float], list[float]]]:
    """Labels, seconds since the start, values."""
    values = {"$__rate_interval": f"{RATE_S}s", "$model": ".*", "$instance": ".*", "$tenant": ".*"}
    for name, value in values.items():
        query = query.replace(name, value)
    answer = httpx.get(
        f"{prometheus}/api/v1/query_range",
        params={"query": query, "start": start_s, "end": end_s, "step": SCRAPE_S},
        trust_env=False,
    )
    for found in answer.raise_for_status().json()["data"]["result"]:
        points = [(at - start_s, float(value)) for at, value in found["values"]]
        yield found["metric"], [p[0] for p in points], [p[1] for p in points]


def _legend(target: dict[str, Any], labels: dict[str, str]) -> str:
    text = str(target["legendFormat"])
    for name, value in labels.items():
        text = text.replace(f"{{{{{name}}}}}", value)
    return text


def _unit(axes: Axes, unit: str) -> None:
    axes.xaxis.set_major_formatter(FuncFormatter(lambda s, _: f"{s // 60:.0f}:{s % 60:02.0f}"))
    if unit == "percentunit":
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    elif unit in ("s", "bytes"):
        axes.yaxis.set_major_formatter(EngFormatter(unit="s" if unit == "s" else "B", places=0))
    elif unit not in ("none", "short", ""):
        label = {"reqps": "req/s"}.get(unit, unit.removeprefix("suffix: "))
        axes.set_ylabel(label, fontsize=7, color=_INK)


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), Path(sys.argv[2]), *map(float, sys.argv[3:]))
