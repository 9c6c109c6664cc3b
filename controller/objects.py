"""TokenPool and TokenEntitlement objects as they are read, and checked once more.

The API server checks them against their definitions. The gateway's own rules of an entitlement
check them here again, whatever was in the cluster before a definition, and whoever wrote it.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypedDict

import msgspec
from pydantic import ValidationError

from controller.allocation import Seat
from controller.quantity import FIELDS, MIB_PER_GIB, NOTHING, Amounts, amounts_of, only
from controller.records import BACKENDS, Object
from gateway.admission.entitlement_terms import BadTerms, ModelShape, instant, terms_from
from gateway.records.entitlement import CLASSES, RESERVING
from gateway.records.record import Record
from gateway.settings.tenants import EntitlementConfig

_PATHS: Final = {
    "name": ("metadata", "name"),
    "tenant": ("spec", "tenantId"),
    "service_class": ("spec", "qos", "serviceClass"),
    "slo_target_ms": ("spec", "qos", "sloTargetMs"),
    "slo_tpot_ms": ("spec", "qos", "sloTpotMs"),
    "tokens_per_second": ("spec", "resources", "tokensPerSecond"),
    "kv_cache_gib": ("spec", "resources", "kvCacheGiB"),
    "concurrency": ("spec", "resources", "concurrency"),
    "max_tokens_per_second": ("spec", "limits", "tokensPerSecond"),
    "max_kv_cache_gib": ("spec", "limits", "kvCacheGiB"),
    "max_concurrency": ("spec", "limits", "concurrency"),
    "expires_at": ("spec", "expiresAt"),
}
"""Field of an entitlement in the gateway -> where a TokenEntitlement has it."""
_NAMES: Final = re.compile(rf"\b({'|'.join(sorted(set(_PATHS) - {'name', 'tenant'}))})\b")
"""Which in the gateway's words have to be said as the object has them."""
_IDENTITY: Final = ("tenantId", "poolRef")
_MALFORMED: Final = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Raised by the reading of an object that an older definition let in. It must not stop others."""
MAX_TEXT: Final = 1000
"""Characters of a problem that are told."""
MAX_REPLICAS: Final = 1_000_000
"""The most that a TokenPool's status can say."""
MAX_PER_REPLICA: Final = 10**12
"""Of any amount, so that a pool's capacity is a number of 64 bits."""
_BASELINE: Final = dict(
    zip(FIELDS, ("tokens_per_second", "kv_cache_gib", "concurrency"), strict=True)
)


class _Condition(TypedDict):
    type: str
    status: str
    lastTransitionTime: str
    reason: str


class _Status(TypedDict, total=False):
    """What is read of the status of either kind."""

    state: str
    boundAt: str
    model: str
    leasePod: str
    tenantId: str
    poolRef: dict[str, Any]
    allocated: dict[str, Annotated[float, msgspec.Meta(ge=0, le=1e16)]]
    conditions: list[_Condition]
    replicas: int
    selector: str


def status_of(source: Object) -> Mapping[str, Any]:
    """An object's status as last written; {} where it is of another shape."""
    status: Mapping[str, Any] = source.get("status") or {}
    try:
        msgspec.convert(status, _Status)
    except msgspec.ValidationError:
        return {}
    return status


class Pool(Record, frozen=True, kw_only=True):
    """A TokenPool."""

    name: str
    source: Object
    status: Mapping[str, Any] = {}
    """As last written."""
    model: str = ""
    gateway_pool: str = ""
    """The only pool of the model that it is; "": all of them."""
    backend: tuple[str, str] | None = None
    """Kind and name."""
    per_replica: Amounts = NOTHING
    """0 in dimensions that are not enforced."""
    bounds: tuple[int, int] | None = None
    """Fewest and most replicas, where the controller scales the backend."""
    replicas: int | None = None
    """As someone set them through the scale subresource."""
    problem: str = ""
    """Why it cannot be used."""


