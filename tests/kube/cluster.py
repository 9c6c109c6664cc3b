"""A Kubernetes cluster for tests: an API server over HTTP, its scheduler and its controllers.

    async with emulated_cluster() as cluster:
        cluster.apply(pool, entitlement)
        token = cluster.account("prod", "sluice-controller", *rendered_roles)
        config = KubeConfig.from_dict(cluster.kubeconfig(token))
        await cluster.advance(41)  # seconds of the cluster's time

Of patches, JSON merge patches alone. Calls are authorized by the Roles and bindings that the
cluster holds.
"""

import asyncio
import copy
import functools
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

import uvicorn
import yaml

from controller.records import PODS, Resource
from tests.kube.controllers import Controllers
from tests.kube.objects import Object, Refused, selected_by_fields, selected_by_labels
from tests.kube.store import Clock, Served, Store, patched, replaced

ADMIN: Final = "admin-token"
CRD_FILES: Final = Path(__file__).parents[2] / "deploy/helm/sluice/files/crds"
RBAC: Final = "rbac.authorization.k8s.io"
ACCOUNTS: Final = Resource(kind="ServiceAccount", plural="serviceaccounts")
STEP_S: Final = 0.02
"""The controllers look so often, and at each change, in seconds of the system's time."""
BOOKMARK_S: Final = 0.1
VERBS: Final = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
SUCCESS: Final[Object] = {"kind": "Status", "apiVersion": "v1", "status": "Success"}
PAGE_MARK: Final = "-next"
MERGE: Final = "application/merge-patch+json"


@dataclass(frozen=True)
class User:
    """Who calls."""

    name: str
    groups: tuple[str, ...] = ()


@dataclass
class Fault:
    """What goes wrong with calls, as long as it stands in the cluster's list."""

    matches: Callable[[str, str], bool] = lambda method, path: True
    """By HTTP method and path."""
    nth: int = 1
    """The first of the matching calls that it befalls."""
    times: int = 1_000_000
    """To how many calls."""
    status: int | None = 500
    """Of the answer. None: the connection breaks off."""
    applied: bool = False
    """The call takes effect all the same."""
    seen: int = 0

    def befalls(self, method: str, path: str) -> bool:
        """Whether this call fails; counts it."""
        if not self.matches(method, path):
            return False
        self.seen += 1
        return self.nth <= self.seen < self.nth + self.times


def writes(method: str, _path: str) -> bool:
    """For faults of writes."""
    return method != "GET"


@dataclass(frozen=True)
class Call:
    """A request to the API."""

    method: str
    path: str
    user: str
    body: Any = None
    status: int = 0
    """Of the answer; a watch is 200 once it has begun."""


@dataclass(frozen=True)
class _Target:
    """What a path names."""

    served: Served
    namespace: str
    name: str
    sub: str


