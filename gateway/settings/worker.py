"""A worker of the file: one engine, or a place that names engines at run time."""

import socket
from ipaddress import ip_address
from typing import Annotated, Final, Literal
from urllib.parse import SplitResult, urlsplit

from msgspec.structs import replace
from pydantic import AfterValidator, BeforeValidator, PrivateAttr

from gateway.records.attempt import DiscoverySource, EngineTls, FoundEngine, WorkerAddress
from gateway.settings.discovery import is_source, source_of
from gateway.settings.types import ModelName, Ranks, Secret, Section, Text, reject

_MAX_URL: Final = 2048
_MAX_NAME: Final = 256
_WORKER_FIX: Final = "write it as http://host:port or https://host:port"


def _worker_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        reject("not a URL", _WORKER_FIX)
    if parts.scheme not in {"http", "https"}:
        if is_source(url):
            reject("a place that names engines, not an engine", "write it as `discover`")
        reject("not an http or https URL", _WORKER_FIX)
    if parts.username is not None or parts.password is not None:
        reject("credentials in a worker's URL", "put the key in `api_key`, as ${NAME}")
    if parts.query or parts.fragment:
        reject("a worker's URL has no query and no fragment", _WORKER_FIX)
    visible = all("!" <= char <= "~" for char in url)
    if len(url) > _MAX_URL or not parts.hostname or port == 0 or not visible:
        reject("not a URL with a host", _WORKER_FIX)
    # Base URLs often end in /v1, but request paths already start with it.
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _found_url(url: str) -> str:
    """The URL of an engine that another system or an admin named.

    Not a link-local address: there a cloud's metadata service tells secrets, and no engine runs.
    """
    found = _worker_url(url)
    host = urlsplit(found).hostname or ""
    try:
        address = ip_address(host)
    except ValueError:
        if _is_number(host):
            raise ValueError("a number for a host: write the address as 10.0.0.1") from None
        return found  # a name
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        raise ValueError("not an address that an engine can have")
    return found


def _is_number(host: str) -> bool:
    """Whether a host is no name but a short, octal or hexadecimal form of an IPv4 address."""
    try:
        socket.inet_aton(host.rstrip("."))
    except OSError:
        return False
    return True


def _from_url(value: object) -> object:
    """A bare URL is short for a mapping with only `url` or `discover`."""
    if not isinstance(value, str):
        return value
    text = str.__str__(value)
    return {"discover" if is_source(text) else "url": text}


def _one_place(worker: "WorkerConfig") -> "WorkerConfig":
    if (worker.url is None) == (worker.discover is None):
        reject(
            "a worker has a `url` or a `discover`, one of them",
            "give the engine's url, or the place that names engines",
        )
    return worker


class WorkerConfig(Section):
    """One engine, or a place that names engines at run time."""

    url: Annotated[str, AfterValidator(_worker_url)] | None = None
    """Base URL, http or https. Its path, without a final `/v1`, is prepended to request paths."""
    discover: Annotated[str, AfterValidator(lambda url: source_of(url).url)] | None = None
    """Instead of `url`, where engines are found: dns://host:port, file:///workers.yaml,
    k8s://service/NAME.NAMESPACE:port, k8s://pods?selector=...&port=... or
    inferencepool://NAME.NAMESPACE. The other keys are for each engine that is found."""
    scheme: Literal["http", "https"] = "http"
    """How engines that are found are called."""
    api_key: Secret | None = None
    """The engine's own key, sent as a bearer token. Client keys are never forwarded."""
    model: ModelName | None = None
    """Model name that this engine serves; absent: the client's name is sent."""
    ca_file: Text | None = None
    """PEM file of the authority that signed the engine's certificate (https only)."""
    ranks: Ranks = 1
    """Data-parallel ranks of this engine (vLLM's --data-parallel-size, SGLang's --dp-size). With 2
    or more, each rank counts as a worker: `host:port#0`, `host:port#1` and so on."""
    rank_by: Literal["header", "body"] = "header"
    """Carrier of the rank: header X-data-parallel-rank (vLLM, newer SGLang), or the body's
    `data_parallel_rank` (every SGLang)."""

    _tls: EngineTls = PrivateAttr(default_factory=EngineTls)

    @property
    def id(self) -> str:
        """host:port and the path, if any; shown in headers and metrics."""
        return self.address().id

    def of_pool(self, tls: EngineTls) -> "WorkerConfig":
        """The worker with its pool's TLS."""
        found = self.model_copy()
        found.note_tls(tls)
        return found

    def note_tls(self, tls: EngineTls) -> None:
        """Take over the pool's TLS."""
        self._tls = tls

    @property
    def addresses(self) -> tuple[WorkerAddress, ...]:
        """The engine, or each of its ranks."""
        if self.ranks == 1:
            return (self.address(),)
        return tuple(self.address(rank) for rank in range(self.ranks))

    def address(self, rank: int | None = None) -> WorkerAddress:
        """The worker as the upstream port takes it, with its key in clear text."""
        parts: SplitResult = urlsplit(self.url or "")
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        shown = f"[{host}]" if ":" in host else host
        return WorkerAddress(
            id=f"{shown}:{port}{parts.path}{'' if rank is None else f'#{rank}'}",
            scheme=parts.scheme,
            host=host,
            port=port,
            path_prefix=parts.path,
            api_key=self.api_key.get_secret_value() if self.api_key else None,
            served_model=self.model,
            # Its own `ca_file` comes before the pool's `tls.ca`.
            tls=self._tls if self.ca_file is None else replace(self._tls, ca_file=self.ca_file),
            rank=rank,
            rank_by=self.rank_by,
        )

    @property
    def source(self) -> DiscoverySource | None:
        """Where its engines are found; None for an engine of its own."""
        return None if self.discover is None else source_of(self.discover)

    def found(self, engine: FoundEngine) -> tuple[WorkerAddress, ...]:
        """An engine that its source named, with an address for each rank.

        Raises ValueError for a URL that is none, or of this machine's cloud, and a model's name
        that is none.
        """
        if engine.model is not None and not 0 < len(engine.model) <= _MAX_NAME:
            raise ValueError(f"its model's name is not of 1 to {_MAX_NAME} characters")
        changes: dict[str, object] = {"discover": None, "model": engine.model or self.model}
        changes["ranks"] = engine.ranks or self.ranks
        ones = [self.model_copy(update={**changes, "url": _found_url(u)}) for u in engine.urls]
        return ones[0].addresses if len(ones) == 1 else tuple(one.address() for one in ones)


Worker = Annotated[
    WorkerConfig,
    BeforeValidator(_from_url, json_schema_input_type=str | WorkerConfig),
    AfterValidator(_one_place),
]
