"""An identity provider for tests: keys, tokens signed with them, and a server with the JWKS."""

import base64
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from tests.running import serving

AUDIENCE = "sluice"
NAME = "https://id.example"


class Issuer:
    """Signs with the newest of its keys; publishes all of them."""

    def __init__(self, name: str = NAME) -> None:
        self.name = name
        self.keys: dict[str, Any] = {}
        self.reads = 0
        """Times that the JWKS was asked for."""
        self.away = False
        """The server answers 500."""
        self.pause_s = 0.0
        """Before each answer."""
        self.url = ""
        self.rotate("k1")

    def rotate(self, kid: str, kind: str = "RSA") -> None:
        """Sign with a new key from now on."""
        self.keys[kid] = (
            rsa.generate_private_key(public_exponent=65537, key_size=2048)
            if kind == "RSA"
            else ec.generate_private_key(ec.SECP256R1())
        )

    def token(
        self, *, alg: str = "RS256", head: Mapping[str, Any] | None = None, **claims: Any
    ) -> str:
        """A token; a claim that is None is left out."""
        kid, key = list(self.keys.items())[-1]
        now = int(time.time())
        said = {
            "iss": self.name,
            "aud": AUDIENCE,
            "sub": "alice",
            "tenant": "acme",
            "iat": now,
            "exp": now + 600,
            **claims,
        }
        kept = {name: value for name, value in said.items() if value is not None}
        heads = {name: value for name, value in {"kid": kid, **(head or {})}.items() if value}
        return jwt.encode(kept, key, algorithm=alg, headers=heads)

    def jwks(self) -> dict[str, Any]:
        """The public keys."""
        found = []
        for kid, key in self.keys.items():
            kind = (
                jwt.algorithms.ECAlgorithm
                if isinstance(key, ec.EllipticCurvePrivateKey)
                else jwt.algorithms.RSAAlgorithm
            )
            found.append({**kind.to_jwk(key.public_key(), as_dict=True), "kid": kid, "use": "sig"})
        return {"keys": found}

    @contextmanager
    def serving(self) -> Iterator["Issuer"]:
        """Answer the JWKS on a local port meanwhile."""
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.reads += 1
                time.sleep(issuer.pause_s)
                body = json.dumps(issuer.jwks()).encode()
                with suppress(OSError):  # the gateway waits a bounded time
                    self.send_response(500 if issuer.away else 200)
                    self.send_header("content-length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        with serving(server) as url:
            self.url = f"{url}/jwks"
            yield self


def forged(header: Mapping[str, Any], claims: Mapping[str, Any], signature: bytes = b"") -> str:
    """A token of any content, with any signature."""
    parts = [json.dumps(header).encode(), json.dumps(claims).encode(), signature]
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)
