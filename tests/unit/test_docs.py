"""The documentation says what the code is: names, numbers, snippets and links are checked."""

import ast
import importlib
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import msgspec
import pytest
from prometheus_client import CollectorRegistry

import gateway.pipeline.dispatcher
import gateway.pipeline.pipeline
from bench.__main__ import BENCHES
from controller.health import Figures
from gateway import errors
from gateway.admission.terms import DenialReason
from gateway.control.metrics_page import MetricsPage
from gateway.errors import REASONS
from gateway.metrics import Metrics
from gateway.payload.head import FORWARDED
from gateway.payload.members import STEERING_FIELDS
from gateway.records.decision import DECISION_SCHEMA, DecisionRecord
from gateway.records.endpoint import ENDPOINTS
from gateway.routing.retry import FaultKind
from gateway.settings import parse
from gateway.settings.source import install
from simulator.engine.profiles import PROFILES
from simulator.mock_server import tokenizer
from simulator.mock_server.api.faults import KINDS
from tests.running import command

ROOT = Path(__file__).parents[2]
ADRS = sorted(ROOT.glob("docs/adr/*.md"))
SITE = [page for page in sorted(ROOT.glob("docs/**/*.md")) if page not in ADRS]
PAGES = [*sorted(ROOT.glob("*.md")), *SITE, *ADRS]
SHIPPED = ("sluice", "gateway", "planner", "simulator", "compressor", "predictor")
UNITS = {"s": 1, "KiB": 1024, "MiB": 1024**2}


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def prose_of(text: str) -> str:
    """The text without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def section_of(name: str, heading: str) -> str:
    """A section of a page: what follows its heading, or the title, up to the next one."""
    pattern = rf"^##? {heading}\n(.*?)(?=^## |\Z)"
    match = re.search(pattern, text_of(name), re.MULTILINE | re.DOTALL)
    assert match, f"{name} has no section {heading}"
    return match[1]


def rows_of(text: str) -> list[list[str]]:
    """Cells of all table rows but the headings and rules."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return [row for row in rows if not row[0] or set(row[0]) != {"-"}]


