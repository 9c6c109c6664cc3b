"""The whole file: the server, its state, the models and the entitlements to use them."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PrivateAttr,
    SecretStr,
    Tag,
    model_validator,
)

from gateway.settings.auth import AdminKeyConfig, AuthConfig
from gateway.settings.budgets import Budgets
from gateway.settings.model import ModelConfig, SplitAliasConfig
from gateway.settings.model_parts import TimeoutsConfig
from gateway.settings.problems import KeyPath
from gateway.settings.sections import KeyHash, TenantConfig
from gateway.settings.state import StateUrl, is_redis
from gateway.settings.tls import ServerTlsConfig
from gateway.settings.types import (
    Amount,
    Attempts,
    Count,
    Days,
    Drain,
    Flag,
    Gib,
    Instant,
    Label,
    Milliseconds,
    ModelName,
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
    typed,
)


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

    @property
    def shared(self) -> bool:
        """Whether replicas share the state, which is then on Redis."""
        return is_redis(self.url.get_secret_value())

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


Concurrency = Annotated[
    Annotated[Natural, Tag("total")] | Annotated[Mapping[Label, Natural], Tag("by_pool")],
    Discriminator(lambda value: "by_pool" if isinstance(value, dict) else "total"),
]


class EntitlementConfig(Section):
    """A tenant's right to use a model, and the API keys for it."""

    name: Label
    """Unique; shown in metrics and admin paths."""
    tenant: Label
    """The tenant that owns it."""
    model: ModelName
    """The model's name (not an alias)."""
    service_class: Literal["dedicated", "guaranteed", "elastic", "spot", "preemptible"] = "elastic"
    """dedicated and guaranteed reserve their baseline; the other classes share the rest."""
    slo_target_ms: Milliseconds | None = None
    """Time to first token that the tenant expects, in milliseconds."""
    tokens_per_second: Amount | None = None
    """Baseline of input and output tokens per second. Absent: what other entitlements leave."""
    max_tokens_per_second: Amount | None = None
    """Limit with what others leave unused; at least the baseline. dedicated, elastic and spot
    only. Default: no limit."""
    kv_cache_gib: Gib | None = None
    """Baseline of the KV cache of requests in flight, in GiB."""
    max_kv_cache_gib: Gib | None = None
    """Limit of that KV cache, in GiB; at least the baseline. Default: the pools' KV cache. For
    guaranteed it is the baseline."""
    concurrency: Concurrency | None = None
    """Baseline of sequences in flight: one number, or one per pool."""
    max_concurrency: Count | None = None
    """Limit of sequences in flight; at least the baseline. Default: the pools' slots. For
    guaranteed it is always the baseline."""
    mode: Literal["enforce", "observe"] = "enforce"
    """observe: refusals are computed, logged and counted, never applied."""
    compression: Literal["allow", "refuse"] = "allow"
    """refuse: this tenant's prompts are never compressed, whatever the model says."""
    trusted_usage: Flag = False
    """Usage that another proxy reports (POST /admission/usage) teaches this tenant's estimates."""
    api_keys: Annotated[tuple[KeyHash, ...], Field(max_length=2)] = Field(default=(), repr=False)
    """`sha256:` hashes of the keys; two keys may be valid at once, to allow rotation."""
    expires_at: Instant | None = None
    """After this the keys answer 403; UTC unless an offset is given."""
    budgets: Budgets = ()
    """What may be used by this entitlement."""

    @property
    def baseline(self) -> int:
        """Sequences of `concurrency` over all pools; 0 when absent."""
        given = self.concurrency
        if given is None:
            return 0
        return given if isinstance(given, int) else sum(given.values())

    @property
    def reserves(self) -> bool:
        """Whether its baseline is reserved."""
        return self.service_class in {"dedicated", "guaranteed"}


