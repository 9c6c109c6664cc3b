"""`python -m bench.common.pacer RATE SECONDS`: announce Poisson arrivals from a separate process.

Writes the time of each arrival (monotonic seconds, a double) to stdout when it is due. The
process never waits for its reader: an open loop.
"""

import asyncio
import struct
import sys
import time
from collections.abc import AsyncIterator
from random import Random

_BATCH = 64
_DUE = struct.Struct("<d")


async def arrivals(rate: float, seconds: float) -> AsyncIterator[float]:
    """The time of each arrival, when a pacer's process tells it."""
    pacer = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.common.pacer", str(rate), str(seconds)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert pacer.stdout is not None
    rest = b""
    while data := await pacer.stdout.read(4096):
        data = rest + data
        whole = len(data) // _DUE.size * _DUE.size
        rest = data[whole:]
        for (due_s,) in _DUE.iter_unpack(data[:whole]):
            yield due_s
    await pacer.wait()


def main(rate: float, seconds: float) -> None:
    """Write, then end."""
    draw = Random(f"pacer/{rate:.0f}")
    out = sys.stdout.buffer
    due_s = time.monotonic() + 0.2
    end_s = due_s + seconds
    while due_s < end_s:
        wait_s = due_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        now_s = time.monotonic()
        count = 0
        while due_s <= now_s and count < _BATCH:
            due_s += draw.expovariate(rate)
            count += 1
        out.write(_DUE.pack(time.monotonic()) * count)
        out.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
