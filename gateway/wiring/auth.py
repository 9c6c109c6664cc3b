"""Builds what checks tokens and admin keys, and a key that follows. In the composition root."""

import hashlib
import importlib
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway.control.roles import NamedKey, Role, RoleKeys
from gateway.metrics import Metrics
from gateway.ports import TokenVerifier
from gateway.records.tenancy import IssuerRules
from gateway.scheduling.prefix_index import use_seed
from gateway.settings import Config

if TYPE_CHECKING:
    from gateway.tenancy.verifier import Verifier


def token_verifier(
    config: Config, metrics: Metrics, clock: Callable[[], float]
) -> "Verifier | None":
    """The verifier of tokens; None where no issuer is configured."""
    if not config.auth.jwt:
        return None
    module = importlib.import_module("gateway.tenancy.verifier")  # of the extra `jwt`
    made: Verifier = module.Verifier(issuer_rules(config), metrics, clock)
    return made


def issuer_rules(config: Config) -> list[IssuerRules]:
    """The issuers whose tokens are taken."""
    rules = []
    for issuer in config.auth.jwt:
        fields = issuer.model_dump()
        fields["ca_file"] = None if issuer.ca_file is None else str(issuer.ca_file)
        fields["tenants"] = None if issuer.tenants is None else frozenset(issuer.tenants)
        rules.append(IssuerRules(**fields))
    return rules


def role_keys(config: Config, tokens: TokenVerifier | None) -> RoleKeys:
    """The keys and tokens that open the admin routes and the dashboard."""
    server = config.server
    admin, viewer = (
        None if key is None else hashlib.sha256(key.get_secret_value().encode()).digest()
        for key in (server.admin_key, server.viewer_key)
    )
    by_claim = any(issuer.role_claim is not None for issuer in config.auth.jwt)
    return RoleKeys(
        admin_sha256=admin,
        viewer_sha256=viewer,
        named=tuple(
            NamedKey(
                name=key.name,
                sha256=bytes.fromhex(key.sha256.removeprefix("sha256:")),
                role=Role(key.role),
            )
            for key in server.admin_keys
        ),
        tokens=tokens if by_claim else None,
        open_dashboard=server.open_dashboard,
    )


def digest_key(config: Config) -> bytes:
    """The key of prompts' digests in the request log; empty where it has none.

    It follows from the admin key, as does the seed of all prefix digests, so that replicas and
    restarts have the same; slowly, so that nobody tries admin keys on a log. Without one it is new.
    """
    log, admin_key = config.request_log, config.server.admin_key
    if log.path is None or not log.digests:
        return b""
    if admin_key is None:
        return secrets.token_bytes(32)
    secret = admin_key.get_secret_value().encode()
    derived = hashlib.scrypt(secret, salt=b"sluice prompt digests", n=1 << 14, r=8, p=1, dklen=40)
    use_seed(int.from_bytes(derived[32:]))
    return derived[:32]
