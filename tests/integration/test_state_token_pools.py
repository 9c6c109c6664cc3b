"""A gateway's process that is killed while it holds leases, and the one that comes after it."""

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

from gateway.admission import admission
from gateway.admission.token_pool import LEASE_TTL_S
from gateway.store.sqlite_leases import SqliteLeases
from tests.token_pools import entitled, pool

ROOT = Path(__file__).parents[2]
HOLDER = """
import asyncio, pathlib, sys, time
from gateway.store.sqlite_leases import SqliteLeases
from gateway.admission import admission
from tests.token_pools import entitled, granted, pool

async def main():
    book = pool(entitled(tokens_per_s=100.0, baseline=8), slots=(8,))
    kept = SqliteLeases(pathlib.Path(sys.argv[1]), {"m": book}, book.limits)
    await kept.start()
    for number in range(5):
        granted(book, f"l{number}", at=time.time(), kv_bytes=10)
    admission.settle(book, "l0", 30, time.time())
    await asyncio.sleep(1.5)
    print("saved", flush=True)
    granted(book, "lost", at=time.time())
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_killed_process_s_leases_return_within_their_time(tmp_path: Path) -> None:
    path = tmp_path / "sluice.db"
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, str(path), cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        async with asyncio.timeout(20):
            assert await holder.stdout.readline() == b"saved\n"
    finally:
        holder.send_signal(signal.SIGKILL)
        await holder.wait()

    now_s = time.time()
    token_pool = pool(entitled(tokens_per_s=100.0, baseline=8), slots=(8,))
    kept = SqliteLeases(path, {"m": token_pool}, token_pool.limits)
    await kept.start()
    account = token_pool.accounts["e"]
    assert set(token_pool.leases) - {"lost"} == {"l1", "l2", "l3", "l4"}
    assert token_pool.pools[0].inflight == account.total == len(token_pool.leases)
    assert token_pool.pools[0].kv_bytes == 40
    assert account.used == 30
    assert account.debited - account.refunded == 30 + 100 * len(token_pool.leases)

    admission.reap(token_pool, now_s + LEASE_TTL_S)
    assert (token_pool.pools[0].inflight, account.total, account.kv_bytes) == (0, 0, 0)
    assert account.debited - account.refunded == account.used
    assert account.used in (430, 530)
    await kept.close()
