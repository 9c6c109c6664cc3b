"""The Redis scripts decide as the policy does: the same history gives the same state, exactly.

Every operation is carried out on policy objects and by the scripts on a real Redis, under one
clock. Answers are compared with `==`, waits and levels included, and so is all state after it.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from bench.common.fleet import RedisServer
from gateway.admission import admission, debt
from gateway.admission.terms import AdmissionRequest, Denial, DenialReason, Terms
from gateway.admission.token_pool import LEASE_TTL_S, TokenPool
from gateway.records.entitlement import (
    BURST_WEIGHT,
    CLASSES,
    PROFILES,
    Entitlement,
)
from gateway.records.limit import Holding, Limit, Spent
from gateway.store.redis.lease_codec import (
    NOTHING,
    LimitEncoder,
    decision,
    limit_views,
    moved,
    token_pool_of,
)
from gateway.store.redis.scripts import GROUPED, Calls, Scripts, argument, grouped, record

pytestmark = pytest.mark.redis
T = TypeVar("T")
Pick = Callable[[Sequence[Any]], Any]
NAMES = ("a", "b", "c", "d", "e", "f")
DERIVED = {"terms", "epoch", "weight", "most"}
DECODE = msgspec.msgpack.decode


class Pair:
    """One model, in policy objects and in Redis."""

    def __init__(self, client: "Redis", terms: Terms) -> None:
        self.now_s = 1_700_000_000.25
        self.client = client
        self.calls = Calls(Scripts(lambda: self.now_s), "m", len(terms.slots))
        client.flushdb()
        for script in self.calls.scripts.all.values():
            client.script_load(script.text)
        self.book = TokenPool(terms)
        self.book.ticked_s = self.now_s
        self.script("change", owner="o", leader_ms=60_000, terms=terms, epoch="x")
        self.issued = 0
        self.met: set[str] = set()
        """What was decided so far."""

    def script(self, script: str, /, **fields: Any) -> Any:
        if script in GROUPED:
            (answer,) = self.group([(script, fields)])
            assert not isinstance(answer, Exception)
            return answer
        return self._run(script, argument(**fields))

    def group(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Any]:
        """Answers of calls that share one script; an exception stands in place of an error."""
        given = [
            part for name, fields in calls for part in (name.encode(), grouped(name, **fields))
        ]
        answers: list[Any] = self._run("calls", *given)
        return answers

    def _run(self, script: str, *given: bytes) -> Any:
        keys = self.calls.all_keys()
        sha = self.calls.scripts.all[script].sha.decode()
        return self.client.evalsha(sha, len(keys), *keys, *given, repr(self.now_s).encode())

    # -- operations

    def define(self, entitlement: Entitlement) -> None:
        self.book.define(entitlement)
        self.script("define", entitlements=[(entitlement.name, entitlement)])

    def change(self, terms: Terms) -> None:
        self.book.change(terms)
        assert self.script("change", owner="o", leader_ms=60_000, terms=terms, epoch="y") == 1

    def quote(
        self, request: AdmissionRequest, counted: tuple[Limit, ...], *, observe: bool
    ) -> None:
        """Both say the same, and nothing changes but what time and the quote itself do."""
        itself = msgspec.structs.replace(request, limits=counted)
        self.reap(64)
        over = admission.count_request(self.book, itself, self.now_s)
        dry = LimitEncoder().asked(counted, request, self.now_s, "limits")
        asked = LimitEncoder().asked(request.limits, request, self.now_s, "limits")
        fields = msgspec.structs.asdict(request) | {"owner": "", "observe": observe, "dry": dry}
        fields["asked"] = asked if request.limits else None
        said, of_itself, _ = decision(self.script("admit", **fields))
        assert of_itself == (over is not None)
        if over is not None:
            assert said == over
            self.met.add("quote refused")
            return
        assert said == admission.admit(self.book, request, self.now_s, observe=observe, dry=True)
        self.met.add("quoted no" if isinstance(said, Denial) else "quoted yes")

    def admit(self, request: AdmissionRequest, *, observe: bool, owner: str = "x") -> None:
        expected = admission.admit(self.book, request, self.now_s, observe=observe, owner=owner)
        fields = msgspec.structs.asdict(request)
        asked = LimitEncoder().asked(request.limits, request, self.now_s, "limits")
        fields |= {"owner": owner, "observe": observe, "asked": asked if request.limits else None}
        fields["dry"] = None
        answer = self.script("admit", **fields)
        found, gives_way, issued_s = decision(answer)
        assert found == expected
        if isinstance(expected, Denial):
            self.met.add(f"denied: {expected.reason}")
            if expected.of_pool and expected.reason == "kv":
                self.met.add("kv for the pool")
        else:
            self.met.add(f"funded: {expected.funded}")
            self.met |= {"burst"} if expected.weight == BURST_WEIGHT else set()
            self.met |= {w for w in ("spilled", "protected") if getattr(expected, w)}
            self.met |= {"warned" for use in expected.uses if use.crossed}
            demoted = expected.spilled and expected.pool == request.pool
            self.met |= {"demoted"} if demoted and expected.uses else set()
        held = self.book.leases.get(request.lease_id)
        if held is not None and not isinstance(expected, Denial):
            evictable = request.lease_id in self.book.pools[held.pool].evictable
            assert (gives_way, issued_s) == (evictable, held.issued_s)

    def settle(self, lease_id: str, charge: int | None) -> None:
        if lease_id in self.book.tombstones:
            self.met.add("late usage")
        spent = None if charge is None else Spent(charge, 3 * charge)
        expected = admission.settle(self.book, lease_id, charge, self.now_s, spent)
        charged: Any = False if charge is None else charge
        answer = self.script("settle", lease_id=lease_id, charge=charged, timely=True, spent=spent)
        assert bool(answer) == expected

    def resize(self, lease_id: str, tokens: int, kv_bytes: int) -> None:
        expected = admission.resize(self.book, lease_id, tokens, kv_bytes, self.now_s)
        answer = self.script("resize", lease_id=lease_id, estimate_tokens=tokens, kv_bytes=kv_bytes)
        assert bool(answer) == expected

    def transfer(self, lease_id: str, pool: int, *, force: bool) -> None:
        expected = admission.transfer(self.book, lease_id, pool, self.now_s, force=force)
        if expected is not None:
            self.met.add("kept in its pool")
        assert (
            moved(self.script("transfer", lease_id=lease_id, pool=pool, force=force)).denied
            == expected
        )

    def renew(self, lease_ids: Sequence[str]) -> None:
        gone = [i for i in lease_ids if not admission.renew(self.book, i, self.now_s)]
        answer = self.script("renew", lease_ids=list(lease_ids))
        assert [raw.decode() for raw in answer] == gone

    def reap(self, most: int) -> None:
        assert self.script("reap", most=most) == admission.reap(self.book, self.now_s, most)

    def tick(self, most: int) -> None:
        elapsed_s = self.now_s - self.book.ticked_s
        due = elapsed_s >= self.book.terms.profile.tick_s
        if due:
            debt.tick(self.book, list(self.book.active), elapsed_s, self.now_s)
            debt.close(self.book, elapsed_s, self.now_s)
        lefts: list[int] = []
        while not lefts or lefts[-1] > 0:
            answer = self.script("tick", owner="o", leader_ms=60_000, silent_s=30.0, most=most)
            assert answer[0] == 1
            lefts.append(answer[1])
        assert lefts[-1] == (0 if due else -1)

    def evict(self, lease_id: str, sequences: int) -> None:
        waiting = self.book.leases.get(lease_id)
        chosen = [] if waiting is None else admission.evict(self.book, waiting.pool, sequences)
        if chosen:
            self.met.add("evicted")
        own = self.script("evict", lease_id=lease_id, sequences=sequences, owner="x")
        assert [raw.decode() for raw in own] == [h.id for h in chosen if h.owner == "x"]
        theirs = self.script("evicted", owner="y")
        assert sorted(raw.decode() for raw in theirs) == sorted(
            h.id for h in chosen if h.owner == "y"
        )

    def remove(self, name: str) -> None:
        account = self.book.accounts.get(name)
        busy = account is not None and account.total > 0
        assert bool(self.script("remove", name=name)) == (not busy)
        if not busy:
            self.book.remove(name)

    # -- comparison

    def compare(self) -> None:
        token_pool, names = self.book, list(self.book.accounts)
        seen = token_pool_of(self.script("view", names=names))
        assert seen.terms == token_pool.terms
        for name in ("surplus", "surplus_s", "surplus_per_s", "ticked_s", "own_served"):
            assert getattr(seen, name) == getattr(token_pool, name), name
        for name in ("priority_denials", "settled", "refunds"):
            assert getattr(seen, name) == getattr(token_pool, name), name
        assert set(seen.accounts) == set(token_pool.accounts)
        for name, account in token_pool.accounts.items():
            fields = {f for f in dir(account) if not (f[0] == "_" or callable(getattr(account, f)))}
            for field in fields - DERIVED:
                assert getattr(seen.accounts[name], field) == getattr(account, field), (name, field)
            assert seen.accounts[name].terms == account.terms
        stored = self._stored()
        self._compare_pools(seen, stored)
        self._compare_leases(stored)
        self._compare_limits(stored)
        assert {member.decode() for member in stored["active"]} == token_pool.active

    def _compare_pools(self, seen: TokenPool, stored: Mapping[str, Any]) -> None:
        for index, pool in enumerate(self.book.pools):
            other = seen.pools[index]
            for field in (
                "inflight",
                "kv_bytes",
                "idle_dedicated",
                "unreserved",
                "service_s",
                "refused_sequences",
                "refused_kv_bytes",
                "refused_tokens",
                "served_tokens",
            ):
                assert getattr(other, field) == getattr(pool, field), field
            for field in ("denials", "denials_last"):
                assert _scores(stored[f"{field}:{index}"]) == getattr(pool, field).weights
            evictable = {i: h.weight for i, h in pool.evictable.items()}
            assert _scores(stored[f"evictable:{index}"]) == evictable
            weights = {h.id: h.weight for h in self.book.leases.values() if h.pool == index}
            assert _scores(stored[f"weights:{index}"]) == weights
            assert sorted(weights.values()) == list(pool.weights)

    def _compare_leases(self, stored: Mapping[str, Any]) -> None:
        token_pool = self.book
        leases = {k.decode(): record("lease", v) for k, v in stored["leases"].items()}
        assert set(leases) == set(token_pool.leases)
        for lease_id, held in token_pool.leases.items():
            for field, value in leases[lease_id].items():
                if field == "evictable":
                    assert (lease_id in token_pool.pools[held.pool].evictable) == value
                elif field == "held":
                    assert tuple(Holding(*each) for each in value[1:]) == held.held
                elif field != "serial":
                    assert getattr(held, field) == value, field
        expiry = {member[16:]: at_s for member, at_s in _scores(stored["expiry"]).items()}
        assert expiry == {h.id: h.expires_s for h in token_pool.leases.values()}
        assert list(expiry)[:1] == list(token_pool.leases)[:1]
        tombstones = {k.decode(): _tombstone(*DECODE(v)) for k, v in stored["graves"].items()}
        assert tombstones == token_pool.tombstones

    def _compare_limits(self, stored: Mapping[str, Any]) -> None:
        counters = {k.decode(): DECODE(v) for k, v in stored["limits"].items()}
        for limit_id, counter in self.book.limits.counters.items():
            # What was only looked at is written by neither.
            total, reserved, warned_s, added, until_s, _, *slices = counters.get(
                limit_id, (0, 0, -1, 0, 0, "")
            )
            assert (total, reserved, warned_s) == (
                counter.total,
                counter.reserved,
                counter.warned_s,
            )
            assert (added, until_s) == (counter.added, counter.added_until_s)
            theirs = {s: n for s, n in zip(slices[::2], slices[1::2], strict=True) if n}
            ours = zip(counter.starts, counter.spent, strict=True)
            # Reading drops what is too old, in the scripts only once they write it.
            assert {s: n for s, n in ours if n}.items() <= theirs.items()

    def compare_views(self) -> None:
        asked = LimitEncoder().asked(LIMITS, NOTHING, self.now_s, "limits")
        views = limit_views(self.script("budget", asked=asked, added=0))
        assert views == [self.book.limits.view(limit, self.now_s) for limit in LIMITS]

    def _key(self, name: str) -> str:
        return self.calls.key.replace(":state", f":{name}")

    def _stored(self) -> dict[str, Any]:
        """What the keys hold, in one round trip."""
        per_pool = ("denials", "denials_last", "evictable", "weights")
        ordered = [f"{name}:{i}" for name in per_pool for i in range(len(self.book.pools))]
        with self.client.pipeline(transaction=False) as pipeline:
            for name in ("expiry", *ordered):
                pipeline.zrange(self._key(name), 0, -1, withscores=True)
            pipeline.hgetall(self._key("leases"))
            pipeline.hgetall(self._key("graves"))
            pipeline.hgetall("limits")
            pipeline.smembers(self._key("active"))
            names = ("expiry", *ordered, "leases", "graves", "limits", "active")
            return dict(zip(names, pipeline.execute(), strict=True))


def _scores(ordered: Sequence[tuple[bytes, float]]) -> dict[str, float]:
    """Members of a sorted set, in its order."""
    return {member.decode(): score for member, score in ordered}


def _tombstone(name: str, tokens: int, funded: str, held: Sequence[Any] = ()) -> Any:
    return name, tokens, funded, tuple(Holding(*each) for each in held[1:])


# -- histories


def _limit(unit: Any, amount: int, window: str = "", **more: Any) -> Limit:
    known = {"id": f"{unit}:{window}", "scope": "key", "name": "t/k", "amount": amount}
    return Limit(**{**known, "unit": unit, "window": window, **more})


LIMITS = (
    _limit("sequences", 2),
    _limit("requests", 4, "minute"),
    _limit("tokens", 900, "hour", warn=500),
    _limit("money", 2_000, "1d", warn=1_000),
    _limit("tokens", 400, "day", spot=True),
)


def some_terms(pick: Pick) -> Terms:
    return Terms(
        slots=(pick((0, 1, 3, 5)), pick((0, 2, 4))),
        kv_bytes=pick(((), (0, 0), (5_000, 9_000), (3_000, 4_000))),
        tokens_per_s=pick((0.0, 0.0, 37.5, 400.0)),
        largest_tokens=pick((0, 900, 2_000)),
        mean_slo_ms=pick((0.0, 700.0, 15_250.0)),
        bound_until=pick(((), (), (0, 0), (3,), (0, 3), (1 << 53, 2))),
        ever_bound_until=pick((3, 1 << 53)),
        headroom=pick((0, 1, 2)),
        spill_queue=pick((0, 1, 3)),
        reclaim_spot=pick((True, False)),
        profile=PROFILES[pick(("default", "paper"))],
    )


def some_entitlement(pick: Pick) -> Entitlement:
    name = pick(NAMES)
    return Entitlement(
        name=name,
        model="m",
        tenant="t" if name in "ab" else "",
        service_class=pick(CLASSES),
        slo_ms=pick((0, 500, 5_000, 30_000)),
        baseline=pick(((), (1,), (2, 1), (0, 3), (5, 5))),
        limit=pick((0, 0, 2, 7)),
        tokens_per_s=pick((0.0, 0.0, 10.0, 77.7)),
        tokens_per_s_limit=pick((0.0, 0.0, 100.0)),
        kv_bytes=pick((0, 0, 3_000)),
        kv_bytes_limit=pick((0, 6_000)),
        expires_unix_s=pick((0.0, 0.0, 0.0, 0.0, 1_700_000_060.0)),
        suspended=pick((False,) * 7 + (True,)),
        observe=pick((False,) * 5 + (True,)),
        created=pick((0, 1, 2, 3, 4, 5)),
    )


def some_step(pair: Pair, pick: Pick) -> None:
    """One operation on both sides."""
    held = [*pair.book.leases, *list(pair.book.tombstones)[:3], "nobody"]
    match pick(("admit",) * 9 + ("settle",) * 3 + ("pass",) * 3 + OTHERS):
        case "admit":
            pair.issued += 1
            asked = AdmissionRequest(
                lease_id=pick((f"l{pair.issued}",) * 12 + (held[0] if pair.book.leases else "l0",)),
                entitlement=pick((*NAMES, "unknown")),
                pool=pick((0, 1)),
                alternates=pick(((), (0,), (1,))),
                estimate_tokens=pick((1, 40, 130, 333, 1_500)),
                kv_bytes=pick((0, 0, 500, 2_500)),
                sequences=pick((1, 1, 1, 2, 3)),
            )
            owner = pick(("x", "y"))
            request = msgspec.structs.replace(
                asked,
                limits=pick(((),) * 4 + (LIMITS, LIMITS[:2], LIMITS[2:], LIMITS[3:])),
                money=pick((0, 10, 700)),
                most_tokens=pick((0, 0, 600)),
                most_money=pick((0, 900)),
                demoted=pick((False,) * 5 + (True,)),
            )
            observe = pick((False,) * 9 + (True,))
            if pick((False,) * 5 + (True,)) and request.lease_id == f"l{pair.issued}":
                pair.quote(request, pick(((), LIMITS[1:2])), observe=observe)
            pair.admit(request, observe=observe, owner=owner)
        case "settle":
            pair.settle(pick(held), pick((None, 0, 1, 50, 130, 700)))
        case "pass":
            pair.now_s += pick((0.0, 0.001, 0.37, 0.37, 1.1, 1.1, 5.0, 9.93, 31.0, 3_000.0))
        case "resize":
            pair.resize(pick(held), pick((10, 200, 900)), pick((0, 100, 4_000)))
        case "transfer":
            pair.transfer(pick(held), pick((0, 1)), force=pick((True, False)))
        case "renew":
            pair.renew([pick(held), pick(held)])
        case "reap":
            pair.reap(pick((1, 64)))
        case "tick":
            pair.tick(pick((1, 2, 500)))
        case "evict":
            pair.evict(pick(held), pick((1, 2, 5)))
        case "define":
            pair.define(some_entitlement(pick))
        case "change":
            pair.change(some_terms(pick))
        case "remove":
            pair.remove(pick(NAMES))


OTHERS = (
    *("resize", "resize", "transfer", "transfer", "renew", "reap", "tick", "tick", "evict"),
    *("define", "define", "change", "remove"),
)


def run(pair: Pair, pick: Pick, steps: int) -> None:
    for name in NAMES[:-1]:
        pair.define(msgspec.structs.replace(some_entitlement(pick), name=name))
    for _ in range(steps):
        some_step(pair, pick)
        pair.compare()
    pair.now_s += LEASE_TTL_S
    while pair.book.leases:
        pair.reap(64)
    pair.compare()
    assert [pool.inflight for pool in pair.book.pools] == [0, 0]


@given(data=st.data())
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_any_short_history_gives_the_same_decisions_and_state(
    redis_process: RedisServer, data: st.DataObject
) -> None:
    def pick(options: Sequence[T]) -> T:
        return data.draw(st.sampled_from(options))

    with redis_process.client() as client:
        run(Pair(client, some_terms(pick)), pick, data.draw(st.integers(1, 25)))


def test_long_histories_give_the_same_decisions_and_state(redis_process: RedisServer) -> None:
    # The histories are worth something: they meet everything that can be decided.
    wanted = {f"denied: {reason}" for reason in get_args(DenialReason)}
    wanted |= {"funded: own", "funded: surplus", "funded: none", "spilled", "protected"}
    wanted |= {"evicted", "kv for the pool", "kept in its pool", "late usage"}
    wanted |= {"warned", "demoted", "burst", "quoted yes", "quoted no", "quote refused"}
    with redis_process.client() as client:
        for seed in range(300):
            pick = random.Random(seed).choice
            pair = Pair(client, some_terms(pick))
            run(pair, pick, 120)
            wanted -= pair.met
            if not wanted and seed >= 30:
                break
    assert not wanted


def test_a_clock_that_is_set_leaves_the_same_levels_of_limits(redis_process: RedisServer) -> None:
    with redis_process.client() as client:
        for seed in range(40):
            pick = random.Random(seed).choice
            pair = Pair(client, Terms(slots=(500, 500)))
            pair.define(Entitlement(name="a", model="m"))
            begin_s = pair.now_s
            pair.now_s += pick((900.0, 90_000.0, 1e8))
            for number in range(40):
                pair.now_s += pick((0.0, 0.37, 1.1))  # no lease expires
                if number == 20:
                    for lease_id in list(pair.book.leases):
                        pair.settle(lease_id, 90)
                    pair.now_s = begin_s
                request = AdmissionRequest(
                    lease_id=f"l{number}",
                    entitlement="a",
                    pool=0,
                    estimate_tokens=pick((40, 130)),
                    limits=LIMITS,
                    money=70,
                )
                pair.admit(request, observe=True)  # a script that refuses writes nothing
                pair.settle(pick([*pair.book.leases, "nobody"]), pick((None, 50, 700)))
                pair.compare_views()


def test_what_a_wrong_clock_counted_ages_though_all_are_refused(
    redis_process: RedisServer,
) -> None:
    with redis_process.client() as client:
        pair = Pair(client, Terms(slots=(4, 4)))
        pair.define(Entitlement(name="a", model="m"))
        limits = (_limit("requests", 1, "minute"),)
        asked = AdmissionRequest(
            lease_id="", entitlement="a", pool=0, estimate_tokens=1, limits=limits
        )
        for lease_id, passed_s in (("early", 0.0), ("refused", -90_000.0), ("later", 63.0)):
            pair.now_s += passed_s
            pair.admit(msgspec.structs.replace(asked, lease_id=lease_id), observe=False)
        assert "denied: key_requests" in pair.met
        assert "later" in pair.book.leases


@pytest.mark.parametrize("window", ["1d", "day"])
def test_what_only_reservations_refuse_resets_at_no_known_time(
    redis_process: RedisServer, window: str
) -> None:
    budget = _limit("tokens", 2_000, window)
    with redis_process.client() as client:
        pair = Pair(client, Terms(slots=(4, 4)))
        pair.define(Entitlement(name="a", model="m"))
        asked = AdmissionRequest(
            lease_id="", entitlement="a", pool=0, estimate_tokens=1_500, limits=(budget,)
        )
        # A refused request begins a slice in the policy, and none in the scripts.
        too_large = msgspec.structs.replace(asked, estimate_tokens=3_000)
        pair.admit(too_large, observe=False)
        for lease_id, passed_s in (("fits", 5_760.0), ("waits", 1.0)):
            pair.now_s += passed_s
            pair.admit(msgspec.structs.replace(asked, lease_id=lease_id), observe=False)
            pair.compare()
        assert "denied: budget_reserved" in pair.met
        _, over, _ = pair.book.limits.weigh(asked, pair.now_s, 5.0)
        assert over is not None
        assert over.resets_unix_s == 0


@pytest.mark.parametrize(
    "owed", [{"tokens_per_s": 50.0}, {"baseline": (2,)}, {"kv_bytes": 2_000}], ids=str
)
def test_debt_in_every_unit_grows_alike(redis_process: RedisServer, owed: dict[str, Any]) -> None:
    with redis_process.client() as client:
        pair = Pair(client, Terms(slots=(4,), kv_bytes=(40_000,), largest_tokens=900))
        pair.define(Entitlement(name="a", model="m", created=1, **owed))
        holder = Entitlement(
            name="b", model="m", service_class="guaranteed", baseline=(4,), created=2
        )
        pair.define(holder)
        asked: dict[str, Any] = {"pool": 0, "estimate_tokens": 40, "kv_bytes": 500}
        full = AdmissionRequest(lease_id="l", entitlement="b", **{**asked, "sequences": 4})
        pair.admit(full, observe=False)
        for number in range(3):
            request = AdmissionRequest(lease_id=f"d{number}", entitlement="a", **asked)
            pair.admit(request, observe=False)
            pair.now_s += 2.5
            pair.tick(500)
            pair.compare()
        assert pair.book.accounts["a"].debt > 0


def _asked(limit: Limit) -> tuple[Any, ...]:
    wanted = AdmissionRequest(
        lease_id="",
        entitlement="",
        pool=0,
        estimate_tokens=50,
        money=70,
        most_tokens=400,
        most_money=90,
    )
    return tuple(LimitEncoder().asked((limit,), wanted, 1_700_000_000.25, "limits")[1])


def some_calls(pick: Pick, count: int) -> list[tuple[str, dict[str, Any]]]:
    """Calls that may share a script, some on leases that others of them took."""
    calls: list[tuple[str, dict[str, Any]]] = []
    for number in range(count):
        lease_id = f"lease-{pick(range(number + 1))}"
        request = {
            "entitlement": pick(NAMES),
            "pool": pick((0, 1)),
            "alternates": pick(([], [0], [1])),
            "estimate_tokens": pick((1, 50, 400)),
            "kv_bytes": pick((0, 10, 1000)),
            "sequences": pick((1, 1, 2, 4)),
        }
        asked = pick((None, ("limits", *(_asked(limit) for limit in LIMITS))))
        own = {"lease_id": f"lease-{number}", "owner": "o", "observe": False, "asked": asked}
        own["dry"] = pick((None, None, ("limits",), ("limits", _asked(LIMITS[1]))))
        own["demoted"] = pick((False, False, True))
        admit = {**own, **request}
        settle: dict[str, Any] = {"lease_id": lease_id, "timely": True, "spent": (60, 180)}
        settle["charge"] = pick((False, 0, 60, 900))
        resize = {"lease_id": lease_id, "estimate_tokens": 70, "kv_bytes": 20}
        transfer = {"lease_id": lease_id, "pool": pick((0, 1)), "force": pick((True, False))}
        named = {"admit": admit, "settle": settle, "resize": resize, "transfer": transfer}
        name = pick(("admit", "admit", "settle", "resize", "transfer"))
        calls.append((name, named[name]))
    return calls


def kept(client: Any) -> dict[bytes, Any]:
    """All that a server holds."""
    found: dict[bytes, Any] = {}
    for key in client.scan_iter():
        kind = client.type(key)
        if kind == b"hash":
            found[key] = client.hgetall(key)
        elif kind == b"zset":
            found[key] = client.zrange(key, 0, -1, withscores=True)
        elif kind == b"set":
            found[key] = client.smembers(key)
    return found


@pytest.mark.parametrize("size", [2, 7, 40])
def test_calls_that_share_a_script_do_as_if_each_came_alone(
    redis_process: RedisServer, size: int
) -> None:
    with redis_process.client() as client:
        for seed in range(30):
            found = []
            for together in (1, size):
                pick = random.Random(seed).choice
                pair = Pair(client, some_terms(pick))
                for name in NAMES[:-1]:
                    pair.define(msgspec.structs.replace(some_entitlement(pick), name=name))
                calls = some_calls(pick, 40)
                answers: list[Any] = []
                for start in range(0, len(calls), together):
                    answers += pair.group(calls[start : start + together])
                found.append((answers, kept(client)))
            assert found[0] == found[1]


def some_admit(lease_id: str, **more: Any) -> dict[str, Any]:
    request = {
        "entitlement": "a",
        "pool": 0,
        "alternates": [],
        "estimate_tokens": 1,
        "kv_bytes": 0,
        "sequences": 1,
        "asked": None,
        "dry": None,
        "demoted": False,
    }
    return {"lease_id": lease_id, "owner": "o", "observe": False, **request, **more}


def test_a_call_that_fails_spares_those_that_share_its_script(redis_process: RedisServer) -> None:
    with redis_process.client() as client:
        pair = Pair(client, Terms(slots=(4, 4)))
        pair.define(Entitlement(name="a", model="m"))
        calls = [
            ("admit", some_admit("x", pool="none")),
            ("admit", some_admit("l")),
            ("settle", {"lease_id": "l", "charge": False, "timely": True, "spent": None}),
        ]
        answers = pair.group(calls)
        assert isinstance(answers[0], Exception)
        assert not isinstance(decision(answers[1])[0], Denial)
        assert answers[2] == 1


def test_a_call_that_a_full_server_refuses_is_not_counted(redis_process: RedisServer) -> None:
    with redis_process.client() as client:
        pair = Pair(client, Terms(slots=(4, 4), kv_bytes=(1_000, 1_000)))
        pair.define(Entitlement(name="a", model="m"))
        for lease_id in ("kept", "settled"):
            pair.script("admit", **some_admit(lease_id))
        client.config_set("maxmemory", 1)
        try:
            answers = pair.group(
                [
                    ("admit", some_admit("refused", kv_bytes=5)),
                    ("resize", {"lease_id": "kept", "estimate_tokens": 9, "kv_bytes": 9}),
                    ("settle", {"lease_id": "settled", "charge": 5, "timely": True, "spent": None}),
                ]
            )
        finally:
            client.config_set("maxmemory", 0)
        assert [isinstance(answer, Exception) for answer in answers] == [True, True, False]
        assert "OOM" in str(answers[0])
        seen = token_pool_of(pair.script("view", names=["a"]))
        assert [(pool.inflight, pool.kv_bytes) for pool in seen.pools] == [(1, 0), (0, 0)]
        account = seen.accounts["a"]
        assert (account.total, account.kv_bytes, account.debited) == (1, 0, 2 + 4)
