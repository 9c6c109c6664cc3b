"""What docker-compose.yml starts, started by hand: no Docker engine is needed.

Each service runs the command of its container, on this machine: hosts become 127.0.0.1, ports
free ones, and mounted paths those of the repository or of a temporary folder.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from sluice.children import Children, free_ports
from tests.unit.deploy.files import (
    DASHBOARDS,
    ROOT,
    dockerfile,
    health_check,
    instruction,
    ours,
    pyproject,
    queries,
    services,
)

KEY = {"authorization": "Bearer sk-demo-elastic"}
CHAT = "/v1/chat/completions"


def interpolated(text: str) -> str:
    """Compose's ${NAME:-default}, with nothing set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


class Composed:
    """The services of ours, running; where each listens; and a folder for what they write."""

    def __init__(self, children: Children, folder: Path) -> None:
        self.children = children
        self.folder = folder
        names = [*ours(), "prometheus", "redis"]
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))

    def url(self, service: str) -> str:
        return f"http://127.0.0.1:{self.ports[service]}"

    def here(self, text: str) -> str:
        """Addresses of other containers as addresses of this machine."""
        for name, port in self.ports.items():
            text = re.sub(rf"\b{name}:\d+", f"127.0.0.1:{port}", text)
        return text

    def mounted(self, service: str, path: str) -> Path:
        """A path in a container as one of this machine; files are copied and rewritten."""
        for volume in services()[service]["volumes"]:
            source, target = volume.split(":")[:2]
            if path == target or path.startswith(f"{target}/"):
                rest = path.removeprefix(target).lstrip("/")
                return self._local(service, source) / rest if rest else self._local(service, source)
        raise AssertionError(f"{service} has no mount for {path}")

    def _local(self, service: str, source: str) -> Path:
        if not source.startswith("./"):  # a named volume
            folder = self.folder / source
            folder.mkdir(exist_ok=True)
            return folder
        local = self.folder / service / source
        if not local.exists():
            local.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, local)
            else:
                shutil.copy(ROOT / source, local)
        return local

    def start(self, service: str) -> None:
        """Run `sluice` as the container would."""
        command = ours()[service].get("command") or json.loads(instruction("CMD"))
        port = self.ports[service]
        arguments = [
            f"--host={part[7:].replace('0.0.0.0', '127.0.0.1')}"
            if part.startswith("--host=")
            else f"--port={port}"
            if part.startswith("--port=")
            else part
            for part in command
        ]
        if service == "gateway":
            arguments[-1] = str(self._gateway_file(arguments[-1]))
        environment = ours()[service].get("environment", {})
        self.children.start(
            [sys.executable, "-m", "sluice", *arguments],
            env={name: self.here(interpolated(text)) for name, text in environment.items()},
            quiet=True,
        )

    def _gateway_file(self, path: str) -> Path:
        file = self.mounted("gateway", path)
        text = self.here(file.read_text(encoding="utf-8"))
        text = text.replace("host: 0.0.0.0", "host: 127.0.0.1")
        text = text.replace("port: 8080", f"port: {self.ports['gateway']}")
        log = self.mounted("gateway", "/var/lib/sluice")
        file.write_text(text.replace("/var/lib/sluice", str(log)), encoding="utf-8")
        return file


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    with Children() as children:
        found = Composed(children, tmp_path_factory.mktemp("compose"))
        mocks = [name for name in ours() if name != "gateway"]
        if shutil.which("redis-server"):
            command = services()["redis"]["command"]
            port = str(found.ports["redis"])
            here = ["--port", port, "--bind", "127.0.0.1", "--dir"]
            children.start([*command, *here, str(found.mounted("redis", "/data"))], quiet=True)
        for name in mocks:
            found.start(name)
        for name in mocks:
            children.wait_for(f"{found.url(name)}/health")
        found.start("gateway")
        children.wait_for(f"{found.url('gateway')}/ready")
        yield found


