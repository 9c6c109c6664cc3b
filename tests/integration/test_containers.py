"""The image and what docker-compose.yml starts, made and started by hand: no Docker is needed.

The image is built from the Dockerfile in an empty environment (`tests.image`). Each service
runs the command of its container from it, on this machine: hosts become 127.0.0.1, ports free
ones, and mounted paths those of the repository or of a temporary folder.

`make test-image` builds the image once, in .image; without $IMAGE it is built here.
"""

import json
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from sluice.children import Children, free_ports
from tests.asking import until
from tests.image import Image
from tests.shipped import ENVIRONMENT, NAMES, shipped
from tests.unit.deploy.files import (
    DASHBOARDS,
    ROOT,
    alerts,
    health_check,
    instruction,
    ours,
    pyproject,
    queries,
    servers,
    services,
)

pytestmark = [pytest.mark.image, pytest.mark.redis]

KEY = {"authorization": "Bearer sk-demo-elastic"}
WITH_TARGET = {"authorization": "Bearer sk-demo-guaranteed"}
CHAT = "/v1/chat/completions"


def interpolated(text: str) -> str:
    """Compose's ${NAME:-default}, with nothing set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


class Composed:
    """The services of ours, running; where each listens; and a folder for what they write."""

    def __init__(self, image: Image, children: Children, folder: Path) -> None:
        self.image = image
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
        """Run the image as the container would."""
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
        set_by_it = ours()[service].get("environment", {})
        environment = {name: self.here(interpolated(text)) for name, text in set_by_it.items()}
        words = [*json.loads(instruction("ENTRYPOINT")), *arguments]
        self.children.start(self.image.command(words, environment), quiet=True)

    def _gateway_file(self, path: str) -> Path:
        file = self.mounted("gateway", path)
        text = self.here(file.read_text(encoding="utf-8"))
        text = text.replace("host: 0.0.0.0", "host: 127.0.0.1")
        text = text.replace("port: 8080", f"port: {self.ports['gateway']}")
        log = self.mounted("gateway", "/var/lib/sluice")
        file.write_text(text.replace("/var/lib/sluice", str(log)), encoding="utf-8")
        return file


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    if "IMAGE" in os.environ:
        return Image(ROOT / os.environ["IMAGE"])
    built = Image(tmp_path_factory.mktemp("image"))
    built.build()
    return built


def written(image: Image) -> set[Path]:
    """Every file of the image."""
    return {path for path in image.root.rglob("*") if path.is_file()}


def output_of(image: Image, *words: str) -> str:
    """What a command in the image prints; it has to succeed."""
    done = subprocess.run(
        image.command(["sluice", *words], ENVIRONMENT), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def composed(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    before = written(image)
    with Children() as children:
        found = Composed(image, children, tmp_path_factory.mktemp("compose"))
        mocks = [name for name in servers() if name != "gateway"]
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
    assert written(image) == before, "the root of every container is read-only"


def test_the_image_is_compiled_and_of_the_package_s_version(image: Image) -> None:
    version = pyproject()["project"]["version"]
    assert output_of(image, "--version") == f"sluice {version} (compiled)\n"


@pytest.mark.parametrize("name", NAMES)
def test_the_image_can_do_what_every_shipped_configuration_asks_for(
    image: Image, tmp_path: Path, name: str
) -> None:
    file = tmp_path / f"{name}.yaml"
    file.write_text(shipped(name), encoding="utf-8")
    found = json.loads(output_of(image, "check", "--json", "-c", str(file)))
    assert (found["ok"], found["remarks"]) == (True, [])
    assert output_of(image, "check", "-c", str(file)).splitlines()[-1] == f"{file}: ok"


def test_the_official_client_chats_and_streams(composed: Composed) -> None:
    url = f"{composed.url('gateway')}/v1"
    with openai.OpenAI(base_url=url, api_key="sk-demo-elastic", max_retries=0) as client:
        assert "demo-model" in [model.id for model in client.models.list()]
        asked: Any = {
            "model": "demo-model",
            "messages": [{"role": "user", "content": "What is a token budget?"}],
            "max_tokens": 16,
        }
        whole = client.chat.completions.create(**asked)
        assert whole.choices[0].message.content
        assert whole.usage.completion_tokens > 0
        chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in {"length", "stop"}


def ask(
    composed: Composed, text: str, key: Mapping[str, str] = KEY, **more: object
) -> httpx.Response:
    body = {"model": "demo-model", "messages": [{"role": "user", "content": text}], **more}
    url = composed.url("gateway") + CHAT
    return httpx.post(url, json=body, headers=key, timeout=60, trust_env=False)


def test_a_chat_request_goes_through_to_the_pool_that_fits(composed: Composed) -> None:
    short = ask(composed, "Hello", max_tokens=8)
    assert short.status_code == 200, short.text
    assert short.headers["x-sluice-pool"] == "short"
    assert short.json()["usage"]["completion_tokens"] > 0
    long = ask(composed, "word " * 12_000, max_tokens=8)
    assert long.status_code == 200, long.text
    assert long.headers["x-sluice-pool"] == "long"
    workers = {answer.headers["x-sluice-worker"] for answer in (short, long)}
    engines = {worker.partition("#")[0] for worker in workers}
    assert engines <= {f"127.0.0.1:{port}" for port in composed.ports.values()}


def test_the_default_keys_are_the_demo_s(composed: Composed) -> None:
    url = composed.url("gateway")
    admin = {"authorization": "Bearer sk-demo-admin"}
    assert httpx.get(f"{url}/admin/pools", headers=admin, trust_env=False).status_code == 200
    assert httpx.get(f"{url}/admin/pools", headers=KEY, trust_env=False).status_code == 401
    assert httpx.get(f"{url}/v1/models", headers=admin, trust_env=False).status_code == 401


def test_sample_traffic_fills_the_dashboards(composed: Composed) -> None:
    command = [composed.here(part) for part in ours()["traffic"]["command"]]
    told = output_of(composed.image, *command, "--once", "--pace", "0.1")
    assert " 0 failed" in told
    page = httpx.get(f"{composed.url('gateway')}/metrics", trust_env=False).text
    for series in (
        'sluice_requests_total{model="demo-model",outcome="ok",pool="short"}',
        'sluice_requests_total{model="demo-model",outcome="ok",pool="long"}',
        'sluice_compressions_total{model="demo-model",result="compressed"}',
        'sluice_admission_total{decision="denied",entitlement="demo-spot"',
    ):
        assert series in page


def test_the_request_log_is_on_the_volume(composed: Composed) -> None:
    answer = ask(composed, "Log me", max_tokens=2)
    log = composed.folder / "requests/requests.jsonl"
    until(lambda: answer.headers["x-request-id"] in log.read_text(encoding="utf-8"))


def check_health(image: Image, port: int, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the image's HEALTHCHECK."""
    command = image.command(health_check(), {"SLUICE_HEALTH_PORT": str(port), **more})
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_health_check_passes_on_every_service_of_ours(composed: Composed) -> None:
    for name in servers():
        done = check_health(composed.image, composed.ports[name])
        assert done.returncode == 0, done.stderr


