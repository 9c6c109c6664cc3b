"""A pool's phases come, change and go under streams: none is cut or refused, decode stays."""

import asyncio
import copy
from pathlib import Path

from bench.changing_fleet.fleet import Engines, Streams, gateway
from tests.asking import eventually
from tests.integration.test_reload_models import Edited, client_of, engine, further
from tests.integration.test_reload_models import until as until_told


async def until(
    edited: Edited, *, decode: set[str], prefill: frozenset[str] | set[str] = frozenset()
) -> None:
    """Wait until exactly these workers are there, all in the rotation."""
    expected = {"all": decode} | ({"all/prefill": prefill} if prefill else {})
    async with asyncio.timeout(60):
        while True:
            (shown,) = (await edited.client.get("/admin/pools")).json()
            rows = {pool["name"]: pool["workers"] for pool in shown["pools"]}
            ids = {name: {worker["id"] for worker in workers} for name, workers in rows.items()}
            if ids == expected and all(w["up"] for workers in rows.values() for w in workers):
                return
            await asyncio.sleep(0.05)


async def test_phases_come_change_and_go_under_streams(tmp_path: Path) -> None:
    engines = Engines()
    one, two, three, four = (f"{engines.address(n)}:{engines.port}" for n in range(1, 5))
    async with (
        engines.listening(4),
        gateway(tmp_path, [engine(engines, 1)]) as url,
        client_of(url) as client,
        Streams(url, clients=6) as streams,
    ):
        edited = Edited(tmp_path / "sluice.yaml", client)
        alone = edited.model["pools"]["all"]
        phases = {
            "max_model_len": 8192,
            "prefill": {"max_num_seqs": 4, "workers": [engine(engines, 2)]},
            "decode": {"max_num_seqs": 8, "workers": [engine(engines, 1)]},
            "transfer": {"kind": "sglang"},
        }
        edited.model["pools"]["all"] = copy.deepcopy(phases)
        assert await edited.reload() == []
        await until(edited, decode={one}, prefill={two})
        (shown,) = (await client.get("/admin/pools")).json()
        rows = {pool["name"]: pool for pool in shown["pools"]}
        assert {name: row["phase"] for name, row in rows.items()} == {
            "all": "decode",
            "all/prefill": "prefill",
        }
        assert [row["max_model_len"] for row in rows.values()] == [8192, 8192]
        # The engines that decode are those from before: nothing of them began anew.
        assert rows["all"]["workers"][0]["up"]
        await further(streams, 20)

        body = {"model": "m", "pool": "all/prefill", "url": f"http://{three}"}
        assert (await client.post("/admin/workers", json=body)).status_code == 201
        await until(edited, decode={one}, prefill={two, three})
        assert (await client.post(f"/admin/workers/{two}/drain")).status_code == 200
        await further(streams, 20)
        assert (await client.delete(f"/admin/workers/{two}")).status_code == 200
        await until(edited, decode={one}, prefill={three})

        named = tmp_path / "prefill.yaml"
        named.write_text(f"[http://{three}]")
        source = {"discover": f"file://{named}", "model": "m"}
        edited.model["pools"]["all"]["prefill"]["workers"] = [source]
        edited.model["pools"]["all"]["decode"]["workers"].append(engine(engines, 4))
        assert await edited.reload() == []
        await until(edited, decode={one, four}, prefill={three})
        await eventually(lambda: engines.served[engines.address(4)])
        assert 'sluice_worker_up{model="m",pool="all/prefill"' in await edited.metrics()

        edited.model["pools"]["all"] = alone
        assert await edited.reload() == []
        assert await edited.pools() == {"m": ["all"]}
        await until(edited, decode={one})
        await until_told(edited, 'pool="all/prefill"', there=False)
        await further(streams, 20)
    assert streams.failures == []
