"""The lease store's scripts as Redis takes them: their text, their keys, their calls as bytes.

Every script has the same keys (see `lua/book.lua`), so a call is a prefix that is made once a
model and script, and one msgpack argument. The keys carry the scripts' version: during a rolling
upgrade that changes it, each version counts for itself.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec

from gateway.domain import Record

VERSION: Final = 4
_SHARED: Final = {"admit": ("book", "place"), "transfer": ("book", "place")}
_NAMES: Final = (
    *("admit", "settle", "resize", "transfer", "renew", "adopt", "reap", "tick"),
    *("evict", "evicted", "define", "remove", "change", "view"),
)
_KEYS: Final = (
    *("state", "defs", "accounts", "leases", "expiry", "graves", "graves_order", "active"),
    *("ticking", "evictions", "leader", "replicas", "dedicated"),
)
_POOL_KEYS: Final = ("weights", "evictable", "denials", "denials_last")
_SERVER_CLOCK: Final = "local now_s, read_s, ticked_by_s = book_time()"
_TEST_CLOCK: Final = "local now_s, read_s, ticked_by_s = tonumber(ARGV[2]), nil, nil"

encode: Final = msgspec.msgpack.Encoder().encode


class Script(Record, frozen=True, kw_only=True):
    """One script's text and what EVALSHA calls it by."""

    name: str
    text: bytes
    sha: bytes


class Scripts:
    """All scripts of the lease store."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock`: for tests, the time that scripts are told instead of the server's."""
        self.clock = clock
        self.all = {name: self._read(name) for name in _NAMES}

    def _read(self, name: str) -> Script:
        parts = (*_SHARED.get(name, ("book",)), name)
        text = "\n".join(lua(part) for part in parts)
        if self.clock is not None:
            if _SERVER_CLOCK not in text:
                raise ValueError(f"{name}.lua does not read the clock where it should")
            text = text.replace(_SERVER_CLOCK, _TEST_CLOCK)
        return script(name, text)


class Calls:
    """Calls of the scripts on one model, as bytes."""

    def __init__(self, scripts: Scripts, model: str, pools: int) -> None:
        self.scripts = scripts
        self.tag = f"{{{quote(model, safe=':')}}}"
        self.pools = pools
        self._prefixes: dict[str, bytes] = {}

    @property
    def key(self) -> str:
        """One of the keys: all are in its slot."""
        return self._named("state")

    def all_keys(self) -> list[str]:
        """All keys, in the scripts' order."""
        per_pool = [f"{name}:{pool}" for pool in range(self.pools) for name in _POOL_KEYS]
        return [self._named(name) for name in (*_KEYS, *per_pool)]

    def widen(self, pools: int) -> None:
        """Name the keys of more pools."""
        self.pools = max(pools, self.pools)
        self._prefixes.clear()

    def packed(self, name: str, argument: bytes) -> bytes:
        """The call of a script with its argument."""
        prefix = self._prefixes.get(name)
        if prefix is None:
            prefix = self._prefixes[name] = self._prefix(name)
        call = b"%b$%d\r\n%b\r\n" % (prefix, len(argument), argument)
        if self.scripts.clock is None:
            return call
        now = repr(self.scripts.clock()).encode()
        return b"%b$%d\r\n%b\r\n" % (call, len(now), now)

    def _prefix(self, name: str) -> bytes:
        keys = [key.encode() for key in self.all_keys()]
        parts = [b"EVALSHA", self.scripts.all[name].sha, b"%d" % len(keys), *keys]
        count = len(parts) + (1 if self.scripts.clock is None else 2)
        return b"*%d\r\n" % count + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts)

    def _named(self, name: str) -> str:
        return f"sluice:{VERSION}:{self.tag}:{name}"


def lua(name: str) -> str:
    """The text of `lua/NAME.lua`."""
    return Path(__file__).with_name("lua").joinpath(f"{name}.lua").read_text("utf-8")


def script(name: str, text: str) -> Script:
    """A script of a text."""
    raw = text.encode()
    sha = hashlib.sha1(raw, usedforsecurity=False).hexdigest().encode()
    return Script(name=name, text=raw, sha=sha)


def argument(**fields: Any) -> bytes:
    """A script's argument: a msgpack map."""
    return encode(fields)
