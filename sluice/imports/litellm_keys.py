"""Rows of LiteLLM's keys and teams -> tenants, their keys and their entitlements.

LiteLLM stores the SHA-256 of a key in hex, as Sluice does: clients keep their keys. A team is a
tenant with one entitlement for each of its models. A key with a token rate or a priority of its own
gets entitlements of its own, because these belong to entitlements. A key is left out rather than
opened too far.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from gateway.settings.problems import KeyPath
from sluice.imports.fleet import Model
from sluice.imports.litellm_limits import budgets_of
from sluice.imports.litellm_router import named
from sluice.imports.litellm_rows import digest_of, instant_of, limits_of, listed, models_in, rows_of
from sluice.imports.report import Report
from sluice.imports.sections import Row, label, literal

_HASHES_ONLY: Final = "hashes alone say no models: ask /key/list with return_full_object=true"
_LEFT_OUT: Final = {
    "soft_budget": "give the budget `warn_at`",
    "model_max_budget": "give the entitlement of that model its budgets",
    "model_rpm_limit": "requests a minute are limited for a key over all of its models",
    "model_tpm_limit": "give the entitlement of that model its tokens_per_second",
    "aliases": "aliases are the model's, for every key",
    "allowed_routes": "a key opens every route of its models",
    "guardrails": "Sluice does not judge contents",
}
_OF_ENTITLEMENTS: Final = frozenset({"tpm_limit", "priority"})
_BOOKKEEPING: Final = frozenset(
    {
        *("token", "key", "key_name", "key_alias", "team_id", "team_alias", "user_id", "models"),
        *("spend", "model_spend", "created_at", "created_by", "updated_at", "updated_by"),
        *("budget_duration", "budget_reset_at", "budget_id", "last_active", "members"),
        *("members_with_roles", "admins", "soft_budget_cooldown", "organization_id", "user"),
        *("user_email", "key_type", "rotation_count", "auto_rotate", "metadata", "blocked"),
        *("expires", "tpm_limit", "rpm_limit", "max_parallel_requests", "max_budget", "duration"),
    }
)
"""Fields that another line speaks of, or that record LiteLLM's own past."""


@dataclass
class _Tenant:
    """One tenant: a team, or a user without one."""

    name: str
    path: KeyPath
    team: dict[str, Any]
    """The team's row; empty without one."""
    keys: list[Row] = field(default_factory=list)
    shared: dict[str, str] = field(default_factory=dict)
    """Model -> the entitlement that keys without limits of their own use."""
    names: set[str] = field(default_factory=set)
    """Of its keys."""
    apart: bool = False
    """Whether a key has entitlements of its own."""
    budgets: list[Row] = field(default_factory=list)

    def section(self) -> dict[str, Any]:
        found: dict[str, Any] = {"name": self.name}
        if alias := self.team.get("team_alias"):
            found["display_name"] = literal(str(alias))
        if self.team:
            found["labels"] = Row(litellm_team_id=literal(str(self.team["team_id"])))
        if self.apart:
            found["entitlements"] = list(self.shared.values())
        if self.budgets:
            found["budgets"] = self.budgets
        return {**found, "keys": self.keys}


