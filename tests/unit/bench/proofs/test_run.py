"""The bench of proofs: its mutations are valid files that differ, and lies are counted."""

from pathlib import Path

import orjson
import pytest

from bench.common.raw_client import TimedAnswer, TimedRequest
from bench.proofs.live import Attainment, _attainment
from bench.proofs.run import COMPARED, Result, totals
from bench.proofs.scene import MUTATIONS, written
from gateway.records.proof import Verdict
from gateway.settings import load


def test_every_mutation_is_a_valid_file_and_changes_something(tmp_path: Path) -> None:
    assert {*COMPARED} < {mutation.name for mutation in MUTATIONS}
    file, seen = tmp_path / "sluice.yaml", set()
    for mutation in MUTATIONS:
        config = mutation.config()
        urls = {
            name: [f"http://{name}-{place}.invalid" for place in range(pool["workers"])]
            for name, pool in config["model"]["pools"].items()
        }
        file.write_text(written(config, urls), "utf-8")
        load(file)
        seen.add((file.read_text("utf-8"), mutation.rate))
    assert len(seen) == len(MUTATIONS) >= 40


@pytest.mark.parametrize(
    ("service_class", "expected"),
    [("elastic", {"priority": 1, "late": 1, "concurrency": 1}), ("spot", {"concurrency": 1})],
)
def test_backfill_is_promised_no_capacity(service_class: str, expected: dict[str, int]) -> None:
    ask = TimedRequest(
        at_s=0.0, client="chat", body=orjson.dumps({"mock_output_tokens": 3, "stream": True})
    )
    served = TimedAnswer(ask=ask, status=200, whole=True, first_s=0.5, ended_s=1.0)
    late = TimedAnswer(ask=ask, status=200, whole=True, first_s=2.5, ended_s=3.0)
    refused = [
        TimedAnswer(ask=ask, status=429, head=b"x-sluice-reason: %s\r\n" % reason)
        for reason in (b"priority", b"concurrency")
    ]
    answers = [served, *refused] + [late] * (service_class == "elastic")
    terms = {"service_class": service_class, "slo_target_ms": 1000}
    attainment = _attainment(terms, answers)
    assert attainment.lost == expected
    assert attainment.requests == 1 + len(expected)


def test_a_verdict_of_one_entitlement_that_is_a_lie_counts() -> None:
    def result(name: str, verdict: Verdict, losses: int) -> Result:
        live = Attainment(100, {"late": losses})
        return Result(name=name, verdict=verdict, live=live, finding=None)

    judged = [
        [result("cut", "breaks", 30), result("chat", "breaks", 30), result("docs", "holds", 2)],
        [result("same", "breaks", 0), result("chat", "breaks", 0)],
        [result("more", "cannot tell", 5), result("chat", "holds", 1)],
    ]
    rows = {row.metric: row for row in totals(judged)}
    assert rows["mutations"].note == "1 of them harmless"
    assert rows["false holds, entitlements included"].note == "cut: docs"
    assert rows["false holds, entitlements included"].holds is False
    assert rows["false breaks"].measured == 1
    assert rows["cannot tell, share"].measured == pytest.approx(1 / 3)
