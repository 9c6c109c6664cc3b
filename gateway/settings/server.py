"""The server's own sections: TLS, state, who may ask, what is written, probes and time limits."""

import importlib.util
import re
import ssl
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import parse_qsl, quote, urlsplit

import pydantic
from pydantic import AfterValidator, Field, SecretStr, model_validator

from gateway.records.attempt import EngineTls
from gateway.records.record import without_credentials
from gateway.settings.source import install
from gateway.settings.tenants import KeyDigest
from gateway.settings.types import (
    Amount,
    Attempts,
    Count,
    Days,
    Drain,
    Flag,
    Label,
    Natural,
    Origin,
    Port,
    Processes,
    Seconds,
    Secret,
    Section,
    Share,
    Text,
    reject,
)


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


Unfit = Iterator[tuple[str, str, str]]
"""What is wrong with files: setting, problem and fix."""


def unfit_engine_tls(tls: EngineTlsConfig, *, read: bool = True) -> Unfit:
    """What is wrong with a pool's TLS and, with `read`, its files."""
    if (tls.cert is None) != (tls.key is None):
        yield "cert", "cert and key go together", "give both, or neither"
    elif tls.verify == "chain" and tls.ca is None:
        yield (
            "verify",
            "chain without a `ca` would trust any certificate of a public authority",
            "give ca, or verify: full",
        )
    elif read:
        yield from unfit_pem(ca=tls.ca, cert=tls.cert, key=tls.key)


def unfit_pem(**files: str | None) -> Unfit:
    """What is wrong with PEM files: `cert` and its `key`; the others are of authorities."""
    given = {name: file for name, file in files.items() if file is not None}
    for name, file in given.items():
        try:
            Path(file).open("rb").close()
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or "not a path"
            yield name, why, "give the path of a PEM file that the gateway may read"
            return
    cert, key = given.pop("cert", None), given.pop("key", None)
    if cert is not None and key is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
        except (ssl.SSLError, OSError, ValueError) as error:
            why = getattr(error, "reason", None) or "not PEM, or encrypted"
            fix = "give a certificate and its own private key, both PEM, the key not encrypted"
            yield "cert", f"not a certificate with its key ({why})", fix
            return
    for name, file in given.items():
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
        except (ssl.SSLError, OSError):
            fix = "give certificates of authorities, as PEM"
            yield name, "no certificate in the file", fix


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
    elif url != "memory://":
        reject("not a state URL", _FIX)
    return url


def _check_many(scheme: str, rest: str) -> None:
    """Several nodes, each with its port. A cluster has no database; sentinels need a service."""
    cluster = scheme == "redis+cluster"
    fix = _CLUSTER_FIX if cluster else _SENTINEL_FIX
    authority, slash, path = rest.partition("/")
    for node in authority.rpartition("@")[2].split(","):
        match = _NODE.fullmatch(node)
        if match is None or not 0 < int(match[1]) < 65536:
            reject("not a list of HOST:PORT", fix)
    if cluster and slash:
        reject("a cluster has no databases", fix)
    if not cluster and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}/[0-9]{1,4}", path):
        reject("no service and database after the sentinels", fix)
    _check_client()


def _check_client() -> None:
    if importlib.util.find_spec("redis") is None:
        reject("the client for Redis is not installed", install("redis"))


class StateUrl(pydantic.Secret[Annotated[Text, AfterValidator(state_url)]]):
    """The URL, which may hold a password; shown without its credentials."""

    def _display(self) -> str:
        return without_credentials(self.get_secret_value())


RoleName = Literal["viewer", "operator", "owner"]
"""Roles on the admin routes; each may do all that those before it may."""
Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]
"""Signatures with a private key only: whoever could check another one could also forge it."""


def _jwks(value: str) -> str:
    try:
        url = urlsplit(value)
        plain = url.scheme == "http" and not ip_address(url.hostname or "").is_loopback
    except ValueError:  # a name, or no URL
        plain = value.startswith("http:")
    if plain:
        reject(
            "keys that come over plain http can be replaced on the way",
            "write https://, or keep the keys in a file and name it here",
        )
    scheme, is_url, rest = value.partition("://")
    if is_url and (scheme not in {"http", "https"} or "@" in rest.partition("/")[0]):
        reject("not a plain https URL", "write https://HOST/PATH without credentials, or a path")
    return value


class AdminKeyConfig(Section):
    """A named key of the admin routes."""

    name: Label
    """Unique; the audit names it."""
    sha256: KeyDigest = Field(repr=False)
    """Hash of the key, from `sluice hash-key`."""
    role: RoleName
    """viewer reads; operator also runs workers and reloads; owner also changes who may use what."""


