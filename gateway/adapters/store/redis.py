"""What estimators learned, shared by replicas through Redis (7 days after the last exchange).

Rules:
- One hash per model and estimator profile, `sluice:1:{PROFILE:MODEL}:learned`, with a hash
  tag, so a cluster keeps all that a call touches in one slot. It holds one record a replica.
- One pipelined round trip a second for all models: `lua/exchange.lua` stores this replica's
  record and returns those that others wrote since. Merging is done by the reader, in
  `gateway.policy.learned`, which says why order and repetition do not matter.
- A record carries the number of its exchange. One that was repeated after a time-out, or comes
  late out of a stalled connection's buffer, changes nothing.
- A record that was silent for SILENT_S is dropped by a living replica; a model's key vanishes
  TTL_S after its last exchange. Time is the server's.
- Connecting and each answer take TIMEOUT_S at most and an exchange twice that; after a failure
  the connection is closed. There are no retries here: the breaker decides (`learning.py`).
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from gateway.errors import StateFailure
from gateway.policy.learned import Learned, Peer, Sums
from gateway.ports import Heard

TIMEOUT_S: Final = 0.25
INTERVAL_S: Final = 1.0
SILENT_S: Final = 600
TTL_S: Final = 7 * 86400
MAX_RECORD_BYTES: Final = 1 << 20

_SCRIPT: Final = Path(__file__).with_name("lua").joinpath("exchange.lua").read_text("utf-8")
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(dict[str, Sums]).decode

_log = logging.getLogger("sluice.state")


def key_of(subject: str) -> str:
    """The hash of a model. Quoted, because a brace in a name would end the hash tag."""
    return f"sluice:1:{{{quote(subject, safe=':')}}}:learned"


class RedisState:
    """EstimatorState shared through one Redis server."""

    interval_s = INTERVAL_S

    def __init__(self, url: str, *, replica: str | None = None) -> None:
        """`url` as redis.from_url has it; `replica` unique among those that share it."""
        self.replica = replica or secrets.token_hex(8)
        self._sequence = 0
        self._since: dict[str, int] = {}
        self._sha = ""
        self._warned = False
        self._client: Redis = Redis.from_url(
            url,
            socket_connect_timeout=TIMEOUT_S,
            socket_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
        )

    async def exchange(self, records: Mapping[str, Learned | None]) -> Heard:
        """See EstimatorState."""
        self._sequence += 1
        subjects = list(records)
        calls = [
            (
                self.replica,
                self._sequence,
                b"" if record is None else _encode(record),
                self._since.get(subject, 0),
                SILENT_S,
                TTL_S,
            )
            for subject, record in records.items()
        ]
        try:
            async with asyncio.timeout(2 * TIMEOUT_S):
                replies = await self._call(subjects, calls)
        except (RedisError, OSError, TimeoutError) as error:
            await self._disconnect()
            raise StateFailure(_reason(error)) from error
        return self._heard(subjects, replies)

    async def close(self) -> None:
        """See EstimatorState."""
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                await self._client.aclose()

    async def _call(
        self, subjects: Sequence[str], calls: Sequence[tuple[Any, ...]]
    ) -> list[list[bytes]]:
        """One round trip; three when the server does not know the script."""
        for _ in range(2):
            if not self._sha:
                self._sha = str(await self._client.script_load(_SCRIPT))
            pipe = self._client.pipeline(transaction=False)
            for subject, arguments in zip(subjects, calls, strict=True):
                pipe.evalsha(self._sha, 1, key_of(subject), *arguments)
            replies = await pipe.execute(raise_on_error=False)
            failed = [reply for reply in replies if isinstance(reply, Exception)]
            if not failed:
                return replies
            if not isinstance(failed[0], NoScriptError):
                raise failed[0]
            self._sha = ""
        raise RedisError("the server forgets its scripts")

    def _heard(self, subjects: Sequence[str], replies: Sequence[Sequence[bytes]]) -> Heard:
        peers: dict[str, tuple[Peer, ...]] = {}
        missing = set()
        for subject, (revision, held, *rest) in zip(subjects, replies, strict=True):
            # A server that was emptied, and then had its clock put back, begins anew.
            newest = int(revision)
            self._since[subject] = newest if newest >= self._since.get(subject, 0) else 0
            if not int(held):
                missing.add(subject)
            found = [
                peer
                for age_ms, record in zip(rest[::2], rest[1::2], strict=True)
                if (peer := self._peer(age_ms, record)) is not None
            ]
            if found:
                peers[subject] = tuple(found)
        return Heard(peers=peers, missing=frozenset(missing))

    def _peer(self, age_ms: bytes, record: bytes) -> Peer | None:
        try:
            if len(record) <= MAX_RECORD_BYTES:
                return Peer(age_s=int(age_ms) / 1000, parts=_decode(record))
        except msgspec.MsgspecError:
            pass
        if not self._warned:
            self._warned = True
            _log.warning("ignoring records in Redis that are not of this version")
        return None

    async def _disconnect(self) -> None:
        """Close the connection, so that no late answer is taken for the next call's."""
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                await self._client.connection_pool.disconnect()


def _reason(error: Exception) -> str:
    """What went wrong, for the log; time-outs often have no text of their own."""
    if isinstance(error, TimeoutError) or "imeout" in type(error).__name__:
        return f"no answer from Redis within {TIMEOUT_S:g} s"
    return f"Redis: {error}"
