"""The contenders of `bench overhead` before the same engines, by turns.

A gateway is one thread. On two cores the kernel wakes an engine, the load generator or Redis on
the gateway's core while the other is idle: a gateway that always had work spent 10 to 13 % of
the time waiting for its core, and its utilisation was .85 to .9. It therefore gets a core, and
all other processes the rest. The core changes by turns, since on a shared host one may be slower
for a while: in two runs on the first core, two hours apart, the same gateway took 214 and 300 us
a request; the peers, which were not bound, took 151 and 157, 14,092 and 14,778. Contenders of
many threads are not bound: they do best unbound.
"""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from bench.common.fleet import RedisServer, redis_program
from bench.common.report import Row, judged
from bench.common.tools import (
    KEY,
    KEY_SHA256,
    MODEL,
    everything,
    serve_command,
    start_engines,
    tree,
)
from sluice.children import ChildDied, Children, free_ports

# -- how each contender is started: the gateway in several forms, and the peers that are installed


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
    "litellm": litellm,
}
if OLD := os.environ.get("SLUICE_BENCH_OLD"):  # a checkout, or a folder with a compiled one
    MAKERS["sluice, older"] = partial(sluice, env={"PYTHONPATH": OLD, "PYTHONSAFEPATH": "1"})
CACHE_AWARE: Final = {
    name: partial(router_command, name, policy="cache_aware")
    for name in ("sglang-router", "vllm-router")
}
"""Port, engines -> command."""


EMBEDDED: Final = "sluice"
ON_REDIS: Final = "sluice on Redis"
LEAST_LOADED: Final = "sluice, least-loaded"
ROUTER: Final = "sglang-router"
LITELLM: Final = "litellm"
NAMES: Final = (EMBEDDED, ON_REDIS, *(name for name in MAKERS if name != EMBEDDED))
ONLY: Final = os.environ.get("SLUICE_BENCH_PEERS", "").split()
"""Peers to measure, the gateways always; empty for all."""
_COMES_TO_S: Final = 0.5
"""What fell due while one was stopped is done by then."""


def is_gateway(name: str) -> bool:
    """Whether a contender is ours, and uses one core at most."""
    return name.startswith(EMBEDDED)


class Contender(NamedTuple):
    """One that runs. `pids`: `self`, and `redis` where it has one of its own."""

    name: str
    port: int
    pids: dict[str, int]


class Field(NamedTuple):
    """Engines and the contenders before them."""

    engine_ports: list[int]
    contenders: dict[str, Contender]
    missing: list[Row]
    load: Path


def field(
    stack: ExitStack,
    folder: Path,
    tools: tuple[Path, Path],
    names: Iterable[str],
    *,
    tick_us: int,
    engines: int = 4,
    makers: Mapping[str, Make] = MAKERS,
) -> Field:
    """Start them; they end with `stack`."""
    engine, load = tools
    children = stack.enter_context(Children())
    engine_ports = start_engines(children, engine, engines, tick_us)
    urls = [f"http://127.0.0.1:{port}" for port in engine_ports]
    contenders: dict[str, Contender] = {}
    missing = []
    for name in names:
        if ONLY and name not in ONLY and not is_gateway(name):
            continue
        pids, port = {}, free_ports(1)[0]
        if name != ON_REDIS:
            make = makers[name]
        elif redis_program() is None:
            missing.append(Row(name, None, "redis-server is not on PATH"))
            continue
        else:
            server = stack.enter_context(RedisServer())
            assert server.process is not None
            pids["redis"] = server.process.pid
            make = partial(sluice, state=server.url)
        start = make(folder, port, urls)
        process = None if start is None else _ready(children, start, port)
        if process is not None:
            contenders[name] = Contender(name, port, {"self": process.pid, **pids})
        elif is_gateway(name):
            missing.append(judged(name, None, "runs", False, "did not start"))
        else:
            missing.append(Row(name, None, "not installed or did not start: make bench-peers"))
    return Field(engine_ports, contenders, missing, load)


def _ready(children: Children, start: Start, port: int) -> subprocess.Popen[bytes] | None:
    process = children.start(start.command, env=start.env, quiet=True, silent=True)
    try:
        children.wait_for(f"http://127.0.0.1:{port}{start.ready_path}")
    except ChildDied:
        with contextlib.suppress(ValueError):
            children.forget(process)
        process.kill()
        process.wait()
        return None
    time.sleep(start.warm_up_s)
    return process


@contextlib.contextmanager
def by_turns(found: Field) -> Iterator[None]:
    """Stop all contenders where they are while the block runs, but for whom `alone` lets go on.

    One that is not measured would use processor and caches of the one that is.
    """
    for contender in found.contenders.values():
        _signal(contender, signal.SIGSTOP)
    try:
        yield
    finally:
        for contender in found.contenders.values():
            _signal(contender, signal.SIGCONT)


@contextlib.contextmanager
def alone(contender: Contender) -> Iterator[None]:
    """Let this one go on."""
    _signal(contender, signal.SIGCONT)
    time.sleep(_COMES_TO_S)
    try:
        yield
    finally:
        _signal(contender, signal.SIGSTOP)


def _signal(contender: Contender, number: signal.Signals) -> None:
    for pid in contender.pids.values():
        for process in tree(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)


@contextlib.contextmanager
def own_core(pid: int, turn: int) -> Iterator[None]:
    """Bind a process tree to one core, and this process and all its others to the other cores.

    `turn` counts on from core to core. Processes started within the block are bound like this
    one. With a single core nothing is bound; afterwards everybody may go anywhere again.
    """
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        yield
        return
    core = sorted(cores)[turn % len(cores)]
    measured = tree(pid)
    _bind(set(tree(os.getpid())) - set(measured), cores - {core})
    _bind(measured, {core})
    try:
        yield
    finally:
        _bind([*tree(os.getpid()), *measured], cores)


def _bind(pids: Iterable[int], cores: set[int]) -> None:
    """Bind every thread of these processes; those that have ended are passed over."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(int(thread.name), cores)


def may_open(files: int) -> str | None:
    """Raise this process's limit on open files, which children inherit; None, or what lacks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < files:
        return f"needs {files} open files, the limit is {hard}"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, files), hard))
    return None
