"""The whole file: the server, its state, the models and the entitlements to use them."""

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from gateway.settings.model import ModelConfig, SplitAliasConfig, TimeoutsConfig
from gateway.settings.problems import KeyPath
from gateway.settings.server import (
    AuthConfig,
    CompressorConfig,
    HealthConfig,
    LedgerConfig,
    RequestLogConfig,
    RetryConfig,
    ServerConfig,
    StateConfig,
    TelemetryConfig,
    UsageExportConfig,
)
from gateway.settings.tenants import EntitlementConfig, TenantConfig
from gateway.settings.types import Label, Natural, Section, typed


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
