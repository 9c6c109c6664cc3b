"""Rights in force: a pure function of the file, a cluster's grants, the directory's rows, denials.

Computed anew on every change, by name; nothing remembers what was joined before.

- Where the file has a section, it counts. Administrators change an entitlement of the file until
  its section changes; to a tenant of the file they only add keys.
- Where it has none and a cluster's controller grants the entitlement, that counts. What it may not
  use now (a verdict), or what nobody confirmed for long, is there, and serves nobody.
- Last come those that administrators made.
- A key opens while its tenant, or its entitlement, is there: of a key that administrators made,
  the very one that it was made for.
- Denials come last: revoked digests open nothing; suspensions and ends restrict a key by its
  digest, a tenant or an entitlement by its name, in the file or made here.
"""

import re
from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

import msgspec

from gateway.admission.entitlement_terms import ModelShape, instant, terms_from
from gateway.records.entitlement import Entitlement
from gateway.records.limit import KeyLimits, key_limits
from gateway.records.record import Record
from gateway.records.request import TenantKey
from gateway.records.tenancy import (
    NOT_GRANTED,
    ClusterEntitlement,
    FileTenant,
    Row,
    TenancyFile,
)
from gateway.tenancy.known import Known

LIMIT_FIELDS = KeyLimits.__struct_fields__
CLUSTER = "kubernetes"
"""Origin of what a cluster's controller grants."""
_DIGEST = re.compile("[0-9a-f]{64}")


class EntitlementInForce(Record, frozen=True, kw_only=True):
    """An entitlement, with what administrators changed and denied."""

    terms: Entitlement
    digests: tuple[str, ...] = ()
    """Of its own live keys, in hex."""
    origin: str = "file"
    """`file`, `kubernetes` or `admin`."""
    uid: str = ""
    """"" for one of the file."""
    revision: int = 0
    granted: ClusterEntitlement = NOT_GRANTED
    """By a cluster. With a verdict it is suspended in its token pool."""
    suspended: bool = False
    """By administrators or in the cluster."""


class NotServed(Exception):
    """An entitlement is for a model that is not configured here."""


class KeyInForce(Record, frozen=True, kw_only=True):
    """A key of a tenant."""

    key: TenantKey
    origin: str
    """`file` or `admin`."""
    former: bool = False
    """It is the one before a rotation."""

    @property
    def sha256(self) -> str:
        """Its digest in hex."""
        return self.key.sha256.hex()


class TenantInForce(Record, frozen=True, kw_only=True):
    """A tenant with its keys."""

    name: str
    exists: bool
    """Whether the file or administrators list it; others may still be suspended."""
    origin: str = "admin"
    display_name: str | None = None
    labels: Mapping[str, str] = {}
    entitlements: tuple[str, ...] | None = None
    """Those of keys that list none, in order of preference; None for all that name it."""
    default: TenantKey | None = None
    """What a token opens that lists no entitlements; None for all of them, by name."""
    suspended: bool = False
    keys: tuple[KeyInForce, ...] = ()
    revision: int = 0


def entitlement_fields(
    name: str, file: TenancyFile, known: Known
) -> tuple[Mapping[str, object], str, str] | None:
    """(fields, origin, uid) of an entitlement, before denials; None if there is none."""
    section, row = file.entitlements.get(name), known.row("entitlement", name)
    if section is None and (granted := known.cluster.entitlements.get(name)) is not None:
        return {**granted.fields, "name": name}, CLUSTER, granted.uid
    if section is None:
        return None if row is None or row.of else (row.fields, "admin", row.uid)
    # A section that changed since replaces the change, unless the whole file is older.
    if row is not None and row.of and (row.of == section.section or older(file, row)):
        return row.fields, "file", ""
    return section.fields, "file", ""


def older(file: TenancyFile, row: Row) -> bool:
    """Whether the file was last modified before a change by an administrator."""
    return 0 < file.unix_s * 1000 < row.changed


def entitlement_of(
    name: str, file: TenancyFile, known: Known, shapes: Mapping[str, ModelShape]
) -> EntitlementInForce | None:
    """The entitlement in force. Raises NotServed, and BadTerms for what its model cannot have."""
    stated = entitlement_fields(name, file, known)
    if stated is None:
        return None
    fields, origin, uid = stated
    section, row = file.entitlements.get(name), known.row("entitlement", name)
    granted = known.cluster.granted(name) if origin == CLUSTER else NOT_GRANTED
    model: Any = fields.get("model")
    if model not in shapes:
        raise NotServed(f"is for model {model}, which is not configured")
    place = section.place if section is not None else row.created if row is not None else 0
    subject = f"entitlement {name}"
    terms = terms_from(fields, shapes[model], granted.created or place)
    if origin == CLUSTER:  # of another version it may have classes that admission cannot weigh
        msgspec.convert(msgspec.structs.asdict(terms), Entitlement)
    suspended = known.suspended(subject) or granted.suspended
    if suspended:  # no capacity will change that
        granted = msgspec.structs.replace(granted, verdict="", message="")
    terms = msgspec.structs.replace(
        terms,
        suspended=suspended or granted.verdict != "",
        expires_unix_s=_earlier(terms.expires_unix_s, known.ends_unix_s(subject)) or 0.0,
    )
    own = [] if section is None else list(section.digests)
    own += filter(_DIGEST.fullmatch, granted.digests)
    for key in known.own_keys_of(name).values() if origin != CLUSTER else ():
        own += key.digests if key.of == uid else ()
    # A denied digest opens nothing, also as it was once a tenant's key.
    live = [
        d
        for d in dict.fromkeys(own)
        if not (known.gone(d) or known.suspended(f"key {d}") or known.ends_unix_s(f"key {d}") > 0)
    ]
    return EntitlementInForce(
        terms=terms,
        digests=tuple(live),
        origin=origin,
        uid=uid,
        revision=known.revisions.get(subject, 0),
        granted=granted,
        suspended=suspended,
    )


