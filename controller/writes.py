"""The controller's writes: the calls of a plan, events, heartbeats of virtual nodes."""

import asyncio
import contextlib
import functools
import hashlib
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, NoReturn, TypeVar

import msgspec
from msgspec import structs

from controller.election import micro_time
from controller.health import Figures
from controller.kube import ApiFailure, Away, Conflict, KubeApi, NotFound
from controller.records import EVENTS, GROUP, LEASES, PODS, Call, EventNote, Object, Resource
from controller.virtual_node import POOL_LABEL

AT_ONCE: Final = 16
"""Most status patches in flight."""
PAUSES_S: Final = (0.5, 60.0)
"""Before a failed call is made again: after the first failure, and the longest."""
NODE_LEASE_S: Final = 40
NODE_LEASES: Final = "kube-node-lease"
SILENT_CONFLICTS: Final = 2
"""In a row. Somebody was faster; more of them say that an object is another one's."""
MAX_NOTE: Final = 1024
MAX_EVENTS: Final = 10_000
"""That wait to be sent; further ones are lost."""
DOING: Final = {
    "create": "create",
    "patch": "change",
    "patch_status": "write the status of",
    "patch_scale": "scale",
    "delete": "delete",
}
T = TypeVar("T")
_log = logging.getLogger("sluice.controller")


class Writes:
    """Makes the calls of a plan. One that failed is logged once, and made again with backoff."""

    def __init__(
        self,
        api: KubeApi,
        *,
        may_write: Callable[[], bool],
        written: Callable[[Resource, Object], None],
        figures: Figures,
        identity: str,
    ) -> None:
        """`written` takes over the answers."""
        self._api = api
        self._may_write = may_write
        self._written = written
        self._figures = figures
        self._identity = identity
        self._failures: dict[str, tuple[int, float]] = {}
        """Call -> failures in a row, and when it may be made again."""
        self._blocked: set[str] = set()
        """What the calls that failed in this pass hold up."""
        self._changed: set[str] = set()
        """What the calls of this pass changed."""
        self._events: asyncio.Queue[Call] = asyncio.Queue()
        self.progress_s = 0.0
        """When the last call ended."""

    async def carry_out(self, calls: Iterable[Call]) -> bool:
        """Make the calls in order, some AT_ONCE at a time; whether any succeeded.

        Status patches are made together. So are lease pods, deleted ones first, and new ones in
        the order of their pool. What follows on a failed call about the same object, or the same
        entitlement's lease pods, is left to a later pass. Raises Away.
        """
        calls, succeeded = tuple(calls), False
        self._blocked, self._changed = set(), set()
        planned = {_key(call) for call in calls} if self._failures else set[str]()
        self._failures = {key: failed for key, failed in self._failures.items() if key in planned}
        for kind, group in itertools.groupby(calls, _kind):
            if kind == "status":
                succeeded |= await _at_once(group, self._make)
            elif kind == "pods":
                deletes, by_pool = [], dict[str, list[Call]]()
                for call in group:
                    if call.verb == "delete":
                        deletes.append(call)
                    else:
                        pool = call.body["metadata"]["labels"][POOL_LABEL]
                        by_pool.setdefault(pool, []).append(call)
                succeeded |= await _at_once(deletes, self._make)
                succeeded |= await _at_once(by_pool.values(), self._in_order)
            else:
                succeeded |= await self._in_order(group)
        self._figures.waiting.set(len(self._failures))
        return succeeded

    async def _in_order(self, calls: Iterable[Call]) -> bool:
        """Whether any was made. Raises Away."""
        made = False
        for call in calls:
            made |= await self._make(call)
        return made

    def retry_s(self) -> float:
        """Until a failed call may be made again; infinite where none failed."""
        due_s = min((due_s for _, due_s in self._failures.values()), default=math.inf)
        return max(0.0, due_s - asyncio.get_running_loop().time())

    async def _make(self, call: Call) -> bool:
        """Whether it was made. Raises Away."""
        loop = asyncio.get_running_loop()
        key, subject = _key(call), _subject(call)
        failures, due_s = self._failures.get(key, (0, 0.0))
        if subject in self._blocked or loop.time() < due_s or not self._may_write():
            self._blocked.add(subject)
            return False
        count = functools.partial(self._figures.calls.labels, call.verb, call.resource.kind)
        try:
            with contextlib.suppress(*([NotFound] if call.verb == "delete" else [])):
                answer = await self._api.make(call)
        except ApiFailure as error:
            self._blocked.add(subject)
            first_s, most_s = PAUSES_S
            again_s = loop.time() + min(most_s, first_s * 2 ** min(failures, 10))
            self._failures[key] = (failures + 1, again_s)
            count("conflict" if isinstance(error, Conflict) else "failed").inc()
            if isinstance(error, Away):
                raise
            if failures == (SILENT_CONFLICTS if isinstance(error, Conflict) else 0):
                what = f"{DOING[call.verb]} {call.resource.kind} {call.name}"
                _log.warning("cannot %s: %s", what, error)
            return False
        else:
            self._failures.pop(key, None)
            self._changed.add(subject)
            count("done").inc()
            if call.verb not in ("delete", "patch_scale"):  # whose answer is not the object
                self._written(call.resource, answer)
        finally:
            self.progress_s = loop.time()
        return True

    def tell(self, events: Iterable[EventNote]) -> None:
        """Send events soon, of what was written: the next pass has the others again."""
        for note in events:
            subject = f"{note.regarding['kind']} None {note.regarding['metadata']['name']}"
            if subject in self._changed and self._events.qsize() < MAX_EVENTS:
                self._events.put_nowait(self._event(note))

    async def send_events(self) -> NoReturn:
        """Send events as they come, beside the passes. They are lost where the API refuses them."""
        failing = False
        while True:
            event = await self._events.get()
            try:
                await self._api.make(event)
                failing = False
            except ApiFailure as error:
                if not failing:
                    _log.warning("events are lost: %s", error)
                failing = True

    def _event(self, note: EventNote) -> Call:
        metadata = note.regarding["metadata"]
        now = micro_time(time.time())
        occasion = f"{metadata['uid']} {note.reason} {note.message} {now}"
        suffix = hashlib.sha256(occasion.encode()).hexdigest()[:16]
        name = f"{metadata['name']}.{suffix}"
        regarding = {part: metadata[part] for part in ("name", "namespace", "uid")}
        regarding |= {part: note.regarding[part] for part in ("apiVersion", "kind")}
        body = {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": name},
            "eventTime": now,
            "type": note.kind,
            "reason": note.reason,
            "note": note.message[:MAX_NOTE],
            "action": "Reconcile",
            "reportingController": f"{GROUP}/controller",
            "reportingInstance": self._identity[:128],
            "regarding": regarding,
        }
        return Call(verb="create", resource=EVENTS, name=name, body=body)

    async def beat(self, nodes: Iterable[Object]) -> None:
        """Renew the Leases of virtual nodes. Raises the first ApiFailure, once all were tried."""
        await _at_once(nodes, self._renew)

    async def _renew(self, node: Object) -> bool:
        """Renew the Lease of a virtual node, as a kubelet does for its node's."""
        name = node["metadata"]["name"]
        spec = {
            "holderIdentity": name,
            "leaseDurationSeconds": NODE_LEASE_S,
            "renewTime": micro_time(time.time()),
        }
        renewal = Call(
            verb="patch", resource=LEASES, name=name, body={"spec": spec}, namespace=NODE_LEASES
        )
        try:
            await self._api.make(renewal)
        except NotFound:
            owner = {"apiVersion": "v1", "kind": "Node", "name": name}
            owner["uid"] = node["metadata"]["uid"]
            body = {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "spec": spec}
            body["metadata"] = {"name": name, "ownerReferences": [owner]}
            await self._api.make(structs.replace(renewal, verb="create", body=body))
        return True


