"""A worker of the file: one engine, or a place that names engines at run time."""

import importlib.util
import os
import re
import socket
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from msgspec.structs import replace
from pydantic import AfterValidator, BeforeValidator, PrivateAttr, model_validator

from gateway.records.attempt import (
    ClusterAccess,
    DiscoverySource,
    EngineTls,
    FoundEngine,
    WorkerAddress,
)
from gateway.settings.source import install
from gateway.settings.types import ModelName, Ranks, Secret, Section, Text, reject

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
URL_VARIABLE: Final = "SLUICE_KUBERNETES_URL"
"""For a gateway outside a cluster: the URL of `kubectl proxy`, which needs no token."""


def cluster_access(account: Path = ACCOUNT) -> ClusterAccess | None:
    """The access that the environment describes; None outside a cluster."""
    if url := os.environ.get(URL_VARIABLE):
        namespace = os.environ.get("SLUICE_KUBERNETES_NAMESPACE", "default")
        return ClusterAccess(url=url.rstrip("/"), namespace=namespace)
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    if not host or not (account / "token").exists():
        return None
    host = f"[{host}]" if ":" in host else host
    return ClusterAccess(
        url=f"https://{host}:{port or 443}",
        namespace=(account / "namespace").read_text(encoding="utf-8").strip() or "default",
        token_file=str(account / "token"),
        ca_file=str(account / "ca.crt"),
    )


SCHEMES: Final = frozenset({"dns", "file", "k8s", "inferencepool"})
_FORMS: Final = {
    "dns": "write dns://host:port, or dns://_service._tcp.host for SRV records",
    "file": "write file:///path/workers.yaml",
    "k8s": "write k8s://service/NAME.NAMESPACE:port, or k8s://pods?selector=app%3Dvllm&port=8000",
    "inferencepool": "write inferencepool://NAME.NAMESPACE",
}
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
"""Of an object, a namespace or a port."""


def is_source(text: str) -> bool:
    """Whether a text is a discovery URL, right or wrong, and not an engine's."""
    return text.partition("://")[0] in SCHEMES and "://" in text


def source_of(url: str) -> DiscoverySource:
    """The source that a discovery URL names. Raises what `reject` raises."""
    scheme = url.partition(":")[0]
    if scheme not in SCHEMES:
        reject("not a discovery URL", "write dns://, file://, k8s:// or inferencepool://")
    try:
        parts = urlsplit(url)
        number = parts.port if scheme != "k8s" else None
        asked = parse_qs(parts.query, strict_parsing=bool(parts.query))
    except ValueError:
        reject("not a URL", _FORMS[scheme])
    allowed = {"dns": {"server"}, "k8s": {"selector", "port", "namespace"}}.get(scheme, set())
    if parts.fragment or "@" in parts.netloc or set(asked) - allowed:
        reject(f"a {scheme}:// URL has other parts", _FORMS[scheme])
    options = {name: values[-1] for name, values in asked.items()}
    if scheme == "dns":
        return _dns(url, parts, number, options)
    if scheme == "file":
        if parts.netloc or not parts.path.strip("/"):
            reject("a file:// URL has three slashes and a path", _FORMS["file"])
        return DiscoverySource(url=url, kind="file", name=unquote(parts.path))
    if scheme == "inferencepool":
        name, namespace = _object(parts.netloc, scheme)
        return DiscoverySource(url=url, kind="inferencepool", name=name, namespace=namespace)
    return _kubernetes(url, parts, options)


def _dns(
    url: str, parts: SplitResult, number: int | None, options: dict[str, str]
) -> DiscoverySource:
    host = parts.hostname or ""
    if not host or parts.path not in ("", "/"):
        reject("a dns:// URL has a host name and a port", _FORMS["dns"])
    if ":" in host or re.fullmatch(r"[0-9.]+", host):
        reject("an address, not a name", "list the engine's own URL")
    srv = host.startswith("_")
    if srv == (number is not None):
        reject("SRV records name the ports" if srv else "no port", _FORMS["dns"])
    server = None
    if "server" in options:
        address, _, port = options["server"].rpartition(":")
        if not address or not port.isdigit() or not 0 < int(port) <= 65535:
            reject("not a DNS server", "write ?server=ADDRESS:PORT")
        server = address.strip("[]"), int(port)
    port_text = "" if number is None else str(number)
    return DiscoverySource(url=url, kind="dns", name=host, port=port_text, server=server)


