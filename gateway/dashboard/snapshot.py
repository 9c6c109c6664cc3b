"""One snapshot for all viewers, built at most once a second, and every 10 s for the history.

The part that all viewers share is encoded once. The long tables are cut for each view, by text,
page and order, and viewers with the same view share the cut as well. Rows are the fields
of /admin and their counters; the page shapes them. A tenant's row sums those of its entitlements.
"""

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from operator import itemgetter
from typing import Annotated, Any, Final, Literal, NamedTuple

import orjson
from msgspec.structs import asdict
from pydantic import AfterValidator, BaseModel, Field

from gateway.control.admin import described
from gateway.control.peers import proof_in_force
from gateway.control.surface import Control
from gateway.dashboard import figures
from gateway.dashboard.figures import Brief, Rates, RecentDecisions, row
from gateway.fleet import members
from gateway.fleet.engine_metrics import EngineSample
from gateway.fleet.model_runtime import ModelRuntime
from gateway.ports import AccountView
from gateway.records.batch import Batch
from gateway.records.entitlement import Entitlement, kv_limit
from gateway.tenancy.tenant_admin import TenantAdmin

PAGE_ROWS: Final = 50
"""Rows of a table that a viewer gets at once."""
MAX_ROWS: Final = 2000
"""Entitlements that the dashboard counts; the oldest ones. /admin/entitlements pages all."""
MAX_KEYS: Final = 12
"""Keys of a tenant that its row names."""
MAX_ENTITLEMENTS: Final = 12
MAX_BATCHES: Final = 20

Row = dict[str, Any]
WorkerOrder = Literal["load", "name", "state"]
EntitlementOrder = Literal["load", "refused", "debt", "priority", "name"]
Text = Annotated[str, Field(max_length=128)]
Casefolded = Annotated[Text, AfterValidator(str.casefold)]
Page = Annotated[int, Field(ge=0, le=10_000)]


class View(BaseModel, frozen=True):
    """Search, page and order of each table, as the query gives them."""

    workers: Casefolded = ""
    workers_page: Page = 0
    workers_order: WorkerOrder = "load"
    entitlements: Casefolded = ""
    entitlements_page: Page = 0
    entitlements_order: EntitlementOrder = "load"
    tenants: Text = ""
    tenants_page: Page = 0
    decisions: Casefolded = ""


