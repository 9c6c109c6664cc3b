"""The workflows of the forge and the hooks before a commit: they run what the Makefile runs."""

import re
from typing import Any

import pytest

from tests.unit.deploy.files import ROOT, load_yaml, pyproject

WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def supported() -> list[str]:
    """The versions of Python that the package names."""
    classifiers = "\n".join(pyproject()["project"]["classifiers"])
    return re.findall(r"Python :: (3\.\d+)$", classifiers, re.MULTILINE)


def recipe(target: str) -> str:
    """The lines that make runs for a target."""
    match = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert match, target
    return match[1]


def test_ci_tests_and_releases_are_built_for_every_supported_python() -> None:
    jobs = load_yaml(".github/workflows/ci.yml")["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == supported()
    built = pyproject()["tool"]["cibuildwheel"]["build"].split()
    assert built == [f"cp{version.replace('.', '')}-*" for version in supported()]


def test_ci_runs_what_the_script_of_ci_runs() -> None:
    jobs = load_yaml(".github/workflows/ci.yml")["jobs"]
    runs = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    called = re.findall(r"^make (\w+)", "\n".join(runs), re.MULTILINE)
    assert sorted(called) == sorted(re.findall(r"^timeout \d+ make (\w+)", script, re.MULTILINE))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_pins_each_action_and_takes_no_permission_by_default(workflow: Any) -> None:
    text = workflow.read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+.*)", text)
    pinned = r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+.*|\./\.github/workflows/\w+\.yml"
    assert [action for action in used if not re.fullmatch(pinned, action)] == []
    loaded = load_yaml(workflow)
    assert loaded["permissions"] == {}
    assert [name for name, job in loaded["jobs"].items() if "permissions" not in job] == []


def test_the_hooks_run_what_lint_runs() -> None:
    hooks = load_yaml(".pre-commit-config.yaml")["repos"][-1]["hooks"]
    tools = {re.sub(r"^\.venv/bin/| --.*", "", hook["entry"]) for hook in hooks}
    linted = recipe("lint").replace(" --check", "")
    called = set(re.findall(r"\$\(BIN\)/([a-z-]+(?: [a-z]+)?)", linted))
    called |= {f"make --no-print-directory {t}" for t in re.findall(r"\$\(MAKE\).* (\S+)$", linted)}
    assert tools == {re.sub(r" --.*", "", entry) for entry in called}
