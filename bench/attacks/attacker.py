"""Sends cases over raw sockets, several at a time, and counts the answers."""

import asyncio
import contextlib
import itertools
import re
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Final

from bench.attacks.cases import AttackCase

CLIENTS: Final = 48
_ANSWER_LIMIT_S: Final = 15.0
_PARTIAL_LIMIT_S: Final = 0.05
"""How long an answer to a request that is not whole is waited for."""
_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_MAX_EXAMPLES: Final = 5


class Outcomes:
    """What all clients saw."""

    def __init__(self) -> None:
        self.families: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.server_errors = 0
        self.unanswered = 0
        self.examples: list[str] = []
        self.silent: list[str] = []

    def add(self, case: AttackCase, status: int | None, answer: bytes) -> None:
        """Count one case's end; `status` None where no answer came."""
        self.families[case.family] += 1
        if status is not None:
            self.statuses[status] += 1
            if status >= 500:
                self.server_errors += 1
                _note(self.examples, case, answer)
        elif case.whole and case.read_bytes is None:
            self.unanswered += 1
            _note(self.silent, case, answer)


def _note(examples: list[str], case: AttackCase, answer: bytes) -> None:
    if len(examples) < _MAX_EXAMPLES:
        sent = b"".join(step for step in case.steps if isinstance(step, bytes))
        examples.append(f"{case.family}: {sent[:600]!r} -> {answer[:400]!r}")


async def attack(port: int, cases: Iterator[AttackCase], count: int, outcomes: Outcomes) -> None:
    """Send the next `count` cases from many clients at a time, each from an address of its own."""
    taken = itertools.islice(cases, count)

    async def client(number: int) -> None:
        for turn, case in enumerate(taken):
            # Of 127.0.0.0/8, so that no pair of addresses and ports is used twice in a minute.
            source = f"127.{1 + number}.{turn // 200 % 250}.{1 + turn % 200}"
            status, answer = await _one(port, source, case)
            outcomes.add(case, status, answer)

    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client(number))


async def _one(port: int, source: str, case: AttackCase) -> tuple[int | None, bytes]:
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        client.bind((source, 0))
        limit_s = _ANSWER_LIMIT_S if case.whole else _PARTIAL_LIMIT_S
        answer = bytearray()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_ANSWER_LIMIT_S):
                await loop.sock_connect(client, ("127.0.0.1", port))
                await _send(client, case)
            async with asyncio.timeout(limit_s):
                await _read(client, case, answer)
        status = _STATUS.match(_final(bytes(answer)))
        return int(status[1]) if status else None, bytes(answer)


async def _send(client: socket.socket, case: AttackCase) -> None:
    loop = asyncio.get_running_loop()
    for step in case.steps:
        if isinstance(step, bytes):
            try:
                await loop.sock_sendall(client, step)
            except OSError:
                return  # answered and closed before all was sent: the answer is read
        elif isinstance(step, float):
            await asyncio.sleep(step)
        else:
            client.shutdown(socket.SHUT_WR)


async def _read(client: socket.socket, case: AttackCase, answer: bytearray) -> None:
    loop = asyncio.get_running_loop()
    while case.read_bytes is None or len(answer) < case.read_bytes:
        piece = await loop.sock_recv(client, 65536)
        answer += piece
        if not piece or _complete(answer):
            return


def _complete(answer: bytearray) -> bool:
    data = _final(bytes(answer))
    head, found, body = data.partition(b"\r\n\r\n")
    if not found:
        return False
    length = _LENGTH.search(head + b"\r\n")
    if length:
        return len(body) >= int(length[1])
    return body.endswith(b"0\r\n\r\n") or b"\r\n0\r\n\r\n" in body


def _final(answer: bytes) -> bytes:
    """The answer without the interim ones (1xx) before it."""
    while answer.startswith(b"HTTP/1.1 1"):
        _, found, rest = answer.partition(b"\r\n\r\n")
        if not found:
            return b""
        answer = rest
    return answer
