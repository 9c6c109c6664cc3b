"""How each contender is started: the gateway in several forms, and the peers that are installed.

`make bench-peers` puts the peers from PyPI into environments of their own under .peers; nginx
and HAProxy are taken from PATH. Missing peers are reported, never required.
"""

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from bench.common.everything_on import KEY, KEY_SHA256, MODEL, everything, serve_command
from sluice.children import free_ports

ROOT: Final = Path(__file__).parents[2]
PEERS: Final = ROOT / ".peers"
_ROUTERS: Final = {
    "sglang-router": (("python", "-m", "sglang_router.launch_router"), "warn"),
    "vllm-router": (("vllm-router",), "warning"),
    "smg": (("smg", "launch"), "warn"),
}
"""Program and arguments in the peer's environment, and the level without a log of requests."""


class Start(NamedTuple):
    """How to start a contender, and where it says that it is ready."""

    command: list[str]
    ready_path: str
    warm_up_s: float = 0.0
    env: dict[str, str] | None = None


Make = Callable[[Path, int, Sequence[str]], Start | None]
"""From a folder, its port and the engines' URLs; None where it is not installed."""


def sluice(
    folder: Path,
    port: int,
    engines: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    state: str = "memory://",
    tenants: bool = False,
    server: str = "",
    more: str = "",
) -> Start:
    """The gateway with everything on that it has; `server`, `more`: further text of its file."""
    file = everything(folder, port, engines, state=state, tenants=tenants)
    text = file.read_text("utf-8").replace("max_connections", f"{server}max_connections", 1)
    file.write_text(text + more, encoding="utf-8")
    return Start(serve_command(file), "/ready", env=env)


def least_loaded(folder: Path, port: int, engines: Sequence[str]) -> Start:
    """The gateway without scheduler, limits, compression and telemetry; embedded state."""
    file = folder / f"least-loaded-{port}.yaml"
    half = len(engines) // 2
    short, long = (", ".join(f'"{url}"' for url in of) for of in (engines[:half], engines[half:]))
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
    return Start(serve_command(file), "/ready")


def nginx(folder: Path, port: int, engines: Sequence[str]) -> Start | None:
    """A bare reverse proxy: the floor."""
    program = shutil.which("nginx")
    if program is None:
        return None
    file = folder / "nginx.conf"
    servers = " ".join(f"server {url.removeprefix('http://')};" for url in engines)
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
    return Start([program, "-p", str(folder), "-c", str(file)], "/health")


def haproxy(folder: Path, port: int, engines: Sequence[str]) -> Start | None:
    """Another bare reverse proxy."""
    program = shutil.which("haproxy")
    if program is None:
        return None
    file = folder / "haproxy.cfg"
    servers = "\n".join(
        f"  server engine{n} {url.removeprefix('http://')}" for n, url in enumerate(engines)
    )
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
    return Start([program, "-f", str(file)], "/health")


def installed(name: str) -> bool:
    """Whether a peer from PyPI is there."""
    return (PEERS / name / "bin").is_dir()


def router_command(name: str, port: int, engines: Sequence[str], policy: str) -> list[str]:
    """A router in Rust, its log of requests off."""
    (program, *arguments), level = _ROUTERS[name]
    return [
        *(str(PEERS / name / "bin" / program), *arguments, "--host", "127.0.0.1"),
        *("--port", str(port), "--worker-urls", *engines, "--policy", policy),
        *("--log-level", level, "--prometheus-port", str(free_ports(1)[0])),
    ]


def router(name: str, folder: Path, port: int, engines: Sequence[str]) -> Start | None:
    """The same as a contender: SGLang's router, vLLM's, or the Shepherd Model Gateway."""
    if not installed(name):
        return None
    return Start(router_command(name, port, engines, "round_robin"), "/health", 2.0)


def litellm(folder: Path, port: int, engines: Sequence[str]) -> Start | None:
    """LiteLLM's proxy."""
    program = PEERS / "litellm" / "bin" / "litellm"
    if not program.exists():
        return None
    file = folder / "litellm.yaml"
    entries = "\n".join(
        f"""  - model_name: {MODEL}
    litellm_params: {{model: openai/{MODEL}, api_base: "{url}/v1", api_key: none}}"""
        for url in engines
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
    return Start(command, "/health/liveliness", 2.0, env)


MAKERS: Final[dict[str, Make]] = {
    "sluice": sluice,
    "sluice, least-loaded": least_loaded,
    **{name: partial(router, name) for name in _ROUTERS},
    "nginx": nginx,
    "haproxy": haproxy,
    "litellm": litellm,
}
CACHE_AWARE: Final = {
    name: partial(router_command, name, policy="cache_aware")
    for name in ("sglang-router", "vllm-router")
}
"""Port, engines -> command."""
