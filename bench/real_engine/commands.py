"""The product's own commands, as an operator types them."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from bench.common.fleet import Fleet


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
