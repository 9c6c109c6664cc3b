"""A verdict was right, wrong, or nobody can tell: by requests that ended since."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.records.decision import DECISION_SCHEMA
from gateway.records.proof import Claim, Interval, Proof, ProofEvent, Verdict
from sluice.prove.review import Compared, review, review_log
from tests.builders import ITEM, decision


def proved(verdict: Verdict, kept: float, **more: Any) -> Proof:
    bounds = Interval(value=kept, low=max(0.0, kept - 0.003), high=min(1.0, kept + 0.003))
    finding = Claim(
        kind="entitlement", name="web", model="m", verdict=verdict, reason="", kept=bounds, **more
    )
    return Proof(id="0123456789ab", config_sha256="ab" * 32, verdict=verdict, findings=(finding,))


def compared(proof: Proof, kept: int, lost: int, limited: int = 0) -> Compared:
    """After 100 s with these requests."""
    counts = {"kept": kept, "lost": lost, "limited": limited}
    (found,) = review(proof, {("entitlement", None, "web"): counts}, 0.0, 100.0).compared
    return found


@pytest.mark.parametrize(
    ("verdict", "kept", "counts", "result", "words"),
    [
        ("holds", 0.996, (1000, 3), "agreed", "as proved"),
        ("breaks", 0.9, (900, 100), "agreed", "as proved"),
        ("breaks", 0.9, (600, 400), "agreed", "worse than proved"),
        ("holds", 0.996, (900, 100), "wrong", "it breaks"),
        ("breaks", 0.9, (1000, 0), "wrong", "it holds"),
        ("holds", 0.996, (200, 0), "cannot tell", "too few"),
        ("holds", 0.996, (0, 0), "cannot tell", "no request since"),
        ("cannot tell", 0.99, (900, 100), "not proved", "now it breaks"),
        ("breaks", 1.0, (1000, 0), "cannot tell", "for want of slots"),
    ],
)
def test_a_verdict_beside_reality(
    verdict: Verdict, kept: float, counts: tuple[int, int], result: str, words: str
) -> None:
    found = compared(proved(verdict, kept, requests_per_s=10.0), *counts)
    assert found.result == result
    assert words in found.words


def test_demand_that_was_not_proved_is_no_fault_of_the_verdict() -> None:
    more = compared(proved("holds", 0.996, requests_per_s=5.0), 900, 100)
    assert more.result == "cannot tell"
    assert "2 times the demand: it breaks at more demand" in more.words
    less = compared(proved("breaks", 0.9, requests_per_s=20.0), 1000, 0)
    assert "0.5 times the demand: it holds at less demand" in less.words
    assert compared(proved("holds", 0.996, requests_per_s=20.0), 1000, 0).result == "agreed"


def test_own_limits_are_excused_as_far_as_they_were_when_it_was_proved() -> None:
    assert compared(proved("holds", 0.996, excused=0.2), 800, 0, 200).result == "agreed"
    assert compared(proved("holds", 0.996, excused=0.1), 800, 0, 200).result == "wrong"


def test_a_log_counts_retries_once_and_ends_with_the_proof(tmp_path: Path) -> None:
    proof, log = proved("breaks", 0.5, requests_per_s=0.2), tmp_path / "requests.jsonl"

    def attached(at_s: float, of: Proof | None, file: str = proof.config_sha256) -> ProofEvent:
        return ProofEvent(schema=DECISION_SCHEMA, unix_s=at_s, config_sha256=file, proof=of)

    def asked(at_s: float, **more: Any) -> Any:
        return decision(entitlement="web", model="m", time_unix_s=at_s, **more)

    refused = {"outcome": "refused", "status": 429, "reason": "priority", "retry_after_s": 2.0}
    lines = [
        asked(9.0),
        attached(10.0, proof),
        attached(10.5, None),  # by a replica that follows later, of the file before
        asked(11.0, body_digest=7, **refused),
        asked(13.0, body_digest=7, **refused),
        asked(17.0, body_digest=7),  # the same request
        asked(18.0, body_digest=7),  # after an answer: another one
        asked(19.0),
        asked(19.5, batch=ITEM, **refused),
        attached(20.0, None, "cd" * 32),
        asked(21.0),
    ]
    log.write_bytes(b"\n".join(map(msgspec.json.encode, lines)) + b'\n{"schema"')
    found = review_log(proof.id, log)
    assert (found.since_unix_s, found.until_unix_s) == (10.0, 19.0)
    (web,) = found.compared
    assert web.requests == 3
    assert web.measured is not None
    assert web.measured.value == pytest.approx(2 / 3)