def test_the_health_check_needs_no_proxy(composed: Composed) -> None:
    nowhere = "http://127.0.0.1:9"
    port = composed.ports["gateway"]
    done = check_health(composed.image, port, http_proxy=nowhere, HTTP_PROXY=nowhere)
    assert done.returncode == 0, done.stderr


def test_the_health_check_fails_where_nothing_listens(image: Image) -> None:
    (port,) = free_ports(1)
    assert check_health(image, port).returncode == 1


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
    ask(composed, "Count me", WITH_TARGET, max_tokens=4, stream=True)
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
        until(lambda: set(health_of_rules(composed).values()) == {"ok"}, 30)
        assert {alert["alert"] for alert in alerts()} <= health_of_rules(composed).keys()
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
    text = text.replace("127.0.0.1:9090", f"127.0.0.1:{port}")
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


def health_of_rules(composed: Composed) -> dict[str, str]:
    groups = api(composed, "rules")["groups"]
    return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}


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
    "Tenants without their capacity",
    "Refusals by tenant and reason",
    "Refused share by tenant",
    "Telemetry: requests not exported",
    "Gamma and what compression achieves",
    "Usage export: lines lost",
    "Late first tokens",
    # Only where a proof is attached.
    "What was proved, and came",
    # Only of slo_tpot_ms, ranks, pools in phases, and engines that tell events of their caches.
    "Targets kept",
    "Ranks that wait for the fullest",
    "Imbalance of ranks",
    "Prompts computed apart",
    "Prefill and hand-over",
    "Events of prefix caches",
    "Since the last event of a prefix cache",
    "Preemptions",
    "Prefix cache",
    "Firing alerts",
    # Only where the configuration has sources of engines, prices, budgets, issuers, adapters, TLS.
    "Engines found",
    "Sources of workers that answer",
    "Cost by tenant",
    "Cost of workers",
    "Budgets near their end",
    "Tokens of identity providers",
    "Age of issuers' keys",
    "LoRA adapters",
    "TLS connections that never began",
    "Certificate expires in",
    "Certificate files fit",
    # Only of batches.
    "Items of batches",
    "Batches and items in flight",
    "Promises of batches",
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


def test_the_wheel_holds_the_runtime_only_and_what_was_compiled(image: Image) -> None:
    with zipfile.ZipFile(image.wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info" not in name}
    packages = pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    sources = {
        str(path.relative_to(ROOT))
        for folder in packages
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    made = {name for name in names if name.endswith(".so")}
    assert names - made == sources
    assert len(made) > 50
