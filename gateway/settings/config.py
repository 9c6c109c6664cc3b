"""The whole file, where it came from, and its JSON Schema."""

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec.structs import replace
from pydantic import BeforeValidator, Field, PrivateAttr
from pydantic.json_schema import GenerateJsonSchema

from gateway.records.record import Record
from gateway.settings.model import ModelConfig, SplitAliasConfig, TimeoutsConfig
from gateway.settings.server import (
    AuthConfig,
    BatchesConfig,
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
from gateway.settings.source import KeyPath
from gateway.settings.tenants import EntitlementConfig, TenantConfig
from gateway.settings.types import Label, Natural, Section, typed


class Origin(Record, frozen=True, kw_only=True):
    """Where a configuration came from."""

    file: str = ""
    """The file that it was read from; "" for none."""
    digest: str = ""
    """By which changes of the file's content are noticed."""
    modified_unix_s: float = 0.0
    """When the file was last modified; 0 where that is not known."""
    given: Mapping[str, Any] = {}
    """Settings of `server` that command-line options gave."""
    references: Mapping[KeyPath, str] = {}
    """Settings that were given as `${NAME}`, as written; not those that options gave."""


def digest_of(content: bytes) -> str:
    """The digest of a file's content."""
    return hashlib.sha256(content).hexdigest()


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
    batches: BatchesConfig | None = None
    """Files and batches. Absent: none."""
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

    _origin: Origin = PrivateAttr(default_factory=Origin)

    @property
    def administered(self) -> bool:
        """Whether a key or a token may change entitlements at run time."""
        roles = {key.role for key in self.server.admin_keys}
        by_token = any(issuer.role_claim is not None for issuer in self.auth.jwt)
        return self.server.admin_key is not None or "owner" in roles or by_token

    @property
    def origin(self) -> Origin:
        """Where it came from."""
        return self._origin

    def note(self, **changes: Any) -> None:
        """Remember more of where it came from."""
        self._origin = replace(self._origin, **changes)

    def listening(self, **given: Any) -> "Config":
        """The configuration with these settings of `server`, as command-line options give them."""
        config = self.model_copy(update={"server": self.server.model_copy(update=given)})
        references = {
            path: written
            for path, written in self._origin.references.items()
            if path[0] != "server" or path[1] not in given
        }
        config.note(given={**self._origin.given, **given}, references=references)
        return config

    def as_started(self, later: "Config") -> "Config":
        """A later file's configuration with the options that this process was started with."""
        return later.listening(**self._origin.given)

    def timeouts_for(self, model: ModelConfig) -> TimeoutsConfig:
        """The model's own time-outs, completed by those of the top level."""
        own = {k: v for k, v in model.timeouts.model_dump().items() if v is not None}
        return self.timeouts.model_copy(update=own)


DIALECT = "https://json-schema.org/draft/2020-12/schema"
_REFERENCE = "EnvReference"
_VERBATIM = frozenset({"default", "required", "propertyNames"})
_SCALARS = frozenset({"integer", "number", "boolean"})


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of sluice.yaml.

    A number, flag, choice or patterned text may also be given as `${NAME}`.
    """
    root = Config.model_json_schema(mode="validation", schema_generator=GenerateJsonSchema)
    definitions = {name: _open(part) for name, part in root.pop("$defs", {}).items()}
    definitions[_REFERENCE] = {
        "title": "Environment reference",
        "description": "`${NAME}` or `${NAME:-default}`, resolved when the file is read.",
        "type": "string",
        "pattern": r"\$\{[A-Za-z_][A-Za-z0-9_]*(:-[^}]*)?\}",
    }
    root = _open(root)
    return {
        "$schema": DIALECT,
        **root,
        "title": "sluice.yaml",
        "$defs": dict(sorted(definitions.items())),
    }


def _open(node: Any) -> Any:
    """Allow an environment reference in place of every scalar that is not free text."""
    if isinstance(node, list):
        return [_open(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "default" in node and isinstance(node["default"], dict):
        node = {key: value for key, value in node.items() if key != "default"}
    if "patternProperties" in node:
        node = {**node, "additionalProperties": False}
    fixed = "enum" in node or "const" in node or "pattern" in node
    if node.get("type") in _SCALARS or fixed:
        about = {k: node[k] for k in ("title", "description", "default") if k in node}
        own = {k: v for k, v in node.items() if k not in about}
        return {**about, "anyOf": [own, {"$ref": f"#/$defs/{_REFERENCE}"}]}
    return {
        key: {name: _open(part) for name, part in value.items()}
        if key == "properties"
        else value
        if key in _VERBATIM
        else _open(value)
        for key, value in node.items()
    }
