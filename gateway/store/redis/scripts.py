"""The lease store's Lua scripts: their text, their keys, and their calls as bytes.

Every script has the same keys (see `lua/book.lua`), so a call is a prefix, built once per model
and script, and one msgpack argument. The calls in GROUPED are parts of one script,
`lua/calls.lua`, which takes any number of them. The keys contain the scripts' version: during a
rolling upgrade that changes it, each version counts separately.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import quote

import msgspec

from gateway.admission.terms import Terms
from gateway.records.entitlement import AdmissionProfile, Entitlement
from gateway.store.redis.route import Script, lua, script

VERSION: Final = 7

GROUPED: Final = {
    "admit": (
        *("lease_id", "owner", "observe", "entitlement", "pool", "alternates"),
        *("estimate_tokens", "kv_bytes", "sequences", "asked", "dry", "demoted"),
    ),
    "settle": ("lease_id", "charge", "timely", "spent"),
    "resize": ("lease_id", "estimate_tokens", "kv_bytes"),
    "transfer": ("lease_id", "pool", "force"),
}
"""Calls that share one script, and the fields of their argument."""
MAX_GROUPED: Final = 32
"""Most calls in one script. It blocks the server meanwhile, for about 1 ms."""
_NAMES: Final = (
    *("calls", "renew", "adopt", "reap", "tick"),
    *("evict", "evicted", "define", "remove", "change", "view", "budget", "sweep"),
)
_KEYS: Final = (
    *("state", "defs", "accounts", "leases", "expiry", "graves", "graves_order", "active"),
    *("ticking", "evictions", "leader", "replicas", "dedicated"),
)
_POOL_KEYS: Final = ("weights", "evictable", "denials", "denials_last")
RECORDS: Final = {
    "terms": Terms.__struct_fields__,
    "profile": AdmissionProfile.__struct_fields__,
    "entitlement": Entitlement.__struct_fields__,
    "book": (
        *("pools", "surplus", "surplus_s", "surplus_per_s", "own_served", "priority_denials"),
        *("ticked_s", "settled", "refunds", "serial", "epoch", "reap_at_s", "tick"),
    ),
    "pool": (
        *("inflight", "kv_bytes", "idle_dedicated", "unreserved", "service_s"),
        *("refused_sequences", "refused_kv_bytes", "refused_tokens", "served_tokens"),
    ),
    "account": (
        *("inflight", "spilled", "total", "kv_bytes", "level", "level_s", "borrowed"),
        *("borrowed_s", "debt", "burst", "served", "denied", "denied_seconds"),
        *("denied_kv_seconds", "promised", "promised_s", "waiters"),
        *("waiters_s", "mean_cost", "inflight_seconds", "kv_seconds", "since_s", "debited"),
        *("refunded", "used"),
    ),
    "lease": (
        *("entitlement", "pool", "sequences", "estimate_tokens", "kv_bytes", "weight"),
        *("issued_s", "funded", "owner", "would_deny", "spilled", "evicted", "evictable"),
        *("adopted", "serial", "held"),
    ),
    "limit": (*("id", "unit", "amount", "step_s", "start_s", "next_s", "kept_s", "warn", "spot"),),
}
"""Fields of the records in the keys, in their order."""
_WITHIN: Final = ("profile", "pool", "limit")
"""Records that are arrays within another record: in the terms, in the book, in a call."""
_LAYER: Final = "-- LAYER\n"
_SERVER_CLOCK: Final = "local now_s, read_s, ticked_by_s = book_time()"
_TEST_CLOCK: Final = "local now_s, read_s, ticked_by_s = tonumber(ARGV[#ARGV]), nil, nil"


def _read(match: re.Match[str]) -> str:
    """Lua code that reads a record into a variable."""
    into, kind, raw = match.groups()
    names = ", ".join(RECORDS[kind])
    unpack = "unpack" if kind in _WITHIN else "unpacked"
    made = ", ".join(f"{field} = {field}" for field in RECORDS[kind])
    return f"do local {names} = {unpack}({raw}) {into} = {{{made}}} end\n"


def _packed(match: re.Match[str]) -> str:
    """Lua code that packs a record."""
    kind, name = match.groups()
    values = ", ".join(f"{name}.{field}" for field in RECORDS[kind])
    return f"{{{values}}}" if kind in _WITHIN else f"pack({values})"


def record(kind: str, raw: bytes) -> dict[str, Any]:
    """Decode a record from a key; nil fields are missing."""
    fields = RECORDS[kind]
    values = msgspec.msgpack.decode(b"\xdc" + len(fields).to_bytes(2, "big") + raw)
    record = {f: v for f, v in zip(fields, values, strict=True) if v is not None}
    if kind == "book":
        record["pools"] = [dict(zip(RECORDS["pool"], p, strict=True)) for p in record["pools"]]
    return record


_LIMITS: Final = "local function make_limits()\n{}\nend".format(
    lua("limits").replace("-- MORE", lua("limits_more"))
)
_LAYERS: Final = lua("book").replace("-- LIMITS", _LIMITS).split(_LAYER)
_BOOK: Final = "return (function()\n".join(_LAYERS)
_ENDS: Final = ["end)()"] * (len(_LAYERS) - 1)
_CHECKS: Final = f"local function make_checks()\n{lua('place')}\n{lua('checks')}\nend"
_MADE: Final = "\nelse".join(
    f"if name == '{name}' then\n" + lua(name).replace("\nreturn ", f"\nmade.{name} = ")
    for name in GROUPED
)
"""Lua code that makes the function of the grouped call `name` on demand."""

encode: Final = msgspec.msgpack.Encoder().encode


class Scripts:
    """All scripts of the lease store."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock`: for tests, the time that scripts use instead of the server's."""
        self.clock = clock
        self.all = {name: _script(name, _TEST_CLOCK if clock else _SERVER_CLOCK) for name in _NAMES}