@dataclass
class Cluster:
    """One emulated cluster. Methods that are not asynchronous act with all rights."""

    store: Store
    calls: list[Call] = field(default_factory=list)
    """All that was asked, answered or not."""
    faults: list[Fault] = field(default_factory=list)
    slow_s: float = 0.0
    """Each call waits so long."""
    gone_as_event: bool = True
    """A watch from before the compaction: an ERROR event, else status 410."""
    port: int = 0
    _users: dict[str, User] = field(default_factory=dict)
    _server: uvicorn.Server | None = None
    _serving: "asyncio.Task[None] | None" = None
    _controllers: Controllers | None = None
    _cut: int = 0

    # -- what tests do

    @property
    def url(self) -> str:
        """Of the API server."""
        return f"http://127.0.0.1:{self.port}"

    def kubeconfig(self, token: str = ADMIN, namespace: str = "default") -> Object:
        """A kubeconfig's content."""
        context = {"cluster": "emulated", "user": "caller", "namespace": namespace}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "emulated",
            "clusters": [{"name": "emulated", "cluster": {"server": self.url}}],
            "users": [{"name": "caller", "user": {"token": token}}],
            "contexts": [{"name": "emulated", "context": context}],
        }

    def account(self, namespace: str, name: str, *roles: Object) -> str:
        """The token of a service account, after these objects (roles, bindings) were applied."""
        self.apply(*roles)
        if ("serviceaccounts", namespace, name) not in self.store.objects:
            self.create(ACCOUNTS, {"metadata": {"name": name}}, namespace)
        return self._token(namespace, name)

    def apply(self, *objects: Object, namespace: str = "default") -> list[Object]:
        """Create objects, or replace what they change. Namespaces that lack are created."""
        done = []
        for obj in objects:
            group, _, version = obj["apiVersion"].rpartition("/")
            served = next(
                s
                for s in self.store.served.values()
                if (s.resource.group, s.resource.version) == (group, version)
                and s.resource.kind == obj["kind"]
            )
            name = obj["metadata"]["name"]
            space = obj["metadata"].get("namespace", namespace)
            if served.resource.namespaced:
                self.namespace(space)
            space = space if served.resource.namespaced else ""
            if (served.collection, space, name) in self.store.objects:
                done.append(self.store.update(served, space, name, patched(obj)))
            else:
                done.append(self.store.create(served, space, obj))
        return done

    def namespace(self, name: str) -> None:
        """Create a namespace that is not there."""
        if ("namespaces", "", name) not in self.store.objects:
            served = self.store.served[("", "v1", "namespaces")]
            self.store.create(served, "", {"metadata": {"name": name}})

    def create(self, resource: Resource, obj: Object, namespace: str = "default") -> Object:
        """Raises Refused."""
        return self.store.create(self.store.of(resource), namespace, obj)

    def get(self, resource: Resource, name: str, namespace: str = "default") -> Object | None:
        """None where there is none."""
        space = namespace if resource.namespaced else ""
        return self.store.objects.get((self.store.of(resource).collection, space, name))

    def list(self, resource: Resource, namespace: str = "") -> list[Object]:
        """Of a namespace; "": of all."""
        return self.store.list(self.store.of(resource), namespace)

    def patch(
        self,
        resource: Resource,
        name: str,
        patch: Object,
        namespace: str = "default",
        sub: str = "",
    ) -> Object:
        """Raises Refused."""
        space = namespace if resource.namespaced else ""
        return self.store.update(self.store.of(resource), space, name, patched(patch), sub=sub)

    def delete(
        self, resource: Resource, name: str, namespace: str = "default", **options: Any
    ) -> None:
        """Raises Refused."""
        space = namespace if resource.namespaced else ""
        self.store.delete(self.store.of(resource), space, name, options)

    async def advance(self, seconds: float, *, step_s: float = 5.0) -> None:
        """Let the cluster's time pass, by steps between which the controllers and callers act."""
        left = seconds
        while left > 0:
            self.store.clock.put_forward(min(step_s, left))
            left -= step_s
            self.settle()
            await asyncio.sleep(0)

    def settle(self) -> None:
        """Have the controllers do all that is due."""
        if self._controllers is not None:
            self._controllers.step()

    def compact(self) -> None:
        """Forget all history: watches and lists that go on from before are 410."""
        self.store.compact()
        self.cut()

    def cut(self) -> None:
        """End all watches, as at their time limit."""
        self._cut += 1
        self.store.wake()

    async def stop(self) -> None:
        """The API server is gone: connections break off, and none is accepted."""
        server, self._server = self._server, None
        if server is not None and self._serving is not None:
            for listening in server.servers:
                listening.close()
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            server.should_exit = server.force_exit = True
            self.cut()
            await self._serving

    async def start(self) -> None:
        """The API server is there, on the same port as before."""
        config = uvicorn.Config(self, port=self.port, log_level="critical", lifespan="off")
        self._server = server = uvicorn.Server(config)
        self._serving = asyncio.create_task(server.serve())
        while not server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.001)
        self.port = server.servers[0].sockets[0].getsockname()[1]

    async def control(self) -> None:
        """Run the controllers for ever: at each change, and as time passes."""
        while True:
            changed = self.store.changed
            self.settle()
            with suppress(TimeoutError):
                async with asyncio.timeout(STEP_S):
                    await changed.wait()

    # -- the API server

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        body = b""
        while (message := await receive()).get("more_body") or message.get("body"):
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if self.slow_s:
            await asyncio.sleep(self.slow_s)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        method, path = scope["method"], scope["path"]
        params = {k: v[-1] for k, v in parse_qs(scope["query_string"].decode()).items()}
        user = self._users.get(headers.get("authorization", "").removeprefix("Bearer "))
        fault = next((f for f in list(self.faults) if f.befalls(method, path)), None)
        status, answer, watched = 200, None, None
        try:
            if fault is not None and not fault.applied:
                raise Refused(fault.status or 500, "InternalError", "injected")
            if user is None:
                raise Refused(401, "Unauthorized", "Unauthorized")
            if path in ("/version", "/healthz", "/livez", "/readyz"):
                answer = {"gitVersion": "v1.34.0-emulated", "major": "1", "minor": "34"}
            elif path.strip("/").count("/") == (1 if path.startswith("/api/") else 2):
                answer = self._discovery(path)
            else:
                target = self._target(path)
                self._authorize(user, target, _verb(method, target, params), params)
                data = json.loads(body) if body else None
                if target.name or method != "GET":
                    status, answer = self._answer(target, method, headers, params, data)
                elif params.get("watch") in ("1", "true"):
                    watched = target
                    keep = _selector(target.served, params)
                    self._check_age(params)
                else:
                    answer = self._page(target, params)
        except Refused as refused:
            status, answer, watched = refused.code, refused.status, None
        except json.JSONDecodeError as error:
            status, answer = 400, Refused(400, "BadRequest", str(error)).status
        shown = None if not body or status == 400 else json.loads(body)
        self.calls.append(Call(method, path, user.name if user else "", shown, status))
        if watched is not None:
            await self._watch(send, watched, params, keep)
        elif fault is not None and fault.status is None:
            await _begin(send, 200, length=1)  # and nothing comes: the connection is closed
        elif fault is not None and fault.applied:
            injected = Refused(fault.status or 500, "InternalError", "injected")
            await _send(send, injected.code, injected.status)
        else:
            await _send(send, status, answer)

    def _discovery(self, path: str) -> Object:
        """The resources of a group's version. Raises Refused with 404."""
        named = path.strip("/").removeprefix("apis/").removeprefix("api/")
        found = [s.resource for s in self.store.served.values() if s.resource.api_version == named]
        if not found:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        resources = [
            {"name": r.plural, "kind": r.kind, "namespaced": r.namespaced, "verbs": []}
            for r in found
        ]
        head = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": named}
        return {**head, "resources": resources}

    def _target(self, path: str) -> _Target:
        """Raises Refused with 404."""
        parts = [part for part in path.split("/") if part]
        group, rest = ("", parts[1:]) if parts[:1] == ["api"] else ("".join(parts[1:2]), parts[2:])
        version, rest, namespace = "".join(rest[:1]), rest[1:], ""
        if rest[:1] == ["namespaces"] and len(rest) > 2 and rest[2] not in ("status", "finalize"):
            namespace, rest = rest[1], rest[2:]
        served = self.store.served.get((group, version, "".join(rest[:1])))
        name, sub = ([*rest[1:], "", ""])[:2]
        known = served and (
            not sub
            or (sub == "status" and served.status)
            or (sub == "scale" and served.scale)
            or (sub == "token" and served.resource.plural == "serviceaccounts")
        )
        if served is None or not known or len(rest) > 3:
            what = "the server could not find the requested resource"
            raise Refused(404, "NotFound", what)
        return _Target(served, namespace, name, sub)

    def _answer(
        self, target: _Target, method: str, headers: Mapping[str, str], params: Any, data: Any
    ) -> tuple[int, Object]:
        served, namespace, name = target.served, target.namespace, target.name
        store, sub = self.store, target.sub
        if sub == "token":
            store.get(served, namespace, name)
            return 201, {**data, "status": {"token": self._token(namespace, name)}}
        if method == "GET":
            obj = store.get(served, namespace, name)
            return 200, store.scale_of(served, obj) if sub == "scale" else obj
        if method == "POST" and not name:
            return 201, store.create(served, namespace, data)
        if method == "PUT" and name:
            change = replaced(data)
            key = (served.collection, namespace, name)
            if served.by_update and key not in store.objects:
                return 201, store.create(served, namespace, data)
            return 200, store.update(served, namespace, name, change, sub=sub, replaces=True)
        if method == "PATCH" and name:
            if headers.get("content-type", "").split(";")[0] != MERGE:
                what = "the body of the request was in an unknown format - accepted media types"
                raise Refused(
                    415,
                    "UnsupportedMediaType",
                    f"{what} include: application/json-patch+json, {MERGE}",
                )
            return 200, store.update(served, namespace, name, patched(data), sub=sub)
        if method == "DELETE":
            options = {**(data or {})}
            if "gracePeriodSeconds" in params:
                options["gracePeriodSeconds"] = int(params["gracePeriodSeconds"])
            if "propagationPolicy" in params:
                options["propagationPolicy"] = params["propagationPolicy"]
            if name:
                left = store.delete(served, namespace, name, options)
                space = namespace if served.resource.namespaced else ""
                held = (served.collection, space, name) in store.objects
                return 200, left if held or served.resource == PODS else SUCCESS
            for obj in store.list(served, namespace, _selector(served, params)):
                metadata = obj["metadata"]
                store.delete(served, metadata.get("namespace", ""), metadata["name"], options)
            return 200, SUCCESS
        what = "the server does not allow this method on the requested resource"
        raise Refused(405, "MethodNotAllowed", what)

    def _page(self, target: _Target, params: Mapping[str, str]) -> Object:
        served, token = target.served, params.get("continue", "")
        if token and token not in self.store.pages and not token.endswith(PAGE_MARK):
            raise Refused(400, "BadRequest", "invalid continue token: continue key is not valid")
        if token and token not in self.store.pages:
            what = "The provided continue parameter is too old to display a consistent list result"
            raise Refused(410, "Expired", what)
        if token:
            version, items = self.store.pages[token]
        else:
            keep = _selector(served, params)
            version, items = self.store.version, self.store.list(served, target.namespace, keep)
        limit = int(params.get("limit") or 0) or len(items)
        metadata: Object = {"resourceVersion": str(version)}
        if items[limit:]:
            metadata["continue"] = f"{version}-{len(self.store.pages)}{PAGE_MARK}"
            metadata["remainingItemCount"] = len(items) - limit
            self.store.pages[metadata["continue"]] = (version, items[limit:])
        resource = served.resource
        head = {"kind": f"{resource.kind}List", "apiVersion": resource.api_version}
        return {**head, "metadata": metadata, "items": items[:limit]}

    def _check_age(self, params: Mapping[str, str]) -> None:
        version = int(params.get("resourceVersion") or 0)
        if version and version < self.store.oldest and not self.gone_as_event:
            raise self._too_old(version)

    def _too_old(self, version: int) -> Refused:
        return Refused(410, "Expired", f"too old resource version: {version} ({self.store.oldest})")

    async def _watch(
        self,
        send: Any,
        target: _Target,
        params: Mapping[str, str],
        keep: Callable[[Object], bool],
    ) -> None:
        store, served, cut = self.store, target.served, self._cut
        since = int(params.get("resourceVersion") or 0)
        await _begin(send, 200)
        if since and since < store.oldest:
            await _line(send, "ERROR", self._too_old(since).status)
            await send({"type": "http.response.body", "body": b""})
            return
        if not since:
            since = store.version
            for obj in store.list(served, target.namespace, keep):
                await _line(send, "ADDED", obj)
        loop, told = asyncio.get_running_loop(), since
        ends_s = loop.time() + float(params.get("timeoutSeconds") or 1800)
        marks = params.get("allowWatchBookmarks") in ("1", "true")
        while cut == self._cut and (left_s := ends_s - loop.time()) > 0:
            changed, upto = store.changed, store.version
            for change in [c for c in store.log if since < c.version <= upto]:
                event = _event(change, served.collection, target.namespace, keep)
                if event is not None:
                    await _line(send, *event)
                    told = change.version
            since = upto
            if marks and told < since:
                resource = served.resource
                head = {"kind": resource.kind, "apiVersion": resource.api_version}
                version = {"resourceVersion": str(since), "creationTimestamp": None}
                await _line(send, "BOOKMARK", {**head, "metadata": version})
                told = since
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, BOOKMARK_S)):
                    await changed.wait()
        if self._server is not None:
            await send({"type": "http.response.body", "body": b""})

    # -- who may do what

    def _token(self, namespace: str, name: str) -> str:
        user = f"system:serviceaccount:{namespace}:{name}"
        spaces = f"system:serviceaccounts:{namespace}"
        groups = ("system:serviceaccounts", spaces, "system:authenticated")
        self._users[f"token-of-{namespace}-{name}"] = User(user, groups)
        return f"token-of-{namespace}-{name}"

    def _authorize(self, user: User, target: _Target, verb: str, params: Mapping[str, str]) -> None:
        """Raises Refused with 403."""
        resource, name = target.served.resource, target.name
        chosen = params.get("fieldSelector", "")
        if not name and verb in ("list", "watch") and chosen.startswith("metadata.name="):
            name = chosen.removeprefix("metadata.name=")
        plural = f"{resource.plural}/{target.sub}".rstrip("/")
        if "system:masters" in user.groups:
            return
        for rule in self._rules(user, target.namespace):
            if (
                _among(resource.group, rule.get("apiGroups"))
                and _among(plural, rule.get("resources"))
                and _among(verb, rule.get("verbs"))
                and (not rule.get("resourceNames") or name in rule["resourceNames"])
            ):
                return
        of_name = f' "{target.name}"' if target.name else ""
        space = (
            f'in the namespace "{target.namespace}"' if target.namespace else "at the cluster scope"
        )
        raise Refused(
            403,
            "Forbidden",
            f'{target.served.collection}{of_name} is forbidden: User "{user.name}" cannot {verb} '
            f'resource "{plural}" in API group "{resource.group}" {space}',
        )

    def _rules(self, user: User, namespace: str) -> Iterable[Object]:
        found = self.store.served
        bindings = self.store.list(found[(RBAC, "v1", "clusterrolebindings")])
        if namespace:
            bindings += self.store.list(found[(RBAC, "v1", "rolebindings")], namespace)
        for binding in bindings:
            space = binding["metadata"].get("namespace", "")
            if any(_is_subject(user, subject, space) for subject in binding.get("subjects") or ()):
                kind, name = binding["roleRef"]["kind"], binding["roleRef"]["name"]
                space = space if kind == "Role" else ""
                role = self.store.objects.get((f"{kind.lower()}s.{RBAC}", space, name), {})
                yield from role.get("rules") or ()


