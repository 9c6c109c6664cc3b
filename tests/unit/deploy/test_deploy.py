"""Deployment files say what the code is: images, commands, targets, metrics, alerts."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway.fleet.engine_metrics import ALIASES
from gateway.metrics import Histogram, Metrics
from gateway.settings import load
from simulator.engine.engine import PROFILES
from simulator.mock_server import MockApp, MockConfig
from tests.image import dockerfile
from tests.unit.deploy.files import (
    DASHBOARDS,
    PROMETHEUS,
    ROOT,
    alerts,
    instruction,
    load_yaml,
    ours,
    parse,
    pyproject,
    queries,
    rules,
    servers,
    services,
)
from tests.unit.test_docs import controller_families, metric_families, section_of

RULE_TESTS = sorted(PROMETHEUS.glob("tests/*.yml"))
SCRAPED = {"job", "instance"}
"""Labels that Prometheus gives to every series."""

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not on PATH (Debian and Ubuntu have it in the package `prometheus`)",
)


def options_of(command: list[str]) -> dict[str, str]:
    return dict(part[2:].split("=", 1) for part in command if part.startswith("--"))


# -- the image


def test_the_image_holds_every_package_of_the_wheel_and_no_other_folder() -> None:
    packages = set(pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    copied = [a.split() for name, a in dockerfile() if name == "COPY" and "--from" not in a]
    sources = {source for parts in copied for source in parts[:-1]}
    assert {source for source in sources if (ROOT / source).is_dir()} == packages
    assert [source for source in sources if not (ROOT / source).exists()] == []
    let_in = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert {line[1:] for line in let_in if line.startswith("!")} == sources
    assert let_in[1] == "*"


def test_the_version_stands_in_pyproject_alone() -> None:
    version = re.compile(rf"(?<![\d.]){re.escape(pyproject()['project']['version'])}(?!\.?\d)")
    shipped = [
        ROOT / name for name in ("Dockerfile", "Makefile", "docker-compose.yml", "README.md")
    ]
    for pattern in ("docs/**/*.md", "deploy/**/*", ".github/**/*"):
        shipped += [path for path in ROOT.glob(pattern) if path.is_file()]
    for package in pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        shipped += ROOT.glob(f"{package}/**/*.py")
    assert [p for p in shipped if version.search(p.read_text(encoding="utf-8"))] == []


def test_the_image_is_not_root_s() -> None:
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", instruction("USER"))
    assert instruction("EXPOSE") == "8080"
    assert instruction("STOPSIGNAL") == "SIGTERM"
    assert next(a for name, a in dockerfile() if name == "FROM") == "${PYTHON_IMAGE} AS build"


# -- the compose file


def test_every_command_of_ours_is_a_command_line_of_sluice() -> None:
    assert json.loads(instruction("ENTRYPOINT")) == ["sluice"]
    assert len(ours()) == 5
    for service in ours().values():
        parse(service.get("command") or json.loads(instruction("CMD")))


def test_mocks_are_what_the_gateway_s_configuration_says() -> None:
    config = load(ROOT / "deploy/compose/sluice.yaml", environ={})
    (model,) = config.models
    mocks = {f"{name}:8000": s for name, s in servers().items() if name != "gateway"}
    workers = {w.id: pool for pool in model.pools.values() for w in pool.workers}
    assert set(workers) == set(mocks)
    ranks = {w.id: w.ranks for pool in model.pools.values() for w in pool.workers}
    for name, pool in workers.items():
        options = options_of(mocks[name]["command"])
        assert options["model"] == model.name
        assert options["max-model-len"] == str(pool.max_model_len)
        assert options["max-num-seqs"] == str(pool.max_num_seqs)
        assert options.get("dp-ranks", "1") == str(ranks[name])
        assert options["port"] == mocks[name]["environment"]["SLUICE_HEALTH_PORT"] == "8000"


def test_the_gateway_listens_where_the_container_is_asked() -> None:
    config = load(ROOT / "deploy/compose/sluice.yaml", environ={})
    gateway = services()["gateway"]
    assert (config.server.host, config.server.port) == ("0.0.0.0", 8080)
    assert gateway["ports"][0].endswith(":8080")
    grace_s = float(gateway["stop_grace_period"].removesuffix("s"))
    assert grace_s > config.server.drain_timeout_s + 2
    mounts = {v.split(":")[1]: v.split(":")[0] for v in gateway["volumes"]}
    assert mounts[json.loads(instruction("CMD"))[-1]] == "./deploy/compose/sluice.yaml"
    assert config.request_log.path is not None
    assert str(config.request_log.path.parent) in mounts
    assert gateway["read_only"] is True


def test_images_are_pinned() -> None:
    for name, service in services().items():
        if name not in ours():
            assert re.search(r":v?\d+\.\d+\.\d+(-\w+)?$", service["image"]), name


def test_what_should_be_secret_comes_from_the_environment() -> None:
    texts = [(ROOT / name).read_text("utf-8") for name in ("docker-compose.yml", COMPOSE_CONFIG)]
    for name, value in re.findall(r"(\w*(?:KEY|key|PASSWORD|SECRET)): (\S+)", "\n".join(texts)):
        assert re.fullmatch(r"\$\{\w+:-\S+\}", value), name
    references = re.findall(r"\$\{[^}]*\}", "\n".join(texts))
    assert [r for r in references if ":-" not in r and r != "${NAME}"] == []


COMPOSE_CONFIG = "deploy/compose/sluice.yaml"


def test_ports_are_bound_to_this_machine() -> None:
    for service in services().values():
        for port in service.get("ports", []):
            assert port.startswith(("127.0.0.1:", "${SLUICE_BIND:-127.0.0.1}:"))


def test_mounts_exist_and_volumes_are_declared() -> None:
    declared = load_yaml("docker-compose.yml")["volumes"]
    for service in services().values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in declared or (ROOT / source).exists(), source


def test_whoever_is_waited_for_has_a_health_check_and_every_service_has_limits() -> None:
    for service in services().values():
        for name, need in service.get("depends_on", {}).items():
            if need["condition"] == "service_healthy":
                assert "healthcheck" in services()[name] or name in ours()
        assert "memory" in service["deploy"]["resources"]["limits"]
        assert service["restart"] == "unless-stopped"
        assert service["logging"]["options"]["max-file"]


# -- Prometheus


def test_every_gateway_and_engine_is_scraped_under_its_pool() -> None:
    jobs = {job["job_name"]: job for job in load_yaml(PROMETHEUS / "prometheus.yml")[SCRAPES]}
    assert [t for g in jobs["sluice"]["static_configs"] for t in g["targets"]] == ["gateway:8080"]
    scraped = {
        target: group["labels"]["pool"]
        for group in jobs["engines"]["static_configs"]
        for target in group["targets"]
    }
    (model,) = load(ROOT / COMPOSE_CONFIG, environ={}).models
    assert scraped == {w.id: name for name, pool in model.pools.items() for w in pool.workers}


SCRAPES = "scrape_configs"


def test_every_file_of_rules_is_loaded() -> None:
    loaded = load_yaml(PROMETHEUS / "prometheus.yml")["rule_files"]
    assert {p.name for p in PROMETHEUS.glob("*.yml")} == {*loaded, "prometheus.yml"}


def recorded() -> set[str]:
    return {rule["record"] for rule in rules() if "record" in rule}


@cache
def engine_metrics() -> dict[str, set[str]]:
    """Series of the mock's /metrics, which has vLLM's names -> labels."""
    page = mock_page()
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^([\w:]+)\{(.*)\} ", page, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def mock_page() -> str:

    async def get() -> str:
        mock = MockApp(MockConfig(model="m", profile=PROFILES["demo"]))
        transport = httpx.ASGITransport(app=mock)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://mock") as client:
            return (await client.get("/metrics")).raise_for_status().text

    return asyncio.run(get())


@cache
def gateway_metrics() -> dict[str, set[str]]:
    """Series of the gateway's /metrics -> labels."""
    found = {name: set(labels) for name, labels in metric_families().items()}
    for family in Metrics().families():
        if isinstance(family, Histogram):
            labels = found.pop(family.name)
            found[f"{family.name}_bucket"] = labels | {"le"}
            found[f"{family.name}_sum"] = found[f"{family.name}_count"] = labels
    return found