class Claim(Record, frozen=True, kw_only=True):
    """What a TokenEntitlement asks for."""

    name: str
    source: Object
    status: Mapping[str, Any] = {}
    """As last written."""
    created: int = 0
    """Unix ms."""
    service_class: str = "elastic"
    pool: str = ""
    """Name of its TokenPool."""
    fields: Mapping[str, Any] = {}
    """Of its section in the gateway. Where they are not accepted, or there is no pool, no more than
    names it; {}: no gateway could take it."""
    wanted: Amounts = NOTHING
    digests: tuple[str, ...] = ()
    expires_unix_s: float = 0.0
    """0: never."""
    suspended: bool = False
    problem: tuple[str, str] | None = None
    """Why it is not accepted: reason and message."""
    remark: str = ""
    """What is wrong with its keys."""

    @property
    def uid(self) -> str:
        """Of the object."""
        uid: str = self.source["metadata"].get("uid", "")
        return uid

    @property
    def reserving(self) -> bool:
        """Whether it comes before elastic ones."""
        return self.service_class in RESERVING

    @property
    def seated(self) -> bool:
        """Whether its class takes a place in the pool."""
        return self.reserving or self.service_class == "elastic"

    def seat(self, pool: Pool, held: Amounts | None, *, moving: bool = False) -> Seat:
        """Its place in a pool."""
        if held and self.service_class == "guaranteed" and not held[2]:
            held = None  # it was elastic; without sequences it could send nothing
        return Seat(
            name=self.name,
            created=self.created,
            reserving=self.reserving,
            wanted=only(self.wanted, pool.per_replica),
            held=None if held is None else only(held, pool.per_replica),
            moving=moving,
        )

    def in_force(self, now_unix_s: float) -> bool:
        """Whether it counts: accepted, not suspended, not expired."""
        return self.problem is None and not self.suspended and not self.expired(now_unix_s)

    def expired(self, now_unix_s: float) -> bool:
        """Whether it has ended."""
        return 0 < self.expires_unix_s <= now_unix_s

    @property
    def identity(self) -> dict[str, Any]:
        """What never changes of it, as its status has it: as first accepted."""
        given = self.status if self.problem else self.source["spec"]
        return {name: given[name] for name in _IDENTITY if name in given}


def read_pool(source: Object) -> Pool:
    """A TokenPool from its object; one that cannot be used says why in `problem`."""
    name, spec, status = source["metadata"]["name"], source.get("spec") or {}, status_of(source)
    try:
        stated, scaling, ref = spec["perReplica"], spec.get("scaling"), spec.get("backendRef")
        rate, kv_gib, sequences = (float(stated.get(field) or 0) for field in FIELDS)
        per_replica = int(rate), int(kv_gib * MIB_PER_GIB), int(sequences)
        replicas = spec.get("replicas")
        bounds = scaling and (_count(scaling.get("minReplicas", 1)), _count(scaling["maxReplicas"]))
        backend = ref and (str(ref["kind"]), str(ref["name"]))
        problem = ""
        if per_replica[2] < 1:
            problem = "spec.perReplica.concurrency: not a positive number; give a replica's slots"
        elif not 0 <= min(per_replica) <= max(per_replica) <= MAX_PER_REPLICA:
            problem = f"spec.perReplica: an amount is not in 0 to {MAX_PER_REPLICA}; correct it"
        elif ref and ref["apiVersion"] != (served := BACKENDS[ref["kind"]].api_version):
            problem = f"spec.backendRef.apiVersion: a {ref['kind']} is of {served}; write that"
        return Pool(
            name=name,
            source=source,
            status=status,
            model=str(spec["model"]),
            gateway_pool=str(spec.get("pool") or ""),
            backend=backend or None,
            per_replica=per_replica,
            bounds=bounds or None,
            replicas=None if replicas is None else _count(replicas),
            problem=problem,
        )
    except _MALFORMED as error:
        problem = f"spec: {error!r:.{MAX_TEXT}}; compare it with the definition of TokenPool"
        return Pool(name=name, source=source, status=status, problem=problem)


def _count(replicas: object) -> int:
    return min(max(int(str(replicas)), 0), MAX_REPLICAS)


def created_of(source: Object) -> int:
    """When an object was created, in Unix ms."""
    return round(instant(source["metadata"].get("creationTimestamp")) * 1000)


def read_claim(
    source: Object,
    pools: Mapping[str, Pool],
    digests: Mapping[str, Mapping[str, str]],
    owners: dict[str, str],
) -> Claim:
    """A TokenEntitlement from its object; one that is not accepted says why in `problem`.

    `digests`: of keys, by Secret and entry. `owners`: who has which digest already; grows.
    """
    try:
        pool = pools.get(source["spec"]["poolRef"]["name"])
        return _read_claim(source, pool, digests, owners)
    except _MALFORMED as error:
        message = f"spec: {error!r:.{MAX_TEXT}}; compare it with the definition of TokenEntitlement"
        name, status = source["metadata"]["name"], status_of(source)
        return Claim(name=name, source=source, status=status, problem=("Invalid", message))


