"""Settings that users of other gateways look for, and where Sluice has what they are for."""

from typing import Final

_LITELLM: Final = (
    "this is a part of a LiteLLM file: `sluice import litellm FILE -o sluice.yaml` converts one"
)
_STACK: Final = (
    "this is a part of a values file: `sluice import production-stack FILE -o sluice.yaml` "
    "converts one"
)
_BUDGET: Final = (
    "write `budgets: [{money: 100, window: month}]`, or `tokens`, at a tenant, a key or an "
    "entitlement"
)
_TOKENS: Final = "give an entitlement's `tokens_per_second`, in tokens a second"
_PRICE: Final = "write `price: {input, output}`, per million tokens"
_REQUESTS: Final = "write `requests_per_minute` at a tenant's key"
_PARALLEL: Final = "give an entitlement's `max_concurrency`"
_ANY: Final = {
    "max_budget": _BUDGET,
    "soft_budget": _BUDGET,
    "budget": _BUDGET,
    "budget_duration": _BUDGET,
    "tpm_limit": _TOKENS,
    "tpm": _TOKENS,
    "rpm_limit": _REQUESTS,
    "rpm": _REQUESTS,
    "requests_per_minute": _REQUESTS,
    "max_parallel_requests": _PARALLEL,
    "blocked": "write `suspended: true` at a tenant's key",
    "expires": "write `expires_at`",
}
"""Under tenants, keys and entitlements alike."""
_KEY: Final = (
    "a key that opens several models stands under `tenants`: {name, keys: [{name, sha256, "
    "models}]}; write one entitlement for each model"
)
_WISHES: Final[dict[str, dict[str, str]]] = {
    "EntitlementConfig": {**_ANY, "models": _KEY, "keys": _KEY},
    "TenantConfig": {
        **_ANY,
        "models": "list `models` at a key, or write one entitlement for each model",
        "api_keys": "list them as `keys: [{name, sha256}]`",
    },
    "TenantKeyConfig": {
        **_ANY,
        "key": "write `sha256`, from `sluice hash-key`: keys are never in the file",
        "token": "write `sha256`",
        "max_parallel_requests": "write `max_concurrency`",
        "rpm": "write `requests_per_minute`",
        "rpm_limit": "write `requests_per_minute`",
    },
    "Config": {
        "model_list": _LITELLM,
        "litellm_settings": _LITELLM,
        "router_settings": _LITELLM,
        "general_settings": _LITELLM,
        "servingEngineSpec": _STACK,
        "routerSpec": _STACK,
        "fallbacks": "write `fallbacks: [other]` at the model",
        "default_fallbacks": "write `fallbacks: [other]` at each model",
        "model_group_alias": "write `aliases` at the model",
        "keys": "list keys under `tenants`: {name, keys: [{name, sha256}]}",
    },
    "ModelConfig": {
        "model_name": "write `name`",
        "litellm_params": _LITELLM,
        "context_window_fallbacks": "give the model a second pool with a larger `max_model_len`",
        "input_cost_per_token": _PRICE,
        "output_cost_per_token": _PRICE,
        "num_retries": "write `retry: {max_attempts}` at the top level",
    },
}


def wish(section: str, name: str) -> str | None:
    """Where the file says what an unknown setting of a section (by class name) is for."""
    return _WISHES.get(section, {}).get(name)
