"""`sluice demo`: mock engines, a gateway on embedded state, sample tenants, light traffic.

Runs real processes over real sockets from a real configuration file. Its path is printed, so
that newcomers can read, copy and change it.
"""

import contextlib
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import httpx
import typer
from rich.console import Console

from sluice.children import ChildDied, Children, free_ports

MODEL = "demo-model"
SHORT_WINDOW, LONG_WINDOW = 8192, 65536
KEYS = {
    "guaranteed": "sk-demo-guaranteed",
    "elastic": "sk-demo-elastic",
    "spot": "sk-demo-spot",
}
ADMIN_KEY = "sk-demo-admin"

_QUESTIONS = (
    "Explain in two sentences what a token budget is.",
    "Write a haiku about queues.",
    "Summarise: the gateway decides who may enter, what fits, and which worker serves it.",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n\nWhat is fib(10)?",
    "请用一句话解释什么是负载均衡。",
)


def demo(
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the gateway; 0 takes a free one.")
    ] = 8080,
    traffic: Annotated[bool, typer.Option(help="Send light sample traffic.")] = True,
    duration: Annotated[
        float | None, typer.Option(min=0.0, help="Stop after this many seconds.")
    ] = None,
    speed: Annotated[
        float, typer.Option(min=0.001, help="Speed of the mock engines, 1 = an A100.")
    ] = 4.0,
) -> None:
    """Run a whole fleet on this machine: 2 short engines, 1 long one, and the gateway."""
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, _stop)
    _need_free(port, console)
    ports = free_ports(4)
    gateway_port = port or ports[3]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-demo-")))
        config = folder / "sluice.yaml"
        config.write_text(_config(gateway_port, ports, folder), encoding="utf-8")
        children = stack.enter_context(Children())
        stack.enter_context(_exit_on_death(console))
        with console.status("starting 3 mock engines and the gateway"):
            for mock_port, window in zip(
                ports, (SHORT_WINDOW, SHORT_WINDOW, LONG_WINDOW), strict=False
            ):
                children.start(_mock_command(mock_port, window, speed), quiet=True)
            for mock_port in ports[:3]:
                children.wait_for(f"http://127.0.0.1:{mock_port}/health")
            children.start([sys.executable, "-m", "sluice", "serve", "-c", str(config)], quiet=True)
            url = f"http://127.0.0.1:{gateway_port}"
            children.wait_for(f"{url}/ready")
        _welcome(console, url, config)
        print(f"SLUICE READY {url}", flush=True)  # noqa: T201 - the line scripts wait for
        if traffic:
            threading.Thread(target=_traffic, args=(url,), daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):
            children.watch(duration)


def _need_free(port: int, console: Console) -> None:
    """Exit 1 if the port is taken: that process would be mistaken for the demo's gateway."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            console.print(f"[red]port {port}: {error.strerror}[/]; give --port, or --port 0")
            raise typer.Exit(1) from None


@contextlib.contextmanager
def _exit_on_death(console: Console) -> Iterator[None]:
    try:
        yield
    except ChildDied as died:
        console.print(f"[red]{died}")
        raise typer.Exit(1) from died


def _mock_command(port: int, window: int, speed: float) -> list[str]:
    slots = 128 if window == SHORT_WINDOW else 16
    return [
        *(sys.executable, "-m", "sluice", "mock"),
        *("--port", str(port), "--model", MODEL),
        *("--max-model-len", str(window), "--max-num-seqs", str(slots), "--speed", str(speed)),
    ]


def _stop(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _config(port: int, mocks: Sequence[int], folder: Path) -> str:
    entitlements = "\n".join(_entitlements())
    return f"""\
# Written by `sluice demo`. The commented example in docs/ explains every key.
version: 1
server: {{host: 127.0.0.1, port: {port}, admin_key: "{ADMIN_KEY}"}}
state: {{url: "memory://"}}
request_log: {{path: "{folder / "requests.jsonl"}"}}
models:
  - name: {MODEL}
    aliases: [gpt-4o-mini]
    kv_bytes_per_token: 327680
    boundary: {{b_short: {SHORT_WINDOW}}}
    compression: {{enabled: true}}
    pools:
      short:
        max_model_len: {SHORT_WINDOW}
        max_num_seqs: 128
        workers: ["http://127.0.0.1:{mocks[0]}", "http://127.0.0.1:{mocks[1]}"]
      long:
        max_model_len: {LONG_WINDOW}
        max_num_seqs: 16
        workers: ["http://127.0.0.1:{mocks[2]}"]
entitlements:
{entitlements}
"""


def _entitlements() -> Iterator[str]:
    limits = {
        "guaranteed": "tokens_per_second: 5000, concurrency: 32, max_concurrency: 32",
        "elastic": "tokens_per_second: 2000, concurrency: 16, max_concurrency: 64",
        "spot": "max_concurrency: 64",
    }
    for service_class, key in KEYS.items():
        digest = sha256(key.encode()).hexdigest()
        yield (
            f"  - {{name: demo-{service_class}, tenant: demo-{service_class}, model: {MODEL}, "
            f"service_class: {service_class},\n     {limits[service_class]}, "
            f'api_keys: ["sha256:{digest}"]}}'
        )


def _welcome(console: Console, url: str, config: Path) -> None:
    console.print()
    console.print(f"[bold]OpenAI base_url[/]  {url}/v1   model [bold]{MODEL}[/]")
    for service_class, key in KEYS.items():
        console.print(f"[bold]key[/]  {key}   ({service_class})")
    console.print(f"[bold]admin key[/]  {ADMIN_KEY}   GET {url}/admin/pools")
    console.print(f"[bold]configuration[/]  {config}   [bold]metrics[/]  {url}/metrics")
    console.print()
    console.print(
        f"curl {url}/v1/chat/completions -H 'authorization: Bearer {KEYS['elastic']}' "
        "-H 'content-type: application/json' "
        f'-d \'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Hello"}}], '
        '"max_tokens": 32}\'',
        soft_wrap=True,
        highlight=False,
    )
    console.print()


def _traffic(url: str) -> None:
    """Send a request about every half second, one tenant after the other; some long or streamed."""
    rng = random.Random(os.getpid())
    with httpx.Client(base_url=url, timeout=120.0, trust_env=False) as client:
        while True:
            key = rng.choice(list(KEYS.values()))
            question = rng.choice(_QUESTIONS)
            if rng.random() < 0.1:  # a long document, for the long pool
                question = "Summarise this.\n" + question * 1200
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": question}],
                "max_tokens": rng.choice((16, 64, 128)),
                "stream": rng.random() < 0.5,
            }
            with contextlib.suppress(httpx.HTTPError):
                client.post(
                    "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
                ).read()
            time.sleep(rng.uniform(0.2, 0.8))
