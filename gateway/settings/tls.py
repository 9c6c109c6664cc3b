"""TLS: for clients (`server.tls`), and towards engines (`tls` of a model, a pool or a worker)."""

import ssl
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from gateway.records.attempt import EngineTls
from gateway.settings.types import Section, Text, reject


def _host_name(name: str) -> str:
    try:
        name.encode("idna")  # as TLS does for each connection
    except UnicodeError:
        reject("not a host's name", "write a name such as engine.internal")
    return name


class ServerTlsConfig(Section):
    """TLS on the clients' port. The files are read anew when they change."""

    cert: Text
    """PEM file of the certificate, followed by those of its issuers."""
    key: Text
    """PEM file of the private key."""
    client_ca: Text | None = None
    """PEM file of the authorities whose certificates clients must show; absent: none is asked."""


class EngineTlsConfig(Section):
    """TLS towards https engines. The files are read anew when they change."""

    ca: Text | None = None
    """PEM file of the authority that signed the engines' certificates; default: the system's."""
    cert: Text | None = None
    """PEM file of the certificate that the gateway shows; needs `key`."""
    key: Text | None = None
    """PEM file of its private key."""
    verify: Literal["full", "chain"] = "full"
    """full checks signature and name; chain only the signature, for engines without fixed names."""
    server_name: Annotated[Text, AfterValidator(_host_name)] | None = None
    """Name that the certificate must have, and that is asked for; default: the URL's host."""

    def address(self) -> EngineTls:
        """As the upstream port takes it."""
        return EngineTls(
            ca_file=self.ca,
            cert_file=self.cert,
            key_file=self.key,
            verify=self.verify,
            server_name=self.server_name,
        )


def unfit_server_tls(tls: ServerTlsConfig) -> tuple[str, str, str] | None:
    """What is wrong with the files: setting, problem and fix."""
    for name, file in (("cert", tls.cert), ("key", tls.key), ("client_ca", tls.client_ca)):
        if file is not None and (found := _unreadable(file)) is not None:
            return name, found, "give the path of a PEM file that the gateway may read"
    return _unfit_pair(tls.cert, tls.key) or unfit_ca("client_ca", tls.client_ca)


def unfit_engine_tls(tls: EngineTlsConfig, *, read: bool = True) -> tuple[str, str, str] | None:
    """What is wrong with the files, which are looked at with `read`: setting, problem and fix."""
    if (tls.cert is None) != (tls.key is None):
        return "cert", "cert and key go together", "give both, or neither"
    if tls.verify == "chain" and tls.ca is None:
        return (
            "verify",
            "chain without a `ca` would trust any certificate of a public authority",
            "give ca, or verify: full",
        )
    if not read:
        return None
    for name, file in (("ca", tls.ca), ("cert", tls.cert), ("key", tls.key)):
        if file is not None and (found := _unreadable(file)) is not None:
            return name, found, "give the path of a PEM file that the gateway may read"
    if tls.cert is not None and tls.key is not None and (pair := _unfit_pair(tls.cert, tls.key)):
        return pair
    return unfit_ca("ca", tls.ca)


def _unreadable(file: str) -> str | None:
    try:
        with Path(file).open("rb"):
            return None
    except (OSError, ValueError) as error:
        return (error.strerror if isinstance(error, OSError) else None) or "not a path"


def _unfit_pair(cert: str, key: str) -> tuple[str, str, str] | None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        why = getattr(error, "reason", None) or "not PEM, or encrypted"
        fix = "give a certificate and its own private key, both PEM, the key not encrypted"
        return "cert", f"not a certificate with its key ({why})", fix
    return None


def unfit_ca(name: str, file: str | None) -> tuple[str, str, str] | None:
    """What is wrong with a file of authorities' certificates: setting, problem and fix."""
    if file is None:
        return None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except (ssl.SSLError, OSError):
        return name, "no certificate in the file", "give certificates of authorities, as PEM"
    return None
