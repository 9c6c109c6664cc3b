"""The type of `state.url`: memory://, sqlite:///PATH, redis:// and its variants, checked here."""

import importlib.util
import re
from typing import Annotated
from urllib.parse import SplitResult, parse_qsl, urlsplit

from pydantic import AfterValidator, Secret

from gateway.records.record import without_credentials
from gateway.settings.problems import install
from gateway.settings.types import Text, reject

_REDIS = frozenset({"redis", "rediss"})
_MANY = frozenset({"redis+sentinel", "redis+cluster"})
# Other URL options of the Redis client could undo the time-outs that protect requests.
_TLS_OPTIONS = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"})
_FIX = "use memory://, sqlite:///PATH, redis://HOST:6379/0 or rediss://HOST:6379/0"
_REDIS_FIX = "write it as redis://USER:PASSWORD@HOST:6379/0; user, password, port may be absent"
_CLUSTER_FIX = "write it as redis+cluster://USER:PASSWORD@HOST:6379,HOST:6379; no database"
_SENTINEL_FIX = "write it as redis+sentinel://USER:PASSWORD@HOST:26379,HOST:26379/SERVICE/0"
_NODE = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


def state_url(url: str) -> str:
    """The URL unchanged, if it can open a store. Rejections quote only its scheme."""
    scheme, _, rest = url.partition("://")
    if scheme in _MANY:
        _check_many(scheme, rest)
        return url
    try:
        parts = urlsplit(url)
    except ValueError:
        reject("not a state URL", _FIX)
    if parts.scheme == "sqlite":
        path = url.removeprefix("sqlite:///")
        if path == url or not path.strip("/") or "?" in path or "#" in path or "\x00" in path:
            reject(
                "not the path of a file",
                "sqlite:///sluice.db is relative to the working directory, "
                "sqlite:////var/lib/sluice/sluice.db absolute",
            )
    elif parts.scheme in _REDIS:
        _check_redis(parts)
    elif url != "memory://":
        reject("not a state URL", _FIX)
    return url


def is_redis(url: str) -> bool:
    """Whether a URL accepted by `state_url` is a Redis URL."""
    return url.partition("://")[0] in _REDIS | _MANY


def _check_redis(parts: SplitResult) -> None:
    try:
        port = parts.port
    except ValueError:
        reject("the port is not a number up to 65535", _REDIS_FIX)
    if not parts.hostname or port == 0 or parts.fragment:
        reject("no host, or no port to connect to", _REDIS_FIX)
    if not re.fullmatch(r"/?|/[0-9]{1,4}", parts.path):
        reject("the path is not the number of a database", _REDIS_FIX)
    given = {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)}
    if not given <= (_TLS_OPTIONS if parts.scheme == "rediss" else frozenset()):
        reject(
            "an option that is not supported",
            "only rediss:// takes options: " + ", ".join(sorted(_TLS_OPTIONS)),
        )
    _check_client()


def _check_many(scheme: str, rest: str) -> None:
    """Several nodes, each with its port. A cluster has no database; sentinels need a service."""
    cluster = scheme == "redis+cluster"
    fix = _CLUSTER_FIX if cluster else _SENTINEL_FIX
    authority, slash, path = rest.partition("/")
    for node in authority.rpartition("@")[2].split(","):
        found = _NODE.fullmatch(node)
        if found is None or not 0 < int(found[1]) < 65536:
            reject("not a list of HOST:PORT", fix)
    if cluster and slash:
        reject("a cluster has no databases", fix)
    if not cluster and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}/[0-9]{1,4}", path):
        reject("no service and database after the sentinels", fix)
    _check_client()


def _check_client() -> None:
    if importlib.util.find_spec("redis") is None:
        reject("the client for Redis is not installed", install("redis"))


class StateUrl(Secret[Annotated[Text, AfterValidator(state_url)]]):
    """The URL, which may hold a password; shown without its credentials."""

    def _display(self) -> str:
        return without_credentials(self.get_secret_value())