@functools.cache
def _script(name: str, clock: str) -> Script:
    between = _CHECKS if name == "calls" else "local arg = unpacked(ARGV[1])"
    text = "\n".join((_BOOK, between, lua(name).replace("-- MAKE", _MADE + "\nend"), *_ENDS))
    text = re.sub(r"(\S+) = READ_([a-z]+)\((.+)\)\n", _read, text)
    text = re.sub(r"PACKED_([a-z]+)\(([a-z.]+)\)", _packed, text)
    if _SERVER_CLOCK not in text:
        raise ValueError(f"{name}.lua does not read the clock where it should")
    return script(name, text.replace(_SERVER_CLOCK, clock))


class Calls:
    """Encodes calls of the scripts on one model."""

    def __init__(self, scripts: Scripts, model: str, pools: int) -> None:
        self.scripts = scripts
        self._tag = f"{{{quote(model, safe=':')}}}"
        self.pools = pools
        self._prefixes: dict[str, bytes] = {}
        self._keys = 0

    @property
    def key(self) -> str:
        """One of the keys; all are in its slot."""
        return self._named("state")

    def all_keys(self) -> list[str]:
        """All keys, in the order of KEYS."""
        per_pool = [f"{name}:{pool}" for pool in range(self.pools) for name in _POOL_KEYS]
        return [self._named(name) for name in (*_KEYS, *per_pool)]

    def widen(self, pools: int) -> None:
        """Add the keys of further pools."""
        self.pools = max(pools, self.pools)
        self._prefixes.clear()

    def packed(self, name: str, *arguments: bytes) -> bytes:
        """An encoded call of a script with its arguments."""
        prefix = self._prefixes.get(name)
        if prefix is None:
            keys = [key.encode() for key in self.all_keys()]
            self._keys = len(keys)
            parts = [b"EVALSHA", self.scripts.all[name].sha, b"%d" % len(keys), *keys]
            prefix = self._prefixes[name] = b"".join(map(_bulk, parts))
        if self.scripts.clock is not None:
            arguments = (*arguments, repr(self.scripts.clock()).encode())
        count = 3 + self._keys + len(arguments)
        return b"*%d\r\n%b%b" % (count, prefix, b"".join(map(_bulk, arguments)))

    def _named(self, name: str) -> str:
        return f"sluice:{VERSION}:{self._tag}:{name}"

    def limits_key(self, *, one_server: bool) -> str:
        """The hash of limits' counters: one for all models, or in a cluster each model's own."""
        return self._named("limits") if not one_server else f"sluice:{VERSION}:limits"


def _bulk(part: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(part), part)


def grouped(name: str, source: object = None, **fields: Any) -> bytes:
    """The argument of a grouped call; fields that are not given are those of `source`."""
    values = [fields[f] if f in fields else getattr(source, f) for f in GROUPED[name]]
    return encode(values)[1:]  # without the list's one-byte head (at most 15 fields)


def argument(**fields: Any) -> bytes:
    """A script's argument: a msgpack map."""
    return encode(fields)