def known_metrics() -> dict[str, set[str] | None]:
    """Series -> labels; None where any may be asked for."""
    sglang = {n for names in ALIASES.values() for n in names if n.startswith("sglang:")}
    known: dict[str, set[str] | None] = dict.fromkeys(recorded() | {"up", "ALERTS"} | sglang)
    known |= {name: labels | SCRAPED for name, labels in gateway_metrics().items()}
    known |= {name: set(labels) | SCRAPED for name, labels in controller_families().items()}
    known |= {name: labels | SCRAPED | {"pool"} for name, labels in engine_metrics().items()}
    return known


WORDS = {"and", "or", "unless", "by", "without", "on", "ignoring", "offset", "bool"}


def metrics_of(expression: str) -> set[str]:
    """Names of the series that a PromQL expression selects."""
    bare = re.sub(r'"[^"]*"', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]", "", bare)
    bare = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", "", bare)
    names = re.findall(r"(?<![\w:.$])([a-zA-Z_:][\w:]*)(?!\w|:|\s*\()", bare)
    return set(names) - WORDS


def selectors_of(expression: str) -> Iterator[tuple[str, list[str]]]:
    """(series, labels that it is selected by)."""
    for name, matchers in re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", expression):
        yield name, re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)


def grouped_by(expression: str) -> set[str]:
    lists = re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression)
    return {label.strip() for labels in lists for label in labels.split(",")}


