"""Tenants, entitlements and keys: as administrators' rows and denials, and as the file's sections.

Rights are positive: rows and sections grant them. Denials only take rights away. They are kept
apart from what they restrict, and are never removed: whatever a file lists, and whatever older
copy of a row comes back, a denial holds. Last come the tokens (JWT) that stand in for keys.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from gateway.records.record import Record
from gateway.records.request import TenantKey

RowKind = Literal["tenant", "entitlement", "key"]
RowId = tuple[RowKind, str]
"""Kind and name."""


class Row(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What administrators made, or what they changed of an entitlement of the file."""

    kind: RowKind
    name: str
    """Of a tenant's key: TENANT/NAME. Of an entitlement's own key: ENTITLEMENT:FINGERPRINT."""
    uid: str
    """Distinguishes it from a deleted one of the same name."""
    fields: Mapping[str, Any] = {}
    """As in the file's section and in the admin body: JSON values."""
    of: str = ""
    """Of a key: the uid of the tenant or entitlement that it was made for; "" for the file's.
    Of an entitlement: the digest of the file's section that it changes; "" for one made here."""
    created: int = 0
    """Unix ms; older entitlements keep their reservation when capacity falls."""
    former_sha256: str = ""
    """Of a key: the digest before the last rotation, which opens until `former_until_unix_s`."""
    former_until_unix_s: float = 0.0
    changed: int = 0
    """Time of its last change in Unix ms, at least one above its value before."""
    revision: int = 0
    """The directory's revision at its last write, on which the next write is based; 0: not kept."""

    @property
    def id(self) -> RowId:
        """Kind and name."""
        return self.kind, self.name

    @property
    def digests(self) -> tuple[str, ...]:
        """Hex digests of a key: the present one, and the one before a rotation."""
        present = str(self.fields.get("sha256", ""))
        return tuple(filter(None, (present, self.former_sha256)))


class Denial(Record, frozen=True, kw_only=True):
    """A right that was taken away, or given back: the newest of one id counts."""

    what: Literal["gone", "suspended", "ends"]
    """gone: a revoked digest or a deleted row's uid, for good. ends: `value` is the time."""
    subject: str
    """A digest in hex or a uid; `tenant NAME`, `entitlement NAME` or `key DIGEST`."""
    of: str = ""
    """Whose revision it raises: `tenant NAME` or `entitlement NAME`."""
    value: float = 1.0
    """suspended: 1, or 0 once resumed; ends: Unix seconds, 0 for never."""
    changed: int = 0
    """Unix ms, at least one above its value before."""
    revision: int = 0

    @property
    def id(self) -> str:
        """What it is about; later denials of this id replace it."""
        return f"{self.what} {self.subject}"


class DirectoryChange(Record, frozen=True, kw_only=True):
    """One change: all of it is written, or nothing."""

    puts: tuple[Row, ...] = ()
    """Each based on its `revision`."""
    removes: tuple[Row, ...] = ()
    denials: tuple[Denial, ...] = ()


class DirectoryState(Record, frozen=True, kw_only=True):
    """The content of a directory, or the part of it that changed."""

    revision: int = 0
    """Number of the last write. A directory that lost writes continues above a given floor."""
    mark: str = ""
    """Unique name of the last write. A directory that does not know it has lost that write."""
    rows: tuple[Row, ...] = ()
    denials: tuple[Denial, ...] = ()


class Written(Record, frozen=True, kw_only=True):
    """The result of a write."""

    revision: int = 0
    mark: str = ""
    conflict: bool = False
    """Nothing was written: the directory holds other versions, or lost the writer's last write."""
    replicated: bool = True
    """False where the server has replicas and none of them took the write in time."""


class FileEntitlement(Record, frozen=True, kw_only=True):
    """An entitlement of the configuration file."""

    fields: Mapping[str, Any]
    digests: tuple[str, ...] = ()
    """Of its `api_keys`, in hex."""
    section: str = ""
    """Digest of the section; layout and fields at their default do not change it."""
    place: int = 1
    """Place in the file, from 1."""


class FileTenant(Record, frozen=True, kw_only=True):
    """A tenant of the configuration file."""

    display_name: str | None = None
    labels: Mapping[str, str] = {}
    entitlements: tuple[str, ...] | None = None
    suspended: bool = False
    keys: tuple[TenantKey, ...] = ()


