"""`sluice controller`: what it refuses before it starts."""

import sys

import pytest

from tests.running import sluice

NO_CLUSTER = {"KUBECONFIG": "/nowhere/config", "KUBERNETES_SERVICE_HOST": ""}


@pytest.mark.parametrize("url", ["memory://", "sqlite:///file.db", "redis://", "nonsense"])
def test_a_state_that_gateways_do_not_share_is_refused(url: str) -> None:
    done = sluice("controller", "--namespace", "team", "--state-url", url, **NO_CLUSTER)
    assert done.exit_code == 2
    assert "not the gateways' Redis" in done.output
    assert "fix: give redis://HOST:6379/0" in done.output


def test_a_password_is_never_shown() -> None:
    url = "redis://:a-secret-word@/0"
    done = sluice("controller", "--namespace", "team", "--state-url", url, **NO_CLUSTER)
    assert done.exit_code == 2
    assert "a-secret-word" not in done.output


def test_without_a_cluster_it_says_how_to_name_one() -> None:
    url = "redis://127.0.0.1:6379/0"
    done = sluice("controller", "--namespace", "team", SLUICE_STATE_URL=url, **NO_CLUSTER)
    assert done.exit_code == 2
    assert "no Kubernetes API: Configuration file /nowhere/config not found" in done.output
    assert "KUBECONFIG" in done.output.partition("fix: ")[2]


@pytest.mark.parametrize("library", ["lightkube", "redis"])
def test_without_its_libraries_it_says_how_to_install_them(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    done = sluice("controller", "--namespace", "team", "--state-url", "redis://127.0.0.1/0")
    assert done.exit_code == 2
    assert "fix: pip install '.[k8s]'" in done.output
