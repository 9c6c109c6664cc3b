"""`python -m bench.controller.cluster POOLS ENTITLEMENTS`: an emulated cluster that holds them.

It prints the URL of its API server, and ends with its standard input.
"""

import asyncio
import sys

from tests.controlling import SPACE, entitlement, secret, token_pool
from tests.kube.cluster import emulated_cluster


async def _serve(pools: int, entitlements: int) -> None:
    objects = [token_pool(f"pool-{i}", concurrency=1_000_000) for i in range(pools)]
    for i in range(entitlements):
        name = f"entitlement-{i}"
        objects.append(secret(name, f"sk-{i}"))
        objects.append(entitlement(name, f"pool-{i % pools}", 1))
    async with emulated_cluster(controllers=False) as cluster:
        cluster.apply(*objects, namespace=SPACE)
        cluster.compact()  # who comes later lists them
        sys.stdout.write(f"{cluster.url}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(*map(int, sys.argv[1:])))
