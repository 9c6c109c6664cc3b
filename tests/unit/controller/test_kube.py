"""Whatever the API answers, callers get objects or an ApiFailure."""

import asyncio
import itertools
from collections.abc import Callable

import httpx
import pytest
from lightkube.config.kubeconfig import KubeConfig
from lightkube.config.models import Cluster

from controller.kube import Away, KubeApi, connection
from controller.records import TOKEN_POOLS, Call

PATCH = Call(verb="patch", resource=TOKEN_POOLS, name="chat", body={"spec": {}})


def api_that(answer: Callable[[httpx.Request], httpx.Response]) -> KubeApi:
    api = KubeApi(connection(KubeConfig.from_one(cluster=Cluster(server="http://api"))), "team")
    api._client = httpx.AsyncClient(base_url="http://api", transport=httpx.MockTransport(answer))
    return api


@pytest.mark.parametrize(
    "body",
    [
        "",
        "<html>",
        "null",
        "[]",
        "7",
        "{}",
        '{"metadata": null, "items": []}',
        '{"metadata": {"resourceVersion": 7, "name": "chat"}}',
        '{"metadata": {"resourceVersion": "7"}, "items": 7}',
        '{"metadata": {"resourceVersion": "7"}, "items": [null]}',
        '{"metadata": {"resourceVersion": "7"}, "items": [{"metadata": {"name": "chat"}}]}',
    ],
)
def test_an_answer_without_sense_counts_as_none(body: str) -> None:
    api = api_that(lambda request: httpx.Response(200, text=body))
    with pytest.raises(Away):
        asyncio.run(api.list(TOKEN_POOLS))
    with pytest.raises(Away):
        asyncio.run(api.get(TOKEN_POOLS, "chat"))
    with pytest.raises(Away):
        asyncio.run(api.make(PATCH))


@pytest.mark.parametrize(
    "line",
    [
        "<html>",
        "null",
        "[]",
        "{}",
        '{"type": "ADDED"}',
        '{"type": "ADDED", "object": null}',
        '{"type": "ADDED", "object": {"metadata": {"resourceVersion": "7"}}}',
        '{"type": "BOOKMARK", "object": {"metadata": {}}}',
        '{"type": "ERROR", "object": null}',
    ],
)
def test_a_watch_without_sense_is_given_up(line: str) -> None:
    api = api_that(lambda request: httpx.Response(200, text=f"{line}\n"))

    async def watched() -> None:
        async for _ in api.watch(TOKEN_POOLS, "1", limit_s=1):
            pytest.fail("it was told something")

    with pytest.raises(Away):
        asyncio.run(watched())


def test_a_list_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.kube.MAX_PAGES", 5)
    pages = itertools.count()

    def page(request: httpx.Request) -> httpx.Response:
        metadata = {"resourceVersion": "7", "continue": str(next(pages))}
        return httpx.Response(200, json={"metadata": metadata, "items": []})

    with pytest.raises(Away):
        asyncio.run(api_that(page).list(TOKEN_POOLS))
    assert next(pages) == 5
