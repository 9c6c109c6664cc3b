"""The controller's copy of its part of the cluster: lists, kept current by watches.

Each collection is listed once and watched from there. A version that is too old (410) is listed
anew, and so is every collection now and then, so that nothing missed stays missed. While the API
is away the last set stays, and the age of the whole grows.

Secrets are reduced as they arrive: of a key in clear text only its SHA-256 digest stays.
"""

import asyncio
import base64
import binascii
import hashlib
import logging
import math
import random
import re
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Final

from controller.kube import ApiFailure, Away, Expired, Forbidden, Invalid, KubeApi, NotFound
from controller.objects import read_pool
from controller.records import (
    BACKENDS,
    NODES,
    PODS,
    SECRETS,
    TOKEN_ENTITLEMENTS,
    TOKEN_POOLS,
    Object,
    Resource,
    World,
)
from controller.scaling import selector_of
from controller.virtual_node import POD_LABEL, POOL_LABEL
from gateway.records.record import Record

WATCH_S: Final = 60
"""Time limit of one watch. A dead connection is noticed soon after it."""
SHORT_S: Final = 1.0
"""After a watch that ended sooner than this there is a pause: a proxy may end each at once."""
RESYNC_S: Final = 600.0
"""Collections are listed anew so often, each up to a fifth sooner or later."""
PAUSES_S: Final = (0.5, 30.0)
"""Pause after a failure: the first and the longest."""
PATIENCE: Final = 3
"""After so many failures in a row a collection is listed, whatever its version."""
_HEX: Final = re.compile("[0-9a-f]{64}")
_log = logging.getLogger("sluice.controller")


class Selection(Record, frozen=True):
    """What is followed: a kind, and a label selector."""

    resource: Resource
    labels: str = ""


def digests_of(secret: Object) -> dict[str, str]:
    """SHA-256 of the key in each entry, in hex; entries that hold none are absent."""
    digests = {}
    for entry, encoded in (secret.get("data") or {}).items():
        try:
            key = base64.b64decode(encoded).rstrip(b"\r\n")
        except (binascii.Error, TypeError, ValueError):
            continue
        if key.startswith(b"sha256:"):
            stated = key.removeprefix(b"sha256:").decode("ascii", "replace").lower()
            if _HEX.fullmatch(stated):
                digests[entry] = stated
        elif key:
            digests[entry] = hashlib.sha256(key).hexdigest()
    return digests


def _reduced(resource: Resource, source: Object) -> Object:
    """What is kept of an object."""
    metadata = source["metadata"]
    if resource == SECRETS:
        reduced = {name: metadata[name] for name in ("name", "resourceVersion")}
        return {"metadata": reduced, "digests": digests_of(source)}
    metadata.pop("managedFields", None)  # the largest part, which nobody reads here
    return source


def _later(source: Object, version: str) -> bool:
    """Whether an object is of a later version. Versions are numbers that grow with each change."""
    own = str(source["metadata"]["resourceVersion"])
    return not (own.isdecimal() and version.isdecimal()) or int(own) > int(version)


class _Follower:
    """One collection."""

    def __init__(
        self,
        api: KubeApi,
        selection: Selection,
        *,
        on_change: Callable[[], None],
        optional: bool,
    ) -> None:
        """`optional`: where the API refuses to list it, it counts as empty."""
        self._api = api
        self._what = selection
        self._on_change = on_change
        self._optional = optional
        self._version = ""
        """From where to watch on; "": list first."""
        self._relist_s = 0.0
        self._failures = 0
        self.unread = False
        """Not listed yet, and not for want of an answer: this kind alone fails."""
        self._written: dict[str, Object] = {}
        """Answers to the controller's own writes since the last list began."""
        self.objects: dict[str, Object] = {}
        self.heard_s: float | None = None
        """When the API last said something of it, by the event loop's clock; None: never."""

    async def run(self) -> None:
        """Follow, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            try:
                if self._version and began_s < self._relist_s:
                    await self._watch()
                else:
                    await self._list()
                    continue
            except Expired:
                self._version = ""
                self._failures += 1
            except ApiFailure as error:
                self._failed(error)
            else:
                if loop.time() - began_s >= SHORT_S:
                    continue
            first, longest = PAUSES_S
            pause_s = min(longest, first * 2 ** min(self._failures, 10))
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    def written(self, source: Object) -> None:
        """Take over the answer to a write of the controller's own, ahead of the watch."""
        name = source["metadata"]["name"]
        if _later(source, self._version):  # else the watch has brought it, and of what followed
            self.objects[name] = self._written[name] = _reduced(self._what.resource, source)

    async def _list(self) -> None:
        self._written = {}
        listing = await self._api.list(self._what.resource, labels=self._what.labels)
        objects = {o["metadata"]["name"]: _reduced(self._what.resource, o) for o in listing.objects}
        early = self._written.items()
        objects |= {name: own for name, own in early if _later(own, listing.version)}
        changed = self.heard_s is None or objects != self.objects
        self.objects, self._version = objects, listing.version
        self._relist_s = asyncio.get_running_loop().time() + RESYNC_S * random.uniform(0.8, 1.2)
        self._heard()
        if changed or self.unread:
            self.unread = False
            self._on_change()

    async def _watch(self) -> None:
        limit_s = round(WATCH_S * random.uniform(0.9, 1.1))
        watch = self._api.watch(
            self._what.resource, self._version, labels=self._what.labels, limit_s=limit_s
        )
        async with aclosing(watch) as changes:
            async for kind, source in changes:
                self._version = source["metadata"]["resourceVersion"]
                self._heard()
                self._recovered()
                if kind != "BOOKMARK":
                    self._apply(kind, source)
        self._heard()
        self._recovered()

    def _apply(self, kind: str, source: Object) -> None:
        name = source["metadata"]["name"]
        own = self._written.get(name)
        if own is not None and not _later(source, own["metadata"]["resourceVersion"]):
            return  # known from the write's own answer
        if kind == "DELETED":
            self.objects.pop(name, None)
        else:
            self.objects[name] = _reduced(self._what.resource, source)
        self._on_change()

    def _heard(self) -> None:
        self.heard_s = asyncio.get_running_loop().time()

    def _recovered(self) -> None:
        if self._failures >= PATIENCE:
            _log.info("the API answers again for %s", self._what.resource.plural)
        self._failures = 0

    def _failed(self, error: ApiFailure) -> None:
        self._failures += 1
        if self._failures == PATIENCE:  # a short break is no news
            plural = self._what.resource.plural
            _log.warning("%s: the last set stays, since it cannot be read: %s", plural, error)
        if self._failures >= PATIENCE:  # where only watches fail, lists have to do
            self._version = ""
        refused = isinstance(error, NotFound) or (
            isinstance(error, Forbidden | Invalid) and self.heard_s is None
        )
        if self._optional and refused:  # the kind is not installed, or not meant for this one
            first, self.heard_s = self.heard_s is None, asyncio.get_running_loop().time()
            if first:
                _log.warning("%s count as none: %s", self._what.resource.plural, error)
                self._on_change()
        never = self._optional and self.heard_s is None
        if never and self._failures >= PATIENCE and not (self.unread or isinstance(error, Away)):
            self.unread = True
            self._on_change()