def _read_claim(
    source: Object,
    pool: Pool | None,
    digests: Mapping[str, Mapping[str, str]],
    owners: dict[str, str],
) -> Claim:
    spec, status = source["spec"], status_of(source)
    name: str = source["metadata"]["name"]
    fields = _fields(source, pool)
    problem = _problem(fields, pool) or _changed(spec, status)
    service_class, expires_at = fields.get("service_class"), fields.get("expires_at")
    if problem is not None or pool is None:
        tenant = status.get("tenantId") or fields.get("tenant")
        model = status.get("model") if pool is None else pool.model
        fields = {"name": name, "model": model, "tenant": tenant}
        if problem is None and expires_at:
            fields["expires_at"] = expires_at
        if _problem(fields, pool) is not None:
            fields = {}
    opening, wrong = [], []
    for ref in (key["secretRef"] for key in spec.get("keys") or ()):
        digest = digests.get(ref["name"], {}).get(ref["key"])
        if digest is None:
            wrong.append(f"no key in entry {ref['key']} of Secret {ref['name']}; put one there")
        elif (owner := owners.setdefault(digest, name)) != name:
            wrong.append(f"its key opens TokenEntitlement {owner} already; give it another one")
        else:
            opening.append(digest)
    return Claim(
        name=name,
        source=source,
        status=status,
        created=created_of(source),
        service_class=str(service_class) if service_class in CLASSES else "elastic",
        pool=spec["poolRef"]["name"],
        fields=fields,
        wanted=NOTHING if problem else amounts_of(spec.get("resources") or {}),
        digests=tuple(dict.fromkeys(opening)),
        expires_unix_s=0.0 if problem else instant(expires_at),
        suspended=bool(spec.get("suspend")),
        problem=problem,
        remark="; ".join(wrong),
    )


def granted_fields(claim: Claim, pool: Pool, allocated: Mapping[str, Any]) -> dict[str, Any]:
    """The claim's fields with what it was allocated as its baseline."""
    fields = dict(claim.fields)
    for resource, field in _BASELINE.items():
        fields.pop(field, None)
        if amount := allocated.get(resource):
            in_pool = field == "concurrency" and pool.gateway_pool
            fields[field] = {pool.gateway_pool: amount} if in_pool else amount
    if claim.service_class == "guaranteed":  # its baseline is its limit
        fields.pop("max_concurrency", None)
    return fields


def _fields(source: Object, pool: Pool | None) -> dict[str, Any]:
    """An entitlement's fields in the gateway; unchecked."""
    fields: dict[str, Any] = {"model": "unknown" if pool is None else pool.model}
    for field, path in _PATHS.items():
        value: Any = source
        for step in path:
            value = value.get(step) if isinstance(value, dict) else None
        if value is not None:
            fields[field] = value
    if pool is not None and pool.gateway_pool and "concurrency" in fields:
        fields["concurrency"] = {pool.gateway_pool: fields["concurrency"]}
    return fields


def _problem(fields: Mapping[str, Any], pool: Pool | None) -> tuple[str, str] | None:
    """What the gateway would not take."""
    only_pool = pool.gateway_pool if pool else ""
    try:
        EntitlementConfig.model_validate(fields)
        model = ModelShape(name=fields["model"], pools=(only_pool or "all",), slots=(1,))
        terms_from(fields, model, 0)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_input=False)[0]
        words = detail.get("ctx", {})
        message = str(words.get("message") or detail["msg"])
        return _invalid(str(detail["loc"][0]), message, str(words.get("fix") or "correct it"))
    except BadTerms as error:
        return _invalid(error.field, error.message, error.fix)
    return None


def _invalid(field: str, message: str, fix: str) -> tuple[str, str]:
    path = ".".join(_PATHS.get(field, ("spec", "poolRef")))
    message = _NAMES.sub(lambda name: ".".join(_PATHS[name[0]]), f"{message}; {fix}")
    return "Invalid", f"{path}: {message[:1].lower()}{message[1:]}"


def _changed(spec: Mapping[str, Any], status: Mapping[str, Any]) -> tuple[str, str] | None:
    """Whether it is another one's than the one first accepted."""
    for field in _IDENTITY:
        if status.get(field, spec.get(field)) != spec.get(field):
            fix = "undo it, or delete the object and create it anew"
            return "ImmutableFieldChanged", f"spec.{field}: it cannot change; {fix}"
    return None
