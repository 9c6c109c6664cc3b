"""Workers that an admin adds: what is refused, with the reason."""

import pytest

from gateway.control.surface import NewWorker
from gateway.errors import Conflict
from gateway.fleet.rotation import ADMIN, CONFIGURED
from gateway.settings import parse
from gateway.wiring.workers import Workers
from tests.unit.gateway.fleet.test_rotation import Bench

FILE = """\
version: 1
models:
  - name: m
    pools:
      only: {max_model_len: 8192, max_num_seqs: 4, workers: ["http://10.0.0.1:8000"]}
"""
URL = "http://10.0.0.1:8000"


async def test_an_engine_that_others_name_with_another_model_is_not_added() -> None:
    config = parse(FILE, "sluice.yaml", {})
    bench = Bench()
    await bench.apply(config.models[0].pools["only"].addresses, source=CONFIGURED)
    workers = Workers(config, [bench.served], bench.rotation)
    with pytest.raises(Conflict, match="another key, model or number of ranks"):
        workers.add(NewWorker(model="m", pool="only", url=URL, served_model="other"))
    assert bench.rotation.sources(bench.pool) == {"10.0.0.1:8000": {CONFIGURED}}
    assert workers.add(NewWorker(model="m", pool="only", url=URL)) == "10.0.0.1:8000"
    assert bench.rotation.sources(bench.pool) == {"10.0.0.1:8000": {CONFIGURED, ADMIN}}
    await bench.prober.close()


async def test_the_file_decides_over_an_admin() -> None:
    config = parse(FILE, "sluice.yaml", {})
    bench = Bench()
    workers = Workers(config, [bench.served], bench.rotation)
    workers.add(NewWorker(model="m", pool="only", url=URL, api_key="sk-of-an-admin"))
    await bench.apply(config.models[0].pools["only"].addresses, source=CONFIGURED)
    assert bench.rotation.sources(bench.pool)["10.0.0.1:8000"] == {CONFIGURED}
    await bench.prober.close()
