"""Entitlements as written and as admission knows them: one conversion, there and back."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.entitlement_terms import (
    GIB,
    BadTerms,
    ModelShape,
    check_fit,
    fields_from,
    terms_from,
)
from gateway.records.entitlement import CLASSES, Entitlement

SHAPE = ModelShape(name="m", pools=("short", "long"), slots=(24, 8))


def written(**fields: Any) -> dict[str, Any]:
    return {"name": "e", "tenant": "t", "model": "m", **fields}


def terms(**fields: Any) -> Entitlement:
    return terms_from(written(**fields), SHAPE, 3)


def test_every_field_arrives() -> None:
    assert terms(
        service_class="dedicated",
        slo_target_ms=250.5,
        tokens_per_second=10,
        max_tokens_per_second=20.5,
        kv_cache_gib=1.5,
        max_kv_cache_gib=3,
        concurrency={"long": 4},
        max_concurrency=9,
        mode="observe",
        compression="refuse",
        trusted_usage=True,
        expires_at="2030-01-02T03:04:05Z",
    ) == Entitlement(
        name="e",
        tenant="t",
        model="m",
        service_class="dedicated",
        slo_ms=251,
        tokens_per_s=10.0,
        tokens_per_s_limit=20.5,
        kv_bytes=3 * GIB // 2,
        kv_bytes_limit=3 * GIB,
        baseline=(0, 4),
        limit=9,
        observe=True,
        compress=False,
        trusted_usage=True,
        expires_unix_s=datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp(),
        created=3,
    )


@pytest.mark.parametrize(
    ("total", "by_pool"), [(32, (24, 8)), (2, (1, 1)), (1, (1, 0)), (0, (0, 0))]
)
def test_one_number_is_split_over_the_pools_by_their_slots(
    total: int, by_pool: tuple[int, int]
) -> None:
    assert terms(concurrency=total).baseline == by_pool


def test_a_guaranteed_entitlement_s_limit_is_its_baseline() -> None:
    assert terms(service_class="guaranteed", concurrency=5).limit == 5
    assert terms(service_class="guaranteed", concurrency=5, max_concurrency=5).limit == 5
    assert terms(service_class="elastic", concurrency=5).limit == 0


@pytest.mark.parametrize(
    "value",
    [
        *("2030-01-01T00:00:00Z", "2030-01-01T00:00:00", "2030-01-01", "2030-01-01T02:00:00+02:00"),
        *(datetime(2030, 1, 1), datetime(2030, 1, 1, tzinfo=UTC)),  # noqa: DTZ001
    ],
)
def test_a_moment_without_an_offset_is_utc(value: object) -> None:
    assert terms(expires_at=value).expires_unix_s == 1893456000.0


def amounts(most: float = 1e9) -> st.SearchStrategy[float | None]:
    return st.none() | st.floats(1e-3, most)


@given(
    service_class=st.sampled_from(CLASSES),
    slo=amounts(1e6),
    rate=amounts(),
    more=st.floats(0, 1e6),
    kv=amounts(1e5),
    concurrency=st.integers(1, 1000)
    | st.fixed_dictionaries({"short": st.integers(1, 99), "long": st.integers(0, 99)}),
    limit=st.none() | st.integers(1000, 2000),
    observe=st.booleans(),
    expires=st.none() | st.datetimes(datetime(2000, 1, 1), datetime(2200, 1, 1)),  # noqa: DTZ001
)
def test_what_is_shown_reads_back_as_the_same_terms(
    service_class: str,
    slo: float | None,
    rate: float | None,
    more: float,
    kv: float | None,
    concurrency: int | Mapping[str, int],
    limit: int | None,
    expires: datetime | None,
    *,
    observe: bool,
) -> None:
    guaranteed = service_class == "guaranteed"
    borrows = service_class in {"dedicated", "elastic", "spot"}
    found = terms(
        service_class=service_class,
        slo_target_ms=slo,
        tokens_per_second=rate,
        max_tokens_per_second=rate + more if rate and borrows else None,
        kv_cache_gib=kv,
        max_kv_cache_gib=None if kv is None else kv + more,
        concurrency=concurrency,
        max_concurrency=None if guaranteed else limit,
        mode="observe" if observe else "enforce",
        expires_at=expires,
    )
    shown = fields_from(found, SHAPE)
    assert terms_from(shown, SHAPE, found.created) == found


def reserving(name: str, **fields: Any) -> Entitlement:
    return terms(name=name, service_class="guaranteed", **fields)


MOST = ModelShape(
    name="m",
    pools=("short", "long"),
    slots=(24, 8),
    max_slots=(48, 8),
    max_kv_bytes=10 * GIB,
    max_tokens_per_s=100.0,
)


def test_baselines_fit_up_to_the_most_replicas() -> None:
    others = [reserving("x", concurrency={"short": 40}), terms(name="y", concurrency={"short": 48})]
    check_fit(reserving("e", concurrency={"short": 8}), MOST, others)
    with pytest.raises(BadTerms, match="lower it to 8") as caught:
        check_fit(reserving("e", concurrency={"short": 9}), MOST, others)
    assert (caught.value.field, caught.value.part) == ("concurrency", "short")
    check_fit(terms(concurrency={"short": 480}), MOST, others)


def test_an_entitlement_s_own_former_terms_take_no_room() -> None:
    check_fit(reserving("x", concurrency={"short": 48}), MOST, [reserving("x", concurrency=40)])