def _page_of(matches: Sequence[Any], total: int, page: int) -> Row:
    """One page of sorted rows; a page past the end is the last one."""
    pages = max(1, -(-len(matches) // PAGE_ROWS))
    page = min(page, pages - 1)
    rows = matches[page * PAGE_ROWS : (page + 1) * PAGE_ROWS]
    return {"rows": rows, "found": len(matches), "total": total, "page": page, "pages": pages}


# -- pools and workers


def pool_rows(served: ModelRuntime, described: Row) -> list[Row]:
    """One row a pool, with its queue, the predictor's coverage and how many workers serve.

    A prefill pool follows the pool that it is of.
    """
    fleet = served.fleet
    rows = [
        {
            **pool,
            "model": described["model"],
            "pool": pool["name"],
            "workers": len(pool["workers"]),
            "ready": sum(worker["in_rotation"] for worker in pool["workers"]),
            "queue": list(state.scheduler.waiting),
            "coverage": state.scheduler.coverage,
        }
        for pool, state in zip(described["pools"], fleet.pools, strict=True)
    ]
    firsts = {at: rows[phases.prefill] for at, phases in fleet.phases.items()}
    routed = rows[: len(fleet.routed)]
    return [row for at, own in enumerate(routed) for row in (own, firsts.get(at)) if row]


_NO_SAMPLE: Final = EngineSample()
_STATE_ORDER: Final = ("down", "ejected", "draining", "up")


def worker_rows(served: ModelRuntime, described: Row, now_s: float) -> list[Row]:
    """One row a worker, with its engine's own figures where those are read."""
    rows = []
    for pool, state in zip(described["pools"], served.fleet.pools, strict=True):
        view, predictor = state.view, state.predictor
        # Workers may have left since they were described.
        places = {name: place for place, name in members.present(state)}
        for worker in pool["workers"]:
            at = places.get(worker["id"])
            sample = (None if at is None else view.fresh(at, now_s)) or _NO_SAMPLE
            # Of looked-up tokens, those that the engine found in its prefix cache since its start.
            queries, hits = sample.prefix_queries_total, sample.prefix_hits_total
            health = "ejected" if worker["ejected_for_s"] > 0 else "up"
            if worker["draining"] or not worker["up"]:
                health = "draining" if worker["draining"] else "down"
            rows.append(
                {
                    **worker,
                    "model": described["model"],
                    "pool": pool["name"],
                    "slots": pool["max_num_seqs"],
                    "state": health,
                    "kv": sample.kv_usage,
                    "hit_rate": hits / queries if queries and hits is not None else sample.hit_rate,
                    "slowness": None if predictor is None or at is None else predictor.slowness(at),
                }
            )
    return rows


def workers_page(rows: Sequence[Row], view: View) -> Row:
    """The page of workers that a viewer looks at."""
    text = view.workers
    matches = [
        row
        for row in rows
        if not text or text in f"{row['model']} {row['pool']} {row['id']} {row['state']}"
    ]
    if view.workers_order == "load":
        matches.sort(key=lambda row: (-row["active_sequences"], row["id"]))
    elif view.workers_order == "name":
        matches.sort(key=itemgetter("id"))
    else:
        matches.sort(key=lambda row: (_STATE_ORDER.index(row["state"]), row["id"]))
    return _page_of(matches, len(rows), view.workers_page)


# -- entitlements and tenants


class CountedEntitlement(NamedTuple):
    """One entitlement at a moment."""

    terms: Entitlement
    account: AccountView | None
    """None on a model without limits."""
    refused: Mapping[str, int]
    attainment: float | None
    pace_attainment: float | None = None

    @property
    def names(self) -> str:
        """What a search looks in."""
        terms = self.terms
        return f"{terms.name} {terms.tenant} {terms.model} {terms.service_class}".casefold()

    @property
    def inflight(self) -> int:
        """Its sequences with a lease."""
        return 0 if self.account is None else sum(self.account.inflight)


_KEYS: Final[Mapping[EntitlementOrder, Callable[[CountedEntitlement], Any]]] = {
    "load": lambda e: (-e.inflight, e.terms.name),
    "refused": lambda e: (-sum(e.refused.values()), e.terms.name),
    "debt": lambda e: (0.0 if e.account is None else -e.account.debt, e.terms.name),
    "priority": lambda e: (0.0 if e.account is None else -e.account.weight, e.terms.name),
    "name": lambda e: e.terms.name,
}


def entitlements_page(entitlements: Sequence[CountedEntitlement], view: View) -> Row:
    """The page of entitlements that a viewer looks at."""
    text = view.entitlements
    matches = [entitlement for entitlement in entitlements if not text or text in entitlement.names]
    matches.sort(key=_KEYS[view.entitlements_order])
    page = _page_of(matches, len(entitlements), view.entitlements_page)
    page["rows"] = [
        {
            **asdict(entitlement.terms),
            "account": None if entitlement.account is None else asdict(entitlement.account),
            "inflight": entitlement.inflight,
            "kv_limit": kv_limit(entitlement.terms),
            "refused_by": entitlement.refused,
            "attainment": entitlement.attainment,
            "tpot_attainment": entitlement.pace_attainment,
        }
        for entitlement in page["rows"]
    ]
    return page


def tenants_page(
    service: TenantAdmin, counted: Mapping[str, CountedEntitlement], view: View
) -> Row:
    """The page of tenants that a viewer looks at; `counted` has counters by entitlement."""
    page = service.search(view.tenants, view.tenants_page, PAGE_ROWS, MAX_KEYS)
    for tenant in page["rows"]:
        names = tenant.pop("uses")
        own = [counted[name] for name in names if name in counted]
        accounts = [entitlement.account for entitlement in own if entitlement.account is not None]
        limits = [entitlement.terms.limit for entitlement in own]
        tenant |= {
            "entitlements": [
                {
                    "name": entitlement.terms.name,
                    "inflight": entitlement.inflight,
                    "limit": entitlement.terms.limit,
                }
                for entitlement in own[:MAX_ENTITLEMENTS]
            ],
            "entitlement_count": len(names),
            "inflight": sum(entitlement.inflight for entitlement in own) if accounts else None,
            "limit": sum(limits) if limits and all(limits) else None,
            "used_tokens": sum(account.used for account in accounts) if accounts else None,
            "refused": sum(sum(entitlement.refused.values()) for entitlement in own),
        }
    return page


PERIOD_S: Final = 1.0
MAX_CUTS: Final = 64
"""Views of one snapshot that are kept encoded."""
HISTORY_PERIOD_S: Final = 10.0
MAX_HISTORY: Final = 90
"""Moments of the history, 15 minutes: each of less than 1 KB with two pools, 20 KB at most."""
MAX_HISTORY_POOLS: Final = 32
MAX_TARGETS: Final = 12
"""Entitlements whose time to first token is shown against its target."""
MAX_CLAIMS: Final = 24
"""Findings of a proof that are shown; a proof begins with those that break."""
_HISTORY: Final = ("model", "pool", "inflight", "ready_slots", "ttft_p50_s")
_FRESH_S: Final = 0.9 * PERIOD_S
_STORE_S: Final = 2.0
"""How long a snapshot waits for the lease store; then it shows terms without counters."""
_WORKERS: Final = 5
"""Workers and entitlements that are named one by one."""
_BUDGET: Final = frozenset({"budget", "budget_reserved"})
_STORE: Final = (
    "The state store is away: gateways know neither each other's traffic nor newly revoked keys. "
    "Have it answer again; they return by themselves."
)


class Snapshots:
    """Builds snapshots when they are asked for."""

    def __init__(self, control: Control) -> None:
        """Starts nothing."""
        self._from = control
        self._recent = RecentDecisions(control.ring.latest, control.peers)
        self._rates = Rates()
        self._history: deque[bytes] = deque(maxlen=MAX_HISTORY)
        self._noted_s = -HISTORY_PERIOD_S
        self._turn = asyncio.Lock()
        self._newest: Callable[[View], Row] | None = None
        """What a view shows of the figures of one moment."""
        self._cuts: dict[View, bytes] = {}
        """The same, encoded."""
        self._built_s = 0.0
        self.built = 0
        """Snapshots built since the start."""

    async def of(self, view: View) -> bytes:
        """The figures now, at most a second old, as JSON."""
        async with self._turn:
            now_s = self._from.clock()
            if self._newest is None or now_s - self._built_s >= _FRESH_S:
                self._newest, self._cuts = await self._build(now_s), {}
                self._built_s = now_s
                self.built += 1
            if (content := self._cuts.get(view)) is None:
                content = orjson.dumps(self._newest(view))
                if len(self._cuts) < MAX_CUTS:
                    self._cuts[view] = content
            return content

    async def keep_history(self) -> None:
        """Have a snapshot when the history is due one, also while nobody looks. Never ends."""
        while True:
            with suppress(Exception):  # viewers are told of the same
                await self.of(View())
            await asyncio.sleep(HISTORY_PERIOD_S)

    def history(self) -> bytes:
        """Some of the figures that all viewers share, of the last minutes, oldest first."""
        return b"[%b]" % b",".join(self._history)

    async def _build(self, now_s: float) -> Callable[[View], Row]:
        control = self._from
        await self._recent.look()
        totals = await figures.all_totals(control.peers, self._from.metrics)
        present = tuple(control.models)  # a reload may change them meanwhile
        fleets = await described(control, present)
        briefs = self._recent.briefs
        last = figures.recent(briefs, time.time())
        entitlements = await self._entitlements(totals)
        models = list(zip(present, fleets, strict=True))
        pools = list(chain.from_iterable(pool_rows(*model) for model in models))
        by_pool, streams = defaultdict(list), defaultdict(list)
        for brief in last:
            by_pool[brief.model, brief.pool].append(brief)
            if brief.stream:
                streams[brief.entitlement].append(brief)
        for pool in pools:
            pool.update(figures.times(by_pool[pool["model"], pool["pool"]]))
        workers = list(chain.from_iterable(worker_rows(*model, now_s) for model in models))
        if proof := await proof_in_force(control):
            proof["more"] = max(0, len(proof["findings"]) - MAX_CLAIMS)
            proof["findings"] = proof["findings"][:MAX_CLAIMS]
        traffic = {**self._rates.at(now_s, totals), **figures.times(last)}
        shared = {
            "time": time.time(),
            "version": control.version,
            "replicas": self._from.replicas(),
            "draining": control.draining(),
            "wrong": wrong_now(pools, workers, last, store_up=self._from.store_up()),
            "traffic": traffic,
            "proof": proof,
            "batches": batch_rows(control.batches()),
            "pools": pools,
            "targets": target_rows(entitlements, streams),
            "models": [
                {
                    "model": served.name,
                    "mode": fleet["mode"],
                    "lengths": figures.lengths(served, briefs),
                    "compression": figures.compression(served, totals, briefs),
                    "plan": figures.plan(served),
                }
                for served, fleet in models
            ],
            "more_entitlements": len(entitlements) > MAX_ROWS,
        }
        if now_s - self._noted_s >= HISTORY_PERIOD_S - PERIOD_S:
            self._noted_s = now_s
            moment = {name: shared[name] for name in ("time", "traffic", "targets")}
            shown = [{name: pool[name] for name in _HISTORY} for pool in pools[:MAX_HISTORY_POOLS]]
            self._history.append(orjson.dumps({**moment, "pools": shown}))
        counted = {entitlement.terms.name: entitlement for entitlement in entitlements}
        encoded = orjson.Fragment(orjson.dumps(shared))

        def cut(view: View) -> Row:
            text = view.decisions
            matches = (brief for brief in self._recent.briefs if not text or brief.matches(text))
            return {
                "shared": encoded,
                "workers": workers_page(workers, view),
                "entitlements": entitlements_page(entitlements[:MAX_ROWS], view),
                "tenants": tenants_page(control.tenants, counted, view),
                "decisions": [row(brief) for brief in islice(matches, PAGE_ROWS)],
            }

        return cut

    async def _entitlements(self, totals: figures.Totals) -> list[CountedEntitlement]:
        """The oldest entitlements with their counters; one more than MAX_ROWS if there are more."""
        refused, met = figures.by_entitlement(totals)
        paced = figures.kept(totals, "slo_tpot_requests")
        counted: list[CountedEntitlement] = []
        for served in tuple(self._from.models):
            terms = list(
                islice(self._from.registry.terms(served.name), MAX_ROWS + 1 - len(counted))
            )
            accounts: dict[str, AccountView] = {}
            if terms and self._from.managed(served.name):
                # While the store is away, as its own code has logged, there are no counters.
                with suppress(Exception):
                    async with asyncio.timeout(_STORE_S):
                        views = await self._from.view(
                            served.name, [entitlement.name for entitlement in terms]
                        )
                        accounts = {view.name: view for view in views}
            counted += [
                CountedEntitlement(
                    entitlement,
                    accounts.get(entitlement.name),
                    refused.get(entitlement.name, {}),
                    met.get(entitlement.name),
                    paced.get(entitlement.name),
                )
                for entitlement in terms
            ]
        return counted


def batch_rows(batches: Sequence[Batch]) -> Row:
    """The batches that are due first, and how many are open."""
    rows = [
        {
            "id": batch.id,
            "tenant": batch.tenant,
            "model": batch.model,
            "status": batch.status,
            "done": batch.completed + batch.failed,
            "failed": batch.failed,
            "total": batch.total,
            "promised_by": batch.promise and batch.promise.promised_by_unix_s,
            "finish_p95": batch.forecast and batch.forecast.finish_p95_unix_s,
            "message": batch.message,
        }
        for batch in batches[:MAX_BATCHES]
    ]
    return {"rows": rows, "open": len(batches)}


def target_rows(
    entitlements: Iterable[CountedEntitlement], streams: Mapping[str | None, list[Brief]]
) -> list[Row]:
    """TTFT of streams by entitlement against its target: of the busiest that have one."""
    rows = [
        {"entitlement": name, "slo_ms": entitlement.terms.slo_ms, **figures.times(streams[name])}
        for entitlement in entitlements
        if entitlement.terms.slo_ms and (name := entitlement.terms.name) in streams
    ]
    rows.sort(key=lambda row: -row["sampled"])
    return rows[:MAX_TARGETS]


def wrong_now(
    pools: Sequence[Row], workers: Iterable[Row], recent: Iterable[Brief], *, store_up: bool
) -> list[dict[str, str]]:
    """Each thing that is wrong, with its cause; nothing only if nothing is.

    `recent` are the requests of the last minute.
    """
    troubles = [] if store_up else [("bad", _STORE)]
    out = [row for row in workers if row["state"] in ("down", "ejected")]
    for pool in pools:
        place = (pool["model"], pool["pool"])
        if not pool["ready"]:
            mine = [row["not_ready"] for row in out if (row["model"], row["pool"]) == place]
            why = next(filter(None, mine), "its workers are ejected or draining, or it has none")
            text = f"Model {place[0]}: no worker of pool {place[1]} serves ({why})."
            troubles.append(("bad", text))
    for worker in out[:_WORKERS]:
        at = f"{worker['model']}/{worker['pool']}"
        why = worker["not_ready"] or "it failed or asked for a pause; it is tried again by itself"
        text = f"Worker {worker['id']} of {at} is {worker['state']}: {why}."
        troubles.append(("warn", text))
    if len(out) > _WORKERS:
        troubles.append(("warn", f"{len(out) - _WORKERS} more workers are out."))
    spent: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for brief in recent:
        if brief.reason in _BUDGET:
            spent[brief.entitlement or brief.tenant or "?"] += 1
        elif brief.outcome in ("upstream_error", "internal_error"):
            failed[brief.model or "?"] += 1
    for who, n in spent.most_common(_WORKERS):
        troubles.append(("warn", f"{n} requests of {who} met a spent budget."))
    for name, n in failed.most_common(_WORKERS):
        troubles.append(("warn", f"{n} requests to {name} failed."))
    return [{"level": level, "text": text} for level, text in troubles]