class JwtIssuerConfig(Section):
    """An identity provider whose tokens open models as keys do, or the admin routes."""

    issuer: Text
    """`iss` of its tokens, to the letter."""
    jwks: Annotated[Text, AfterValidator(_jwks)]
    """Its public keys: an https URL that answers a JWKS, or a file with one."""
    ca_file: Path | None = None
    """Certificates to verify that URL against. Absent: the system's."""
    audience: Annotated[tuple[Text, ...], Field(min_length=1, max_length=16)]
    """`aud` of its tokens for this gateway; one of these is required."""
    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)] = ("RS256",)
    """Algorithms of its signatures. No others are taken, whatever a token says."""
    leeway_s: Annotated[Seconds, Field(le=600)] = 30.0
    """By how much its clock and this one may differ."""
    refresh_s: Annotated[Seconds, Field(ge=10)] = 300.0
    """Between two reads of its keys. A key that is new to the gateway is asked for at once."""
    max_stale_s: Seconds = 86_400.0
    """How long known keys serve while they cannot be read; then its tokens answer 503."""
    tenant_claim: Text = "tenant"
    """Claim that names the tenant; a path with dots leads into nested claims."""
    entitlements_claim: Text | None = None
    """Claim that lists the entitlements a token may use. Absent: all of its tenant's."""
    tenants: Annotated[tuple[Label, ...], Field(min_length=1)] | None = None
    """The only tenants that its tokens may name. Absent: any."""
    role_claim: Text | None = None
    """Claim that gives a role on the admin routes. Absent: its tokens do not open them."""
    roles: Mapping[Annotated[str, Field(min_length=1, max_length=256)], RoleName] = {
        "viewer": "viewer",
        "operator": "operator",
        "owner": "owner",
    }
    """Value of that claim -> role."""


class AuthConfig(Section):
    """Who may send requests, besides the keys of tenants and entitlements."""

    jwt: Annotated[tuple[JwtIssuerConfig, ...], Field(max_length=16)] = ()
    """Issuers of tokens. Needs the extra `jwt`."""


class ServerConfig(Section):
    """Where the gateway listens, and its limits."""

    host: Text = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: Port = 8080
    """Port to listen on; 0 takes a free one."""
    workers: Processes = 1
    """Replicas on this host, all on this port. Several replicas share their state on Redis."""
    management_port: Port = 0
    """Port for metrics and admin routes; 0 serves them on `port`. With several replicas this port
    lists them for Prometheus (/http_sd), and each replica takes one of the ports after it."""
    max_body_bytes: Count = 33_554_432
    """Largest request body in bytes; larger ones are refused with 413."""
    max_held_body_bytes: Count | None = None
    """Bytes of all requests held at once, from announcement to answer, over all `workers`. Absent:
    a quarter of the memory that the gateway may use, and 2 GiB at most. One entitlement may hold as
    much as is still free; the rest is refused with 429 or 503."""
    max_header_bytes: Count = 65_536
    """Largest request head in bytes; larger ones are refused with 431."""
    max_connections: Count = 10_000
    """Client connections served at once. Beyond, those give way on which no request was served."""
    keep_alive_s: Seconds = 75.0
    """Time after which an idle client connection is closed. Behind a load balancer give more than
    it keeps idle connections."""
    allowed_origins: Annotated[tuple[Origin, ...], Field(max_length=100)] = ("*",)
    """Origins whose pages may call the API from a browser (CORS), such as https://chat.example;
    `*` is every origin, an empty list none. The admin routes are never opened to pages."""
    admin_key: Secret | None = None
    """Key of an owner for the admin routes, which are closed without any key. Write ${NAME}."""
    viewer_key: Secret | None = None
    """Key that reads the admin routes and the dashboard, and changes nothing."""
    admin_keys: Annotated[tuple[AdminKeyConfig, ...], Field(max_length=100)] = ()
    """Further keys of the admin routes, each with a name and a role. `admin_key` is an owner's."""
    open_dashboard: Flag = False
    """Whether the dashboard opens without a key; only on a loopback `host`, for a demo."""
    tls: ServerTlsConfig | None = None
    """TLS for clients on `port`; absent: plain HTTP. `management_port` always speaks plain HTTP."""
    drain_timeout_s: Drain = 30.0
    """How long streams may continue after SIGTERM."""


class ControllerConfig(Section):
    """Entitlements that `sluice controller` reads from TokenEntitlement objects of Kubernetes.

    With this section every model's entitlements have limits, and nobody comes in without a key.
    """

    stale_after_s: Annotated[Seconds, Field(ge=30)] = 3600.0
    """Time without news of the cluster after which its entitlements of class spot and preemptible
    are refused; elastic after twice, guaranteed and dedicated after three times as long."""


