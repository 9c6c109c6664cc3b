"""The settings of a LiteLLM file around its models: names, fallbacks, retries, state, admin key."""

from typing import Any, Final

from gateway.settings.source import KeyPath
from sluice.imports.fleet import Model
from sluice.imports.litellm_models import reference
from sluice.imports.report import Report
from sluice.imports.sections import Row, literal

Models = dict[str, Model]
Given = dict[str, tuple[KeyPath, Any]]
"""What the file sets, by name: where, and to what."""
_SECTIONS: Final = ("router_settings", "litellm_settings", "general_settings")
_SECONDS: Final = 86_400.0
_REASONS: Final = {
    "routing_strategy": "Sluice schedules by load and prefix cache: scheduling.policy",
    "routing_strategy_args": "Sluice schedules by load and prefix cache: scheduling.policy",
    "enable_pre_call_checks": "Sluice always checks that a request fits its window",
    "content_policy_fallbacks": "Sluice does not judge contents",
    "cache": "Sluice keeps no answers; engines keep prefixes",
    "cache_params": "Sluice keeps no answers; engines keep prefixes",
    "callbacks": "see request_log, usage_export and telemetry",
    "success_callback": "see request_log, usage_export and telemetry",
    "failure_callback": "see request_log, usage_export and telemetry",
    "drop_params": "Sluice passes parameters on as they are",
    "set_verbose": "see `sluice serve --log-level`",
    "json_logs": "see request_log",
    "database_url": "Sluice needs no database; keys are in the file",
    "store_model_in_db": "Sluice reads models from the file",
    "max_budget": "budgets are of tenants, keys and entitlements",
    "budget_duration": "budgets are of tenants, keys and entitlements",
    "environment_variables": "set them where Sluice runs",
    "include": "import each file by itself",
    "guardrails": "Sluice does not judge contents",
    "mcp_servers": "Sluice relays requests to models only",
    "default_team_settings": "see request_log and telemetry",
}


def settings_of(data: dict[str, Any]) -> Given:
    """What the three sections set, by name; where two set the same, the router's."""
    found: Given = {}
    for section in _SECTIONS:
        values = data.get(section)
        for name, value in values.items() if isinstance(values, dict) else ():
            if value not in (None, ""):
                found.setdefault(name, ((section, name), value))
    return found


def names_and_fallbacks(given: Given, models: Models, report: Report) -> None:
    """Aliases, second pools from context_window_fallbacks, and fallbacks, into the models."""
    _aliases(given, models, report)
    _windows(given, models, report)
    _fallbacks(given, models, report)


def named(models: Models, name: object) -> Model | None:
    """A model by its name or by an alias of it."""
    if isinstance(name, str) and name in models:
        return models[name]
    return next((model for model in models.values() if name in model.aliases), None)


def adapted(models: Models, name: object) -> Model | None:
    """The model that a LoRA adapter belongs to."""
    return next((model for model in models.values() if name in model.loras), None)


def _aliases(given: Given, models: Models, report: Report) -> None:
    path, table = given.get("model_group_alias", ((), {}))
    for alias, target in table.items() if isinstance(table, dict) else ():
        where = (*path, alias)
        hidden = isinstance(target, dict) and bool(target.get("hidden"))
        model = named(models, target.get("model") if isinstance(target, dict) else target)
        if model is None:
            report.left_out(where, "its model was not imported, or is a LoRA adapter")
        elif named(models, alias) is not None or adapted(models, alias) is not None:
            report.left_out(where, "a model has this name")
        else:
            model.aliases.append(alias)
            note = f"an alias of `{model.name}`"
            if hidden:
                report.approximated(where, f"{note}; /v1/models shows every alias")
            else:
                report.taken(where, note)


def _pairs(given: Given, name: str) -> list[tuple[KeyPath, str, list[str]]]:
    """(path, model, others) of a setting like `fallbacks: [{a: [b, c]}]`."""
    path, items = given.get(name, ((), ()))
    return [
        ((*path, index), str(model), [str(other) for other in others])
        for index, item in enumerate(items if isinstance(items, list) else ())
        for model, others in (item.items() if isinstance(item, dict) else ())
        if isinstance(others, list)
    ]


def _windows(given: Given, models: Models, report: Report) -> None:
    """A larger window of the same model becomes a pool of it, and its name an alias."""
    for path, name, others in _pairs(given, "context_window_fallbacks"):
        small = named(models, name)
        for other in others:
            large = named(models, other)
            if small is None or large is None:
                report.left_out(path, f"`{name}` or `{other}` is no model that was imported")
            elif large is small:
                report.taken(path, f"`{other}` is in pools of `{small.name}` already")
            elif large.served != small.served:
                report.left_out(
                    path, f"`{other}` is another model: Sluice never changes the model for length"
                )
            elif not _larger(small, large):
                report.left_out(
                    path,
                    "windows are not known to differ: give max_input_tokens in model_info, or join "
                    "the two as pools of one model",
                )
            else:
                small.engines += large.engines
                small.aliases += [large.name, *large.aliases]
                small.loras += large.loras
                del models[large.name]
                report.taken(path, f"`{other}` is the larger pool of `{small.name}`, and its alias")


def _larger(small: Model, large: Model) -> bool:
    windows = [[engine.window or 0 for engine in model.engines] for model in (small, large)]
    return max(windows[0]) < min(windows[1]) and min(windows[0]) > 0


