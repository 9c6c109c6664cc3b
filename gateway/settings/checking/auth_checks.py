"""Checks of tokens' issuers and of named admin keys, beyond their types."""

import hashlib
from importlib.util import find_spec
from pathlib import Path

from gateway.settings.config import Config
from gateway.settings.explain import nearest
from gateway.settings.install import install
from gateway.settings.problems import KeyPath
from gateway.settings.source import Document
from gateway.settings.tls import unfit_ca


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
        _taken(document, seen, issuer.issuer, (*path, "issuer"), "list an issuer once")
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
        _taken(document, names, key.name, (*path, "name"), "give every key a name of its own")
        first = digests.setdefault(key.sha256, (*path, "sha256"))
        if first != (*path, "sha256"):
            document.add(
                (*path, "sha256"),
                f"the same key as on line {document.place(first).line}",
                "make another with `sluice hash-key --new`",
            )


def _taken(
    document: Document, seen: dict[str, KeyPath], name: str, path: KeyPath, fix: str
) -> None:
    first = seen.setdefault(name, path)
    if first != path:
        document.add(path, f"`{name}` is taken on line {document.place(first).line}", fix)