def expressions() -> list[tuple[str, str]]:
    """(where, PromQL) of every rule and every query of the dashboards."""
    found = [(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]
    for path in DASHBOARDS:
        found += queries(json.loads(path.read_text(encoding="utf-8")))
    return found


def test_every_metric_asked_for_exists_with_its_labels() -> None:
    known = known_metrics()
    assert "sluice_requests_total" in known
    assert "sluice_ttft_seconds_bucket" in known
    assert "vllm:num_preemptions_total" in known
    for where, text in expressions():
        names = metrics_of(text)
        assert names, where
        assert names - known.keys() == set(), where
        for name, labels in selectors_of(text):
            assert set(labels) <= (known[name] or set(labels)), (where, name)
        labels_known = [known[name] for name in names]
        if None not in labels_known:
            grouping = set().union(*(labels or set() for labels in labels_known))
            assert grouped_by(text) <= grouping, where


def test_every_metric_of_the_gateway_is_on_a_dashboard() -> None:
    shown = {n for path in DASHBOARDS for _, q in queries(json.loads(path.read_text())) for n in
             metrics_of(q)}  # fmt: skip
    told = shown | {name for rule in rules() for name in metrics_of(rule["expr"])}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in told}
    assert set(metric_families()) - families == set()


def test_buckets_asked_for_exist() -> None:
    page = mock_page()
    for rule in rules():
        for bound in re.findall(r'\ble="([^"]+)"', rule["expr"]):
            assert f'le="{bound}"' in page


def test_outcomes_asked_for_exist() -> None:
    documented = (ROOT / "docs/operate/request-log.md").read_text("utf-8")
    for _, text in expressions():
        for values in re.findall(r'outcome=~?"([^"]+)"', text):
            assert [v for v in values.split("|") if f"`{v}`" not in documented] == []


@pytest.mark.parametrize("alert", alerts(), ids=lambda a: a["alert"])
def test_every_alert_is_tested_both_ways_and_described(alert: dict[str, Any]) -> None:
    name = alert["alert"]
    cases = [
        case["exp_alerts"]
        for path in RULE_TESTS
        for test in load_yaml(path)["tests"]
        for case in test.get("alert_rule_test", [])
        if case["alertname"] == name
    ]
    assert any(cases)
    assert not all(cases)
    assert alert["labels"]["severity"] in {"page", "ticket"}
    assert alert["annotations"]["summary"]
    assert alert["annotations"]["runbook_url"] == f"docs/operate/runbooks.md#{name.lower()}"
    assert f"| `{name}` | {alert['labels']['severity']} |" in DEPLOY_PAGE


