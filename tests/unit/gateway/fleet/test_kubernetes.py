"""List and watch by Kubernetes' rules: versions, bookmarks, 410, watches that end, new tokens."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.fleet import kubernetes
from gateway.fleet.kubernetes import (
    PODS,
    POOLS,
    KubernetesApi,
    Objects,
    engines_of_pods,
    engines_of_slices,
    pool_selects,
    sets_of_kubernetes,
)
from gateway.ports import DiscoveryFailure
from gateway.records.attempt import ClusterAccess, FoundEngine
from gateway.settings.worker import source_of
from tests.kube.discovery import KubeServer, pod, slice_of

PATH = PODS.format("ns")


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeServer]:
    monkeypatch.setattr(kubernetes, "RETRY_PAUSE_S", 0.01)
    async with KubeServer().serving() as serving:
        yield serving


@pytest.fixture
async def api(
    server: KubeServer, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[KubernetesApi]:
    """The server's API; a parameter is the time limit of a watch."""
    token = tmp_path / "token"
    token.write_text(server.token + "\n")
    access = ClusterAccess(url=server.url, namespace="ns", token_file=str(token))
    made = KubernetesApi(access, watch_s=getattr(request, "param", 5))
    yield made
    await made.close()


def watching(seconds: int) -> pytest.MarkDecorator:
    """Have the API's watches end after so long."""
    return pytest.mark.parametrize("api", [seconds], indirect=True)


async def exhausted(sets: AsyncGenerator[Any, None]) -> None:
    """Read sets for ever."""
    async for _ in sets:
        pass


async def reached(sets: Any, *names: str) -> None:
    """Read sets until one has exactly these objects."""
    async with asyncio.timeout(10):
        async for found in sets:
            objects: Objects = found
            if set(objects) == set(names):
                return


async def test_a_watch_that_ends_goes_on_at_the_last_version_without_a_list(
    server: KubeServer, api: KubernetesApi
) -> None:
    await server.put(PATH, pod("a", "10.0.0.1"))
    async with aclosing(api.follow(PATH)) as sets:
        await reached(sets, "a")
        await server.cut()
        await server.put(PATH, pod("b", "10.0.0.2"))
        await reached(sets, "a", "b")
        assert server.lists == [PATH]


@watching(1)
async def test_a_watch_ends_by_its_own_time_limit(server: KubeServer, api: KubernetesApi) -> None:
    async with aclosing(api.follow(PATH)) as sets:
        await reached(sets)
        following = asyncio.ensure_future(reached(sets, "a"))
        async with asyncio.timeout(10):
            while len(server.watches) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await server.put(PATH, pod("a", "10.0.0.1"))
        await following
    assert server.lists == [PATH]


async def test_bookmarks_move_the_version_on_so_that_quiet_watches_do_not_expire(
    server: KubeServer, api: KubernetesApi
) -> None:
    async with aclosing(api.follow(PATH)) as sets:
        await reached(sets)
        following = asyncio.ensure_future(reached(sets, "a"))
        for number in range(3):
            await server.put("/other", pod(f"o{number}", "10.0.0.9"))
        await asyncio.sleep(0.2)
        await server.cut()
        await asyncio.sleep(0.1)
        assert int(server.watches[-1]["resourceVersion"]) == server.version
        await server.put(PATH, pod("a", "10.0.0.1"))
        await following


@pytest.mark.parametrize("as_event", [True, False])
async def test_a_version_that_is_gone_means_a_new_list(
    server: KubeServer, api: KubernetesApi, *, as_event: bool
) -> None:
    server.gone_as_event = as_event
    await server.put(PATH, pod("a", "10.0.0.1"))
    async with aclosing(api.follow(PATH)) as sets:
        await reached(sets, "a")
        following = asyncio.ensure_future(reached(sets, "b"))
        await asyncio.sleep(0.02)
        server.oldest = server.version + 5  # nothing is told of what comes now
        await server.delete(PATH, "a")
        server._log.clear()
        await server.put(PATH, pod("b", "10.0.0.2"))
        server._log.clear()
        server.version += 5
        await server.cut()
        await following
    assert len(server.lists) >= 2


async def test_the_token_is_read_anew_for_each_call(
    server: KubeServer, api: KubernetesApi, tmp_path: Path
) -> None:
    async with aclosing(api.follow(PATH)) as sets:
        await reached(sets)
        following = asyncio.ensure_future(reached(sets, "a"))
        await asyncio.sleep(0.05)
        server.token = "token-2"
        (tmp_path / "token").write_text("token-2")
        await server.cut()
        await server.put(PATH, pod("a", "10.0.0.1"))
        await following