def code_of(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def blocks_of(path: Path, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def commands() -> dict[str, list[str]]:
    """Verb -> its long options, and those of the verbs under it."""
    return {name: options_of(verb) for name, verb in command().commands.items()}


def options_of(verb: Any) -> list[str]:
    found = [o for p in verb.params for o in (*p.opts, *p.secondary_opts) if o.startswith("--")]
    return found + [
        o for under in getattr(verb, "commands", {}).values() for o in options_of(under)
    ]


def metric_families() -> dict[str, list[str]]:
    """Metric -> labels, as /metrics spells them."""
    page = MetricsPage(Metrics(), [], lambda: 0, lambda: 0.0)
    found = {}
    for family in page.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        found[name] = list(family.labels)
    return found


def controller_families() -> dict[str, list[str]]:
    """The same of the controller's own port."""
    metrics = [m for m in vars(Figures()).values() if not isinstance(m, CollectorRegistry)]
    return {
        m._name + ("_total" if m._type == "counter" else ""): list(m._labelnames) for m in metrics
    }


def test_files_named_in_the_architecture_exist() -> None:
    names = [
        name
        for name in code_of(prose_of(text_of("docs/architecture.md")))
        if "/" in name or name.endswith((".py", ".toml", ".md", ".yaml"))
    ]
    assert len(names) > 30
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_architecture_names_every_module() -> None:
    rows = {
        row[1].strip("`"): row[2]
        for row in rows_of(text_of("docs/architecture.md"))
        if len(row) == 3
    }
    folders = sorted({file.parent for file in (ROOT / "gateway").glob("*/**/*.py")})
    assert len(folders) > 15
    for folder in folders:
        modules = {file.stem for file in folder.glob("*.py")} - {"__init__"}
        assert set(code_of(rows[f"{folder.relative_to(ROOT)}/"])) == modules


def test_files_named_in_the_guide_for_developers_exist() -> None:
    names = re.findall(r"`((?:[a-z_]+/)+[a-zA-Z_.]*)`", text_of("docs/develop/add.md"))
    assert len(names) > 30
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_files_and_names_in_the_glossary_exist() -> None:
    rows = [row for row in rows_of(section_of("docs/glossary.md", "Glossary")) if len(row) == 3]
    cells = [row[2] for row in rows if code_of(row[2])]
    assert len(cells) > 60
    for cell in cells:
        under = ROOT if "top level" in cell else ROOT / "gateway"
        text = ""
        for name in code_of(cell):
            if "/" in name or name.endswith(".py"):
                assert (under / name).exists(), name
                text = (under / name).read_text(encoding="utf-8") if name[-1] != "/" else ""
            else:
                assert re.search(rf"\b{name}\b", text), (name, cell)


@pytest.mark.parametrize("page", SITE, ids=lambda p: p.name)
def test_a_page_says_first_for_whom_it_is_and_is_not_long(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert re.match(r"For [^.:]+:", lines[2]), lines[2]
    assert len(lines) < 300


def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").splitlines()) <= 200


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs/README.md"
    linked = {
        (index.parent / target.partition("#")[0]).resolve()
        for target in re.findall(r"\]\(([^)\s]+)\)", index.read_text(encoding="utf-8"))
    }
    benches = ROOT / "docs/develop/benches"
    pages = {page for page in SITE if page != index and page.parent != benches}
    assert pages - linked == set()


def test_pages_named_in_the_sources_exist() -> None:
    folders = ("gateway", "sluice", "simulator", "planner", "compressor", "predictor", "bench")
    files = [p for folder in (*folders, "deploy", "tests") for p in ROOT.glob(f"{folder}/**/*")]
    files += [ROOT / name for name in ("Makefile", "Dockerfile", "docker-compose.yml")]
    files += [ROOT / "pyproject.toml", ROOT / "docs/sluice.yaml"]
    suffixes = {"", ".py", ".yml", ".yaml", ".json", ".toml", ".lua"}
    named = {
        name.rstrip(".")
        for file in files
        if file.is_file() and file.suffix in suffixes
        for name in re.findall(r"\bdocs/[\w/.-]+", file.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert [name for name in sorted(named) if not list(ROOT.glob(f"{name}*"))] == []


def test_the_architecture_names_every_stage_in_order() -> None:
    page = text_of("docs/architecture.md")
    assert [row[:2] for row in rows_of(page) if row[0].isdigit()] == numbered_stages()


def numbered_stages() -> list[list[str]]:
    """[number, name] as the pipeline's docstring lists them."""
    docstring = gateway.pipeline.pipeline.__doc__ or ""
    found = re.findall(
        r"(?<=[\n ] )(\d+) ([a-z][a-z, ]*?)(?: \(always\))?(?=\s{2}|\n|$)", docstring
    )
    assert len(found) == 10
    return [list(pair) for pair in found]


def test_the_ten_stages_are_those_of_the_pipeline() -> None:
    rows = [row for row in rows_of(text_of("docs/concepts/pipeline.md")) if row[0].isdigit()]
    assert [row[:2] for row in rows] == numbered_stages()


def test_the_pipeline_calls_its_stages_in_that_order() -> None:
    def calls(module: ModuleType, method: str, *expected: str) -> None:
        source = Path(module.__file__ or "").read_text(encoding="utf-8")
        body = source[source.index(f"async def {method}(") :]
        places = [body.index(call) for call in expected]
        assert places == sorted(places)

    calls(gateway.pipeline.pipeline, "serve", "self._run(", "self._settler.settle(")
    calls(gateway.pipeline.pipeline, "_read", "authenticate.authenticate(", "plan.estimate(")
    calls(
        gateway.pipeline.pipeline,
        "_run",
        *("self._read(", "stage_plan.plan(", "stage_plan.admit(", "self._compress("),
        "self._dispatcher.run(",
    )
    calls(gateway.pipeline.dispatcher, "run", "self._bind(", "self._attempt(")
    calls(gateway.pipeline.dispatcher, "_bind", "binder.bind(", "binder.wait(")
    calls(gateway.pipeline.dispatcher, "_attempt", "self._relay(", "relay.run(")


def test_every_metric_is_described_and_every_described_metric_exists() -> None:
    for section, families in (
        ("Metrics", metric_families()),
        ("Controller", controller_families()),
    ):
        described = {
            code_of(row[0])[0]: [label for label in row[1].split(", ") if label]
            for row in rows_of(section_of("docs/operate/metrics.md", section))
            if row[0].startswith("`sluice_") and len(row) == 3
        }
        assert described == families


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_metrics_named_anywhere_exist(page: Path) -> None:
    known = {*metric_families(), *controller_families()}
    named = set(re.findall(r"\bsluice_[a-z_]+", page.read_text(encoding="utf-8")))
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in named} <= known


def test_every_field_of_a_decision_is_documented_and_no_other() -> None:
    section = section_of("docs/operate/request-log.md", "Request log")
    documented = [name for row in rows_of(section) for name in code_of(row[0])]
    assert sorted(documented) == sorted(decision_fields())
    assert f"`schema` is {DECISION_SCHEMA};" in section


def test_the_examples_for_jq_name_fields_that_exist() -> None:
    examples = re.findall(
        r"^jq .*$", section_of("docs/operate/request-log.md", "Request log"), re.MULTILINE
    )
    named = [name for line in examples for name in re.findall(r"(?<![\w\]])\.([a-z][\w.]+)", line)]
    assert len(examples) == 4
    assert set(named) <= set(decision_fields())


def decision_fields() -> Iterator[str]:
    """Fields of a decision, those of its sections as `section.field`."""
    for field in msgspec.structs.fields(DecisionRecord):
        if isinstance(field.default, msgspec.Struct):
            yield from (f"{field.name}.{name}" for name in field.default.__struct_fields__)
        else:
            yield field.name


STATUSES = {
    reason: {status for status, several in REASONS.items() if reason in several.split()}
    for reason in " ".join(REASONS.values()).split()
}
"""Those of each reason for which the gateway refuses."""


def test_every_refusal_is_documented_with_its_statuses() -> None:
    rows = rows_of(section_of("docs/operate/errors.md", "Errors"))
    documented = [name for row in rows for name in code_of(row[0])]
    assert sorted(documented) == sorted({*STATUSES, "engine_refused"})  # each in one row
    for reasons, told, *_ in rows:
        if told.replace(", ", "").isdecimal():  # others: the engine's, or in the stream
            found = set().union(*(STATUSES[name] for name in code_of(reasons)))
            assert {int(status) for status in told.split(", ")} == found, reasons


def test_every_reason_of_a_refusal_is_in_the_table() -> None:
    found = set(get_args(DenialReason))
    for path in ROOT.glob("gateway/**/*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in REFUSALS:
                found |= {
                    name.value
                    for keyword in call.keywords
                    if keyword.arg == "reason"
                    for name in ast.walk(keyword.value)
                    if isinstance(name, ast.Constant)
                }
    assert found <= STATUSES.keys() | {"engine_refused"}


REFUSALS = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.Refusal)
}


def test_plan_reasons_are_documented() -> None:
    files = ("routing/routing.py", "pipeline/plan.py")
    source = "".join(text_of(f"gateway/{file}") for file in files)
    documented = [
        name
        for row in rows_of(section_of("docs/concepts/pipeline.md", "Boundary"))
        for name in code_of(row[0])
    ]
    assert len(documented) == 7
    assert [name for name in documented if f'"{name}"' not in source] == []


def test_every_fault_of_an_attempt_is_in_the_retry_table() -> None:
    rows = rows_of(section_of("docs/concepts/pipeline.md", "Retry"))
    documented = {name for row in rows for name in code_of(row[0])}
    assert documented == set(get_args(FaultKind))


def test_routes_of_the_data_plane_are_documented() -> None:
    section = section_of("docs/operate/routes.md", "Routes")
    assert [path for path in ENDPOINTS if path not in section] == []


def test_every_header_of_the_gateway_s_own_is_documented() -> None:
    page = text_of("docs/operate/routes.md")
    sources = [path.read_text(encoding="utf-8") for path in ROOT.glob("gateway/**/*.py")]
    named = {name for text in sources for name in re.findall(r"\bx-sluice-[a-z-]*[a-z]", text)}
    assert len(named) > 8
    assert [name for name in sorted(named) if f"`{name}`" not in page] == []


def test_forwarded_headers_and_removed_fields_are_documented() -> None:
    security = section_of("docs/operate/security.md", "Security")
    assert [h for h in FORWARDED if f"`{h.decode()}`" not in security] == []
    for page in (security, section_of("docs/concepts/pipeline.md", "What is changed in a body")):
        assert [f for f in STEERING_FIELDS if f"`{f}`" not in page] == []


def bounds() -> list[tuple[str, str]]:
    """(value, where) of every row that names a constant or a setting."""
    rows = rows_of(section_of("docs/operate/bounds.md", "Bounds"))
    found = [(row[1], code_of(row[2])[0]) for row in rows if len(row) == 3 and code_of(row[2])]
    timeouts = rows_of(section_of("docs/operate/bounds.md", "Time-outs"))
    found += [(row[1], code_of(row[0])[0]) for row in timeouts if code_of(row[0])]
    assert len(found) > 25
    return found


@pytest.mark.parametrize(("stated", "where"), bounds(), ids=str)
def test_stated_bounds_are_the_code_s(stated: str, where: str) -> None:
    number, _, unit = stated.partition(" ")
    value = float(number.replace(",", "")) * UNITS.get(unit, 1)
    if where.startswith("gateway."):
        module, _, name = where.rpartition(".")
        assert value == getattr(importlib.import_module(module), name)
        return
    found: object = parse(MINIMAL, "minimal.yaml", {})
    for step in where.split("."):
        found = getattr(found, step)
    assert value == found


MINIMAL = """\
version: 1
models:
  - name: m
    pools: {only: {max_model_len: 8192, max_num_seqs: 8, workers: ["http://127.0.0.1:1"]}}
"""


def test_every_command_and_its_options_are_documented() -> None:
    rows = {row[0]: row for row in rows_of(section_of("docs/start/commands.md", "Commands"))}
    usages = [code_of(cell)[0] for cell in rows if cell.startswith("`sluice ")]
    assert {usage.split()[1] for usage in usages} == set(commands())
    for usage in usages:
        options = commands()[usage.split()[1]]
        assert [o for o in re.findall(r"--[a-z-]+", usage) if o not in options] == []


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("docs/operate/metrics.md", r"\| (`\w+`)"),
        ("docs/operate/routes.md", r"\| (`[^|]+)\|"),
        ("docs/start/commands.md", r"\| `(sluice (?:import )?[\w-]+)"),
    ],
)
def test_no_metric_route_or_command_has_two_rows_in_one_table(page: str, name: str) -> None:
    for table in text_of(page).split("\n\n"):
        found = re.findall(f"^{name}", table, re.MULTILINE)
        assert len(found) == len(set(found)), sorted(found)


def test_addresses_of_this_machine_are_written_as_what_servers_bind_to() -> None:
    """`localhost` is IPv6 first on many machines, where nobody listens."""
    shipped = [ROOT / "Makefile", ROOT / "Dockerfile", ROOT / "docker-compose.yml", *PAGES]
    shipped += [ROOT / "docs/sluice.yaml", *ROOT.glob("deploy/**/*.y*ml")]
    for folder in ("gateway", "sluice", "simulator", "planner", "compressor"):
        shipped += ROOT.glob(f"{folder}/**/*.py")
    named = [p.name for p in shipped if "localhost" in p.read_text(encoding="utf-8")]
    assert set(named) == {"roles.py", "checks.py", "names.py"}, (
        "where an operator or a browser writes it"
    )


def test_the_readme_starts_with_the_two_commands() -> None:
    commands_block = blocks_of(ROOT / "README.md", "sh")[0]
    assert [line.split("#")[0].strip() for line in commands_block.splitlines()] == [
        "make demo",
        "make test",
    ]


def test_every_benchmark_is_documented_and_no_other() -> None:
    named = set(re.findall(r"NAME=([a-z-]+)", text_of("docs/develop/benches/README.md")))
    assert named == set(BENCHES)


def test_make_targets_named_in_the_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    for page in PAGES:
        named = re.findall(
            r"^make ([a-z-]+)|`make ([a-z-]+)", page.read_text("utf-8"), re.MULTILINE
        )
        assert {a or b for a, b in named} <= targets


def test_what_is_to_be_installed_is_the_checkout_or_a_wheel() -> None:
    """No index has the package, and the name `sluice` on PyPI is another project's."""
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    code = [file for name in SHIPPED for file in ROOT.glob(f"{name}/**/*.py")]
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    named = set()
    for file in (*code, *pages, ROOT / "docs/sluice.yaml", ROOT / "docs/sluice.schema.json"):
        text = file.read_text("utf-8")
        assert not re.search(r"sluice[-_]gateway\[|pip install [^\n`]*\bsluice\b", text), file
        named.update(re.findall(r"'\.\[(\w+)\]'", text))
        named.update(re.findall(r"""(?:install\(|needs_extra\([^)]*)"(\w+)"\)""", text))
    assert {"redis", "exact", "jwt", "otel", "plan", "train", "bench"} <= named
    assert named <= project["optional-dependencies"].keys()
    assert install("redis").startswith("pip install '.[redis]' in Sluice's checkout")
    assert project["scripts"] == {"sluice": "sluice.__main__:main"}


def test_the_mock_s_flags_and_faults_are_documented() -> None:
    flags = {
        name
        for row in rows_of(section_of("docs/develop/mock.md", "Flags"))
        for name in code_of(row[0])
    }
    assert flags == {option for option in commands()["mock"] if option != "--help"}
    rows = rows_of(section_of("docs/develop/mock.md", "Faults"))
    faults = {code_of(row[0])[0].partition(":")[0] for row in rows if code_of(row[0])}
    assert faults == set(KINDS)
    assert [name for name in PROFILES if f"`{name}`" not in text_of("docs/develop/mock.md")] == []


def test_the_mock_s_fixed_tokens_are_stated() -> None:
    assert (
        f"adds {tokenizer.CHAT_REQUEST_TOKENS} tokens to a request and "
        f"{tokenizer.CHAT_MESSAGE_TOKENS} to each message; a plain prompt gets "
        f"{tokenizer.PROMPT_TOKENS}; an image costs {tokenizer.IMAGE_TOKENS}."
    ) in text_of("docs/develop/mock.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_configurations_load(page: Path) -> None:
    for number, block in enumerate(blocks_of(page, "yaml")):
        if block.startswith("version: "):
            environ = dict.fromkeys(re.findall(r"\$\{(\w+)", block), "from-the-environment")
            parse(block, f"{page.name}, block {number + 1}", environ)


def test_the_readme_has_a_whole_configuration() -> None:
    assert any(b.startswith("version: 1") for b in blocks_of(ROOT / "README.md", "yaml"))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_snippets_parse(page: Path) -> None:
    for block in blocks_of(page, "python"):
        ast.parse(block)
    for body in re.findall(r"-d '(\{.*?\})'", page.read_text(encoding="utf-8")):
        json.loads(body)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_relative_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page.read_text(encoding="utf-8"))):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
            assert anchor in slugs, target


@pytest.mark.parametrize("adr", ADRS, ids=lambda p: p.name)
def test_decisions_are_short_and_whole(adr: Path) -> None:
    text = adr.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 40
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences"]


def test_files_named_in_the_decisions_exist() -> None:
    for adr in ADRS:
        names = code_of(prose_of(adr.read_text(encoding="utf-8")))
        paths = [name for name in names if re.match(r"(gateway|simulator|sluice|bench)/", name)]
        assert [path for path in paths if not (ROOT / path).exists()] == []
