"""The contenders: the gateway, and the peers that are installed.

`make bench-peers` puts the peers from PyPI into environments of their own under .peers; nginx
and HAProxy are taken from PATH. Missing peers are reported, never required.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.common.everything_on import KEY, KEY_SHA256, MODEL, everything, serve_command
from sluice.children import free_ports

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".peers"


class PeerStart(NamedTuple):
    """One contender: how to start it before the engines."""

    name: str
    command: list[str]
    ready_path: str
    warm_up_s: float = 0.0
    env: dict[str, str] | None = None


def sluice(folder: Path, port: int, engine_ports: Sequence[int]) -> PeerStart:
    """The gateway with everything on that it has, embedded state."""
    file = everything(folder, port, urls(engine_ports))
    return PeerStart("sluice", serve_command(file), "/ready")


def sluice_on_redis(folder: Path, port: int, engine_ports: Sequence[int], state: str) -> PeerStart:
    """The same on a Redis at `state`."""
    file = everything(folder, port, urls(engine_ports), state=state)
    return PeerStart("sluice on Redis", serve_command(file), "/ready")


def sluice_tenants(folder: Path, port: int, engine_ports: Sequence[int]) -> PeerStart:
    """The same, embedded, asked with a tenant's key that has budgets and limits of its own."""
    file = everything(folder, port, urls(engine_ports), tenants=True)
    return PeerStart("sluice, tenants", serve_command(file), "/ready")


def sluice_least_loaded(folder: Path, port: int, engine_ports: Sequence[int]) -> PeerStart:
    """The gateway without scheduler, limits, compression and telemetry; embedded state."""
    file = folder / f"least-loaded-{port}.yaml"
    half = len(engine_ports) // 2
    short, long = (
        ", ".join(f'"{url}"' for url in urls(ports))
        for ports in (engine_ports[:half], engine_ports[half:])
    )
    file.write_text(
        f"""version: 1
server: {{host: 127.0.0.1, port: {port}, max_connections: 20000}}
models:
  - name: {MODEL}
    scheduling: {{policy: least-loaded, shadow: false}}
    pools:
      short: {{max_model_len: 8192, max_num_seqs: 20000, workers: [{short}]}}
      long: {{max_model_len: 131072, max_num_seqs: 20000, workers: [{long}]}}
request_log: {{path: "{folder}/requests-{port}.jsonl"}}
entitlements:
  - {{name: bench, tenant: bench, model: {MODEL}, api_keys: ["sha256:{KEY_SHA256}"]}}
"""
    )
    return PeerStart("sluice, least-loaded", serve_command(file), "/ready")


def urls(ports: Sequence[int]) -> list[str]:
    """Of servers on these ports."""
    return [f"http://127.0.0.1:{port}" for port in ports]


def nginx(folder: Path, port: int, engine_ports: Sequence[int]) -> PeerStart | None:
    """A bare reverse proxy: the floor."""
    program = shutil.which("nginx")
    if program is None:
        return None
    file = folder / "nginx.conf"
    servers = " ".join(f"server 127.0.0.1:{port};" for port in engine_ports)
    file.write_text(
        f"""worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log /dev/null;
worker_rlimit_nofile 65536;
events {{ worker_connections 16384; }}
http {{ access_log off; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p;
  client_body_buffer_size 1m; client_max_body_size 4m;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  keepalive_requests 100000000;
  upstream engine {{ {servers} keepalive 16384;
    keepalive_requests 100000000; }}
  server {{ listen 127.0.0.1:{port} backlog=4096;
    location / {{ proxy_pass http://engine; proxy_http_version 1.1;
      proxy_set_header Connection ""; proxy_buffering off; }} }} }}
"""
    )
    return PeerStart("nginx", [program, "-p", str(folder), "-c", str(file)], "/health")


def haproxy(folder: Path, port: int, engine_ports: Sequence[int]) -> PeerStart | None:
    """Another bare reverse proxy."""
    program = shutil.which("haproxy")
    if program is None:
        return None
    file = folder / "haproxy.cfg"
    servers = "\n".join(f"  server engine{port} 127.0.0.1:{port}" for port in engine_ports)
    file.write_text(
        f"""global
  nbthread 1
  maxconn 4000
defaults
  mode http
  timeout connect 2s
  timeout client 600s
  timeout server 600s
  http-reuse always
frontend f
  bind 127.0.0.1:{port}
  default_backend b
backend b
{servers}
"""
    )
    return PeerStart("haproxy", [program, "-f", str(file)], "/health")


def sglang_router(folder: Path, port: int, engine_ports: Sequence[int]) -> PeerStart | None:
    """SGLang's Rust router, its per-request logging off."""
    python = PEERS / "sglang-router" / "bin" / "python"
    if not python.exists():
        return None
    command = [
        *(str(python), "-m", "sglang_router.launch_router", "--host", "127.0.0.1"),
        *("--port", str(port), "--worker-urls", *urls(engine_ports)),
        *("--policy", "round_robin", "--log-level", "warn"),
        *("--prometheus-port", str(free_ports(1)[0])),
    ]
    return PeerStart("sglang-router", command, "/health", 2.0)


def vllm_router(folder: Path, port: int, engine_ports: Sequence[int]) -> PeerStart | None:
    """VLLM's Rust router, its per-request logging off."""
    program = PEERS / "vllm-router" / "bin" / "vllm-router"
    if not program.exists():
        return None
    command = [
        *(str(program), "--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", *urls(engine_ports)),
        *("--policy", "round_robin", "--log-level", "warning"),
        *("--prometheus-port", str(free_ports(1)[0])),
    ]
    return PeerStart("vllm-router", command, "/health", 2.0)


def litellm(folder: Path, port: int, engine_ports: Sequence[int]) -> PeerStart | None:
    """LiteLLM's proxy."""
    program = PEERS / "litellm" / "bin" / "litellm"
    if not program.exists():
        return None
    file = folder / "litellm.yaml"
    entries = "\n".join(
        f"""  - model_name: {MODEL}
    litellm_params: {{model: openai/{MODEL}, api_base: "{url}/v1", api_key: none}}"""
        for url in urls(engine_ports)
    )
    file.write_text(
        f"""model_list:
{entries}
litellm_settings: {{telemetry: false}}
general_settings: {{master_key: {KEY}}}
"""
    )
    command = [str(program), "--config", str(file), "--port", str(port), "--host", "127.0.0.1"]
    # Nothing is fetched from outside.
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return PeerStart("litellm", command, "/health/liveliness", 2.0, env)


MAKERS: dict[str, Callable[[Path, int, Sequence[int]], PeerStart | None]] = {
    "sluice": sluice,
    "sluice, least-loaded": sluice_least_loaded,
    "sluice, tenants": sluice_tenants,
    "sglang-router": sglang_router,
    "vllm-router": vllm_router,
    "nginx": nginx,
    "haproxy": haproxy,
    "litellm": litellm,
}