async def test_missing_rights_are_told_with_the_fix(api: KubernetesApi, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("wrong")
    with pytest.raises(DiscoveryFailure, match="Role with get, list and watch"):
        await reached(api.follow(PATH), "a")


async def test_a_watch_that_fails_just_after_a_change_is_not_waited_for(
    server: KubeServer, api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "TOGETHER_S", 0.3)
    async with asyncio.timeout(10), aclosing(api.follow(PATH)) as sets:
        await reached(sets)
        following = asyncio.ensure_future(reached(sets, "a"))
        await asyncio.sleep(0.05)
        await server.put(PATH, pod("a", "10.0.0.1"))
        await asyncio.sleep(0.05)
        server.token = "another"
        await server.cut()
        await following
        with pytest.raises(DiscoveryFailure, match="answered 401"):
            await exhausted(sets)


async def test_outside_a_cluster_the_fix_is_told() -> None:
    with pytest.raises(DiscoveryFailure, match="SLUICE_KUBERNETES_URL"):
        await reached(KubernetesApi(None).follow(PATH))


async def test_a_pod_that_loses_its_label_is_out(server: KubeServer, api: KubernetesApi) -> None:
    await server.put(PATH, pod("a", "10.0.0.1"))
    async with aclosing(api.follow(PATH, labels="app=vllm")) as sets:
        await reached(sets, "a")
        other = pod("a", "10.0.0.1")
        other["metadata"]["labels"] = {"app": "other"}
        await server.put(PATH, other)
        await reached(sets)


async def test_an_inference_pool_that_changes_its_selector_selects_other_pods(
    server: KubeServer, api: KubernetesApi
) -> None:
    pools = POOLS.format("ns")
    second = pod("b", "10.0.0.2")
    second["metadata"]["labels"] = {"app": "two"}
    await server.put(PATH, pod("a", "10.0.0.1"))
    await server.put(PATH, second)
    spec: dict[str, Any] = {"selector": {"matchLabels": {"app": "vllm"}}}
    spec["targetPorts"] = [{"number": 8000}, {"number": 8001}]
    await server.put(pools, {"metadata": {"name": "p"}, "spec": spec})
    named = sets_of_kubernetes(api, source_of("inferencepool://p"), "http")
    async with asyncio.timeout(10), aclosing(named) as sets:
        first = await anext(sets)
        assert first == (FoundEngine(urls=("http://10.0.0.1:8000", "http://10.0.0.1:8001")),)
        changed = {"selector": {"matchLabels": {"app": "two"}}, "targetPorts": [{"number": 9}]}
        await server.put(pools, {"metadata": {"name": "p"}, "spec": changed})
        while (found := await anext(sets)) == first:
            pass
        assert found == (FoundEngine(urls=("http://10.0.0.2:9",)),)
        await server.delete(pools, "p")
        with pytest.raises(DiscoveryFailure, match="no InferencePool p"):
            await exhausted(sets)


def urls(found: tuple[FoundEngine, ...]) -> list[str]:
    return [url for engine in found for url in engine.urls]


def test_ready_endpoints_are_in_and_terminating_ones_are_out() -> None:
    slices = [
        slice_of("a", "s", "10.0.0.1"),
        slice_of("b", "s", "10.0.0.2", terminating=True, ready=False),
        slice_of("c", "s", "10.0.0.3", ready=False),
        slice_of("d", "s", "10.0.0.4", ready=True, terminating=True),
    ]
    unknown = slice_of("e", "s", "10.0.0.5")
    unknown["endpoints"][0]["conditions"] = {}
    found = engines_of_slices([*slices, unknown], "", "http")
    assert urls(found) == ["http://10.0.0.1:8000", "http://10.0.0.5:8000"]


def test_a_pod_with_two_addresses_is_one_engine() -> None:
    six = slice_of("six", "s", "10.0.0.1")
    six["addressType"] = "IPv6"
    six["endpoints"][0]["addresses"] = ["fd00::1"]
    assert urls(engines_of_slices([six, slice_of("four", "s", "10.0.0.1")], "", "http")) == [
        "http://10.0.0.1:8000"
    ]
    assert urls(engines_of_slices([six], "8000", "https")) == ["https://[fd00::1]:8000"]


@pytest.mark.parametrize(("port", "number"), [("api", 9000), ("9000", 9000), ("http", 8000)])
def test_a_services_port_is_chosen_by_name_or_number(port: str, number: int) -> None:
    one = slice_of("a", "s", "10.0.0.1")
    one["ports"].append({"name": "api", "port": 9000})
    assert urls(engines_of_slices([one], port, "http")) == [f"http://10.0.0.1:{number}"]
    with pytest.raises(DiscoveryFailure, match="http:8000, api:9000"):
        engines_of_slices([one], "", "http")


def test_a_services_only_port_is_taken_though_the_service_maps_another_to_it() -> None:
    one = slice_of("a", "s", "10.0.0.1", port=8000)
    assert urls(engines_of_slices([one], "80", "http")) == ["http://10.0.0.1:8000"]


def test_only_ready_pods_that_do_not_end_are_in() -> None:
    pods = [
        pod("a", "10.0.0.1"),
        pod("b", "10.0.0.2", ready=False),
        pod("c", "10.0.0.3", deletionTimestamp="2026-01-01T00:00:00Z"),
        pod("d", ""),
    ]
    found, lacking = engines_of_pods(pods, ("8000",), "http")
    assert (urls(found), lacking) == (["http://10.0.0.1:8000"], [])


def test_a_pod_says_its_model_and_ranks() -> None:
    one = pod("a", "10.0.0.1", annotations={"sluice/model": "org/name"})
    one["metadata"]["labels"]["sluice/ranks"] = "4"
    (found,), _ = engines_of_pods([one], ("http",), "http")
    assert (found.urls, found.model, found.ranks) == (("http://10.0.0.1:8000",), "org/name", 4)


@pytest.mark.parametrize("ranks", ["²", "٤", "9" * 5000, "257", "-1", "x", ""])
def test_ranks_that_are_no_number_are_the_configurations(ranks: str) -> None:
    pods = [pod("a", "10.0.0.1", annotations={"sluice/ranks": ranks}), pod("b", "10.0.0.2")]
    found, _ = engines_of_pods(pods, ("8000",), "http")
    assert [each.ranks for each in found] == [0, 0]


async def test_a_pod_without_the_port_is_left_out_and_named(
    server: KubeServer, api: KubernetesApi, caplog: pytest.LogCaptureFixture
) -> None:
    other = pod("b", "10.0.0.2")
    other["spec"]["containers"][0]["ports"][0]["name"] = "grpc"
    await server.put(PATH, pod("a", "10.0.0.1"))
    await server.put(PATH, other)
    source = source_of("k8s://pods?selector=app%3Dvllm&port=http&namespace=ns")
    named = sets_of_kubernetes(api, source, "http")
    async with asyncio.timeout(10), aclosing(named) as sets:
        assert urls(await anext(sets)) == ["http://10.0.0.1:8000"]
        assert "1 ready pods lack port http: b" in caplog.text
        await server.delete(PATH, "a")
        with pytest.raises(DiscoveryFailure, match="no ready pod has a port http: b"):
            await exhausted(sets)


@pytest.mark.parametrize(
    ("spec", "ports"),
    [
        ({"targetPorts": [{"number": 1}, {"number": 2}]}, ("1", "2")),
        ({"targetPorts": [{"portNumber": 1}]}, ("1",)),
        ({"targetPorts": [{"port": {"number": 1}}]}, ("1",)),
        ({"targetPortNumber": 3}, ("3",)),
    ],
)
def test_the_versions_of_inference_pools_are_understood(
    spec: dict[str, Any], ports: tuple[str, ...]
) -> None:
    selector = {"matchLabels": {"b": "2", "a": "1"}}
    assert pool_selects({"spec": {"selector": selector, **spec}}) == ("a=1,b=2", ports)
    assert pool_selects({"spec": {"selector": {"a": "1"}, **spec}}) == ("a=1", ports)
    with pytest.raises(DiscoveryFailure, match="no selector"):
        pool_selects({"spec": spec})


async def test_a_list_without_an_end_is_given_up(
    server: KubeServer, api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "MAX_PAGES", 2)
    for number in range(2 * kubernetes.PAGE + 1):
        await server.put(PATH, pod(f"p{number}", "10.0.0.1", port=1))
    with pytest.raises(DiscoveryFailure, match="more than 2 pages"):
        await anext(api.follow(PATH))


async def test_a_list_whose_next_page_is_gone_is_begun_again(
    server: KubeServer, api: KubernetesApi
) -> None:
    for number in range(kubernetes.PAGE + 1):
        await server.put(PATH, pod(f"p{number}", "10.0.0.1", port=1))
    server.pages_gone = 2
    async with asyncio.timeout(10), aclosing(api.follow(PATH)) as sets:
        assert len(await anext(sets)) == kubernetes.PAGE + 1
    assert len(server.lists) == 3


@watching(0)
async def test_watches_that_end_at_once_are_begun_again_after_a_pause(
    server: KubeServer, api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "RETRY_PAUSE_S", 3600.0)
    async with aclosing(api.follow(PATH)) as sets:
        await anext(sets)
        following = asyncio.ensure_future(exhausted(sets))
        async with asyncio.timeout(10):
            while not server.watches:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        assert len(server.watches) == 1
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


@watching(60)
async def test_no_number_of_watches_starves_another(
    server: KubeServer, api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(httpx._config.DEFAULT_LIMITS, "max_connections", 2)  # 100 would be slow
    tasks = [asyncio.ensure_future(exhausted(api.follow(PATH))) for _ in range(3)]
    try:
        async with asyncio.timeout(10):
            while len(server.watches) < len(tasks):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_more_objects_than_there_may_be_are_a_failure(
    server: KubeServer, api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "MAX_OBJECTS", 2)
    for number in range(3):
        await server.put(PODS.format("ns"), pod(f"p{number}", "10.0.0.1", port=1))
    with pytest.raises(DiscoveryFailure, match="select fewer"):
        await exhausted(api.follow(PODS.format("ns")))


async def test_changes_that_come_together_are_one_set(
    server: KubeServer, api: KubernetesApi
) -> None:
    path, sizes = PODS.format("ns"), []
    async with asyncio.timeout(10), aclosing(api.follow(path)) as sets:
        async for found in sets:
            sizes.append(len(found))
            if len(found) == 200:
                break
            if not found:
                for number in range(200):
                    await server.put(path, pod(f"p{number}", "10.0.0.1", port=1))
    assert len(sizes) < 20