class Tenancy:
    """Tenants, keys and entitlements, as they are found in a dump."""

    def __init__(
        self, models: dict[str, Model], groups: dict[str, list[str]], report: Report
    ) -> None:
        self._models = models
        self._groups = groups
        self._report = report
        self._tenants: dict[tuple[str, str], _Tenant] = {}
        """By LiteLLM's id of the team, else of the user."""
        self._digests: set[str] = set()
        self._names: set[str] = set()
        """Of tenants."""
        self._teams: dict[str, tuple[KeyPath, dict[str, Any]]] = {}
        self._prioritized: dict[tuple[str, str], list[Row]] = {}
        """Entitlements by (priority, model)."""
        self.entitlements: list[Row] = []
        self._taken: set[str] = set()
        """Names of entitlements."""

    @property
    def tenants(self) -> list[dict[str, Any]]:
        """The section of each tenant."""
        return [tenant.section() for tenant in self._tenants.values() if tenant.keys]

    def read(self, dump: object) -> None:
        """Every row of a dump: a list of keys, or `keys` and `teams` as the API lists them."""
        tables: dict[str, Any] = dump if isinstance(dump, dict) else {"keys": dump}
        for path, team in rows_of(tables, "teams", "LiteLLM_TeamTable"):
            self._teams[str(team.get("team_id"))] = (path, team)
        for path, row in rows_of(tables, "keys", "LiteLLM_VerificationToken"):
            self._key(path, row)
        if any(isinstance(row, str) for row in listed(tables, "keys")):
            self._report.left_out(("keys",), _HASHES_ONLY)
        for team_id, (path, team) in self._teams.items():
            if ("team", team_id) not in self._tenants:
                self._report.left_out(path, "a team of which no key was imported")
            else:
                self._others(path, team)

    def reserve(self, shares: object, path: KeyPath, report: Report) -> None:
        """Share the slots out by `priority_reservation`, among the entitlements of a priority."""
        table = shares if isinstance(shares, dict) else {}
        for (priority, model), rows in self._prioritized.items():
            share = table.get(priority)
            if isinstance(share, bool) or not isinstance(share, int | float) or share <= 0:
                for row in rows:
                    row["service_class"] = "spot"
                continue
            each = max(1, int(share * self._models[model].slots / len(rows)))
            for row in rows:
                row["concurrency"] = min(each, row.get("max_concurrency", each))
        if table:
            report.approximated(
                path,
                "concurrency of elastic entitlements, shared out among those of a priority; "
                "without a reservation: class spot",
            )

    def _key(self, path: KeyPath, row: dict[str, Any]) -> None:
        digest = digest_of(row)
        allowed, unknown = self._allowed(row)
        if digest is None or not allowed or (row.get("expires") and not instant_of(row["expires"])):
            gone = f" ({', '.join(unknown)})" if unknown else ""
            why = f"none of its models was imported{gone}" if not allowed else "no usable expiry"
            self._report.left_out(path, "no token" if digest is None else why)
            return
        if digest in self._digests:
            self._report.left_out(path, "the same key as a row before")
            return
        self._digests.add(digest)
        tenant = self._tenant(row)
        name = label(str(row.get("key_alias") or row.get("key_name") or digest[:8]), tenant.names)
        tenant.names.add(name)
        key = Row(name=name, sha256=f"sha256:{digest}")
        note = f"key `{name}` of tenant `{tenant.name}`, unchanged, for {', '.join(allowed)}"
        if unknown:
            self._report.approximated(path, f"{note}; not imported: {', '.join(unknown)}")
        else:
            self._report.taken(path, note)
        if limits_of(row).keys() & _OF_ENTITLEMENTS:
            tenant.apart = True
            key["entitlements"] = [
                self._entitlement(path, tenant, model, row, name) for model in allowed
            ]
        else:
            for model in allowed:
                if model not in tenant.shared:
                    made = self._entitlement(tenant.path, tenant, model, tenant.team, "")
                    tenant.shared[model] = made
            if models_in(row):
                key["models"] = [literal(model) for model in allowed]
        self._limits(path, row, key)
        self._ends(path, row, tenant, key)
        tenant.keys.append(key)
        self._others(path, row)

    def _tenant(self, row: dict[str, Any]) -> _Tenant:
        """The tenant of a key: its team, else its user, else one for all."""
        kind = "team" if row.get("team_id") else "user"
        owner = (kind, str(row.get(f"{kind}_id") or "default"))
        if owner not in self._tenants:
            path, team = self._teams.get(owner[1], ((), {})) if kind == "team" else ((), {})
            said = (team.get("team_alias") or row.get("team_alias")) if kind == "team" else None
            name = label(str(said or owner[1]), self._names)
            self._names.add(name)
            self._tenants[owner] = _Tenant(name, path, team)
            if team:
                self._report.taken(path, f"tenant `{name}`")
                self._tenants[owner].budgets = budgets_of(path, team, self._report)
                if team.get("rpm_limit"):
                    self._report.left_out(
                        (*path, "rpm_limit"), "keys have requests_per_minute, tenants do not"
                    )
        return self._tenants[owner]

    def _allowed(self, row: dict[str, Any]) -> tuple[list[str], list[str]]:
        """(imported models that a key opens, names that were not imported)."""
        _, team = self._teams.get(str(row.get("team_id")), ((), {}))
        of_team, _ = self._named(models_in(team))
        found, unknown = self._named(models_in(row))
        everything = list(self._models)
        of_team = everything if of_team is None else of_team
        return [m for m in (of_team if found is None else found) if m in of_team], unknown

    def _named(self, names: list[str]) -> tuple[list[str] | None, list[str]]:
        """(models of a list, None for no limit; names that are none)."""
        if not names:
            return None, []
        found: dict[str, None] = {}
        unknown = []
        for name in names:
            model = named(self._models, name)
            members = [model.name] if model is not None else self._groups.get(name, [])
            found.update(dict.fromkeys(m.name for n in members if (m := named(self._models, n))))
            if not members:
                unknown.append(name)
        return list(found), unknown

    def _entitlement(
        self, path: KeyPath, tenant: _Tenant, model: str, row: dict[str, Any], key: str
    ) -> str:
        """Make an entitlement with the limits of a row, a key's or a team's; its name."""
        name = label("-".join(filter(None, (tenant.name, key, model))), self._taken)
        self._taken.add(name)
        made = Row(name=name, tenant=tenant.name, model=literal(model), service_class="elastic")
        limits = limits_of(row)
        if "tpm_limit" in limits:
            made["tokens_per_second"] = round(limits["tpm_limit"] / 60, 3)
            self._report.approximated(
                (*path, "tpm_limit"),
                "tokens_per_second, a sixtieth, for each model by itself; a burst of 10 s",
            )
        if "max_parallel_requests" in limits and not key:
            made["max_concurrency"] = limits["max_parallel_requests"]
            self._report.approximated(
                (*path, "max_parallel_requests"), "max_concurrency, for each model by itself"
            )
        if "priority" in limits:
            self._prioritized.setdefault((limits["priority"], model), []).append(made)
            self._report.approximated(
                (*path, "metadata", "priority"), "a class and a baseline: see priority_reservation"
            )
        self.entitlements.append(made)
        return name

    def _limits(self, path: KeyPath, row: dict[str, Any], key: Row) -> None:
        """Limits of a key over all of its models."""
        for name, given in (
            ("requests_per_minute", "rpm_limit"),
            ("max_concurrency", "max_parallel_requests"),
        ):
            value = row.get(given)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                key[name] = value
                self._report.taken((*path, given), f"{name} of the key")
        if budgets := budgets_of(path, row, self._report):
            key["budgets"] = budgets

    def _ends(self, path: KeyPath, row: dict[str, Any], tenant: _Tenant, key: Row) -> None:
        """Expiry and suspension, of the key or of its team."""
        expires = instant_of(row.get("expires"))
        if expires is not None:
            key["expires_at"] = expires
            self._report.taken((*path, "expires"), f"expires_at: {expires}")
        if row.get("blocked") or tenant.team.get("blocked"):
            key["suspended"] = True
            self._report.taken((*path, "blocked"), "suspended")

    def _others(self, path: KeyPath, row: dict[str, Any]) -> None:
        """Account for every other field of a row that says something."""
        for name, value in row.items():
            where = (*path, name)
            if name in _BOOKKEEPING:
                self._report.part_of(where)
            elif name in _LEFT_OUT and value:
                self._report.left_out(where, _LEFT_OUT[name])
        metadata = row.get("metadata")
        for name in metadata if isinstance(metadata, dict) else ():
            if name != "priority":
                self._report.left_out((*path, "metadata", name), "a note; see `labels` of tenants")
