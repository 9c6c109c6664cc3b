"""The objects of a cluster, changed by the API server's rules.

Every change of any object raises the resource version by one. Objects that were handed out are
never changed: a change makes another one.
"""

import asyncio
import copy
import itertools
import random
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from controller.records import Resource
from tests.kube import builtin, crd
from tests.kube.objects import Object, Refused, at, invalid, merged, metadata_problems, put_at

CRDS: Final = Resource(
    kind="CustomResourceDefinition",
    plural="customresourcedefinitions",
    group="apiextensions.k8s.io",
    namespaced=False,
)
NAMESPACES: Final = Resource(kind="Namespace", plural="namespaces", namespaced=False)
SYSTEM: Final = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds")
Key = tuple[str, str, str]
"""Collection (plural.group), namespace, name."""


class Clock:
    """The cluster's time: the system's, run faster and put forward by tests."""

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed
        self._begin_s, self._offset_s = time.time(), 0.0

    def now(self) -> float:
        """In unix seconds."""
        return self._begin_s + (time.time() - self._begin_s) * self.speed + self._offset_s

    def put_forward(self, seconds: float) -> None:
        """Seconds of the cluster's time pass at once."""
        self._offset_s += seconds

    def stamp(self, later_s: float = 0.0) -> str:
        """Now as objects hold it."""
        return datetime.fromtimestamp(self.now() + later_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Served:
    """A kind of object that the API serves."""

    resource: Resource
    status: bool = False
    """It has /status, and its own endpoint leaves the status alone."""
    scale: Mapping[str, str] | None = None
    """Paths of the scale subresource."""
    schema: Object | None = None
    """Of a custom resource."""
    generation: bool = False
    unconditional: bool = True
    """An update may leave the resource version out."""
    by_update: bool = False
    """An update of one that is not there creates it."""

    @property
    def collection(self) -> str:
        """Name of its collection: plural, and group where it has one."""
        return f"{self.resource.plural}.{self.resource.group}".rstrip(".")

    @property
    def titled(self) -> str:
        """Its kind in messages."""
        return f"{self.resource.kind}.{self.resource.group}".rstrip(".")


@dataclass(frozen=True)
class Change:
    """What a watch tells."""

    version: int
    key: Key
    before: Object | None
    after: Object | None


@dataclass
class Store:
    """All objects of one cluster."""

    clock: Clock
    objects: dict[Key, Object] = field(default_factory=dict)
    served: dict[tuple[str, str, str], Served] = field(default_factory=dict)
    """By group, version and plural."""
    version: int = 1000
    oldest: int = 1000
    """Changes up to this version are forgotten."""
    log: list[Change] = field(default_factory=list)
    pages: dict[str, tuple[int, list[Object]]] = field(default_factory=dict)
    """What is left of lists that are read in pages, by their token."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the next change, when another one takes its place."""

    def __post_init__(self) -> None:
        for served in BUILT_IN:
            self.serve(served)

    def serve(self, served: Served) -> None:
        """Serve a kind of object."""
        r = served.resource
        self.served[(r.group, r.version, r.plural)] = served

    def of(self, resource: Resource) -> Served:
        """How a resource is served. Raises Refused with 404."""
        try:
            return self.served[(resource.group, resource.version, resource.plural)]
        except KeyError:
            what = "the server could not find the requested resource"
            raise Refused(404, "NotFound", what) from None

    def compact(self) -> None:
        """Forget all history."""
        self.version += 1
        self.oldest = self.version
        self.log.clear()
        self.pages.clear()
        self.wake()

    def wake(self) -> None:
        """Have all who wait for a change look."""
        event, self.changed = self.changed, asyncio.Event()
        event.set()

    # -- reading

    def get(self, served: Served, namespace: str, name: str) -> Object:
        """Raises Refused with 404."""
        obj = self.objects.get((served.collection, namespace, name))
        if obj is None:
            raise Refused(404, "NotFound", f'{served.collection} "{name}" not found')
        return obj

    def list(
        self, served: Served, namespace: str = "", keep: Callable[[Object], bool] | None = None
    ) -> list[Object]:
        """Objects of a namespace ("": of all), by namespace and name."""
        found = [
            (key, obj)
            for key, obj in self.objects.items()
            if key[0] == served.collection and namespace in ("", key[1])
        ]
        found.sort(key=lambda pair: pair[0])
        return [obj for _, obj in found if keep is None or keep(obj)]

    # -- writing

    def create(self, served: Served, namespace: str, body: Object) -> Object:
        """Raises Refused."""
        obj, resource = copy.deepcopy(body), served.resource
        metadata = obj.setdefault("metadata", {})
        self._check_kind(served, obj)
        if resource.namespaced and metadata.setdefault("namespace", namespace) != namespace:
            what = "the namespace of the provided object does not match the namespace sent on the"
            raise Refused(400, "BadRequest", f"{what} request")
        if not metadata.get("name") and metadata.get("generateName"):
            letters = random.choices("bcdfghjklmnpqrstvwxz2456789", k=5)
            metadata["name"] = metadata["generateName"] + "".join(letters)
        if not metadata.get("name"):
            why = "metadata.name: Required value: name or generateName is required"
            raise invalid(served.titled, "", [why])
        if metadata.get("resourceVersion"):
            what = "resourceVersion should not be set on objects to be created"
            raise Refused(500, "", what)
        name = metadata["name"]
        if resource.namespaced:
            self._check_namespace(served, namespace, name)
        for system in (*SYSTEM, "generation", "selfLink"):
            metadata.pop(system, None)
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": self.clock.stamp()}
        if served.generation:
            metadata["generation"] = 1
        if served.status and resource.plural != "nodes":  # a kubelet brings its node's status
            obj.pop("status", None)
        obj = self._settled(served, obj, None)
        key = (served.collection, namespace if resource.namespaced else "", name)
        if key in self.objects:
            what = f'{served.collection} "{name}" already exists'
            raise Refused(409, "AlreadyExists", what)
        return self.commit(key, obj)

    def update(
        self,
        served: Served,
        namespace: str,
        name: str,
        change: Callable[[Object], Object],
        *,
        sub: str = "",
        replaces: bool = False,
    ) -> Object:
        """Change an object. `replaces`: by another one, as PUT does. Raises Refused."""
        old = self.get(served, namespace, name)
        if sub == "scale":
            return self._update_scale(served, namespace, old, change)
        new = change(copy.deepcopy(old))
        self._check_kind(served, new)
        self._check_same(served, old, new, replaces=replaces)
        new = self._with_old_parts(served, old, new, sub)
        new = self._settled(served, new, old)
        if served.generation and _spec(new) != _spec(old):
            new["metadata"]["generation"] = old["metadata"]["generation"] + 1
        if new == old:
            return old
        key = (served.collection, old["metadata"].get("namespace", ""), name)
        gone = new["metadata"].get("deletionTimestamp") and not new["metadata"].get("finalizers")
        if gone and not new["metadata"].get("deletionGracePeriodSeconds"):
            return self.commit(key, None)
        return self.commit(key, new)

    def delete(
        self, served: Served, namespace: str, name: str, options: Mapping[str, Any] | None = None
    ) -> Object:
        """Delete an object, or mark it as deleted while finalizers or a grace hold it."""
        options = options or {}
        old = self.get(served, namespace, name)
        metadata = copy.deepcopy(old["metadata"])
        for wanted, what in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
            given = (options.get("preconditions") or {}).get(wanted)
            if given and given != metadata[wanted]:
                why = (
                    f"the {what} in the precondition ({given}) does not match the {what} in record"
                )
                raise _conflict(served, name, f"{why} ({metadata[wanted]})")
        finalizers = [f for f in metadata.get("finalizers") or () if f not in PROPAGATION.values()]
        policy = options.get("propagationPolicy") or "Background"
        if policy not in (*PROPAGATION, "Background"):
            why = f'propagationPolicy: Unsupported value: "{policy}"'
            raise invalid("DeleteOptions.meta.k8s.io", "", [why])
        held = PROPAGATION.get(policy)
        finalizers += [held] if held else []
        grace = builtin.grace_s(old, options) if served.collection == "pods" else 0
        known = metadata.get("deletionGracePeriodSeconds")
        grace = grace if known is None else min(grace, known)
        if served.collection == "namespaces":
            finalizers.append("kubernetes")
        key = (served.collection, metadata.get("namespace", ""), name)
        if not finalizers and not grace:
            return self.commit(key, None)
        if "generation" in metadata and "deletionTimestamp" not in metadata:
            metadata["generation"] += 1
        metadata.setdefault("deletionTimestamp", self.clock.stamp(grace))
        metadata["deletionGracePeriodSeconds"] = grace
        if finalizers:
            metadata["finalizers"] = list(dict.fromkeys(finalizers))
        new = {**old, "metadata": metadata}
        return old if new == old else self.commit(key, new)

    def scale_of(self, served: Served, obj: Object) -> Object:
        """The scale subresource. Raises Refused."""
        paths = served.scale or {}
        replicas = at(obj, _path(paths["specReplicasPath"]))
        if replicas is None:
            path = paths["specReplicasPath"]
            why = f"the spec replicas field {path!r} does not exist".replace("'", '"')
            raise Refused(500, "InternalError", f"Internal error occurred: {why}")
        return self._scale(served, obj, replicas)

    # -- the parts of a change

    def _check_kind(self, served: Served, obj: Object) -> None:
        resource = served.resource
        obj.setdefault("apiVersion", resource.api_version)
        obj.setdefault("kind", resource.kind)
        if obj["apiVersion"] != resource.api_version:
            what = f"does not match the expected API version ({resource.api_version})"
            given = f"the API version in the data ({obj['apiVersion']})"
            raise Refused(400, "BadRequest", f"{given} {what}")
        if obj["kind"] != resource.kind:
            why = f'kind: Invalid value: "{obj["kind"]}": must be {resource.kind}'
            raise invalid(served.titled, obj.get("metadata", {}).get("name", ""), [why])

    def _check_namespace(self, served: Served, namespace: str, name: str) -> None:
        space = self.objects.get(("namespaces", "", namespace))
        if space is None:
            raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
        if space["metadata"].get("deletionTimestamp"):
            why = f"unable to create new content in namespace {namespace} because it is being"
            what = f'{served.collection} "{name}" is forbidden: {why} terminated'
            raise Refused(403, "Forbidden", what)

    def _check_same(self, served: Served, old: Object, new: Object, *, replaces: bool) -> None:
        was, now = old["metadata"], new.setdefault("metadata", {})
        name = was["name"]
        now.setdefault("name", name)
        if "namespace" in was:
            now.setdefault("namespace", was["namespace"])
        if now["name"] != name or now.get("namespace") != was.get("namespace"):
            what = f"the name of the object ({now['name']}) does not match the name on the URL"
            raise Refused(400, "BadRequest", f"{what} ({name})")
        if now.get("uid", was["uid"]) != was["uid"] and not replaces:
            why = f'metadata.uid: Invalid value: "{now["uid"]}": field is immutable'
            raise invalid(served.titled, name, [why])
        if now.get("uid", was["uid"]) != was["uid"]:
            why = f"Precondition failed: UID in precondition: {now['uid']}, UID in object meta"
            raise _conflict(served, name, f"{why}: {was['uid']}")
        version = now.get("resourceVersion")
        if replaces and not version and not served.unconditional:
            why = "metadata.resourceVersion: Invalid value: 0x0: must be specified for an update"
            raise invalid(served.titled, name, [why])
        if version and version != was["resourceVersion"]:
            why = "the object has been modified; please apply your changes to the latest version"
            raise _conflict(served, name, f"{why} and try again")
        fresh = set(now.get("finalizers") or ()) - set(was.get("finalizers") or ())
        if was.get("deletionTimestamp") and fresh:
            why = "no new finalizers can be added if the object is being deleted"
            raise invalid(served.titled, name, [f"metadata.finalizers: Forbidden: {why}"])

    def _with_old_parts(self, served: Served, old: Object, new: Object, sub: str) -> Object:
        """What an endpoint does not change is as it was."""
        metadata = dict(new["metadata"])
        custom = served.schema is not None
        if sub == "status":
            status = {"status": new["status"]} if "status" in new else {}
            rest = {k: v for k, v in old.items() if k != "status"}
            if custom or served.generation:
                metadata = dict(old["metadata"])
            new = {**rest, **status}
        elif served.status:
            new = {k: v for k, v in new.items() if k != "status"}
            if "status" in old:
                new["status"] = old["status"]
        for system in (*SYSTEM, "generation", "resourceVersion"):
            metadata.pop(system, None)
            if system in old["metadata"]:
                metadata[system] = old["metadata"][system]
        return {**new, "metadata": metadata}

    def _settled(self, served: Served, obj: Object, old: Object | None) -> Object:
        """Defaults set, what the kind does not have left out, and valid. Raises Refused."""
        name = obj["metadata"]["name"]
        wrong = metadata_problems(obj)
        if served.schema is not None:
            whole = {k: v for k, v in obj.items() if k not in ("apiVersion", "kind", "metadata")}
            kept = crd.completed(served.schema, whole)
            heads = ("apiVersion", "kind", "metadata")
            obj = {**{head: obj[head] for head in heads}, **kept}
            before = None if old is None else _view(old)
            wrong += crd.problems(served.schema, _view(obj), before)
        else:
            obj = builtin.admitted(served.collection, obj, old, self)
            wrong += builtin.problems(served.collection, obj, old)
        if wrong:
            raise invalid(served.titled, name, wrong)
        return obj

    def _scale(self, served: Served, obj: Object, replicas: int) -> Object:
        paths, metadata = served.scale or {}, obj["metadata"]
        kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        status: Object = {"replicas": at(obj, _path(paths["statusReplicasPath"])) or 0}
        selector = at(obj, _path(paths.get("labelSelectorPath", ".status.selector")))
        if isinstance(selector, dict):
            pairs = sorted((selector.get("matchLabels") or {}).items())
            selector = ",".join(f"{key}={value}" for key, value in pairs)
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {key: metadata[key] for key in kept},
            "spec": {"replicas": replicas},
            "status": {**status, "selector": selector} if selector else status,
        }

    def _update_scale(
        self, served: Served, namespace: str, old: Object, change: Callable[[Object], Object]
    ) -> Object:
        path = _path((served.scale or {})["specReplicasPath"])
        name = old["metadata"]["name"]
        scale = change(self._scale(served, old, at(old, path) or 0))
        replicas = (scale.get("spec") or {}).get("replicas", 0)
        if not isinstance(replicas, int) or replicas < 0:
            why = f"spec.replicas: Invalid value: {replicas}: must be greater than or equal to 0"
            raise invalid("Scale.autoscaling", name, [why])

        def scaled(obj: Object) -> Object:
            put_at(obj, path, replicas)
            given = scale["metadata"].get("resourceVersion")
            obj["metadata"]["resourceVersion"] = given or obj["metadata"]["resourceVersion"]
            return obj

        new = self.update(served, namespace, name, scaled)
        return self.scale_of(served, new)

    def commit(self, key: Key, obj: Object | None) -> Object:
        """Store an object, or remove it (None), and tell it to the watches."""
        self.version += 1
        before = self.objects.get(key)
        if obj is None:
            assert before is not None
            del self.objects[key]
            stored = before
            told = {
                **before,
                "metadata": {**before["metadata"], "resourceVersion": str(self.version)},
            }
            self.log.append(Change(self.version, key, told, None))
        else:
            metadata = {**obj["metadata"], "resourceVersion": str(self.version)}
            stored = {**obj, "metadata": metadata}
            self.objects[key] = stored
            self.log.append(Change(self.version, key, before, stored))
        if key[0] == "customresourcedefinitions.apiextensions.k8s.io":
            self._define(stored, gone=obj is None)
        if key[0] == "namespaces" and before is None:
            account = {"metadata": {"name": "default"}}
            self.create(self.served[("", "v1", "serviceaccounts")], key[2], account)
        self.wake()
        return stored

    def _define(self, definition: Object, *, gone: bool) -> None:
        spec = definition["spec"]
        for version in spec["versions"]:
            subresources = version.get("subresources") or {}
            resource = Resource(
                kind=spec["names"]["kind"],
                plural=spec["names"]["plural"],
                group=spec["group"],
                version=version["name"],
                namespaced=spec["scope"] == "Namespaced",
            )
            served = Served(
                resource=resource,
                status="status" in subresources,
                scale=subresources.get("scale"),
                schema=version["schema"]["openAPIV3Schema"],
                generation=True,
                unconditional=False,
            )
            if not gone and version.get("served"):
                self.serve(served)
            else:
                self.served.pop((resource.group, resource.version, resource.plural), None)
            if gone:
                for key in [key for key in self.objects if key[0] == served.collection]:
                    self.commit(key, None)


