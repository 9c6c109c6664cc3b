"""`sluice usage`: tables, CSV and JSON, from ledgers and exports, several together."""

import csv
import io
import json
from pathlib import Path

import msgspec
import pytest

from gateway.records.usage import UsageLine
from gateway.usage.ledger import Ledger
from gateway.usage.report import PoolBill
from tests.running import sluice

NOON = 1_700_049_600.0  # 2023-11-15T12:00:00Z


def run(*arguments: object) -> tuple[int, str]:
    done = sluice("usage", *arguments)
    return done.exit_code, done.output


def line(name: str, tenant: str = "acme", **more: object) -> UsageLine:
    fields = {
        "id": name,
        "time_unix_s": NOON,
        "tenant": tenant,
        "entitlement": "chat",
        "key": "web",
        "model": "m",
        "endpoint": "chat",
        "input_tokens": 1000,
        "cached_input_tokens": 400,
        "output_tokens": 30,
        "charge_tokens": 900,
        "source": "engine",
        "status": "ok",
        "cost_nano": 474_000,
        "currency": "EUR",
    }
    return msgspec.convert({**fields, **more}, UsageLine)


def export_of(path: Path, *lines: UsageLine, torn: bytes = b"") -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in lines) + torn)
    return path


def ledger_of(path: Path, *lines: UsageLine, idle_nano: int = 0) -> Path:
    ledger = Ledger(path, keep_days=400, currency="EUR")
    ledger.open()
    bill = sum(one.cost_nano or 0 for one in lines) + idle_nano
    ledger.commit(lines, [PoolBill("m", "p", 1.0, bill)] if idle_nano else (), NOON)
    ledger.close()
    return path


def test_an_export_counts_each_request_once_and_skips_torn_lines(tmp_path: Path) -> None:
    lines = [line("a"), line("b"), line("a"), line("c", "zeta")]
    file = export_of(tmp_path / "u.jsonl", *lines, torn=b'{"id":"d","time_un')
    code, said = run(file, "--by", "tenant", "--json")
    assert code == 0
    rows = json.loads(said)["rows"]
    assert [(row["tenant"], row["requests"]) for row in rows] == [("acme", 2), ("zeta", 1)]


def test_ledger_and_export_of_the_same_requests_say_the_same(tmp_path: Path) -> None:
    lines = [line(str(n), f"t{n % 3}", time_unix_s=NOON + n * 50_000) for n in range(20)]
    file, ledger = export_of(tmp_path / "u", *lines), ledger_of(tmp_path / "l", *lines)
    for by in ("tenant", "day,model", "key,tenant,entitlement", "model"):
        assert run(file, "--by", by, "--json") == run(ledger, "--by", by, "--json")
    span = ("--from", "2023-11-16", "--to", "2023-11-20", "--json")
    assert run(file, *span) == run(ledger, *span)


def test_the_sums_of_several_hosts_are_added(tmp_path: Path) -> None:
    one = ledger_of(tmp_path / "1", line("a"), idle_nano=5_000_000)
    two = export_of(tmp_path / "2", line("b"))
    found = json.loads(run(one, two, "--by", "tenant", "--json")[1])
    assert found["total"]["requests"] == 2
    assert found["total"]["cost_nano"] == 2 * 474_000 + 5_000_000
    assert found["currency"] == "EUR"


def test_the_table_ends_with_what_was_idle_and_the_total(tmp_path: Path) -> None:
    code, said = run(ledger_of(tmp_path / "l", line("a"), idle_nano=5_000_000))
    assert code == 0
    rows = [text.split() for text in said.splitlines()]
    assert rows[0][:3] == ["tenant", "model", "requests"]
    assert rows[1] == ["acme", "m", "1", "1,000", "400", "30", "900", "0.000474"]
    assert rows[2][:2] == ["(idle)", "m"]
    assert (rows[3][0], rows[3][-1]) == ("total", "0.005474")
    assert said.endswith("cost in EUR\n")


def test_csv_has_a_row_for_each_and_exact_costs(tmp_path: Path) -> None:
    file = export_of(tmp_path / "u", line("a"), line("b", "ze,ta"))
    code, said = run(file, "--by", "tenant,day", "--csv")
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(said)))
    assert [row["tenant"] for row in rows] == ["acme", "ze,ta"]
    assert (rows[0]["day"], rows[0]["input_tokens"]) == ("2023-11-15", "1000")
    assert (rows[0]["cost_nano"], rows[0]["cost"]) == ("474000", "0.000474")
    assert rows[0]["currency"] == "EUR"


@pytest.mark.parametrize("section", ["ledger", "usage_export", ""])
def test_without_files_it_reads_those_of_the_configuration(tmp_path: Path, section: str) -> None:
    data = tmp_path / "data"
    file = ledger_of(data, line("a")) if section == "ledger" else export_of(data, line("a"))
    config = tmp_path / "sluice.yaml"
    where = f"{section}: {{path: {file}}}\n" if section else ""
    pool = "{max_model_len: 9, max_num_seqs: 1, workers: ['http://h:1']}"
    config.write_text(f"version: 1\n{where}models: [{{name: m, pools: {{all: {pool}}}}}]\n")
    code, said = run("-c", config, "--json")
    if section:
        assert (code, json.loads(said)["total"]["requests"]) == (0, 1)
    else:
        assert code == 2
        assert "neither `ledger.path` nor `usage_export.path`" in said


def test_what_cannot_be_read_or_asked_is_told(tmp_path: Path) -> None:
    code, said = run(tmp_path / "none.db")
    assert code == 1
    assert "none.db: No such file" in said
    code, said = run(tmp_path / "none.db", "--by", "colour")
    assert code == 2
    assert "give some of day, tenant" in said