async def _at_once(items: Iterable[T], make: Callable[[T], Awaitable[bool]]) -> bool:
    """Await `make` of each, AT_ONCE at a time; whether any was true.

    Raises the first ApiFailure, once all were tried, or at Away. Workers end by themselves then: a
    task group that a failure ends may swallow a cancellation.
    """
    left, results, failures = iter(items), list[bool](), list[ApiFailure]()

    async def worker() -> None:
        for item in left:
            try:
                results.append(await make(item))
            except ApiFailure as error:
                failures.append(error)
            if any(isinstance(failure, Away) for failure in failures):
                return

    async with asyncio.TaskGroup() as workers:
        for _ in range(AT_ONCE):
            workers.create_task(worker())
    if failures:
        raise failures[0]
    return any(results)


def _kind(call: Call) -> str:
    """Which calls are made together."""
    if call.verb == "patch_status":
        return "status"
    return "pods" if call.resource == PODS else ""


def _key(call: Call) -> str:
    """The call's identity: one that says something else is not held up by its failures.

    A status has the time in it, so that it would differ each second.
    """
    body = "" if call.verb == "patch_status" else msgspec.json.encode(call.body).decode()
    return " ".join(
        (call.verb, call.resource.kind, call.namespace or "", call.name, call.uid, body)
    )


def _subject(call: Call) -> str:
    """What a failure holds up: the object; of a lease pod, all pods of its entitlement."""
    name = call.name.rpartition("-")[0] if call.resource == PODS else call.name
    return f"{call.resource.kind} {call.namespace} {name}"