class Mirror:
    """All collections that the plan needs, and those of backends while TokenPools name them."""

    def __init__(self, api: KubeApi, *, virtual_nodes: bool, on_change: Callable[[], None]) -> None:
        """`on_change` is called after each change that others made."""
        self._api = api
        self._on_change = on_change
        self._always = [Selection(kind) for kind in (TOKEN_POOLS, TOKEN_ENTITLEMENTS, SECRETS)]
        if virtual_nodes:
            self._always += [Selection(NODES, POOL_LABEL), Selection(PODS, POD_LABEL)]
        self._followers: dict[Selection, _Follower] = {}
        self._running: dict[Selection, asyncio.Task[None]] = {}
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        """Follow all of them, for ever."""
        async with self._tasks:
            self._adjust()
            await asyncio.Event().wait()

    def age_s(self) -> float:
        """For how long the API has said nothing of some collection; infinite before it has."""
        heard = [f.heard_s for f in self._followers.values() if f.heard_s is not None]
        return asyncio.get_running_loop().time() - min(heard) if heard else math.inf

    def world(self, now_unix_s: float, demand: Mapping[tuple[str, str], int] = {}) -> World | None:
        """What is known now; None while some collection was never read."""
        followers = self._followers.items()
        if not followers or any(f.heard_s is None and not f.unread for _, f in followers):
            return None
        pods: dict[str, Object] = {}
        for selection, follower in followers:
            if selection.resource == PODS:
                pods |= follower.objects
        own = f"{self._api.namespace}."[:54]  # a longer label has a hash from there on
        return World(
            namespace=self._api.namespace,
            now_unix_s=now_unix_s,
            pools=dict(self._of(TOKEN_POOLS)),
            entitlements=dict(self._of(TOKEN_ENTITLEMENTS)),
            digests={name: secret["digests"] for name, secret in self._of(SECRETS).items()},
            backends={
                (kind, name): backend
                for kind, resource in BACKENDS.items()
                for name, backend in self._of(resource).items()
            },
            pods=pods,
            nodes={
                name: node
                for name, node in self._of(NODES, POOL_LABEL).items()
                if node["metadata"]["labels"][POOL_LABEL].startswith(own)
            },
            demand=demand,
            unread=frozenset(what.resource.kind for what, follower in followers if follower.unread),
        )

    def written(self, resource: Resource, source: Object) -> None:
        """Take over the answer to a write of the controller's own."""
        for selection in self._always:
            if selection.resource == resource:
                self._followers[selection].written(source)

    def _of(self, resource: Resource, labels: str = "") -> Mapping[str, Object]:
        follower = self._followers.get(Selection(resource, labels))
        return {} if follower is None else follower.objects

    def _changed(self) -> None:
        self._adjust()
        self._on_change()

    def _adjust(self) -> None:
        """Follow what the objects read so far refer to, and nothing else."""
        wanted = {*self._always}
        for pool in self._of(TOKEN_POOLS).values():
            kind, name = read_pool(pool).backend or ("", "")
            resource = BACKENDS.get(kind)
            if resource is None:
                continue
            wanted.add(Selection(resource))
            backend = self._of(resource).get(name)
            if resource.kind == "InferencePool" and backend and (labels := selector_of(backend)):
                wanted.add(Selection(PODS, labels))
        for selection in wanted - self._followers.keys():
            follower = self._followers[selection] = _Follower(
                self._api,
                selection,
                on_change=self._changed,
                optional=selection not in self._always,
            )
            self._running[selection] = self._tasks.create_task(follower.run())
        for selection in self._followers.keys() - wanted:
            del self._followers[selection]
            self._running.pop(selection).cancel()
