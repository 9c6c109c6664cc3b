"""`python -m bench batches prefixes`: what the order of items by their prefixes is worth.

A batch whose items share some long prefixes, in random order in its file, through a gateway before
mock engines whose prefix caches hold a part of them or all. Asked three times: as it is, which the
gateway puts in order; with a long member at the beginning of all bodies that is the same, so that
the gateway leaves them as they are; and so, but with the items of a prefix together in the file.
"""

import json
import random
import tempfile
import time
from pathlib import Path
from typing import Final

from bench.batches.live import ask, batch_fleet, submit
from bench.common.fleet import MODEL
from bench.common.raw_client import text
from bench.common.report import Report, Row, scaled, tracked

ITEMS: Final = scaled(3_200, 200)
PREFIXES: Final = 32
CACHES: Final = {"an eighth of the prefixes": 8, "half of them": 2, "all": 1}
"""What an engine keeps beside what it runs, as a divisor."""
ORDERS: Final = ("none", "the gateway's", "in the file")
LENGTHS: Final = (500, 2_000)
"""Tokens of a prefix."""
_ALIKE: Final = "x" * 4096
"""At the beginning of bodies, it has the gateway leave them in the order of their file."""
SPEED: Final = 4
_OWN_TOKENS, _ANSWER_TOKENS = 50, 32


def run() -> Report:
    """Cached tokens and time without the order, with it, and of a file that is in order."""
    rows = []
    cases = [(tokens, cache) for tokens in LENGTHS for cache in CACHES]
    for tokens, cache in tracked(cases, "caches"):
        held = PREFIXES * tokens // CACHES[cache]
        for order in ORDERS:
            cached, took_s = _batch(tokens, held, order)
            where = f"{PREFIXES} prefixes of {tokens} tokens, caches of {cache}, {order}"
            rows.append(Row(f"{where}: input cached", round(cached, 3), f"{took_s:.1f} s"))
    return Report(name="batches prefixes", rows=rows)


def _batch(prefix_tokens: int, cache_tokens: int, order: str) -> tuple[float, float]:
    """Of one batch the share of input tokens that were cached, and its seconds."""
    mock = (
        *("--profile", "demo-replica", "--speed", str(SPEED)),
        *("--prefix-cache-tokens", str(cache_tokens)),
    )
    with tempfile.TemporaryDirectory() as name, batch_fleet(Path(name), mock=mock) as fleet:
        file = Path(name) / "items.jsonl"
        file.write_bytes(_file(prefix_tokens, order))
        begin_s = time.monotonic()
        made, _, _ = submit(fleet, file, "24h")
        while made["status"] not in ("completed", "failed", "expired"):
            time.sleep(0.1)
            made = ask(fleet, f"/v1/batches/{made['id']}").json()
        took_s = time.monotonic() - begin_s
    usage = made["usage"]
    return usage["input_tokens_details"]["cached_tokens"] / usage["input_tokens"], took_s


def _file(prefix_tokens: int, order: str) -> bytes:
    """An input file of which the gateway makes one of ORDERS."""
    draw = random.Random("batches/prefixes")
    lines = []
    prefixes = [draw.randrange(PREFIXES) for _ in range(ITEMS)]
    if order == "in the file":
        prefixes.sort()
    for number, prefix in enumerate(prefixes):
        body = {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": text(f"prefix {prefix}", prefix_tokens)},
                {"role": "user", "content": text(f"item {number}", _OWN_TOKENS)},
            ],
            "max_tokens": _ANSWER_TOKENS,
            "mock_output_tokens": _ANSWER_TOKENS,
        }
        if order != "the gateway's":
            body = {"user": _ALIKE, **body}
        line = {"custom_id": f"i{number}", "method": "POST", "url": "/v1/chat/completions"}
        lines.append(json.dumps({**line, "body": body}))
    return "\n".join(lines).encode()
