"""A short `bench attacks`: nothing that a client sends breaks, leaks or ends the gateway."""

import shutil

import pytest

from bench.attacks.run import rows

CASES = 3000


@pytest.mark.skipif(shutil.which("cc") is None, reason="the engines are built by a C compiler")
def test_hostile_clients_find_no_fault() -> None:
    found = {row.metric: row for row in rows(cases=CASES, seed=3)}
    timed = found.pop("/health, slowest answer, s")
    assert timed.measured is not None
    assert {name: row.note for name, row in found.items() if row.holds is False} == {}
