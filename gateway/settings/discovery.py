"""Discovery URLs: where a pool's engines are found at run time; how Kubernetes is reached."""

import os
import re
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from gateway.records.attempt import ClusterAccess, DiscoverySource
from gateway.settings.types import reject

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
_PORT: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


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
    known = {"dns": {"server"}, "k8s": {"selector", "port", "namespace"}}.get(scheme, set())
    if parts.fragment or "@" in parts.netloc or set(asked) - known:
        reject(f"a {scheme}:// URL has other parts", _FORMS[scheme])
    options = {name: values[-1] for name, values in asked.items()}
    if scheme == "dns":
        return _dns(url, parts, number, options)
    if scheme == "file":
        return _file(url, parts)
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


def _file(url: str, parts: SplitResult) -> DiscoverySource:
    if parts.netloc or not parts.path.strip("/"):
        reject("a file:// URL has three slashes and a path", _FORMS["file"])
    return DiscoverySource(url=url, kind="file", name=unquote(parts.path))


def _kubernetes(url: str, parts: SplitResult, options: dict[str, str]) -> DiscoverySource:
    if parts.netloc == "pods" and not parts.path.strip("/"):
        selector, port = options.get("selector", ""), options.get("port", "")
        if not selector or not _PORT.fullmatch(port):
            reject("pods need a selector and a port", _FORMS["k8s"])
        return DiscoverySource(
            url=url,
            kind="pods",
            selector=selector,
            port=port,
            namespace=options.get("namespace", ""),
        )
    if parts.netloc != "service" or options:
        reject("neither a service nor pods", _FORMS["k8s"])
    text, _, port = parts.path.strip("/").partition(":")
    if port and not _PORT.fullmatch(port):
        reject("not a port's number or name", _FORMS["k8s"])
    name, namespace = _object(text, "k8s")
    return DiscoverySource(url=url, kind="service", name=name, namespace=namespace, port=port)


def _object(text: str, scheme: str) -> tuple[str, str]:
    """(name, namespace) of NAME or NAME.NAMESPACE."""
    name, dot, namespace = text.partition(".")
    if not _NAME.fullmatch(name) or (dot and not _NAME.fullmatch(namespace)):
        reject("not the name of a Kubernetes object", _FORMS[scheme])
    return name, namespace
