"""Checks of the server's own sections and its keys, and of what they ask of the machine."""

import hashlib
import sys
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from gateway.settings.config import Config
from gateway.settings.explain import nearest
from gateway.settings.name_checks import unique
from gateway.settings.problems import KeyPath, install
from gateway.settings.source import Document
from gateway.settings.tls import unfit_ca, unfit_server_tls
from gateway.settings.token_pools import limits_tenants

MAX_PORT: Final = 65_535
_OTLP: Final = "opentelemetry.exporter.otlp.proto.http"
"""Of the extra `otel`; its API alone is installed with many packages."""
ONE_SERVES: Final = "some thousand requests/s a core (docs/performance.md)"


def check_config(document: Document, config: Config) -> None:
    """Relations between the server's own sections."""
    if config.health.max_eject_s < config.health.eject_s:
        document.add(
            ("health", "max_eject_s"),
            f"below eject_s ({config.health.eject_s:g})",
            f"give at least {config.health.eject_s:g}",
        )
    stated_bytes = config.server.max_held_body_bytes
    held_bytes = (stated_bytes or sys.maxsize) // config.server.workers
    if held_bytes < config.server.max_body_bytes:
        document.add(
            ("server", "max_held_body_bytes"),
            f"{held_bytes:,} bytes for each replica, below max_body_bytes",
            f"give at least {config.server.max_body_bytes * config.server.workers}",
        )
    if (found := unfit_workers(config)) is not None:
        document.add(("server", "workers"), *found)
    _check_roles(document, config)
    if limits_tenants(config) and (found := unfit_limits(config)) is not None:
        document.add(("state", "url"), *found)
    if (found := unfit_ports(config)) is not None:
        document.add(("server", "management_port"), *found)
    tls = None if document.sent else config.server.tls
    if tls is not None and (wrong := unfit_server_tls(tls)):
        document.add(("server", "tls", wrong[0]), *wrong[1:])
    if config.server.tls is not None and config.state.shared and not config.server.management_port:
        document.add(
            ("server", "tls"),
            "replicas ask one another over plain HTTP, and the clients' port would speak TLS only",
            "set server.management_port, and keep that port internal",
        )
    if config.telemetry.otlp and not _installed(_OTLP):
        document.add(
            ("telemetry", "otlp"),
            "the exporter is not installed",
            install("otel"),
        )


def unfit_limits(config: Config) -> tuple[str, str] | None:
    """Why no tenant and no key may have limits of its own: (problem, fix)."""
    if not config.state.address.startswith("redis+cluster://"):
        return None
    return (
        "a limit of a tenant or a key counts over all models, which a cluster spreads over servers",
        "use one server (redis:// or redis+sentinel://), or give budgets to entitlements",
    )


def unfit_ports(config: Config) -> tuple[str, str] | None:
    """(problem, fix) if `server.port` clashes with management ports, else None."""
    server = config.server
    first = server.management_port
    several = server.workers if server.workers > 1 else 0
    if not first or not first <= server.port <= first + several:
        return None
    if several:
        return (
            f"the clients' port, {server.port}, is among these {several + 1} of the replicas",
            f"give one below {max(server.port - several, 1)} or above {server.port}",
        )
    return ("the clients' port", "give another one, or 0 to have both on one port")


def unfit_workers(config: Config) -> tuple[str, str] | None:
    """(problem, fix) if several replicas on a host cannot serve this configuration, else None."""
    server = config.server
    if server.workers == 1:
        return None
    if not config.state.shared:
        return (
            "several replicas share their state through Redis, and state.url names none",
            f"set state.url to redis://HOST:6379/0, or give 1: one replica serves {ONE_SERVES}",
        )
    if not 0 < server.management_port <= MAX_PORT - server.workers:
        return (
            "each of several replicas needs a port of its own for metrics and admin routes",
            f"set server.management_port to a free port with {server.workers} free ones after it",
        )
    balanced = next((m.name for m in config.models if "bfio" in m.policies(server.workers)), None)
    if balanced is not None:
        return (
            f"the ranks of {balanced} are balanced by one replica",
            "give 1, or another policy than bfio",
        )
    return None


def _check_roles(document: Document, config: Config) -> None:
    """The viewer key must be another one, and the dashboard open to this host alone."""
    server = config.server
    if server.viewer_key is not None and server.viewer_key == server.admin_key:
        document.add(("server", "viewer_key"), "the same as admin_key", "give another key")
    if server.open_dashboard and not _is_loopback(server.host):
        document.add(
            ("server", "open_dashboard"),
            f"everybody who reaches {server.host} could read the dashboard",
            "set server.host to 127.0.0.1, or leave it out and give server.viewer_key",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.rstrip(".") == "localhost"


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor is a package around it
        return False


def check_auth(document: Document, config: Config) -> None:
    """Issuers, and keys of the admin routes."""
    _check_admin_keys(document, config)
    issuers = config.auth.jwt
    if issuers and (find_spec("jwt") is None or find_spec("cryptography") is None):
        document.add(("auth", "jwt"), "PyJWT is not installed", install("jwt"))
    tenants = {each.name for each in config.tenants} | {e.tenant for e in config.entitlements}
    seen: dict[str, KeyPath] = {}
    for index, issuer in enumerate(issuers):
        path: KeyPath = ("auth", "jwt", index)
        unique(document, seen, issuer.issuer, (*path, "issuer"), "list an issuer once")
        if not issuer.jwks.startswith(("https:", "http:")):
            _check_file(document, (*path, "jwks"), issuer.jwks)
        ca_file = None if issuer.ca_file is None else str(issuer.ca_file)
        if ca_file is not None and _check_file(document, (*path, "ca_file"), ca_file):
            wrong = unfit_ca("ca_file", ca_file)
            if wrong is not None:
                document.add((*path, wrong[0]), *wrong[1:])
        for at, name in enumerate(issuer.tenants or ()):
            if name not in tenants:
                document.add(
                    (*path, "tenants", at), f"no tenant is named `{name}`", nearest(name, tenants)
                )


def _check_file(document: Document, path: KeyPath, name: str) -> bool:
    """Whether a file can be read; False for one that a sent text names, which nobody looks at."""
    if document.sent:
        return False
    try:
        Path(name).open("rb").close()
    except OSError as error:
        document.add(path, f"cannot read the file: {error.strerror}", "check the path")
        return False
    return True


def _check_admin_keys(document: Document, config: Config) -> None:
    server = config.server
    names: dict[str, KeyPath] = {}
    digests: dict[str, KeyPath] = {}
    for short in ("admin_key", "viewer_key"):
        secret = getattr(server, short)
        if secret is not None:
            digest = hashlib.sha256(secret.get_secret_value().encode()).hexdigest()
            digests[f"sha256:{digest}"] = ("server", short)
    for index, key in enumerate(server.admin_keys):
        path: KeyPath = ("server", "admin_keys", index)
        unique(document, names, key.name, (*path, "name"), "give every key a name of its own")
        first = digests.setdefault(key.sha256, (*path, "sha256"))
        if first != (*path, "sha256"):
            document.add(
                (*path, "sha256"),
                f"the same key as on line {document.place(first).line}",
                "make another with `sluice hash-key --new`",
            )