def test_every_alert_described_exists() -> None:
    described = re.findall(r"^\| `(\w+)` \| (?:page|ticket)", DEPLOY_PAGE, re.MULTILINE)
    assert described == [alert["alert"] for alert in alerts()]


DEPLOY_PAGE = (ROOT / "docs/operate/deploy.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("alert", alerts(), ids=lambda a: a["alert"])
def test_every_alert_has_a_runbook_that_says_what_to_do(alert: dict[str, Any]) -> None:
    section = section_of("docs/operate/runbooks.md", alert["alert"])
    for part in ("**Meaning.** ", "**Do.** "):
        assert len(section.partition(part)[2].partition("\n")[0]) > 30, part


def test_every_runbook_belongs_to_an_alert() -> None:
    page = (ROOT / "docs/operate/runbooks.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == [alert["alert"] for alert in alerts()]


def test_variables_of_the_environment_are_described() -> None:
    text = (ROOT / "docker-compose.yml").read_text("utf-8")
    named = set(re.findall(r"\$\{(\w+):-", text)) - {"NAME"}
    assert [name for name in sorted(named) if f"`{name}`" not in DEPLOY_PAGE] == []
    assert [name for name in services() if f"`{name}`" not in DEPLOY_PAGE] == []


def promtool(*arguments: str | Path, cwd: Path = ROOT) -> None:
    done = subprocess.run(
        ["promtool", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_configuration_and_rules() -> None:
    promtool("check", "config", PROMETHEUS / "prometheus.yml")


@needs_promtool
@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda p: p.name)
def test_promtool_s_unit_tests_pass(path: Path) -> None:
    promtool("test", "rules", path)


@needs_promtool
def test_queries_of_the_dashboards_are_promql(tmp_path: Path) -> None:
    found = [query for path in DASHBOARDS for _, query in queries(json.loads(path.read_text()))]
    assert len(found) > 30
    as_rules = [{"record": f"panel:{i}", "expr": query} for i, query in enumerate(found)]
    group = {"groups": [{"name": "panels", "rules": as_rules}]}
    (tmp_path / "panels.yml").write_text(yaml.safe_dump(group), encoding="utf-8")
    promtool("check", "rules", tmp_path / "panels.yml")


# -- Grafana


def test_grafana_finds_its_source_and_its_dashboards() -> None:
    source = load_yaml("deploy/grafana/provisioning/datasources/prometheus.yml")["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    scrape = load_yaml(PROMETHEUS / "prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scrape
    provider = load_yaml("deploy/grafana/provisioning/dashboards/sluice.yml")["providers"][0]
    grafana = services()["grafana"]
    mounts = {v.split(":")[1]: v.split(":")[0] for v in grafana["volumes"]}
    folder = ROOT / mounts[provider["options"]["path"]]
    assert folder == DASHBOARDS[0].parent
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (folder / home.name).exists()
    assert ROOT / mounts["/etc/grafana/provisioning"] == ROOT / "deploy/grafana/provisioning"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda p: p.name)
def test_a_dashboard_is_whole(path: Path) -> None:
    dashboard = json.loads(path.read_text(encoding="utf-8"))
    assert dashboard["schemaVersion"] >= 41
    assert dashboard["uid"] == path.stem
    variables = {v["name"] for v in dashboard["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", path.read_text("utf-8"))) - {"__all"} <= variables
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["targets"]
            assert panel["datasource"]["uid"] == "${datasource}"
            letters = [target["refId"] for target in panel["targets"]]
            assert len(set(letters)) == len(letters)


def test_the_dashboard_leads_to_the_story_of_a_request() -> None:
    (path,) = DASHBOARDS
    urls = [link["url"] for link in json.loads(path.read_text(encoding="utf-8"))["links"]]
    assert "${gateway}/dashboard#request=${request:percentencode}" in urls
