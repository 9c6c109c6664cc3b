"""The certificate of the clients' port, read anew when its files change.

A pair that does not fit (a renewal writes one file after the other), or that cannot be read,
changes nothing; the log says so once, and the next look tries again.
"""

import asyncio
import hashlib
import logging
import ssl
from _ssl import _test_decode_cert  # type: ignore[attr-defined]  # the only way without handshake
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from gateway.records.record import Record

LOOK_EVERY_S: Final = 2.0
_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Of TLS 1.2: forward secrecy and authenticated encryption. Those of 1.3 are all of that kind."""

_log = logging.getLogger("sluice.tls")


class TlsStatus(Record, frozen=True, kw_only=True):
    """The clients' certificate."""

    expires_unix_s: float
    successful: bool
    """Whether the last reading of its files succeeded."""


class Certificates:
    """Makes TLS contexts of files."""

    def __init__(self, cert: str, key: str, client_ca: str | None = None) -> None:
        """Reads the files. Raises OSError, ssl.SSLError included."""
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._seen = b""
        found = self._read()
        self.context = _context(cert, key, client_ca)
        self._seen = found[0]
        self.status = TlsStatus(expires_unix_s=found[1], successful=True)

    def look(self) -> None:
        """Use the files' content if it changed. Raises nothing."""
        try:
            digest, expires_unix_s = self._read()
            if digest == self._seen:
                self.status = TlsStatus(expires_unix_s=expires_unix_s, successful=True)
                return
            context = _context(self._cert, self._key, self._client_ca)
            if self._read()[0] != digest:
                return  # changed meanwhile: the next look sees all of it
        except OSError as error:
            if self.status.successful:
                _log.error("the certificate in use stays: %s", error)
            self.status = TlsStatus(expires_unix_s=self.status.expires_unix_s, successful=False)
            return
        self.context, self._seen = context, digest
        self.status = TlsStatus(expires_unix_s=expires_unix_s, successful=True)
        until = datetime.fromtimestamp(expires_unix_s, UTC)
        _log.info("a new certificate is in use, valid until %s", until.isoformat())

    async def watch(self) -> None:
        """Look again and again."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await asyncio.to_thread(self.look)

    def _read(self) -> tuple[bytes, float]:
        """A digest of all files, and when the certificate expires."""
        files = [Path(f).read_bytes() for f in (self._cert, self._key, self._client_ca) if f]
        digest = hashlib.sha256(b"\0".join(hashlib.sha256(file).digest() for file in files))
        until = str(_test_decode_cert(self._cert)["notAfter"])
        return digest.digest(), float(ssl.cert_time_to_seconds(until))


def _context(cert: str, key: str, client_ca: str | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(cert, key, password="")  # never ask on the terminal
    if client_ca is not None:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
