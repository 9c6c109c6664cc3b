"""A gateway of 200 workers and 1,000 tenants before one mock engine with 200 addresses."""

import contextlib
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import yaml

from sluice.children import Children, free_ports

WORKERS: Final = 200
TENANTS: Final = 1000
MODEL: Final = "bench-model"
VIEWER_KEY: Final = "sk-bench-viewer"
_CLASSES: Final = ("guaranteed", "elastic", "spot", "preemptible")


def key_of(tenant: int) -> str:
    """The API key of a tenant."""
    return f"sk-bench-{tenant}"


@contextlib.contextmanager
def large_fleet() -> Iterator[tuple[str, int]]:
    """The gateway's URL and its process, while the block runs."""
    engine, port = free_ports(2)
    with Children() as children, TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sluice"]
        mock = ["mock", "--port", str(engine), "--host", "0.0.0.0", "--model", MODEL]
        children.start([*command, *mock, "--speed", "20"], quiet=True)
        children.wait_for(f"http://127.0.0.1:{engine}/health")
        file = Path(folder) / "sluice.yaml"
        file.write_text(yaml.safe_dump(_config(port, engine)), encoding="utf-8")
        gateway = children.start([*command, "serve", "-c", str(file)], quiet=True)
        url = f"http://127.0.0.1:{port}"
        children.wait_for(f"{url}/ready")
        yield url, gateway.pid


def _config(port: int, engine: int) -> dict[str, Any]:
    half = WORKERS // 2
    addresses = [f"http://127.0.{1 + i // 250}.{1 + i % 250}:{engine}" for i in range(WORKERS)]
    return {
        "version": 1,
        "server": {"port": port, "viewer_key": VIEWER_KEY},
        # Probes of 200 workers would cost more than what is measured here.
        "health": {"interval_s": 3600},
        "models": [
            {
                "name": MODEL,
                "kv_bytes_per_token": 131072,
                "boundary": {"b_short": 4096},
                "pools": {
                    "short": {
                        "max_model_len": 8192,
                        "max_num_seqs": 128,
                        "workers": addresses[:half],
                    },
                    "long": {
                        "max_model_len": 65536,
                        "max_num_seqs": 16,
                        "workers": addresses[half:],
                    },
                },
            }
        ],
        "entitlements": [_entitlement(i) for i in range(TENANTS)],
    }


def _entitlement(number: int) -> dict[str, Any]:
    digest = sha256(key_of(number).encode()).hexdigest()
    service_class = _CLASSES[number % len(_CLASSES)]
    baseline = {"concurrency": {"short": 4, "long": 1}} if service_class == "guaranteed" else {}
    return {
        "name": f"tenant-{number:04}",
        "tenant": f"customer-{number // 4}",
        "model": MODEL,
        "service_class": service_class,
        "tokens_per_second": 2000,
        "api_keys": [f"sha256:{digest}"],
        **baseline,
    }
