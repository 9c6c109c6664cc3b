"""The locks in requirements/: complete, hashed, from no index of their own, one version each."""

import re
from collections.abc import Iterable

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.deploy.files import ROOT, pins, pyproject

LOCKS = ("runtime", "build", "dev")
PROJECT = pyproject()["project"]
EXTRAS = PROJECT["optional-dependencies"]
IMAGE = [line for extra in ("jwt", "k8s", "redis", "otel") for line in EXTRAS[extra]]
"""What the image holds beyond the package's own."""
BUILD = pyproject()["dependency-groups"]["build"]


def with_extras(requirements: Iterable[str]) -> list[Requirement]:
    """The requirements, each extra of this package replaced by what it holds."""
    found = []
    for requirement in map(Requirement, requirements):
        if requirement.name == PROJECT["name"]:
            found += with_extras(line for extra in requirement.extras for line in EXTRAS[extra])
        else:
            found.append(requirement)
    return found


@pytest.mark.parametrize(
    ("lock", "requirements"),
    [
        ("runtime", [*PROJECT["dependencies"], *IMAGE]),
        ("build", BUILD),
        ("dev", [*PROJECT["dependencies"], *EXTRAS["dev"], *BUILD]),
    ],
)
def test_a_lock_holds_a_version_that_each_requirement_allows(
    lock: str, requirements: list[str]
) -> None:
    versions = pins(lock)
    for requirement in with_extras(requirements):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)])


@pytest.mark.parametrize("lock", [*LOCKS, "helm"])
def test_a_lock_has_pins_and_hashes_only(lock: str) -> None:
    text = (ROOT / f"requirements/{lock}.txt").read_text(encoding="utf-8")
    entries = re.sub(r" \\\n", "", re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    assert entries
    named = r"[a-z0-9-]+(\[[a-z0-9,-]+\])?==[\w.]+"
    pin = re.compile(named + r"( ; [^\\]+?)?( +--hash=sha256:[0-9a-f]{64})+")
    assert [entry for entry in entries if not pin.fullmatch(entry)] == []


def test_the_image_runs_the_versions_that_the_tests_run_with() -> None:
    assert pins("runtime").items() <= pins("dev").items()
    assert pins("build").items() <= pins("dev").items()