def _verb(method: str, target: _Target, params: Mapping[str, str]) -> str:
    if method == "GET" and target.name:
        return "get"
    if method == "GET":
        return "watch" if params.get("watch") in ("1", "true") else "list"
    if method == "DELETE" and not target.name:
        return "deletecollection"
    return VERBS.get(method, method.lower())


def _among(value: str, listed: Iterable[str] | None) -> bool:
    names = list(listed or ())
    return value in names or "*" in names or f"*/{value.rpartition('/')[2]}" in names


def _is_subject(user: User, subject: Mapping[str, str], namespace: str) -> bool:
    if subject["kind"] == "ServiceAccount":
        space = subject.get("namespace") or namespace
        return user.name == f"system:serviceaccount:{space}:{subject['name']}"
    return subject["name"] in ([user.name] if subject["kind"] == "User" else user.groups)


def _selector(served: Served, params: Mapping[str, str]) -> Callable[[Object], bool]:
    labels = selected_by_labels(params.get("labelSelector", ""))
    fields = selected_by_fields(params.get("fieldSelector", ""), served.resource.plural)
    return lambda obj: labels(obj) and fields(obj)


def _event(
    change: Any, collection: str, namespace: str, keep: Callable[[Object], bool]
) -> tuple[str, Object] | None:
    """What a watch says of a change: of its selection, an object may come or go by its labels."""
    if change.key[0] != collection or namespace not in ("", change.key[1]):
        return None
    before, after = change.before, change.after
    was = before is not None and keep(before)
    if after is not None and keep(after):
        return "MODIFIED" if was else "ADDED", after
    if not was:
        return None
    metadata = {**before["metadata"], "resourceVersion": str(change.version)}
    return "DELETED", {**before, "metadata": metadata}


