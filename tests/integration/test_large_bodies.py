"""Many large bodies at once neither stop the gateway nor count against an engine."""

import hashlib
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from bench.common.fleet import MODEL, Fleet

pytestmark = pytest.mark.alone

BODIES = 50
BODY_BYTES = 32 * 1024 * 1024
KEYS = [f"sk-{number}" for number in range(5)]
"""Of so many entitlements each may hold ten such bodies at once."""
LONGEST_S = 1.0
"""A turn of the gateway's loop takes a few milliseconds. But the clients, the gateway and the
process that reads the bodies share this machine's cores, so each turn may wait for theirs."""
PROBE_S = 0.02


def known() -> dict[str, Any]:
    return {
        "entitlements": [
            {
                "name": f"e{number}",
                "tenant": f"t{number}",
                "model": MODEL,
                "api_keys": [f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"],
            }
            for number, key in enumerate(KEYS)
        ]
    }


def large_body() -> bytes:
    """One message of words, more than any window holds."""
    start = b'{"model":"%b","max_tokens":1,"messages":[{"role":"user","content":"' % MODEL.encode()
    return start + b"words " * ((BODY_BYTES - len(start) - 4) // 6) + b'"}]}'


def send(port: int, key: str, body: bytes, statuses: list[int]) -> None:
    """One request on a connection of its own, and its answer's status."""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.sendall(head.encode())
        connection.sendall(body)
        with connection.makefile("rb") as answer:
            statuses.append(int(answer.readline().split()[1]))


def test_fifty_large_bodies_at_once_stop_neither_the_gateway_nor_its_engines() -> None:
    body = large_body()
    statuses: list[int] = []
    slowest_s = 0.0
    # One engine: without it the gateway is not ready.
    with Fleet(short=1, long=0, config=known()) as fleet, httpx.Client(trust_env=False) as client:
        senders = [
            threading.Thread(
                target=send, args=(fleet.port, KEYS[number % len(KEYS)], body, statuses)
            )
            for number in range(BODIES)
        ]
        for sender in senders:
            sender.start()
        while any(sender.is_alive() for sender in senders):
            began_s = time.monotonic()
            assert client.get(f"{fleet.url}/health", timeout=60).status_code == 200
            slowest_s = max(slowest_s, time.monotonic() - began_s)
            ready = client.get(f"{fleet.url}/ready", timeout=60)
            assert ready.status_code == 200, ready.text
            time.sleep(PROBE_S)
    assert statuses == [400] * BODIES, "each was read, and is beyond the window"
    assert slowest_s < LONGEST_S