def ask(composed: Composed, text: str, **more: object) -> httpx.Response:
    body = {"model": "demo-model", "messages": [{"role": "user", "content": text}], **more}
    url = composed.url("gateway") + CHAT
    return httpx.post(url, json=body, headers=KEY, timeout=60, trust_env=False)


def test_a_chat_request_goes_through_to_the_pool_that_fits(composed: Composed) -> None:
    short = ask(composed, "Hello", max_tokens=8)
    assert short.status_code == 200, short.text
    assert short.headers["x-sluice-pool"] == "short"
    assert short.json()["usage"]["completion_tokens"] > 0
    long = ask(composed, "word " * 12_000, max_tokens=8)
    assert long.status_code == 200, long.text
    assert long.headers["x-sluice-pool"] == "long"
    workers = {answer.headers["x-sluice-worker"] for answer in (short, long)}
    assert workers <= {f"127.0.0.1:{port}" for port in composed.ports.values()}


def test_the_default_keys_are_the_demo_s(composed: Composed) -> None:
    url = composed.url("gateway")
    admin = {"authorization": "Bearer sk-demo-admin"}
    assert httpx.get(f"{url}/admin/pools", headers=admin, trust_env=False).status_code == 200
    assert httpx.get(f"{url}/admin/pools", headers=KEY, trust_env=False).status_code == 401
    assert httpx.get(f"{url}/v1/models", headers=admin, trust_env=False).status_code == 401


def test_the_request_log_is_on_the_volume(composed: Composed) -> None:
    answer = ask(composed, "Log me", max_tokens=2)
    log = composed.folder / "requests/requests.jsonl"
    until(lambda: answer.headers["x-request-id"] in log.read_text(encoding="utf-8"))


def until(condition: Callable[[], bool], limit_s: float = 15.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.1)


