"""One YAML file -> a frozen, typed configuration; the only reader of the environment.

`load` and `parse` return a `Config` or raise `ConfigError`, which lists every problem with file,
line, column, dotted path and fix. Secrets are `SecretStr` and never appear in messages.
"""

from gateway.settings.checks import remarks, unfit_ports, unfit_workers
from gateway.settings.config import Config, schema
from gateway.settings.loading import load, parse
from gateway.settings.model import ModelConfig, SchedulingConfig
from gateway.settings.server import HealthConfig
from gateway.settings.source import ConfigError, Problem
from gateway.settings.tenants import EntitlementConfig

__all__ = [
    "Config",
    "ConfigError",
    "EntitlementConfig",
    "HealthConfig",
    "ModelConfig",
    "Problem",
    "SchedulingConfig",
    "load",
    "parse",
    "remarks",
    "schema",
    "unfit_ports",
    "unfit_workers",
]