class StateConfig(Section):
    """Where admission counters and learned values are kept and shared."""

    url: StateUrl = StateUrl("memory://")
    """memory:// is lost when the process ends; sqlite:///PATH survives restarts of one gateway.
    Replicas share redis://HOST:PORT/DB (rediss:// with TLS),
    redis+cluster://HOST:PORT,HOST:PORT and redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB."""
    password: Annotated[SecretStr, Field(max_length=4096)] | None = None
    """Redis's password, as it is; instead of one in the URL, where signs are written as %XX."""
    fail_mode: Literal["local_share", "closed"] = "local_share"
    """While shared state is unreachable: local_share enforces this process's share of each limit,
    closed answers 503."""
    controller: ControllerConfig | None = None
    """Entitlements of a Kubernetes cluster, which come through Redis. Absent: none."""

    @property
    def shared(self) -> bool:
        """Whether replicas share the state, which is then on Redis."""
        return self.url.get_secret_value().partition("://")[0] in _REDIS | _MANY

    @model_validator(mode="after")
    def _one_password(self) -> "StateConfig":
        user = self.url.get_secret_value().partition("://")[2].rpartition("@")[0]
        if self.password and ":" in user:
            reject("a password beside the URL's", "keep one of them")
        return self

    @property
    def address(self) -> str:
        """The URL in clear text, with its password."""
        url = self.url.get_secret_value()
        if not (self.password and self.shared):
            return url
        scheme, _, rest = url.partition("://")
        user, _, place = rest.rpartition("@")
        return f"{scheme}://{user}:{quote(self.password.get_secret_value(), safe='')}@{place}"


class RequestLogConfig(Section):
    """One JSON line per request."""

    path: Path | None = None
    """File to append to; absent: no log."""
    prompts: Flag = False
    """Also record request bodies, which may be personal data."""
    digests: Flag = True
    """Also record keyed digests of prompts' beginnings: `sluice prove` needs them to simulate
    prefix caches."""


class UsageExportConfig(Section):
    """One JSON line for each settled request, for billing."""

    path: Path | None = None
    """File to append to and sync; absent: no export."""


class LedgerConfig(Section):
    """Usage summed by day, tenant, entitlement, key and model: `sluice usage`, /admin/usage."""

    path: Path | None = None
    """SQLite file of this host; absent: no ledger."""
    keep_days: Days = 400
    """Days after which sums are removed."""


def _batches_url(url: str) -> str:
    scheme = url.partition("://")[0]
    if not re.fullmatch(
        r"file:///[^?#\x00]*[^/?#\x00]|s3://[a-z0-9][a-z0-9.-]+(/[^?#@\x00]*)?", url
    ):
        fix = "write it as file:///PATH or s3://BUCKET/PREFIX; keys go into AWS_* variables"
        reject("not a place for files", fix)
    for module, extra in (("fsspec", "batches"), *([("s3fs", "s3")] if scheme == "s3" else [])):
        if importlib.util.find_spec(module) is None:
            reject(f"{module} is not installed", install(extra))
    return url


class BatchesConfig(Section):
    """Files and batches (/v1/files, /v1/batches). What bounds them counts for each tenant."""

    url: Annotated[Text, AfterValidator(_batches_url)]
    """Where files and outputs are kept: file:///PATH, a directory that all replicas share, or
    s3://BUCKET/PREFIX of S3 or a store like it, whose address and keys boto3's own AWS_* variables
    say. Needs the extra `batches`, or `s3`."""
    max_file_bytes: Count = 1 << 30
    """Largest file; larger ones are refused with 413."""
    max_files: Annotated[Count, Field(le=10_000)] = 500
    """Files that are kept, outputs of batches included."""
    max_open: Annotated[Count, Field(le=1_000)] = 20
    """Batches that have not ended."""
    keep_days: Annotated[Days, Field(le=365)] = 30
    """Days after which a file is removed, and with its files a batch."""


class TelemetryConfig(Section):
    """OpenTelemetry: spans and metrics of requests, by OTLP over HTTP.

    The standard OTEL_* variables say where they go; the OpenTelemetry SDK reads them itself.
    """

    otlp: Flag = False
    """Whether to export. Needs the extra `otel`."""
    sample: Share | None = None
    """Share of requests that are traced, unless the client's traceparent decides. Absent:
    OTEL_TRACES_SAMPLER, and without that every request."""


class CompressorConfig(Section):
    """The processes that compress prompts, off the event loop."""

    processes: Count = 1
    """Worker processes; each uses at most one core."""
    time_limit_ms: Amount = 250.0
    """Time for one prompt; after it the prompt goes to the larger pool uncompressed."""
    queue: Natural = 16
    """Prompts that may wait for a process; further ones go to the larger pool at once."""


class HealthConfig(Section):
    """Probes and passive ejection of workers."""

    interval_s: Seconds = 2.0
    """Between two probes of a worker."""
    timeout_s: Seconds = 2.0
    """Time limit of one probe."""
    eject_after: Count = 3
    """Failures in a row that eject a worker."""
    eject_s: Seconds = 5.0
    """Length of the first ejection; each further one lasts twice as long."""
    max_eject_s: Seconds = 60.0
    """Longest ejection."""
    stall_s: Seconds = 30.0
    """How long an engine may produce no token, beyond the allowance of its waiting requests,
    before other workers are preferred to it."""


class RetryConfig(Section):
    """Retries at another worker, before the first byte and only when that is safe."""

    max_attempts: Attempts = 3
    """Workers tried for one request, the first included."""