def _fallbacks(given: Given, models: Models, report: Report) -> None:
    everyones = []
    for path, name, others in _pairs(given, "fallbacks"):
        if name == "*":
            everyones.append((path, others))
            continue
        model = named(models, name)
        known = [found for other in others if (found := named(models, other)) is not None]
        gone = [other for other in others if named(models, other) is None]
        if model is None or not known:
            report.left_out(path, f"`{name}` or its fallbacks are no models that were imported")
            continue
        _fall(model, known)
        note = f"fallbacks of `{model.name}`: before the first byte, and never for a tenant's limit"
        if gone:
            note += f"; left out: {', '.join(gone)}"
        report.approximated(path, note)
    everyones.append(given.get("default_fallbacks", ((), ())))
    for path, others in everyones:
        known = [found for o in others if (found := named(models, o)) is not None]
        if not known:
            continue
        for model in models.values():
            if not model.fallbacks:
                _fall(model, known)
        report.approximated(path, "fallbacks of every model that has none of its own")


def _fall(model: Model, others: list[Model]) -> None:
    for other in others:
        usable = other is not model and other.kind == model.kind
        if usable and other.name not in model.fallbacks:
            model.fallbacks.append(other.name)


def server_sections(given: Given, report: Report) -> dict[str, Any]:
    """The sections beside models: server, state, timeouts, health, retry."""
    found: dict[str, Any] = {"server": _server(given, report)}
    found.update(_state(given, report))
    for path, seconds in _numbers(given, ("timeout", "request_timeout", "stream_timeout")):
        if "timeouts" in found or not seconds:
            report.left_out(path, "timeouts.first_byte_s is from another setting, or its default")
            continue
        found["timeouts"] = Row(first_byte_s=min(seconds, _SECONDS))
        report.approximated(path, "timeouts.first_byte_s; LiteLLM means the whole request")
    for path, count in _numbers(given, ("num_retries",)):
        if "retry" in found:
            continue
        found["retry"] = Row(max_attempts=min(int(count) + 1, 10))
        report.approximated(path, "retry.max_attempts, the first included; before the first byte")
    health = Row()
    for path, count in _numbers(given, ("allowed_fails",)):
        health["eject_after"] = int(count) + 1
        report.approximated(path, "health.eject_after: failures in a row, not in a minute")
    for path, seconds in _numbers(given, ("cooldown_time",)):
        if not seconds:
            continue
        health["eject_s"] = min(seconds, _SECONDS)
        health["max_eject_s"] = max(60.0, health["eject_s"])
        report.approximated(path, "health.eject_s; further ejections last twice as long each")
    return {**found, "health": health} if health else found


def _numbers(given: Given, names: tuple[str, ...]) -> list[tuple[KeyPath, float]]:
    """(path, number) of those settings that are numbers."""
    rows = [given[name] for name in names if name in given]
    return [
        (path, float(value))
        for path, value in rows
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    ]


def _server(given: Given, report: Report) -> Row:
    server = Row(host="0.0.0.0", port=4000)  # noqa: S104 - as LiteLLM's proxy listens
    path, key = given.get("master_key", ((), None))
    if key is None:
        return server
    server["admin_key"] = reference(key) or "${SLUICE_ADMIN_KEY}"
    if reference(key) is None:
        report.approximated(
            path, "server.admin_key: keys are not copied into files, so set SLUICE_ADMIN_KEY"
        )
    else:
        report.approximated(path, f"server.admin_key: {server['admin_key']}; it opens no model")
    return server


def _state(given: Given, report: Report) -> dict[str, Any]:
    if "redis_url" in given:
        path, url = given["redis_url"]
        if reference(url) is None and any(sign in str(url) for sign in "@?"):
            report.approximated(
                path, "state.url: passwords are not copied into files, so set REDIS_URL"
            )
            return {"state": Row(url="${REDIS_URL}")}
        report.taken(path, "state.url")
        return {"state": Row(url=reference(url) or literal(str(url)))}
    if "redis_host" not in given:
        return {}
    path, host = given["redis_host"]
    port = given.get("redis_port", ((), 6379))[1]
    secret = ""
    if "redis_password" in given:
        where, password = given["redis_password"]
        known = reference(password)
        secret = f":{known or '${REDIS_PASSWORD}'}@"
        if known is None:
            report.approximated(where, "passwords are not copied into files: set REDIS_PASSWORD")
        else:
            report.taken(where, "state.url")
    if "redis_port" in given:
        report.taken(given["redis_port"][0], "state.url")
    report.taken(path, "state.url")
    shown = [reference(value) or literal(str(value)) for value in (host, port)]
    return {"state": Row(url=f"redis://{secret}{shown[0]}:{shown[1]}/0")}


def explained(data: dict[str, Any], report: Report) -> None:
    """Leave out, with a reason, what no part of Sluice does."""
    for path, name in [((s, n), n) for s in _SECTIONS for n in _keys(data.get(s))]:
        if (reason := _REASONS.get(name)) is not None:
            report.left_out(path, reason)
    for name in _keys(data):
        if (reason := _REASONS.get(name)) is not None:
            report.left_out((name,), reason)


def _keys(section: object) -> list[str]:
    return list(section) if isinstance(section, dict) else []
