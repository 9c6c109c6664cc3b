"""Reads schema 1 of the request log (one flat object per request) as schema 2."""

from collections.abc import Mapping
from typing import Any, Final

from gateway.records.decision import DECISION_SCHEMA

_SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "request": ("body_bytes", "text_bytes", "messages", "media_parts", "rag"),
    "estimate": (
        *("category", "bytes_per_token", "bytes_per_token_conservative", "cap_tokens"),
        "sequences",
    ),
    "admission": (
        *("lease_id", "service_class", "asked_pool", "alternates", "spilled", "admitted_unix_s"),
        *("settled_unix_s", "reserved_tokens", "reserved_kv_bytes", "priority", "contended"),
        *("would_deny", "evicted", "lease_changes", "charge_tokens"),
    ),
    "compression": ("compressed", "not_compressed", "kept_share"),
    "scheduling": (
        *("score", "candidates", "expected_hit_tokens", "backlog_tokens", "worker_active"),
        *("worker_kv_usage", "predicted_prefill_s", "predicted_prefill_q_s", "prefill_s"),
    ),
    "usage": ("prompt_tokens", "completion_tokens", "cached_tokens"),
    "timing": ("queue_ms", "overhead_ms", "compress_ms", "ttft_s", "tpot_s", "duration_s"),
}
"""Fields that kept their names, by their section in schema 2."""

PATHS: Final[Mapping[str, tuple[str, str]]] = {
    "estimated_input_tokens": ("estimate", "input_tokens"),
    "estimated_output_tokens": ("estimate", "output_tokens"),
    "estimated_total_tokens": ("estimate", "total_tokens"),
    "planned_pool": ("plan", "pool"),
    "plan_reason": ("plan", "reason"),
    "would_route": ("plan", "would_route"),
    "usage_source": ("usage", "source"),
    **{name: (section, name) for section, names in _SECTIONS.items() for name in names},
}
"""Field of schema 1 -> section and name in schema 2; all other fields stay at the top level."""


def as_schema_2(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """A decoded line of either schema, in the form of schema 2. Pool events do not differ."""
    if line.get("schema") != 1 or "event" in line:
        return line
    found: dict[str, Any] = {}
    for name, value in line.items():
        section, field = PATHS.get(name, ("", ""))
        if section:
            found.setdefault(section, {})[field] = value
        else:
            found[name] = value
    found["schema"] = DECISION_SCHEMA
    return found
