"""Discovery URLs, and how the process reaches the Kubernetes API."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from gateway.records.attempt import DiscoverySource, FoundEngine
from gateway.settings.model import PoolConfig
from gateway.settings.worker import WorkerConfig, cluster_access, source_of


@pytest.mark.parametrize(
    ("url", "fields"),
    [
        ("dns://e.test:80", {"kind": "dns", "name": "e.test", "port": "80"}),
        ("dns://_http._tcp.e.test", {"kind": "dns", "name": "_http._tcp.e.test"}),
        ("dns://e:80?server=10.0.0.2:53", {"name": "e", "server": ("10.0.0.2", 53)}),
        ("file:///etc/w.yaml", {"kind": "file", "name": "/etc/w.yaml"}),
        ("k8s://service/e", {"kind": "service", "name": "e"}),
        ("k8s://service/e.ns:http", {"name": "e", "namespace": "ns", "port": "http"}),
        (
            "k8s://pods?selector=app%3Dvllm,tier%3Da&port=8000&namespace=ns",
            {"kind": "pods", "selector": "app=vllm,tier=a", "port": "8000", "namespace": "ns"},
        ),
        ("inferencepool://p.ns", {"kind": "inferencepool", "name": "p", "namespace": "ns"}),
    ],
)
def test_urls_name_sources(url: str, fields: dict[str, object]) -> None:
    source = source_of(url)
    assert isinstance(source, DiscoverySource)
    assert {name: getattr(source, name) for name in fields} == fields


@pytest.mark.parametrize(
    "url",
    [
        *("dns://e.test", "dns://_http._tcp.e:80", "dns://10.0.0.1:80", "dns://:80", "dns://e:x"),
        *(
            "dns://e:80?server=x",
            "dns://e:80?ttl=1",
            "dns://e:80/path",
            "file://w.yaml",
            "file:///",
        ),
        *("k8s://service/", "k8s://service/E", "k8s://pods?port=80", "k8s://pods?selector=a%3Db"),
        *("k8s://nodes/a", "k8s://service/a.b.c", "inferencepool://", "inferencepool://A"),
        *("k8s://service/a?x=1", "dns://u@e:80", "dns://[::1:80"),
    ],
)
def test_bad_urls_are_refused_with_the_right_form(url: str) -> None:
    with pytest.raises(ValidationError) as refused:
        WorkerConfig(discover=url)
    (error,) = refused.value.errors()
    assert "write" in error["ctx"]["fix"] or "list" in error["ctx"]["fix"]


def pool(workers: object, **more: object) -> PoolConfig:
    return PoolConfig.model_validate(
        {"max_model_len": 8192, "max_num_seqs": 4, "workers": workers, **more}
    )


@pytest.mark.parametrize(
    "workers",
    [
        "dns://e.test:80",
        ["dns://e.test:80"],
        [{"discover": "dns://e.test:80"}],
    ],
)
def test_a_source_is_written_like_a_worker(workers: object) -> None:
    found = pool(workers)
    assert found.workers == (WorkerConfig(discover="dns://e.test:80"),)
    assert (found.may_be_empty, found.addresses, found.engines) == (True, (), ())
    assert found.replica_bounds == (0, 64)


def test_engines_and_sources_stand_side_by_side() -> None:
    found = pool(["http://a:1", {"discover": "dns://e.test:80", "ranks": 2}])
    assert [address.id for address in found.addresses] == ["a:1"]
    assert found.replica_bounds == (0, 65)
    assert pool("dns://e:80", replicas={"min": 1, "max": 9}).replica_bounds == (1, 9)


def test_a_found_engine_has_the_sources_key_name_and_ranks_unless_it_says_its_own() -> None:
    source = WorkerConfig.model_validate(
        {"discover": "dns://e:80", "api_key": "sk", "model": "base", "ranks": 2}
    )
    ids = [address.id for address in source.addresses_for(FoundEngine(urls=("http://a:1/v1/",)))]
    assert ids == ["a:1#0", "a:1#1"]
    (one,) = source.addresses_for(FoundEngine(urls=("http://a:1",), model="other", ranks=1))
    assert (one.api_key, one.served_model, one.rank) == ("sk", "other", None)
    two = source.addresses_for(FoundEngine(urls=("http://a:1", "http://a:2")))
    assert [(address.port, address.rank) for address in two] == [(1, None), (2, None)]
    with pytest.raises(ValueError, match="host"):
        source.addresses_for(FoundEngine(urls=("http://a:0",)))


def test_a_pod_reaches_the_api_by_its_service_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLUICE_KUBERNETES_URL", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert cluster_access(tmp_path) is None
    (tmp_path / "token").write_text("t")
    (tmp_path / "namespace").write_text("ns\n")
    access = cluster_access(tmp_path)
    assert access is not None
    assert (access.url, access.namespace) == ("https://10.0.0.1:443", "ns")
    monkeypatch.setenv("SLUICE_KUBERNETES_URL", "http://127.0.0.1:8001/")
    access = cluster_access(tmp_path)
    assert access is not None
    assert (access.url, access.token_file) == ("http://127.0.0.1:8001", None)