def tenant_of(name: str, file: TenancyFile, known: Known) -> TenantInForce:
    """The tenant in force; one that is not listed may still have tokens, or be suspended."""
    section, row = file.tenants.get(name), known.row("tenant", name)
    subject = f"tenant {name}"
    if section is None:
        fields: Mapping[str, Any] = {} if row is None else row.fields
        listed = fields.get("entitlements")
        section = FileTenant(
            display_name=fields.get("display_name"),
            labels=fields.get("labels") or {},
            entitlements=None if listed is None else tuple(listed),
        )
    given, order = section.entitlements, file.order.get(name, ())
    default = None
    if given is not None or order:
        default = TenantKey(
            tenant=name,
            name="",
            sha256=b"",
            entitlements=order if given is None else given,
            only_listed=given is not None,
        )
    return TenantInForce(
        name=name,
        exists=name in file.tenants or row is not None,
        origin="file" if name in file.tenants else "admin",
        display_name=section.display_name,
        labels=section.labels,
        entitlements=given,
        default=default,
        suspended=section.suspended or known.suspended(subject),
        keys=tuple(_keys(name, file, known, given)),
        revision=known.revisions.get(subject, 0),
    )


def _keys(
    tenant: str, file: TenancyFile, known: Known, given: tuple[str, ...] | None
) -> Iterator[KeyInForce]:
    """Every live key of a tenant, the file's first."""
    section, row = file.tenants.get(tenant), known.row("tenant", tenant)
    of_file = () if section is None else section.keys
    valid = {uid for uid, there in (("", section), (row.uid if row else "", row)) if there}
    made = [key for key in known.keys_of(tenant).values() if key.of in valid]
    former = {key.former_sha256 for key in made}
    listed = {key.sha256.hex(): key for key in of_file}
    for digest, key in listed.items():
        if digest not in former and not known.gone(digest):
            yield KeyInForce(key=_restricted(key, known), origin="file")
    # By its section alone: what is denied of one value does not concern another one.
    namesakes = {key.name: key for key in of_file}
    for key_row in made:
        key = _made(tenant, key_row, file, given)
        if (namesake := namesakes.get(key.name)) is not None:
            key = _narrowed(key, namesake)
        present = key.sha256.hex()
        if present not in listed and not known.gone(present):
            yield KeyInForce(key=_restricted(key, known), origin="admin")
        before = key_row.former_sha256
        if before and not known.gone(before):
            ends = _earlier(key.expires_unix_s, key_row.former_until_unix_s)
            old = msgspec.structs.replace(key, sha256=bytes.fromhex(before), expires_unix_s=ends)
            yield KeyInForce(key=_restricted(old, known), origin="admin", former=True)


def _made(tenant: str, row: Row, file: TenancyFile, given: tuple[str, ...] | None) -> TenantKey:
    """A key that administrators made, before what restricts it."""
    fields = row.fields
    name, models, own = fields["name"], fields.get("models"), fields.get("entitlements")
    listed = given if own is None else tuple(own)
    stated = msgspec.convert({n: fields[n] for n in LIMIT_FIELDS if n in fields}, KeyLimits)
    return TenantKey(
        tenant=tenant,
        name=name,
        sha256=bytes.fromhex(fields["sha256"]),
        models=None if models is None else frozenset(models),
        entitlements=file.order.get(tenant, ()) if listed is None else listed,
        only_listed=listed is not None,
        queue_status=bool(fields.get("queue_status")),
        expires_unix_s=instant(fields.get("expires_at")) or None,
        stated=stated,
        limits=key_limits(tenant, name, stated, file.currency),
    )


def _restricted(key: TenantKey, known: Known) -> TenantKey:
    """The key with what administrators denied."""
    subject = f"key {key.sha256.hex()}"
    suspended, ends = known.suspended(subject), known.ends_unix_s(subject)
    if not (suspended or ends):
        return key
    return msgspec.structs.replace(
        key,
        suspended=key.suspended or suspended,
        expires_unix_s=_earlier(key.expires_unix_s, ends),
    )


def _narrowed(key: TenantKey, by: TenantKey) -> TenantKey:
    """A key that opens no more than the file's key of its name, and has that one's limits."""
    listed = key.entitlements
    if by.only_listed:
        listed = by.entitlements
        if key.only_listed:
            listed = tuple(name for name in key.entitlements if name in by.entitlements)
    models = [m for m in (key.models, by.models) if m is not None]
    return msgspec.structs.replace(
        key,
        models=frozenset.intersection(*models) if models else None,
        entitlements=listed,
        only_listed=key.only_listed or by.only_listed,
        expires_unix_s=_earlier(key.expires_unix_s, by.expires_unix_s),
        suspended=key.suspended or by.suspended,
        queue_status=by.queue_status,
        stated=by.stated,
        limits=by.limits,
    )


def _earlier(*ends_unix_s: float | None) -> float | None:
    """The first of some ends in Unix seconds; None and 0 are none."""
    first = min((end for end in ends_unix_s if end), default=inf)
    return None if first == inf else first