def _kubernetes(url: str, parts: SplitResult, options: dict[str, str]) -> DiscoverySource:
    if parts.netloc == "pods" and not parts.path.strip("/"):
        selector, port = options.get("selector", ""), options.get("port", "")
        if not selector or not _NAME.fullmatch(port):
            reject("pods need a selector and a port", _FORMS["k8s"])
        namespace = options.get("namespace", "")
        return DiscoverySource(
            url=url, kind="pods", selector=selector, port=port, namespace=namespace
        )
    if parts.netloc != "service" or options:
        reject("neither a service nor pods", _FORMS["k8s"])
    text, _, port = parts.path.strip("/").partition(":")
    if port and not _NAME.fullmatch(port):
        reject("not a port's number or name", _FORMS["k8s"])
    name, namespace = _object(text, "k8s")
    return DiscoverySource(url=url, kind="service", name=name, namespace=namespace, port=port)


def _object(text: str, scheme: str) -> tuple[str, str]:
    """(name, namespace) of NAME or NAME.NAMESPACE."""
    name, dot, namespace = text.partition(".")
    if not _NAME.fullmatch(name) or (dot and not _NAME.fullmatch(namespace)):
        reject("not the name of a Kubernetes object", _FORMS[scheme])
    return name, namespace


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


def _kv_endpoint(url: str) -> str:
    match = re.fullmatch(r"tcp://(?:[^/@:\s]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})", url)
    if match is None or not 0 < int(match[1]) < 1 << 16:
        reject("not a ZeroMQ endpoint", "write tcp://host:port, or tcp://*:port")
    if importlib.util.find_spec("zmq") is None:
        reject("pyzmq is not installed", install("kv-events"))
    return url


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
    kv_events: Annotated[str, AfterValidator(_kv_endpoint)] | None = None
    """Where vLLM (0.32 or newer) sends the events of its prefix cache: the `endpoint` of its
    --kv-events-config. `tcp://*:port` is a port of the engine's own host; ranks have the next
    ones. Needs the extra `kv-events`."""

    _tls: EngineTls = PrivateAttr(default_factory=EngineTls)

    @model_validator(mode="after")
    def _one_place(self) -> "WorkerConfig":
        if (self.url is None) == (self.discover is None):
            reject(
                "a worker has a `url` or a `discover`, one of them",
                "give the engine's url, or the place that names engines",
            )
        return self

    @property
    def id(self) -> str:
        """host:port and the path, if any; shown in headers and metrics."""
        return self.address().id

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
        kv_events = None
        if self.kv_events is not None:
            sender, _, first = self.kv_events.rpartition(":")
            kv_events = f"{sender.replace('*', shown)}:{int(first) + (rank or 0)}"
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
            kv_events=kv_events,
        )

    @property
    def plain_http(self) -> bool:
        """Whether it is called without TLS."""
        return (self.url or f"{self.scheme}://").startswith("http://")

    @property
    def source(self) -> DiscoverySource | None:
        """Where its engines are found; None for an engine of its own."""
        return None if self.discover is None else source_of(self.discover)

    def addresses_for(self, engine: FoundEngine) -> tuple[WorkerAddress, ...]:
        """An engine that its source named, with an address for each rank.

        Raises ValueError for a URL that is none, or of this machine's cloud, and a model's name
        that is none.
        """
        if engine.model is not None and not 0 < len(engine.model) <= _MAX_NAME:
            raise ValueError(f"its model's name is not of 1 to {_MAX_NAME} characters")
        changes: dict[str, object] = {"discover": None, "model": engine.model or self.model}
        changes["ranks"] = engine.ranks or self.ranks
        ones = []
        for url in map(_worker_url, engine.urls):
            host = urlsplit(url).hostname or ""
            try:
                address = ip_address(host)
            except ValueError:  # a name, or a short, octal or hexadecimal form of an address
                with suppress(OSError):
                    socket.inet_aton(host.rstrip("."))
                    raise ValueError("a number for a host: write the address as 10.0.0.1") from None
            else:
                # At a link-local address a cloud's metadata service tells secrets.
                address = getattr(address, "ipv4_mapped", None) or address
                if address.is_link_local or address.is_multicast or address.is_unspecified:
                    raise ValueError("not an address that an engine can have")
            ones.append(self.model_copy(update={**changes, "url": url}))
        return ones[0].addresses if len(ones) == 1 else tuple(one.address() for one in ones)


Worker = Annotated[
    WorkerConfig,
    BeforeValidator(
        # A bare URL is short for a mapping with only `url` or `discover`.
        lambda value: (
            {"discover" if is_source(value) else "url": str.__str__(value)}
            if isinstance(value, str)
            else value
        ),
        json_schema_input_type=str | WorkerConfig,
    ),
]
