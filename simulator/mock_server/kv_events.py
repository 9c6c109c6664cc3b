"""Publish what the prefix cache stores and evicts, as vLLM 0.32 does over ZeroMQ.

A request's blocks are told with its first token: those that were there first, if it asks for the
full report. Block hashes are numbers. Nothing is replayed.
"""

import importlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from simulator.engine.engine import Engine
from simulator.mock_server.api.requests import Body

_encode = msgspec.msgpack.Encoder().encode


def session_of(body: Body, headers: dict[str, str]) -> tuple[str | None, bool]:
    """(session id of a request, whether its blocks that are there already are reported)."""
    given = body.get("vllm_xargs")
    asked: dict[str, Any] = given if isinstance(given, dict) else {}
    session = body.get("session_id") or headers.get("x-session-id") or asked.get("session_id")
    return session, asked.get("kv_cache_report_mode") == "full"


class KvEventPublisher:
    """The sockets of an engine's ranks; each has the next port."""

    def __init__(self, endpoint: str, engines: Sequence[Engine]) -> None:
        """`endpoint`: tcp://host:port, bound at once; host `*` for all addresses."""
        zmq: Any = importlib.import_module("zmq")
        self._block_tokens = engines[0].profile.block_tokens
        self._numbers = [0] * len(engines)
        self._sockets: list[Any] = []
        host, _, port = endpoint.rpartition(":")
        for rank, engine in enumerate(engines):
            socket = zmq.Context.instance().socket(zmq.PUB)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(f"{host}:{int(port) + rank}")
            self._sockets.append(socket)
            engine.prefix_cache.on_evict = partial(self._evicted, rank)

    def close(self) -> None:
        """Free the ports."""
        for socket in self._sockets:
            socket.close()

    def stored(
        self, rank: int, session: tuple[str | None, bool], blocks: Sequence[int], cached: int
    ) -> None:
        """A prompt's blocks are there, of which `cached` were before."""
        session_id, full = session
        events = []
        for first, last in ((0, cached), (cached, len(blocks))):
            if first < last and (first or full or not cached):
                events.append(
                    {
                        "type": "BlockStored",
                        "block_hashes": list(blocks[first:last]),
                        "parent_block_hash": blocks[first - 1] if first else None,
                        "token_ids": [],
                        "block_size": self._block_tokens,
                        "lora_id": None,
                        "medium": "GPU",
                        "lora_name": None,
                        "group_idx": 0,
                        "session_id": session_id,
                    }
                )
        if events:
            self._publish(rank, events)

    def _evicted(self, rank: int, block: int) -> None:
        removed = {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU", "group_idx": 0}
        self._publish(rank, [removed])

    def _publish(self, rank: int, events: list[dict[str, Any]]) -> None:
        number = self._numbers[rank]
        self._numbers[rank] += 1
        payload = _encode([time.time(), events, rank])
        self._sockets[rank].send_multipart([b"", number.to_bytes(8, "big"), payload])