class ClusterEntitlement(Record, frozen=True, kw_only=True, omit_defaults=True):
    """An entitlement that the control plane of a Kubernetes cluster grants."""

    name: str
    fields: Mapping[str, Any]
    """As in the file's section: JSON values, those that were allocated."""
    digests: tuple[str, ...] = ()
    """Of its keys, in hex."""
    created: int = 0
    """Unix ms."""
    verdict: Literal["", "pending", "degraded"] = ""
    """Why it may not be used now; "": it may."""
    message: str = ""
    """The verdict in words, for clients and operators."""
    suspended: bool = False
    source: str = ""
    """The object that states it, such as `TokenEntitlement team/search`."""
    uid: str = ""
    """Of that object."""


STALE: Final = "nothing was heard of the cluster for too long"
NOT_GRANTED: Final = ClusterEntitlement(name="", fields={})


class ClusterState(Record, frozen=True, kw_only=True):
    """What the control plane published, or the part of it that changed."""

    version: tuple[int, int] = (0, 0)
    """The writer's epoch, greater for each controller that takes over, and the revision."""
    whole: bool = False
    """Whether these are all entitlements."""
    entitlements: tuple[ClusterEntitlement, ...] = ()
    removed: tuple[str, ...] = ()
    age_s: float = 0.0
    """Since the writer saw the cluster so, by the store's clock."""
    seen_us: int = 0
    """When that was, by the same clock, which may be set meanwhile."""


class KnownCluster(Record, frozen=True, kw_only=True):
    """The entitlements that a cluster grants, as its controller published them last."""

    version: tuple[int, int] = (0, 0)
    entitlements: Mapping[str, ClusterEntitlement] = {}
    stale: frozenset[str] = frozenset()
    """Service classes that nobody confirmed for too long."""

    def granted(self, name: str) -> ClusterEntitlement:
        """One of them, with its verdict as far as it is known."""
        granted = self.entitlements[name]
        service_class = granted.fields.get("service_class") or "elastic"
        if granted.verdict or service_class not in self.stale:
            return granted
        return msgspec.structs.replace(granted, verdict="degraded", message=STALE)


class TenancyFile(Record, frozen=True, kw_only=True):
    """The configuration file's part in tenancy."""

    tenants: Mapping[str, FileTenant] = {}
    entitlements: Mapping[str, FileEntitlement] = {}
    order: Mapping[str, tuple[str, ...]] = {}
    """Entitlements of the file by tenant, in the file's order."""
    currency: str = ""
    """Label of money."""
    unix_s: float = 0.0
    """When it was modified; 0 if unknown."""


NO_FILE: Final = TenancyFile()


def fingerprint(digest: str) -> str:
    """The name of a key for people; it reveals nothing of the key."""
    return digest[:8]


class IssuerRules(Record, frozen=True, kw_only=True):
    """An issuer of tokens, and what its tokens may do."""

    issuer: str
    """`iss` of its tokens."""
    jwks: str
    """Its public keys: an https URL, or a file."""
    ca_file: str | None = None
    """Certificates that its URL is verified against; None for the system's."""
    audience: tuple[str, ...]
    """Of `aud`, one is required."""
    algorithms: tuple[str, ...]
    leeway_s: float
    refresh_s: float
    max_stale_s: float
    """How long its keys serve after they were last read."""
    tenant_claim: str
    entitlements_claim: str | None = None
    tenants: frozenset[str] | None = None
    """The only tenants that its tokens may name; None for any."""
    role_claim: str | None = None
    roles: Mapping[str, str] = {}
    """Value of the role's claim -> role on the admin routes."""


TOKEN_NAME: Final = "jwt:"  # noqa: S105 - no secret
"""What names of tokens begin with, and names of keys never do."""


class TokenIdentity(Record, frozen=True, kw_only=True):
    """Who a verified token is, and until when it counts."""

    issuer: str
    name: str
    """`jwt:` and its subject, for the request log."""
    until_unix_s: float
    """Its expiry, the leeway included."""
    tenant: str | None = None
    """None if it names no tenant."""
    tenant_claim: str = ""
    """Where it should."""
    entitlements: tuple[str, ...] | None = None
    """Those it may use; None for all of its tenant's."""
    role: str | None = None
    """The role on the admin routes; None for none."""
