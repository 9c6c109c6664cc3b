"""Rows of LiteLLM's keys and teams -> tenants, their keys and their entitlements.

LiteLLM stores the SHA-256 of a key in hex, as Sluice does: clients keep their keys. A team is a
tenant with one entitlement for each of its models, and so is a user for keys without a team. Any
other key is a tenant by itself, because the keys of a tenant see its usage and its decisions. A key
with a token rate or a priority of its own gets entitlements of its own, because these belong to
entitlements.

No key may open more than before. Limits that hold for several keys or models in LiteLLM are divided
among them. A key that is restricted in a way that Sluice lacks, or by a row that the dump lacks, is
suspended; one of which it is not known what it opens is left out.
"""

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.settings.source import KeyPath
from sluice.imports.fleet import Model
from sluice.imports.litellm_limits import (
    LIMITS,
    RESUME,
    SEQUENCES,
    budgets_of,
    key_limits,
    limits_of,
    other_fields,
    over_models,
    refusing,
    restricted,
    spent,
    unreadable,
)
from sluice.imports.litellm_models import covered
from sluice.imports.litellm_router import Models, adapted, named
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
_MISSING: Final = "its {0}'s models and limits are not in the dump: add /{0}/list, or its table"
_OF_ENTITLEMENTS: Final = frozenset({"tpm_limit", "priority"})
_LIMITS: Final = frozenset(
    {"max_tokens_per_second", "max_concurrency", "requests_per_minute", "budgets"}
)
_NO_MODELS: Final = frozenset({"management_routes", "info_routes"})
"""LiteLLM's names of groups of routes that serve no model."""
_NO_MODEL_TYPES: Final = frozenset({"management", "read_only"})
"""Values of `key_type` of keys that call no model."""
_NOBODY: Final = "default_user_id"
"""The user of keys that were made with the master key."""

Owner = tuple[str, str]
"""LiteLLM's `team`, `user` or `key`, and its id."""


