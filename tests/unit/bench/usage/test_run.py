"""What the bench of usage compares: a round with the ledger enters every request."""

from pathlib import Path

from bench.usage.run import BATCH, KEYS, PRICE, ending
from gateway.metrics import Metrics
from gateway.usage.ledger import Ledger, report
from gateway.usage.report import query_of, total
from gateway.usage.request_log import DecisionRing, Records
from gateway.usage.usage_export import UsageExport


async def test_a_round_with_the_ledger_enters_every_request(tmp_path: Path) -> None:
    metrics, path = Metrics(), tmp_path / "ledger.db"
    books = UsageExport(None, metrics, Ledger(path, keep_days=400, currency="USD"))
    books.open()
    end = ending(metrics, Records(DecisionRing(10), None, books), PRICE)
    for number in range(BATCH):
        end(number)
    await books.close()
    found = report(path, query_of("key", None, None))
    assert (len(found.rows), total(found).requests) == (KEYS, BATCH)
    assert total(found).cost_nano == round(sum(metrics.cost.values.values()))