PROPAGATION: Final = {"Foreground": "foregroundDeletion", "Orphan": "orphan"}
"""Policy of a deletion -> the finalizer that stands for it."""


def _conflict(served: Served, name: str, why: str) -> Refused:
    what = f'Operation cannot be fulfilled on {served.collection} "{name}": {why}'
    return Refused(409, "Conflict", what)


def _view(obj: Object) -> Object:
    """What a schema's rules see of an object."""
    return {**obj, "metadata": {"name": obj["metadata"]["name"]}}


def _spec(obj: Object) -> Object:
    return {key: value for key, value in obj.items() if key not in ("metadata", "status")}


def _path(text: str) -> list[str]:
    return text.strip(".").split(".")


def patched(patch: Object) -> Callable[[Object], Object]:
    """The change that a JSON merge patch is."""
    return lambda obj: merged(obj, patch)


def replaced(body: Object) -> Callable[[Object], Object]:
    """The change that a whole object is."""
    return lambda obj: copy.deepcopy(body)


REPLICAS: Final = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".spec.selector",
}


def _built_in() -> Iterable[Served]:
    plain = [
        ("", "v1", "Secret ConfigMap Service ServiceAccount"),
        ("events.k8s.io", "v1", "Event"),
        ("coordination.k8s.io", "v1", "Lease"),
        ("discovery.k8s.io", "v1", "EndpointSlice"),
        ("rbac.authorization.k8s.io", "v1", "Role RoleBinding"),
    ]
    wide = [
        ("scheduling.k8s.io", "v1", "PriorityClass"),
        ("rbac.authorization.k8s.io", "v1", "ClusterRole ClusterRoleBinding"),
    ]
    for (group, version, kinds), namespaced in itertools.chain(
        zip(plain, itertools.repeat(True)),
        zip(wide, itertools.repeat(False)),
    ):
        for kind in kinds.split():
            plural = kind.lower() + ("es" if kind.endswith("s") else "s")
            resource = Resource(
                kind=kind, plural=plural, group=group, version=version, namespaced=namespaced
            )
            lease = kind == "Lease"
            yield Served(resource=resource, unconditional=not lease, by_update=lease)
    yield Served(resource=Resource(kind="Pod", plural="pods"), status=True)
    yield Served(resource=Resource(kind="Node", plural="nodes", namespaced=False), status=True)
    yield Served(resource=NAMESPACES, status=True)
    yield Served(resource=CRDS, status=True, unconditional=False)
    for kind in ("Deployment", "StatefulSet"):
        resource = Resource(kind=kind, plural=f"{kind.lower()}s", group="apps")
        yield Served(resource=resource, status=True, scale=REPLICAS, generation=True)


BUILT_IN: Final = tuple(_built_in())
