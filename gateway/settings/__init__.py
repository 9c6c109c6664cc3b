"""One YAML file -> a frozen, typed configuration; the only reader of the environment.

`load` and `parse` give a `Config` or raise `ConfigError`, which names every problem at once
with file, line, column, dotted path and fix. Secrets are `SecretStr` and stand in no message.
"""

from gateway.settings.config import (
    Config,
    EntitlementConfig,
    HealthConfig,
    RequestLogConfig,
    RetryConfig,
    ServerConfig,
    StateConfig,
)
from gateway.settings.fleet import (
    BoundaryConfig,
    CompressionConfig,
    ModelConfig,
    PoolConfig,
    SchedulingConfig,
    TimeoutOverrides,
    TimeoutsConfig,
    WorkerConfig,
)
from gateway.settings.json_schema import schema
from gateway.settings.loading import load, parse
from gateway.settings.notices import not_enforced, remarks
from gateway.settings.problems import ConfigError, Problem

__all__ = [
    "BoundaryConfig",
    "CompressionConfig",
    "Config",
    "ConfigError",
    "EntitlementConfig",
    "HealthConfig",
    "ModelConfig",
    "PoolConfig",
    "Problem",
    "RequestLogConfig",
    "RetryConfig",
    "SchedulingConfig",
    "ServerConfig",
    "StateConfig",
    "TimeoutOverrides",
    "TimeoutsConfig",
    "WorkerConfig",
    "load",
    "not_enforced",
    "parse",
    "remarks",
    "schema",
]
