"""What an administrator sends of a tenant, an entitlement or a key: a section of the file, as JSON.

It is checked by the file's own section, with the same words and fixes. Keys and budgets of an
entitlement or a tenant are set in the file only, or by routes of their own.
"""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from gateway.records.tenancy import RowKind
from gateway.settings.budgets import KeyLimitsConfig
from gateway.settings.config import Config, EntitlementConfig
from gateway.settings.explain import first_problem
from gateway.settings.problems import ConfigError, Problem, dotted
from gateway.settings.sections import TenantConfig, TenantKeyConfig
from gateway.settings.server_checks import unfit_limits
from gateway.settings.types import Section

_SECTIONS: Final[dict[RowKind, type[Section]]] = {
    "entitlement": EntitlementConfig,
    "tenant": TenantConfig,
    "key": TenantKeyConfig,
}
_IN_FILE: Final[dict[RowKind, dict[str, str]]] = {
    "entitlement": {
        "api_keys": "add a key with POST /admin/entitlements/{name}/keys",
        "budgets": "set it in the configuration file",
    },
    "tenant": {
        "keys": "add each with POST /admin/tenants/{name}/keys",
        "budgets": "set it in the configuration file",
    },
    "key": {},
}


def read_admin_fields(
    config: Config, kind: RowKind, fields: Mapping[str, object]
) -> dict[str, Any]:
    """The given fields as JSON. Raises ConfigError with the first problem."""
    for name, fix in _IN_FILE[kind].items():
        if name in fields:
            raise _refused(name, "cannot be sent here", fix)
    section = _SECTIONS[kind]
    try:
        found = section.model_validate(fields)
    except ValidationError as error:
        path, message, fix = first_problem(error, section)
        raise _refused(dotted(path), message, fix) from None
    limits = [name for name in KeyLimitsConfig.model_fields if name in fields]
    if kind == "key" and limits and (unfit := unfit_limits(config)) is not None:
        raise _refused(limits[0], *unfit)
    return found.model_dump(mode="json", exclude_unset=True, exclude_none=True)


def _refused(path: str, message: str, fix: str) -> ConfigError:
    return ConfigError(
        [Problem(file="request", line=1, column=1, path=path, message=message, fix=fix)]
    )