def check_health(port: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the image's HEALTHCHECK."""
    command = [sys.executable, *health_check()[1:]]
    env = {**os.environ, "SLUICE_HEALTH_PORT": str(port), **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_the_health_check_passes_on_every_service_of_ours(composed: Composed) -> None:
    for name in ours():
        done = check_health(composed.ports[name])
        assert done.returncode == 0, done.stderr


def test_the_health_check_needs_no_proxy(composed: Composed) -> None:
    nowhere = "http://127.0.0.1:9"
    done = check_health(composed.ports["gateway"], http_proxy=nowhere, HTTP_PROXY=nowhere)
    assert done.returncode == 0, done.stderr


def test_the_health_check_fails_where_nothing_listens() -> None:
    (port,) = free_ports(1)
    assert check_health(port).returncode == 1


@pytest.mark.redis
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not on PATH")
def test_redis_runs_as_its_service_says_and_the_gateway_uses_it(composed: Composed) -> None:
    port = composed.ports["redis"]
    kind, check = services()["redis"]["healthcheck"]["test"]
    assert kind == "CMD-SHELL"
    check = check.replace("redis-cli", f"redis-cli -p {port}")
    until(lambda: subprocess.run(check, shell=True, check=False).returncode == 0)
    asked = ["redis-cli", "-p", str(port), "config", "get", "maxmemory-policy"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert "noeviction" in answer.stdout
    assert list((composed.folder / "redis").glob("appendonlydir/*")) != []
    page = f"{composed.url('gateway')}/metrics"
    until(lambda: "sluice_store_up 1.0" in httpx.get(page, trust_env=False).text)
    learned = ["redis-cli", "-p", str(port), "--scan"]
    until(lambda: subprocess.run(learned, capture_output=True, check=False).stdout != b"")


@pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="prometheus is not on PATH (Debian and Ubuntu have a package of that name)",
)
def test_prometheus_finds_every_target_and_evaluates_rules_and_panels(composed: Composed) -> None:
    ask(composed, "Count me", max_tokens=4, stream=True)
    port = composed.ports["prometheus"]
    with Children() as children:
        children.start(prometheus_command(composed, port), quiet=True)
        children.wait_for(f"{composed.url('prometheus')}/-/ready")
        if shutil.which("wget"):  # the image has it
            kind, check = services()["prometheus"]["healthcheck"]["test"]
            assert kind == "CMD-SHELL"
            check = check.replace("127.0.0.1:9090", f"127.0.0.1:{port}")
            assert subprocess.run(check, shell=True, check=False).returncode == 0
        until(lambda: set(states(composed)) == {"up"})
        assert len(states(composed)) == 5
        until(lambda: set(health_of_rules(composed)) == {"ok"}, 30)
        check_panels(composed)


def prometheus_command(composed: Composed, port: int) -> list[str]:
    command = ["prometheus"]
    for part in services()["prometheus"]["command"]:
        name, _, value = part.partition("=")
        if value.startswith("/"):
            value = str(composed.mounted("prometheus", value))
        command.append(f"{name}={value}")
    file = composed.mounted("prometheus", "/etc/prometheus/prometheus.yml")
    text = composed.here(file.read_text(encoding="utf-8"))
    text = text.replace("localhost:9090", f"127.0.0.1:{port}")
    settings = yaml.safe_load(text)
    settings["global"] |= {
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "evaluation_interval": "1s",
    }
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return [*command, f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]


def api(composed: Composed, path: str, **parameters: str) -> Any:
    url = f"{composed.url('prometheus')}/api/v1/{path}"
    answer = httpx.get(url, params=parameters, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def states(composed: Composed) -> list[str]:
    return [target["health"] for target in api(composed, "targets")["activeTargets"]]


def health_of_rules(composed: Composed) -> list[str]:
    groups = api(composed, "rules")["groups"]
    return [rule["health"] for group in groups for rule in group["rules"]]


MAY_BE_EMPTY = {
    # Counters that appear with their first event, which a healthy fleet does not have.
    "Failed",
    "Misrouted",
    "Preempted",
    "Misroutes and rescues",
    "Spillovers",
    "Observe mode",
    "Usage that taught nothing",
    "Retries",
    "Ejections",
    "Request log: records lost",
    "Compression",
    "Kept of compressed prompts",
    # Only where a plan is given, or boundaries move.
    "What boundaries go by",
    "Denied, by reason",
    "Would be denied, by reason",
    "Evictions",
    "Entitlements without their capacity",
    "Usage export: lines lost",
    "Late first tokens",
    "Preemptions",
    "Prefix cache",
    "Firing alerts",
    # Pools without a scheduler that queues have no such series.
    "Waiting in the gateway",
    "Time in the gateway queue",
    "Predictions",
    "Preemptions told by engines",
}


def check_panels(composed: Composed) -> None:
    """Every query of the dashboard is answered, and those of a healthy fleet with numbers."""
    for path in DASHBOARDS:
        for where, query in queries(json.loads(path.read_text(encoding="utf-8"))):
            if where in MAY_BE_EMPTY:
                api(composed, "query", query=query)
            else:
                until(lambda query=query: bool(api(composed, "query", query=query)["result"]))  # type: ignore[misc]


def test_the_wheel_is_built_from_the_image_s_context_and_holds_the_runtime_only(
    tmp_path: Path,
) -> None:
    """Takes some seconds: pip makes an environment for the build."""
    context = tmp_path / "src"
    context.mkdir()
    copies = [a.split() for name, a in dockerfile() if name == "COPY" and "--from" not in a]
    for source in (source for parts in copies for source in parts[:-1]):
        if (ROOT / source).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(ROOT / source, context / source, ignore=ignored)
        else:
            shutil.copy(ROOT / source, context)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    done = subprocess.run(
        [*build, str(tmp_path), str(context)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("sluice_gateway-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (points,) = (archive.read(n).decode() for n in names if n.endswith("entry_points.txt"))
    folders = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert folders == set(pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    sources = {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info" not in name} == sources
    assert "sluice = sluice.cli:main" in points
