"""Settings that a proof does not cover: a file that changes one is not said to hold.

Every setting counts as not covered that is not listed here, so a new one is never forgotten.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from gateway.settings import Config
from gateway.settings.compare import changes

SIMULATED: Final = (
    *("models.name", "models.mode", "models.output_estimate", "models.output_prior_tokens"),
    *("models.estimator", "models.kv_bytes_per_token", "models.default_max_tokens"),
    *("models.spill_queue", "models.boundary", "models.compression.enabled"),
    *("models.compression.when", "models.compression.only_when_busy"),
    *("models.compression.max_cut", "models.scheduling.policy", "models.scheduling.predictor"),
    *("models.scheduling.queue_limit", "models.scheduling.queue_timeout_s"),
    *("models.admission.mode", "models.admission.profile", "models.admission.headroom"),
    *("models.admission.mean_slo_ms", "models.admission.reclaim", "models.admission.reclaim_ms"),
    *("models.pools.max_num_seqs", "models.pools.workers", "models.pools.tokens_per_second"),
    *("models.pools.kv_cache_gib", "models.pools.replicas", "models.pools.scheduling"),
    *("models.pools.max_model_len", "models.pools.transfer", "entitlements", "server.workers"),
    *("models.cache_salt", "models.scheduling.prefix_entries"),
)
"""By the gateway's own code, or as engines."""
COUNTED: Final = (
    *("models.aliases", "models.loras", "models.price", "models.pools.gpu_hour"),
    *("models.pools.gpus", "models.timeouts.first_byte_s", "models.timeouts.idle_s"),
    *("timeouts.first_byte_s", "timeouts.idle_s", "server.max_body_bytes", "auth.jwt"),
    *("tenants.name", "tenants.budgets", "tenants.suspended", "tenants.keys.name"),
    *("tenants.keys.models", "tenants.keys.suspended", "tenants.keys.expires_at"),
    *("tenants.keys.requests_per_minute", "tenants.keys.max_concurrency"),
    *("tenants.keys.budgets",),
)
"""Against the log, or told to be unknown by a verdict of their own."""
IGNORED: Final = {
    "serves no request": (
        *("version", "request_log", "usage_export", "ledger", "telemetry", "currency"),
        *("decisions_kept", "server.admin_key", "server.viewer_key", "server.admin_keys"),
        *("server.open_dashboard", "server.management_port", "tenants.display_name"),
        *("tenants.labels", "tenants.keys.queue_status", "models.scheduling.shadow"),
        *("models.compression.mark",),
    ),
    "clients reach the gateway": (
        *("server.host", "server.port", "server.tls", "server.keep_alive_s"),
        *("server.allowed_origins", "server.drain_timeout_s"),
    ),
    "engines and stores answer": (
        *("state", "health", "retry", "timeouts.connect_s", "models.timeouts.connect_s"),
        *("models.pools.tls", "models.pools.flow_headers"),
    ),
    "batches have promises of their own": ("batches",),
}
"""By what is taken for granted."""
_COVERED: Final = (*SIMULATED, *COUNTED, *(path for paths in IGNORED.values() for path in paths))
_NAME: Final = re.compile(r"\[[^\]]*\]")
_PHASE: Final = re.compile(r"(?<=^models\.pools\.)(?:prefill|decode)\.")


def uncovered(config: Config, in_force: Config | None) -> list[str]:
    """Settings that no proof covers, and that are not as in force; without it, not at default."""
    if in_force is None:
        given = _given("", config.model_dump(exclude_defaults=True))
    else:
        given = (change.path for change in changes(in_force, config))
    paths = {path: _PHASE.sub("", _NAME.sub("", path)) for path in given}
    return [path for path, setting in paths.items() if not _covered(setting)]


def _covered(setting: str) -> bool:
    return any(setting == path or setting.startswith(f"{path}.") for path in _COVERED)


def _given(path: str, value: Any) -> Iterator[str]:
    """Paths of a file's settings, as those of changes are."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            under = f"{path}[{name}]" if path.endswith("pools") else f"{path}.{name}"
            yield from _given(under.removeprefix("."), inner)
    elif isinstance(value, list | tuple) and any(isinstance(inner, Mapping) for inner in value):
        for inner in value:
            yield from _given(path, inner)
    else:
        yield path
