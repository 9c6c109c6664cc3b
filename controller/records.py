"""What passes between the cluster's mirror, the plan and the loop.

API objects are plain JSON mappings, as the API server sends them.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

from gateway.records.record import Record
from gateway.records.tenancy import ClusterEntitlement

Object = dict[str, Any]
"""An API object."""
GROUP: Final = "sluice.dev"


class Resource(Record, frozen=True):
    """A kind of API object, and where the API serves it."""

    kind: str
    plural: str
    group: str = ""
    version: str = "v1"
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """`apiVersion` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version


TOKEN_POOLS: Final = Resource("TokenPool", "tokenpools", GROUP, version="v1alpha1")
TOKEN_ENTITLEMENTS: Final = Resource(
    "TokenEntitlement", "tokenentitlements", GROUP, version="v1alpha1"
)
SECRETS: Final = Resource("Secret", "secrets")
PODS: Final = Resource("Pod", "pods")
NODES: Final = Resource("Node", "nodes", namespaced=False)
EVENTS: Final = Resource("Event", "events", "events.k8s.io")
LEASES: Final = Resource("Lease", "leases", "coordination.k8s.io")
BACKENDS: Final = {
    resource.kind: resource
    for resource in (
        Resource("Deployment", "deployments", "apps"),
        Resource("StatefulSet", "statefulsets", "apps"),
        Resource("LeaderWorkerSet", "leaderworkersets", "leaderworkerset.x-k8s.io"),
        Resource("InferencePool", "inferencepools", "inference.networking.k8s.io"),
    )
}
"""What a TokenPool may refer to, by kind."""


class World(Record, frozen=True, kw_only=True):
    """All that the controller knows at one moment. Objects are of its namespace, by name."""

    namespace: str
    now_unix_s: float
    pools: Mapping[str, Object]
    entitlements: Mapping[str, Object]
    digests: Mapping[str, Mapping[str, str]]
    """Secret -> entry -> SHA-256 of the key in hex. The mirror keeps no key in clear text."""
    backends: Mapping[tuple[str, str], Object] = {}
    """By kind and name."""
    pods: Mapping[str, Object] = {}
    """Lease pods, and engines of InferencePools."""
    nodes: Mapping[str, Object] = {}
    """Virtual nodes."""
    demand: Mapping[tuple[str, str], int] = {}
    """(model, pool of the gateway) -> replicas that the gateways' demand requires."""
    unread: frozenset[str] = frozenset()
    """Kinds of backends, or Pod, that the API fails to list, while it lists others."""


class Call(Record, frozen=True, kw_only=True):
    """One change of the cluster. Patches are JSON merge patches."""

    verb: Literal["create", "patch", "patch_status", "patch_scale", "delete"]
    resource: Resource
    name: str
    body: Mapping[str, Any] = {}
    uid: str = ""
    """Of the object to delete: another one of its name stays."""
    namespace: str | None = None
    """None: the controller's own."""


class EventNote(Record, frozen=True, kw_only=True):
    """An event that says why something waits, was lost, or is back."""

    regarding: Object
    """The object; its identity counts."""
    kind: Literal["Normal", "Warning"]
    reason: str
    message: str


class Plan(Record, frozen=True, kw_only=True):
    """What follows from a world. Calls are in the order in which they have to be made."""

    calls: tuple[Call, ...] = ()
    entitlements: Mapping[str, ClusterEntitlement] = {}
    """All that the gateways shall hold, by name."""
    events: tuple[EventNote, ...] = ()
    next_unix_s: float | None = None
    """When time alone changes the plan: the next expiry."""