class Config(Section):
    """sluice.yaml: one file configures the gateway."""

    version: Annotated[Literal[1], BeforeValidator(typed)]
    """Version of the file format; always 1."""
    server: ServerConfig = ServerConfig()
    """Where the gateway listens, and its limits."""
    state: StateConfig = StateConfig()
    """Where admission counters and learned values are kept and shared."""
    request_log: RequestLogConfig = RequestLogConfig()
    """One JSON line per request."""
    usage_export: UsageExportConfig = UsageExportConfig()
    """One JSON line for each settled request, for billing."""
    ledger: LedgerConfig = LedgerConfig()
    """Usage summed by day, tenant, entitlement, key and model."""
    auth: AuthConfig = AuthConfig()
    """Tokens of identity providers."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """OpenTelemetry: spans and metrics of requests."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    """Time limits for each phase of an exchange with an engine."""
    health: HealthConfig = HealthConfig()
    """Probes and passive ejection of workers."""
    compressor: CompressorConfig = CompressorConfig()
    """The processes that compress prompts."""
    retry: RetryConfig = RetryConfig()
    """Retries at another worker."""
    currency: Label = "USD"
    """Of all prices; a label only, nothing is converted."""
    decisions_kept: Natural = 10_000
    """Decisions that GET /admin/decisions/{request_id} can still explain."""
    models: Annotated[tuple[ModelConfig, ...], Field(min_length=1, max_length=1000)]
    """Models that the gateway serves."""
    aliases: Annotated[tuple[SplitAliasConfig, ...], Field(max_length=1000)] = ()
    """Names that stand for several models, by weight. A name of one model is its own alias."""
    entitlements: tuple[EntitlementConfig, ...] = ()
    """Rights to use the models. Without any, the gateway serves requests with any key or none."""
    tenants: tuple[TenantConfig, ...] = ()
    """Tenants whose keys open several models. A tenant with one key for one model needs no entry:
    its entitlement's `api_keys` suffice."""

    _modified_unix_s: float = PrivateAttr(0.0)
    _file: str = PrivateAttr("")
    _digest: str = PrivateAttr("")
    _given: dict[str, Any] = PrivateAttr(default_factory=dict)
    _references: Mapping[KeyPath, str] = PrivateAttr(default_factory=dict)

    @property
    def administered(self) -> bool:
        """Whether a key or a token may change entitlements at run time."""
        roles = {key.role for key in self.server.admin_keys}
        by_token = any(issuer.role_claim is not None for issuer in self.auth.jwt)
        return self.server.admin_key is not None or "owner" in roles or by_token

    @property
    def file(self) -> str:
        """The file that it was read from; "" for none."""
        return self._file

    @property
    def references(self) -> Mapping[KeyPath, str]:
        """Settings that were given as `${NAME}`, as written; not those that options gave."""
        return {
            path: written
            for path, written in self._references.items()
            if path[0] != "server" or path[1] not in self._given
        }

    def note_references(self, references: Mapping[KeyPath, str]) -> None:
        """Remember which settings were given as `${NAME}`."""
        self._references = references

    @property
    def digest(self) -> str:
        """The digest of that file's content."""
        return self._digest

    @staticmethod
    def digest_of(content: bytes) -> str:
        """The digest by which changes of a file are noticed."""
        return hashlib.sha256(content).hexdigest()

    def note_file(self, file: str, content: bytes, modified_unix_s: float) -> None:
        """Remember where it was read from, and when that was modified; `load` calls this."""
        self._file, self._digest = file, self.digest_of(content)
        self._modified_unix_s = modified_unix_s

    def note_digest(self, digest: str) -> None:
        """Remember that a later content of the file is in force."""
        self._digest = digest

    def listening(self, **given: Any) -> "Config":
        """The configuration with these settings of `server`, as command-line options give them."""
        server = self.server.model_copy(update=given)
        found = self.model_copy(update={"server": server})
        found.note_given({**self._given, **given})
        return found

    def note_given(self, given: Mapping[str, Any]) -> None:
        """Remember the settings of `server` that options gave."""
        self._given = dict(given)

    def as_started(self, later: "Config") -> "Config":
        """A later file's configuration with the options that this process was started with."""
        return later.listening(**self._given)

    @property
    def modified_unix_s(self) -> float:
        """When the file was last modified; 0 where that is not known."""
        return self._modified_unix_s

    def timeouts_for(self, model: ModelConfig) -> TimeoutsConfig:
        """The model's own time-outs, completed by those of the top level."""
        own = {k: v for k, v in model.timeouts.model_dump().items() if v is not None}
        return self.timeouts.model_copy(update=own)
