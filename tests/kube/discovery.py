"""A Kubernetes API server for tests and benches: list, watch and change objects by the API's rules.

Resource versions rise with each change of any object. A watch gives the changes after its
version, bookmarks if it asks for them, and ends at its time limit. A version that was compacted
away is 410, either as the answer's status or as an ERROR event. A write with an old version is 409.
A change that takes an object out of a selection is a DELETED event there.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import parse_qs

import uvicorn

Object = dict[str, Any]
BOOKMARK_EVERY_S = 0.05
GONE = {"kind": "Status", "code": 410, "reason": "Expired"}


class KubeServer:
    """The objects of one cluster, by collection path and name."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Object]] = {}
        self.version = 100
        self.oldest = 100
        """Watches from versions before this one are 410."""
        self.token = "token-1"
        """What callers must present; "" lets all in, like `kubectl proxy`."""
        self.lists: list[str] = []
        """Paths listed."""
        self.watches: list[dict[str, str]] = []
        """Parameters of the watches begun."""
        self.url = ""
        self.gone_as_event = True
        self.pages_gone = 0
        """So many next pages of lists are 410."""
        self.away = False
        self._log: list[tuple[int, str, str, Object | None, Object | None]] = []
        """(version, path, name, before, after)."""
        self._changed = asyncio.Condition()
        self._cuts = 0

    # -- what tests do

    async def put(self, path: str, obj: Object, *, version: str | None = None) -> int:
        """Create or change an object; returns the status: 409 for an outdated version."""
        name = obj["metadata"]["name"]
        before = self.objects.setdefault(path, {}).get(name)
        known = None if before is None else before["metadata"]["resourceVersion"]
        if version is not None and known not in (None, version):
            return 409
        self.version += 1
        after = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self.version)}}
        self.objects[path][name] = after
        await self._note(path, name, before, after)
        return 200 if before else 201

    async def delete(self, path: str, name: str) -> None:
        """Delete an object."""
        before = self.objects[path].pop(name)
        self.version += 1
        await self._note(path, name, before, None)

    async def compact(self) -> None:
        """Forget all history, and end the watches so that they come back too late."""
        self.version += 1
        self.oldest = self.version
        self._log.clear()
        await self.cut()

    async def cut(self) -> None:
        """End all watches, as at their time limit."""
        async with self._changed:
            self._cuts += 1
            self._changed.notify_all()

    async def _note(
        self, path: str, name: str, before: Object | None, after: Object | None
    ) -> None:
        # At once: a watch that goes on to this version must find the change there.
        self._log.append((self.version, path, name, before, after))
        async with self._changed:
            self._changed.notify_all()

    # -- the server

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["KubeServer"]:
        """Serve on a free port of this host during the block."""
        config = uvicorn.Config(self, port=0, log_level="critical", lifespan="off")
        server = uvicorn.Server(config)
        task = asyncio.ensure_future(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn sets no event
            await asyncio.sleep(0.001)
        port = server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        try:
            yield self
        finally:
            server.should_exit = server.force_exit = True
            await self.cut()
            await task

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        params = {k: v[-1] for k, v in parse_qs(scope["query_string"].decode()).items()}
        headers = dict(scope["headers"])
        path = scope["path"]
        if self.away:
            await _answer(send, 503, {"kind": "Status", "code": 503})
        elif self.token and headers.get(b"authorization") != f"Bearer {self.token}".encode():
            await _answer(send, 401, {"kind": "Status", "code": 401})
        elif params.get("watch"):
            await self._watch(send, path, params)
        else:
            items = [o for o in self.objects.get(path, {}).values() if _matches(o, params)]
            start = int(params.get("continue", "0"))
            if start and self.pages_gone:
                self.pages_gone -= 1
                await _answer(send, 410, GONE)
                return
            if not start:
                self.lists.append(path)
            ends = start + int(params.get("limit", len(items)))
            metadata = {"resourceVersion": str(self.version)}
            if ends < len(items):
                metadata["continue"] = str(ends)
            page = {"kind": "List", "metadata": metadata, "items": items[start:ends]}
            await _answer(send, 200, page)

    async def _watch(self, send: Any, path: str, params: dict[str, str]) -> None:
        self.watches.append(params)
        since, cuts = int(params["resourceVersion"]), self._cuts
        if since < self.oldest and not self.gone_as_event:
            await _answer(send, 410, GONE)
            return
        await _begin(send, 200)
        if since < self.oldest:
            await _line(send, {"type": "ERROR", "object": GONE})
            await send({"type": "http.response.body", "body": b""})
            return
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + float(params["timeoutSeconds"])
        while loop.time() < ends_s and cuts == self._cuts and not self.away:
            upto = self.version  # of this turn: more may come while it is told
            for version, where, _, before, after in list(self._log):
                if version > since and where == path:
                    event = _event(before, after, params, version)
                    if event is not None:
                        await _line(send, event)
            since = max(since, upto)
            if params.get("allowWatchBookmarks") == "true":
                mark = {"metadata": {"resourceVersion": str(since)}}
                await _line(send, {"type": "BOOKMARK", "object": mark})
            async with self._changed:
                if self.version == since and cuts == self._cuts:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), BOOKMARK_EVERY_S)
        await send({"type": "http.response.body", "body": b""})


def _event(
    before: Object | None, after: Object | None, params: dict[str, str], version: int
) -> Object | None:
    was = before is not None and _matches(before, params)
    now = after is not None and _matches(after, params)
    if now:
        return {"type": "MODIFIED" if was else "ADDED", "object": after}
    if not was or before is None:
        return None
    metadata = {**before["metadata"], "resourceVersion": str(version)}
    return {"type": "DELETED", "object": {**before, "metadata": metadata}}


def _matches(obj: Object, params: dict[str, str]) -> bool:
    labels = obj["metadata"].get("labels") or {}
    wanted = [pair.split("=", 1) for pair in params.get("labelSelector", "").split(",") if pair]
    named = params.get("fieldSelector", "").removeprefix("metadata.name=")
    if named and named != obj["metadata"]["name"]:
        return False
    return all(labels.get(name) == value for name, value in wanted)


async def _begin(send: Any, status: int) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _answer(send: Any, status: int, body: Object) -> None:
    await _begin(send, status)
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


async def _line(send: Any, event: Object) -> None:
    body = json.dumps(event).encode() + b"\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})


# -- objects


def slice_of(name: str, service: str, *ips: str, port: int = 8000, **conditions: bool) -> Object:
    """An EndpointSlice with these ready endpoints."""
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": port}],
        "endpoints": [
            {
                "addresses": [ip],
                "conditions": {"ready": True, "serving": True, "terminating": False, **conditions},
                "targetRef": {"kind": "Pod", "name": f"pod-{ip}", "uid": f"uid-{ip}"},
            }
            for ip in ips
        ],
    }


def pod(name: str, ip: str, *, ready: bool = True, port: int = 8000, **more: Any) -> Object:
    """A pod of app vllm."""
    metadata = {"name": name, "labels": {"app": "vllm"}, **more}
    condition = {"type": "Ready", "status": "True" if ready else "False"}
    ports = [{"name": "http", "containerPort": port}]
    return {
        "metadata": metadata,
        "spec": {"containers": [{"name": "engine", "ports": ports}]},
        "status": {"podIP": ip, "conditions": [condition]},
    }
