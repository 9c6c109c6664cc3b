"""Limits of a key that an administrator sends, checked as those in the file are."""

from collections.abc import Mapping

from pydantic import ValidationError

from gateway.records.limit import KeyLimits
from gateway.settings.checking.server_checks import unfit_limits
from gateway.settings.config import Config
from gateway.settings.explain import first_problem
from gateway.settings.problems import ConfigError, Problem, dotted
from gateway.settings.tenancy.budgets import KeyLimitsConfig, stated_limits


def read_key_limits(config: Config, fields: Mapping[str, object]) -> KeyLimits:
    """The limits in these fields of a key. Raises ConfigError with the first problem."""
    try:
        found = stated_limits(KeyLimitsConfig.model_validate(fields))
    except ValidationError as error:
        path, message, fix = first_problem(error, KeyLimitsConfig)
        raise _refused(dotted(path), message, fix) from None
    unfit = unfit_limits(config)
    if unfit is not None and fields:
        raise _refused(next(iter(fields)), *unfit)
    return found


def _refused(path: str, message: str, fix: str) -> ConfigError:
    return ConfigError(
        [Problem(file="request", line=1, column=1, path=path, message=message, fix=fix)]
    )
