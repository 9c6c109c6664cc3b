"""A LiteLLM proxy's config.yaml, and a dump of its keys -> sluice.yaml."""

from typing import Any, Final

from gateway.settings.source import Document
from sluice.imports import litellm_router as router
from sluice.imports.fleet import closed
from sluice.imports.litellm_keys import Tenancy
from sluice.imports.litellm_models import models_of
from sluice.imports.report import Report

_NO_KEYS: Final = (
    "no keys were given, so the gateway knows none and refuses all: import with --keys; without "
    "`entitlements` it is open to everybody"
)
_OBSERVED: Final = (
    "limits and budgets refuse nobody while a model has `mode: observe`: before you point clients "
    "here, remove it from the models whose keys have limits"
)


def convert(
    document: Document, report: Report, dump: object = None, of_keys: Report | None = None
) -> dict[str, Any]:
    """The sections of sluice.yaml; empty if no model is usable. The reports account for all."""
    data = document.data if isinstance(document.data, dict) else {}
    models, groups = models_of(data.get("model_list"), report)
    if not models:
        report.rest(data)
        return {}
    given = router.settings_of(data)
    router.names_and_fallbacks(given, models, report)
    config: dict[str, Any] = {"version": 1, **router.server_sections(given, report)}
    config["models"] = [model.section() for model in models.values()]
    if of_keys is not None:
        rows = [str(row.get("model_name")) for row in data["model_list"] if isinstance(row, dict)]
        tenancy = Tenancy(models, groups, of_keys, rows)
        tenancy.read(dump)
        path, shares = given.get("priority_reservation", (("litellm_settings",), None))
        tenancy.reserve(shares, path, report)
        config["entitlements"] = tenancy.entitlements or closed(models.values())
        if tenancy.tenants:
            config["tenants"] = tenancy.tenants
        if tenancy.limited:
            of_keys.left_out((), _OBSERVED)
        of_keys.rest(dump if isinstance(dump, dict) else {"keys": dump})
    else:
        config["entitlements"] = closed(models.values())
        report.left_out((), _NO_KEYS)
    router.explained(data, report)
    report.rest(data)
    return config
