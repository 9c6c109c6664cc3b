"""The pool's own bookkeeping: reservations of dedicated baselines, the heap, the journal."""

import msgspec
import pytest

from gateway.policy.admission import admission
from gateway.policy.token_pool.counters import Journal
from gateway.policy.token_pool.terms import Terms
from gateway.policy.token_pool.token_pool import TokenPool
from tests.token_pools import NOW_S, entitled, granted, pool


def changed(book: TokenPool, **terms: object) -> None:
    book.change(msgspec.structs.replace(book.terms, **terms))


def test_idle_dedicated_baseline_is_what_is_not_in_use() -> None:
    book = pool(entitled(service_class="dedicated", baseline=3), slots=(8,))
    assert book.pools[0].idle_dedicated == 3
    granted(book, sequences=2)
    assert book.pools[0].idle_dedicated == 1
    granted(book, "b", sequences=2)
    assert book.pools[0].idle_dedicated == 0
    for lease_id in "ab":
        admission.settle(book, lease_id, 1, NOW_S)
    assert book.pools[0].idle_dedicated == 3


def test_only_bound_dedicated_entitlements_reserve() -> None:
    book = pool(
        entitled("x", "dedicated", baseline=1),
        entitled("y", "dedicated", baseline=2),
        entitled("z", "dedicated", baseline=4),
        slots=(8,),
    )
    for bound_until, reserved in ((1, 1), (2, 3), (0, 0), (1 << 53, 7), (2, 3)):
        changed(book, bound_until=(bound_until,))
        assert book.pools[0].idle_dedicated == reserved


def test_changing_class_or_suspending_gives_the_reservation_up() -> None:
    terms = entitled("x", "dedicated", baseline=2, created=1)
    book = pool(terms)
    book.define(msgspec.structs.replace(terms, suspended=True))
    assert book.pools[0].idle_dedicated == 0
    book.define(terms)
    assert book.pools[0].idle_dedicated == 2
    book.define(msgspec.structs.replace(terms, service_class="elastic"))
    assert book.pools[0].idle_dedicated == 0
    assert book.dedicated == []


def test_leaving_the_elastic_class_ends_debt() -> None:
    book = pool(entitled())
    book.accounts["e"].debt = 0.5
    book.define(entitled(service_class="spot"))
    assert book.accounts["e"].debt == 0


def test_an_entitlement_with_requests_in_flight_cannot_be_removed() -> None:
    book = pool(entitled())
    granted(book)
    with pytest.raises(ValueError, match="e has 1 sequences in flight"):
        book.remove("e")
    admission.settle(book, "a", 1, NOW_S)
    book.remove("e")
    book.remove("e")
    assert book.accounts == {}


def test_new_terms_are_weighed_at_once() -> None:
    book = pool(entitled(slo_ms=1000), mean_slo_ms=1000.0)
    before = admission.weight_now(book, book.accounts["e"])
    changed(book, mean_slo_ms=4000.0)
    assert admission.weight_now(book, book.accounts["e"]) > before
    book.define(entitled(slo_ms=100))
    assert admission.weight_now(book, book.accounts["e"]) == pytest.approx(100 / 1.05)


def test_the_surplus_follows_the_capacity_before_the_next_tick() -> None:
    book = pool(tokens_per_s=100.0)
    book.surplus_per_s = 30.0
    for tokens_per_s, left in ((150.0, 80.0), (0.0, 0.0), (100.0, 100.0)):
        changed(book, tokens_per_s=tokens_per_s)
        assert book.surplus_per_s == left


def test_weights_hold_the_leases_in_force_and_no_others() -> None:
    book = pool(entitled(), slots=(4, 4))
    granted(book, "stays")
    for number in range(1000):
        granted(book, f"{number}")
        admission.settle(book, f"{number}", 1, NOW_S)
    assert list(book.pools[0].weights) == [book.leases["stays"].weight]
    assert admission.least_weight(book, 0) == book.leases["stays"].weight


def test_the_journal_names_what_changed() -> None:
    book = pool(entitled(), entitled("f"), slots=(4, 4))
    book.journal = Journal()
    granted(book)
    assert (book.journal.accounts, book.journal.leases) == ({"e"}, {"a"})
    for change in (
        lambda: admission.renew(book, "a", NOW_S),
        lambda: admission.resize(book, "a", 7, 0, NOW_S),
        lambda: admission.transfer(book, "a", 1, NOW_S, force=True),
        lambda: admission.settle(book, "a", 1, NOW_S),
    ):
        book.journal = Journal()
        change()
        assert book.journal.leases == {"a"}
    book.journal = Journal()
    book.remove("f")
    assert book.journal.accounts == {"f"}


def test_kv_that_is_not_stated_is_not_enforced() -> None:
    terms = Terms(slots=(1, 1), kv_bytes=(5,))
    assert (terms.kv_of(0), terms.kv_of(1)) == (5, 0)
