"""Who is measured: the gateway, and the peers that are installed.

`make bench-peers` puts the peers from PyPI into environments of their own under .peers; nginx
and HAProxy are taken from PATH. What is missing is reported, never required.
"""

import shutil
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from sluice.children import free_ports

MODEL = "bench-model"
KEY = "sk-bench"
KEY_SHA256 = sha256(KEY.encode()).hexdigest()
ROOT = Path(__file__).parent.parent
PEERS = ROOT / ".peers"


class Peer(NamedTuple):
    """One contender: how to start it before the engine on `engine_port`."""

    name: str
    command: list[str]
    ready_path: str
    warm_up_s: float = 0.0
    env: dict[str, str] | None = None


def sluice(folder: Path, port: int, engine_port: int) -> Peer:
    """The gateway with everything on that it has, embedded state."""
    file = folder / "sluice.yaml"
    engine = f"http://127.0.0.1:{engine_port}"
    file.write_text(
        f"""version: 1
server: {{host: 127.0.0.1, port: {port}, max_connections: 20000}}
models:
  - name: {MODEL}
    pools:
      short: {{max_model_len: 8192, max_num_seqs: 20000, workers: ["{engine}"]}}
      long: {{max_model_len: 65536, max_num_seqs: 20000, workers: ["{engine}"]}}
request_log: {{path: "{folder / "requests.jsonl"}"}}
entitlements:
  - {{name: bench, tenant: bench, model: {MODEL}, api_keys: ["sha256:{KEY_SHA256}"]}}
"""
    )
    command = [sys.executable, "-m", "sluice", "serve", "-c", str(file), "--log-level", "error"]
    return Peer("sluice", command, "/ready")


def nginx(folder: Path, port: int, engine_port: int) -> Peer | None:
    """A bare reverse proxy: the floor."""
    program = shutil.which("nginx")
    if program is None:
        return None
    file = folder / "nginx.conf"
    file.write_text(
        f"""worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log /dev/null;
worker_rlimit_nofile 65536;
events {{ worker_connections 16384; }}
http {{ access_log off; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p;
  client_body_buffer_size 1m;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  keepalive_requests 100000000;
  upstream engine {{ server 127.0.0.1:{engine_port}; keepalive 512;
    keepalive_requests 100000000; }}
  server {{ listen 127.0.0.1:{port} backlog=4096;
    location / {{ proxy_pass http://engine; proxy_http_version 1.1;
      proxy_set_header Connection ""; proxy_buffering off; }} }} }}
"""
    )
    return Peer("nginx", [program, "-p", str(folder), "-c", str(file)], "/health")


def haproxy(folder: Path, port: int, engine_port: int) -> Peer | None:
    """Another bare reverse proxy."""
    program = shutil.which("haproxy")
    if program is None:
        return None
    file = folder / "haproxy.cfg"
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
  server engine 127.0.0.1:{engine_port}
"""
    )
    return Peer("haproxy", [program, "-f", str(file)], "/health")


def sglang_router(folder: Path, port: int, engine_port: int) -> Peer | None:
    """SGLang's Rust router, its per-request logging off."""
    python = PEERS / "sglang-router" / "bin" / "python"
    if not python.exists():
        return None
    command = [
        *(str(python), "-m", "sglang_router.launch_router", "--host", "127.0.0.1"),
        *("--port", str(port), "--worker-urls", f"http://127.0.0.1:{engine_port}"),
        *("--policy", "round_robin", "--log-level", "warn"),
        *("--prometheus-port", str(free_ports(1)[0])),
    ]
    return Peer("sglang-router", command, "/health", 2.0)


def vllm_router(folder: Path, port: int, engine_port: int) -> Peer | None:
    """VLLM's Rust router, its per-request logging off."""
    program = PEERS / "vllm-router" / "bin" / "vllm-router"
    if not program.exists():
        return None
    command = [
        *(str(program), "--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", f"http://127.0.0.1:{engine_port}"),
        *("--policy", "round_robin", "--log-level", "warning"),
        *("--prometheus-port", str(free_ports(1)[0])),
    ]
    return Peer("vllm-router", command, "/health", 2.0)


def litellm(folder: Path, port: int, engine_port: int) -> Peer | None:
    """LiteLLM's proxy."""
    program = PEERS / "litellm" / "bin" / "litellm"
    if not program.exists():
        return None
    file = folder / "litellm.yaml"
    file.write_text(
        f"""model_list:
  - model_name: {MODEL}
    litellm_params:
      {{model: openai/{MODEL}, api_base: "http://127.0.0.1:{engine_port}/v1", api_key: none}}
litellm_settings: {{telemetry: false}}
general_settings: {{master_key: {KEY}}}
"""
    )
    command = [str(program), "--config", str(file), "--port", str(port), "--host", "127.0.0.1"]
    # Nothing is fetched from outside.
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return Peer("litellm", command, "/health/liveliness", 2.0, env)


MAKERS: dict[str, Callable[[Path, int, int], Peer | None]] = {
    "sluice": sluice,
    "sglang-router": sglang_router,
    "vllm-router": vllm_router,
    "nginx": nginx,
    "haproxy": haproxy,
    "litellm": litellm,
}
