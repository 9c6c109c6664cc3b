"""`python -m bench batches prefixes`: what the order of items by their prefixes is worth.

A batch whose items share some long prefixes, in random order in its file, through a gateway before
mock engines whose prefix caches hold a part of them or all. Asked twice: as it is, and with a
random member at the beginning of each body, behind which the gateway finds no common prefix, while
the prompts are the same.
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

ITEMS: Final = scaled(1_600, 200)
PREFIXES: Final = 32
CACHES: Final = {"an eighth of the prefixes": 8, "half of them": 2, "all": 1}
"""What an engine keeps beside what it runs, as a divisor."""
LENGTHS: Final = (500, 2_000)
"""Tokens of a prefix."""
ENGINES, SLOTS, SPEED = 2, 8, 8
_OWN_TOKENS, _ANSWER_TOKENS = 50, 32


def run() -> Report:
    """Cached tokens and time with the order and without it."""
    rows = []
    cases = [(tokens, cache) for tokens in LENGTHS for cache in CACHES]
    for tokens, cache in tracked(cases, "caches"):
        held = PREFIXES * tokens // CACHES[cache] + ENGINES * 100
        (shares, times) = zip(
            *(_batch(tokens, held, mixed=mixed) for mixed in (True, False)), strict=True
        )
        where = f"prefixes of {tokens} tokens, caches of {cache}"
        rows.append(Row(f"{where}: tokens cached", round(shares[1], 3), f"{shares[0]:.3f} without"))
        gain = f"{times[0]:.1f} s without, {times[1]:.1f} with"
        rows.append(Row(f"{where}: time", round(times[1] / times[0], 3), gain))
    return Report(name="batches prefixes", rows=rows)


def _batch(prefix_tokens: int, cache_tokens: int, *, mixed: bool) -> tuple[float, float]:
    """Of one batch the share of input tokens that were cached, and its seconds."""
    mock = (
        *("--profile", "demo-replica", "--speed", str(SPEED)),
        *("--prefix-cache-tokens", str(cache_tokens)),
    )
    with (
        tempfile.TemporaryDirectory() as name,
        batch_fleet(Path(name), short=ENGINES, short_slots=SLOTS, mock=mock) as fleet,
    ):
        file = Path(name) / "items.jsonl"
        file.write_bytes(_file(prefix_tokens, mixed=mixed))
        begin_s = time.monotonic()
        made, _, _ = submit(fleet, file, "24h")
        while made["status"] not in ("completed", "failed", "expired"):
            time.sleep(0.1)
            made = ask(fleet, f"/v1/batches/{made['id']}").json()
        took_s = time.monotonic() - begin_s
    usage = made["usage"]
    return usage["input_tokens_details"]["cached_tokens"] / usage["input_tokens"], took_s


def _file(prefix_tokens: int, *, mixed: bool) -> bytes:
    """Items in random order; `mixed`: bodies begin with what is each one's own."""
    draw = random.Random("batches/prefixes")
    lines = []
    for number in range(ITEMS):
        prefix = text(f"prefix {draw.randrange(PREFIXES)}", prefix_tokens)
        own = {"user": f"{draw.random()}"}
        body = {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": prefix},
                {"role": "user", "content": text(f"item {number}", _OWN_TOKENS)},
            ],
            "max_tokens": _ANSWER_TOKENS,
            "mock_output_tokens": _ANSWER_TOKENS,
        }
        body = {**own, **body} if mixed else {**body, **own}
        line = {"custom_id": f"i{number}", "method": "POST", "url": "/v1/chat/completions"}
        lines.append(json.dumps({**line, "body": body}))
    return "\n".join(lines).encode()
