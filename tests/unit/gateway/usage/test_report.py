"""Reports: what may be asked, sums that lose nothing, and several sources as one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.records.usage import UsageLine, UsageReport, UsageSums
from gateway.usage.report import (
    COLUMNS,
    IDLE,
    day_of,
    lines_of,
    merged,
    query_of,
    summed,
    total,
)
from tests.builders import usage_line

NOON = 1_700_049_600.0  # 2023-11-15T12:00:00Z
names = st.sampled_from(["a", "b", "c"])


lines = st.lists(
    st.builds(
        lambda tenant, key, model, day, tokens: usage_line(
            tenant=tenant,
            key=key,
            model=model,
            time_unix_s=NOON + 86_400 * day,
            input_tokens=tokens,
            cost_nano=tokens * 7,
        ),
        names,
        names,
        names,
        st.integers(0, 3),
        st.integers(0, 10**6),
    ),
    max_size=40,
)


@given(lines, st.lists(st.sampled_from(COLUMNS), min_size=1, unique=True))
def test_rows_add_up_to_all_requests_whatever_tells_them_apart(
    many: list[UsageLine], by: list[str]
) -> None:
    expected = UsageSums(
        len(many),
        sum(one.input_tokens for one in many),
        4 * len(many),
        3 * len(many),
        11 * len(many),
        sum(one.cost_nano or 0 for one in many),
    )
    report = UsageReport(query=query_of(",".join(by), None, None), rows=summed(many, by))
    assert total(report) == expected


@given(lines, lines)
def test_two_hosts_together_are_one(here: list[UsageLine], there: list[UsageLine]) -> None:
    query = query_of("tenant,model", None, None)
    parts = [
        UsageReport(query=query, rows=summed(half, query.by), idle_nano={(IDLE, "m"): 5})
        for half in (here, there)
    ]
    both = merged(query, parts)
    assert both.rows == summed([*here, *there], query.by)
    assert both.idle_nano == {(IDLE, "m"): 10}


def test_days_are_those_of_utc() -> None:
    assert day_of(NOON) == "2023-11-15"
    assert day_of(NOON + 43_199.9) == "2023-11-15"
    assert day_of(NOON + 43_200) == "2023-11-16"


@pytest.mark.parametrize(
    ("by", "first", "last", "said"),
    [
        ("", None, None, "give some of day, tenant"),
        ("tenant,colour", None, None, "give some of day, tenant"),
        ("cost_nano; DROP TABLE usage", None, None, "give some of day, tenant"),
        ("day", "yesterday", None, "write it as 2026-12-31"),
        ("day", None, "2026-02-30", "write it as 2026-12-31"),
        ("day", "2026-12-31", "2026-12-01", "is after the last"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_what_can(
    by: str, first: str | None, last: str | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        query_of(by, first, last)


def test_rows_are_shown_in_order_and_then_what_was_idle() -> None:
    query = query_of("tenant", None, None)
    rows = summed([usage_line(tenant="b"), usage_line(tenant="a")], query.by)
    shown = lines_of(UsageReport(query=query, rows=rows, idle_nano={(IDLE,): 1_500_000_000}))
    assert [row["tenant"] for row in shown] == ["a", "b", IDLE]
    assert shown[0]["cost"] == "0.0000005"
    assert (shown[2]["cost"], shown[2]["requests"]) == ("1.50", 0)