@dataclass
class _Tenant:
    """One tenant: a team, a user, or a key without either."""

    name: str
    owner: Owner
    path: KeyPath
    row: dict[str, Any]
    """The team's or the user's; empty if the dump has none."""
    apart: int = 0
    """Keys that have entitlements of their own."""
    keys_in_all: int = 1
    suspended: bool = False
    """Whether something suspends all of its keys."""
    keys: list[Row] = field(default_factory=list)
    shared: dict[str, str] = field(default_factory=dict)
    """Model -> the entitlement that keys without limits of their own use."""
    names: set[str] = field(default_factory=set)
    """Of its keys."""
    budgets: list[Row] = field(default_factory=list)

    def section(self) -> dict[str, Any]:
        kind, key = self.owner
        found: dict[str, Any] = {"name": self.name}
        if alias := self.row.get(f"{kind}_alias"):
            found["display_name"] = literal(str(alias))
        if self.row:
            found["labels"] = Row({f"litellm_{kind}_id": literal(key)})
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
        self._tenants: dict[Owner, _Tenant] = {}
        self._digests: set[str] = set()
        self._names: set[str] = set()
        """Of tenants."""
        self._rows: dict[Owner, tuple[KeyPath, dict[str, Any]]] = {}
        """Of teams and users."""
        self._keys_of: Counter[Owner] = Counter()
        self._apart_of: Counter[Owner] = Counter()
        self._prioritized: dict[tuple[str, str], list[Row]] = {}
        """Entitlements by (priority, model)."""
        self.entitlements: list[Row] = []
        self._taken: set[str] = set()
        """Names of entitlements."""

    @property
    def tenants(self) -> list[dict[str, Any]]:
        """The section of each tenant."""
        return [tenant.section() for tenant in self._tenants.values() if tenant.keys]

    @property
    def limited(self) -> bool:
        """Whether a limit or a budget was imported."""
        sections = [*self.entitlements, *self.tenants]
        rows = [*sections, *(key for tenant in self.tenants for key in tenant["keys"])]
        return any(not _LIMITS.isdisjoint(row) for row in rows)

    def read(self, dump: object) -> None:
        """Every row of a dump: a list of keys; or `keys`, `teams` and `users` as the API does."""
        tables: dict[str, Any] = dump if isinstance(dump, dict) else {"keys": dump}
        for kind, table in (("team", "LiteLLM_TeamTable"), ("user", "LiteLLM_UserTable")):
            for path, row in rows_of(tables, f"{kind}s", table):
                self._rows[kind, str(row.get(f"{kind}_id"))] = (path, row)
        keys = list(rows_of(tables, "keys", "LiteLLM_VerificationToken"))
        for _, row in keys:
            owner = _owner(row)
            self._keys_of[owner] += 1
            self._apart_of[owner] += bool(limits_of(row).keys() & _OF_ENTITLEMENTS)
        for path, row in keys:
            self._key(path, row)
        for index, row in enumerate(listed(tables, "keys")):
            if isinstance(row, str):
                self._report.left_out(("keys",), _HASHES_ONLY)
                self._report.part_of(("keys", index))
        for owner, (path, row) in self._rows.items():
            tenant = self._tenants.get(owner)
            if tenant is None:
                self._report.left_out(path, f"a {owner[0]} of which no key was imported")
            else:
                if not tenant.shared and "priority" in limits_of(row):
                    self._report.left_out(
                        (*path, "metadata", "priority"),
                        "each of its keys has a rate or a priority of its own",
                    )
                other_fields(path, row, self._report)

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
        said = str(row.get("key_alias") or row.get("key_name") or digest[:8])
        tenant = self._tenant(row, said)
        name = label(said, tenant.names)
        tenant.names.add(name)
        key = Row(name=name, sha256=f"sha256:{digest}")
        bases = list(dict.fromkeys(self._opens.base(name) for name in allowed))
        if limits_of(row).keys() & _OF_ENTITLEMENTS:
            own = over_models(path, row, self._report)
            of_all = _divided(limits_of(tenant.row), tenant.apart + 1)
            of_all.pop("priority", None)
            own.pop("max_parallel_requests", None)  # the key's own: over all of its models
            for limit, most in of_all.items():
                own[limit] = min(own.get(limit, most), most)
            key["entitlements"] = [
                self._entitlement(tenant, model, _divided(own, len(bases)), name) for model in bases
            ]
        else:
            shared = _divided(limits_of(tenant.row), tenant.apart + 1)
            opened, _ = self._opens.listed(models_in(tenant.row) or [])
            shared = _divided(shared, len(set(map(self._opens.base, opened))))
            for model in bases:
                if model not in tenant.shared:
                    tenant.shared[model] = self._entitlement(tenant, model, shared)
        if models_in(row) or len(allowed) < len(self._opens.every):
            key["models"] = [literal(model) for model in allowed]
        lost = self._lost(path, row, tenant, key, bases)
        if lost or self._refused(path, row, tenant):
            key["suspended"] = True
        state = "suspended" if lost else "unchanged"
        note = f"key `{name}` of tenant `{tenant.name}`, {state}, for {', '.join(allowed)}"
        say = self._report.approximated if notes or lost else self._report.taken
        say(path, "; ".join([note, *notes]))
        tenant.keys.append(key)
        other_fields(path, row, self._report)

    def _tenant(self, row: dict[str, Any], key: str) -> _Tenant:
        """The tenant of a key: its team, else its user, else the key's own."""
        owner = kind, owner_id = _owner(row)
        if owner not in self._tenants:
            path, of = self._rows.get(owner, ((), {}))
            alias = of.get(f"{kind}_alias") or (row.get("team_alias") if kind == "team" else None)
            name = label(str(alias or (key if kind == "key" else owner_id)), self._names)
            self._names.add(name)
            self._tenants[owner] = tenant = _Tenant(
                name, owner, path, of, self._apart_of[owner], self._keys_of[owner]
            )
            if of:
                self._report.taken(path, f"tenant `{name}`, whose keys see its usage")
                over_models(path, of, self._report)
                if "max_parallel_requests" in limits_of(of):
                    self._report.approximated(
                        (*path, "max_parallel_requests"),
                        f"{SEQUENCES}, in equal parts for each model",
                    )
                if (whole(of.get("rpm_limit")) or 0) > 0:
                    self._report.approximated(
                        (*path, "rpm_limit"), "requests_per_minute of its keys, in equal parts"
                    )
                budgets = budgets_of(path, of, self._report)
                tenant.budgets = budgets or []
                unread = [unreadable(path, of, self._report), restricted(path, of, self._report)]
                tenant.suspended = budgets is None or any(unread)
        return self._tenants[owner]

    def _allowed(self, row: dict[str, Any]) -> tuple[list[str], list[str]]:
        """(imported models and adapters that a key opens, remarks); none opened: why."""
        asked, notes = models_in(row), list[str]()
        routes, (kind, owner_id) = row.get("allowed_routes"), _owner(row)
        no_models = isinstance(routes, list) and routes and _NO_MODELS.issuperset(map(str, routes))
        if no_models or row.get("key_type") in _NO_MODEL_TYPES:
            return [], ["its routes serve no model"]
        if asked is None:
            return [], ["its `models` are missing, or no list"]
        of_owner: list[str] | None = []
        if kind != "key":
            of_owner = models_in(self._rows.get((kind, owner_id), ((), {}))[1])
        if of_owner is None and not asked:
            return [], [_MISSING.format(kind)]
        opened, unknown = self._opens.listed(asked)
        owner_opens, _ = self._opens.listed(of_owner or [])
        allowed = [name for name in opened if name in owner_opens]
        if not allowed:
            gone = f" ({', '.join(unknown)})" if unknown else ""
            return [], [f"none of its models was imported{gone}"]
        if unknown:
            notes.append(f"not imported: {', '.join(unknown)}")
        return allowed, notes

    def _entitlement(
        self, tenant: _Tenant, model: str, limits: dict[str, Any], key: str = ""
    ) -> str:
        """Make an entitlement with these limits; its name."""
        parts = (tenant.name, key if tenant.owner[0] != "key" else "", model)
        name = label("-".join(filter(None, parts)), self._taken)
        self._taken.add(name)
        made = Row(name=name, tenant=tenant.name, model=literal(model), service_class="elastic")
        if "tpm_limit" in limits:
            rate = max(0.001, math.floor(limits["tpm_limit"] / 60 * 1_000) / 1_000)
            made["tokens_per_second"] = made["max_tokens_per_second"] = rate
        if "max_parallel_requests" in limits:
            made["max_concurrency"] = max(1, int(limits["max_parallel_requests"]))
        if "priority" in limits:
            self._prioritized.setdefault((limits["priority"], model), []).append(made)
        self.entitlements.append(made)
        return name

    def _lost(
        self, path: KeyPath, row: dict[str, Any], tenant: _Tenant, key: Row, bases: list[str]
    ) -> bool:
        """Set the key's own limits and its expiry; whether something that binds it is lost."""
        within = key_limits(path, row, key, self._report)
        if (of_all := whole(tenant.row.get("rpm_limit")) or 0) > 0:
            part = max(1, of_all // tenant.keys_in_all)
            key["requests_per_minute"] = min(key.get("requests_per_minute", part), part)
        if (expires := instant_of(row.get("expires"))) is not None:
            key["expires_at"] = expires
            self._report.taken((*path, "expires"), f"expires_at: {expires}")
        lost = [
            not within,
            tenant.suspended,
            unreadable(path, row, self._report),
            restricted(path, row, self._report),
            *(self._owner_unknown(path, row, kind, tenant) for kind in ("team", "user")),
        ]
        free = next((name for name in bases if self._models[name].price is None), None)
        for where, limited in ((path, row), (tenant.path, tenant.row)):
            if free and (number(limited.get("max_budget")) or 0) > 0 and spent(limited):
                why = f"{RESUME}: give `{free}` a price, or its budget counts nothing"
                self._report.left_out((*where, "spend"), why)
                lost.append(True)
        return any(lost)

    def _refused(self, path: KeyPath, row: dict[str, Any], tenant: _Tenant) -> bool:
        """Whether LiteLLM refuses all of the key's requests."""
        blocked = bool(row.get("blocked") or tenant.row.get("blocked"))
        if blocked:
            self._report.taken((*path, "blocked"), "suspended")
        for where, limited in ((path, row), (tenant.path, tenant.row)):
            if (name := refusing(limited)) is not None:
                blocked = True
                self._report.taken((*where, name), "suspended: a limit of nothing admits nothing")
        return blocked

    def _owner_unknown(
        self, path: KeyPath, row: dict[str, Any], kind: str, tenant: _Tenant
    ) -> bool:
        """Whether limits of the team or the user that a key names are not known, or are lost."""
        owner_id = row.get(f"{kind}_id")
        if not owner_id or (kind == "user" and owner_id == _NOBODY):
            return False
        where = (*path, f"{kind}_id")
        _, found = self._rows.get((kind, str(owner_id)), ((), None))
        if found is None or models_in(found) is None:
            self._report.left_out(where, f"{RESUME}: {_MISSING.format(kind)}")
            return True
        if kind == "user" and tenant.owner[0] == "team" and any(map(found.get, LIMITS)):
            self._report.left_out(
                where, f"{RESUME}: limits of its user hold over the keys of all teams"
            )
            return True
        return False


def _owner(row: dict[str, Any]) -> Owner:
    """Whom a key belongs to: its team, else its user, else nobody but itself."""
    if row.get("team_id"):
        return "team", str(row["team_id"])
    if row.get("user_id") and row["user_id"] != _NOBODY:
        return "user", str(row["user_id"])
    return "key", str(digest_of(row))


def _divided(limits: dict[str, Any], parts: int) -> dict[str, Any]:
    """An equal part of each limit; a priority is nobody's part."""
    return {
        name: value if name == "priority" else value / max(1, parts)
        for name, value in limits.items()
    }


class ModelNames:
    """Names of the imported models. A LoRA adapter is opened by its own name."""

    def __init__(
        self, models: Models, groups: dict[str, list[str]], rows: Collection[str] = ()
    ) -> None:
        """`groups`: access groups, each with the names in it; `rows`: names with a row."""
        self._models = models
        self._rows = rows
        self._groups = groups
        self.every = [name for m in models.values() for name in (m.name, *m.loras)]
        """Every model and adapter that a key can open."""

    def base(self, name: str) -> str:
        """The model of an adapter; a model is its own."""
        found = adapted(self._models, name)
        return name if found is None else found.name

    def listed(self, names: list[str]) -> tuple[list[str], list[str]]:
        """(models and adapters that a list opens, all if it is empty; names that open none)."""
        if not names:
            return self.every, []
        found: dict[str, None] = {}
        unknown = []
        for name in names:
            members = [name] if self._opened(name) else self._groups.get(name, [])
            opened = [each for member in members if (each := self._opened(member)) is not None]
            found.update(dict.fromkeys(opened))
            if not opened:
                unknown.append(name)
        return list(found), unknown

    def _opened(self, name: str) -> str | None:
        model = named(self._models, name)
        if model is None and adapted(self._models, name) is not None:
            return name
        if model is None and name not in self._rows:
            model = covered(self._models, name)
        return None if model is None else model.name
