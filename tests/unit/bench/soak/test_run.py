"""The arithmetic of the soak, and the books that it keeps; no processes."""

from pathlib import Path

import msgspec
import pytest

from bench.common.gateway_books import Line, LogReader
from bench.common.report import Row
from bench.soak.gateway import GatewaySample
from bench.soak.run import LogTotals, book_rows, growth, refusal_gaps

MINUTE_S = 60.0


def sample(at_s: float, rss_kib: int) -> GatewaySample:
    return GatewaySample(at_s=at_s, rss_kib=rss_kib, fds=0, cpu_s=0, leases=0, waiting=0)


def half_an_hour(kib_per_s: float) -> list[GatewaySample]:
    """100 MiB that grow evenly, and a warm-up that does not count."""
    return [
        sample(at_s, int(102_400 + kib_per_s * at_s) - (50_000 if at_s < 240 else 0))
        for at_s in range(0, 1800, 5)
    ]


def test_growth_compares_the_last_minutes_with_those_after_warm_up() -> None:
    duration_s = 30 * MINUTE_S
    assert growth(half_an_hour(0), duration_s) == 0
    grown = growth(half_an_hour(3.0), duration_s)
    assert grown == pytest.approx((28.5 - 6.5) * 60 * 3 / (102_400 + 6.5 * 180), rel=0.01)


def line(outcome: str, status: int = 200, **more: object) -> Line:
    return msgspec.convert({"outcome": outcome, "status": status, **more}, Line)


def test_errors_are_judged_by_who_failed() -> None:
    totals = LogTotals(["bad"])
    bad = [{"worker": "bad", "result": "reset"}]
    good = [{"worker": "good", "result": "reset"}]
    totals.add([line("upstream_error", 502, attempts=bad), line("ok"), line("refused", 429)])
    assert (totals.caused, totals.uncaused_count, totals.statuses[429]) == (1, 0, 1)
    totals.add([line("upstream_error", 200, attempts=good), line("internal_error", 500)])
    assert (totals.caused, totals.uncaused_count, totals.count) == (1, 2, 5)


def rows_of(logged: list[Line], ended: dict[tuple[str, str], int]) -> dict[str, Row]:
    totals = LogTotals(["bad"])
    totals.add(logged)
    counted = dict(totals.outcomes)
    return {row.metric: row for row in book_rows(totals, counted, ended, 1, 0)}


def test_books_are_exact_or_do_not_hold() -> None:
    ended = {("chat", "ok"): 1, ("leaver", "left"): 1, ("mistake", "http 400"): 1}
    logged = [line("ok"), line("ok"), line("disconnected"), line("refused", 400)]
    assert all(row.holds for row in rows_of(logged, ended).values())
    missing = rows_of(logged[1:], ended)
    assert not missing["sent - logged"].holds
    assert not missing["served, clients - log"].holds


def test_whoever_left_may_have_been_refused_but_nobody_else() -> None:
    assert refusal_gaps({"http 429": 3, "left": 2}, {429: 5}) == (0, 2)
    assert refusal_gaps({"http 429": 3, "left": 1}, {429: 5}) == (1, 2)
    assert refusal_gaps({"http 429": 3, "left": 9}, {429: 2}) == (1, 0)
    assert refusal_gaps({"http 404": 1, "ok": 4}, {404: 1}) == (0, 0)


def test_a_log_is_read_once_and_only_in_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    note = b'{"event":"entitlement","status":"active"}\n'
    file.write_bytes(b'{"outcome":"ok","status":200,"request_id":"a-b-1"}\n' + note + b'{"outc')
    reader = LogReader(file, forget=True)
    assert [(found.outcome, found.request_id) for found in reader.new()] == [("ok", "a-b-1")]
    assert reader.new() == []
    assert file.read_bytes()[-7:] == b"\n" + b'{"outc', "the end is left for who appends"
    with file.open("ab") as appended:
        appended.write(b'ome":"refused","status":429}\n')
    assert [found.status for found in reader.new()] == [429]
