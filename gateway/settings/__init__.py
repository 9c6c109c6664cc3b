"""One YAML file -> a frozen, typed configuration; the only reader of the environment.

`load` and `parse` return a `Config` or raise `ConfigError`, which lists every problem with file,
line, column, dotted path and fix. Secrets are `SecretStr` and never appear in messages.
"""

from gateway.settings.checking.server_checks import unfit_ports, unfit_workers
from gateway.settings.config import (
    Config,
    EntitlementConfig,
    HealthConfig,
    RequestLogConfig,
    RetryConfig,
    ServerConfig,
    StateConfig,
    UsageExportConfig,
)
from gateway.settings.fleet.model import ModelConfig
from gateway.settings.fleet.model_parts import (
    AdmissionConfig,
    BoundaryConfig,
    CompressionConfig,
    SchedulingConfig,
    TimeoutOverrides,
    TimeoutsConfig,
)
from gateway.settings.fleet.pool import PoolConfig, ReplicasConfig
from gateway.settings.fleet.worker import WorkerConfig
from gateway.settings.json_schema import schema
from gateway.settings.loading import load, parse
from gateway.settings.notices import remarks
from gateway.settings.problems import ConfigError, Problem

__all__ = [
    "AdmissionConfig",
    "BoundaryConfig",
    "CompressionConfig",
    "Config",
    "ConfigError",
    "EntitlementConfig",
    "HealthConfig",
    "ModelConfig",
    "PoolConfig",
    "Problem",
    "ReplicasConfig",
    "RequestLogConfig",
    "RetryConfig",
    "SchedulingConfig",
    "ServerConfig",
    "StateConfig",
    "TimeoutOverrides",
    "TimeoutsConfig",
    "UsageExportConfig",
    "WorkerConfig",
    "load",
    "parse",
    "remarks",
    "schema",
    "unfit_ports",
    "unfit_workers",
]
