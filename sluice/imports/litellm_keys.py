"""Rows of LiteLLM's keys and teams -> tenants, their keys and their entitlements.

LiteLLM stores the SHA-256 of a key in hex, as Sluice does: clients keep their keys. A team is a
tenant with one entitlement for each of its models. A key with a token rate or a priority of its own
gets entitlements of its own, because these belong to entitlements. A key is left out rather than
opened too far.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.settings.problems import KeyPath
from sluice.imports.fleet import Model
from sluice.imports.litellm_fields import other_fields
from sluice.imports.litellm_limits import (
    SEQUENCES,
    budgets_of,
    key_limits,
    limits_of,
    refusing,
    unreadable,
)
from sluice.imports.litellm_names import ModelNames
from sluice.imports.litellm_rows import (
    digest_of,
    instant_of,
    listed,
    models_in,
    number,
    rows_of,
    whole,
)
from sluice.imports.report import Report
from sluice.imports.sections import Row, label, literal

_HASHES_ONLY: Final = "hashes alone say no models: ask /key/list with return_full_object=true"
_NO_TEAM: Final = (
    "its team's models are not in the dump, so what it opens is not known: add /team/list"
)
_OF_ENTITLEMENTS: Final = frozenset({"tpm_limit", "priority"})
_NO_MODELS: Final = frozenset({"management_routes", "info_routes"})
"""LiteLLM's names of groups of routes that serve no model."""


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
        self,
        models: dict[str, Model],
        groups: dict[str, list[str]],
        report: Report,
        rows: Collection[str] = (),
    ) -> None:
        """`rows`: names that have a row of their own, imported or not."""
        self._models = models
        self._opens = ModelNames(models, groups, rows)
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
        for index, row in enumerate(listed(tables, "keys")):
            if isinstance(row, str):
                self._report.left_out(("keys",), _HASHES_ONLY)
                self._report.part_of(("keys", index))
        for team_id, (path, team) in self._teams.items():
            tenant = self._tenants.get(("team", team_id))
            if tenant is None:
                self._report.left_out(path, "a team of which no key was imported")
            else:
                self._unused(tenant)
                other_fields(path, team, self._report)

    def reserve(self, shares: object, path: KeyPath, report: Report) -> None:
        """Share the slots out by `priority_reservation`, among the entitlements of a priority."""
        table = shares if isinstance(shares, dict) else {}
        for priority, given in table.items():
            if (number(given) or 0) > 0:
                report.part_of((*path, priority))
            else:
                report.left_out((*path, priority), "not a share of the slots, so class spot")
        for (priority, model), rows in self._prioritized.items():
            share = number(table.get(priority)) or 0
            if share <= 0:
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
        allowed, notes = self._allowed(row)
        why = "" if allowed else notes[0]
        if row.get("expires") and not instant_of(row["expires"]):
            why = why or "no usable expiry"
        if digest in self._digests:
            why = "the same key as a row before"
        if digest is None or why:
            self._report.left_out(path, why if digest is not None else "no token")
            return
        self._digests.add(digest)
        tenant = self._tenant(row)
        name = label(str(row.get("key_alias") or row.get("key_name") or digest[:8]), tenant.names)
        tenant.names.add(name)
        key = Row(name=name, sha256=f"sha256:{digest}")
        bases = list(dict.fromkeys(self._opens.base(name) for name in allowed))
        if limits_of(row).keys() & _OF_ENTITLEMENTS:
            tenant.apart = True
            key["entitlements"] = [
                self._entitlement(path, tenant, model, row, name) for model in bases
            ]
            if limits_of(tenant.team):
                notes.append("limits and priority of the team do not bind it")
        else:
            for model in bases:
                if model not in tenant.shared:
                    made = self._entitlement(tenant.path, tenant, model, tenant.team, "")
                    tenant.shared[model] = made
        if models_in(row) or len(allowed) < len(self._opens.every):
            key["models"] = [literal(model) for model in allowed]
        note = f"key `{name}` of tenant `{tenant.name}`, unchanged, for {', '.join(allowed)}"
        say = self._report.approximated if notes else self._report.taken
        say(path, "; ".join([note, *notes]))
        key_limits(path, row, key, self._report)
        self._ends(path, row, tenant, key)
        tenant.keys.append(key)
        unreadable(path, row, self._report)
        other_fields(path, row, self._report)

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
                unreadable(path, team, self._report)
                if whole(team.get("rpm_limit")):
                    self._report.left_out(
                        (*path, "rpm_limit"), "keys have requests_per_minute, tenants do not"
                    )
        return self._tenants[owner]

    def _allowed(self, row: dict[str, Any]) -> tuple[list[str], list[str]]:
        """(imported models and adapters that a key opens, remarks); none opened: why."""
        asked, of_team, notes = models_in(row), list[str](), list[str]()
        routes = row.get("allowed_routes")
        if isinstance(routes, list) and routes and _NO_MODELS.issuperset(map(str, routes)):
            return [], ["its routes serve no model"]
        if asked is None:
            return [], ["its `models` are missing, or no list"]
        if row.get("team_id"):
            _, team = self._teams.get(str(row["team_id"]), ((), {}))
            known = models_in(team)
            if known is None and not asked:
                return [], [_NO_TEAM]
            if known is None:
                notes.append("its team is not in the dump: models and limits of it do not bind")
            of_team = known or []
        elif row.get("user_id"):
            notes.append("models, limits and budgets of its user are not read")
        opened, unknown = self._opens.listed(asked)
        team_opens, _ = self._opens.listed(of_team)
        allowed = [name for name in opened if name in team_opens]
        if not allowed:
            gone = f" ({', '.join(unknown)})" if unknown else ""
            return [], [f"none of its models was imported{gone}"]
        if unknown:
            notes.append(f"not imported: {', '.join(unknown)}")
        return allowed, notes

    def _entitlement(
        self, path: KeyPath, tenant: _Tenant, model: str, row: dict[str, Any], key: str
    ) -> str:
        """Make an entitlement with the limits of a row, a key's or a team's; its name."""
        name = label("-".join(filter(None, (tenant.name, key, model))), self._taken)
        self._taken.add(name)
        made = Row(name=name, tenant=tenant.name, model=literal(model), service_class="elastic")
        limits = limits_of(row)
        if "tpm_limit" in limits:
            rate = round(limits["tpm_limit"] / 60, 3)
            made["tokens_per_second"] = made["max_tokens_per_second"] = rate
            self._report.approximated(
                (*path, "tpm_limit"),
                "tokens_per_second, a sixtieth, and no more, for each model by itself; "
                "a bucket of 10 s of it, or of the widest window's tokens",
            )
        if "max_parallel_requests" in limits and not key:
            made["max_concurrency"] = limits["max_parallel_requests"]
            self._report.approximated(
                (*path, "max_parallel_requests"), f"{SEQUENCES}, for each model by itself"
            )
        if "priority" in limits:
            self._prioritized.setdefault((limits["priority"], model), []).append(made)
            self._report.approximated(
                (*path, "metadata", "priority"), "a class and a baseline: see priority_reservation"
            )
        self.entitlements.append(made)
        return name

    def _unused(self, tenant: _Tenant) -> None:
        """Leave out limits of a team that none of its entitlements has."""
        for name in () if tenant.shared else limits_of(tenant.team):
            where = ("metadata", name) if name == "priority" else (name,)
            self._report.left_out(
                (*tenant.path, *where), "each of its keys has a rate or a priority of its own"
            )

    def _ends(self, path: KeyPath, row: dict[str, Any], tenant: _Tenant, key: Row) -> None:
        """Expiry and suspension, of the key or of its team."""
        expires = instant_of(row.get("expires"))
        if expires is not None:
            key["expires_at"] = expires
            self._report.taken((*path, "expires"), f"expires_at: {expires}")
        if row.get("blocked") or tenant.team.get("blocked"):
            key["suspended"] = True
            self._report.taken((*path, "blocked"), "suspended")
        for where, limited in ((path, row), (tenant.path, tenant.team)):
            if (name := refusing(limited)) is not None:
                key["suspended"] = True
                self._report.taken((*where, name), "suspended: a limit of nothing admits nothing")
