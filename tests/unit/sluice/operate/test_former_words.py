"""Verbs under their former names do what they did where only that can be meant."""

import os
import subprocess
import sys

import pytest

from sluice.operate.former_words import in_present_words


@pytest.mark.parametrize(
    ("given", "new"),
    [
        ("tenants", "tenant"),
        ("tenants create acme --entitlements chat", "tenant create acme --entitlements chat"),
        ("tenant create a --tenant acme --model m", None),
        ("tenant list --model m", None),
        ("tenant change a --max-concurrency 2", None),
        ("tenant change a --unset slo-target-ms", None),
        ("tenant change a --unset tokens_per_second", None),
        ("tenant expire a", None),
        ("tenant keys add a", None),
        ("tenant audit", None),
    ],
)
def test_a_former_name_is_read_as_the_new_one_with_one_line(
    given: str, new: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = new or given.replace("tenant", "entitlement", 1)
    assert in_present_words(given.split()) == expected.split()
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n"), "is called `sluice" in said.err) == ("", 1, True)


@pytest.mark.parametrize(
    "given",
    [
        "",
        "--help",
        "tenant",
        "tenant show acme",
        "tenant create acme --display-name Acme",
        "tenant change acme --unset display-name",
        "entitlement list --model m",
        "key add acme web --max-concurrency 4",
    ],
)
def test_the_present_names_are_left_alone(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_present_words(given.split()) == given.split()
    assert capsys.readouterr().err == ""


def test_the_command_knows_former_names_and_lists_none() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sluice", *arguments]
        env = {**os.environ, "COLUMNS": "200"}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True)

    former = run("tenants", "create", "--help")
    assert "--display-name" in former.stdout
    assert former.stderr == "`sluice tenants create` is called `sluice tenant create` now\n"
    assert "--at" in run("tenant", "expire", "--help").stdout
    listed = run("--help").stdout
    assert "tenants " not in listed.replace("tenants at", "")
    assert "entitlement " in listed