async def _begin(send: Any, status: int, length: int | None = None) -> None:
    headers = [(b"content-type", b"application/json")]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _send(send: Any, status: int, body: Any) -> None:
    data = json.dumps(body).encode()
    await _begin(send, status, len(data))
    await send({"type": "http.response.body", "body": data})


async def _line(send: Any, kind: str, obj: Object) -> None:
    data = json.dumps({"type": kind, "object": obj}).encode() + b"\n"
    await send({"type": "http.response.body", "body": data, "more_body": True})


@functools.cache
def _crds() -> list[Object]:
    files = sorted(CRD_FILES.glob("*.yaml"))
    return [yaml.load(file.read_bytes(), Loader=yaml.CSafeLoader) for file in files]


def shipped_crds() -> list[Object]:
    """The CustomResourceDefinitions that the chart brings."""
    return copy.deepcopy(_crds())


@asynccontextmanager
async def emulated_cluster(
    *objects: Object, speed: float = 1.0, controllers: bool = True
) -> AsyncIterator[Cluster]:
    """A cluster with the chart's CRDs and these objects, during the block.

    `speed`: how much faster its time runs. `controllers`: with scheduler and controllers.
    """
    cluster = Cluster(Store(Clock(speed)))
    cluster._users[ADMIN] = User("admin", ("system:masters",))
    for name in ("default", "kube-system", "kube-node-lease"):
        cluster.namespace(name)
    cluster.apply(*shipped_crds(), *objects)
    await cluster.start()
    if controllers:
        cluster._controllers = Controllers(cluster.store)
    running = asyncio.create_task(cluster.control())
    try:
        yield cluster
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await cluster.stop()
