"""Shares what estimators learned through Redis; kept for 7 days after the last exchange.

There is one subject per model and estimator profile, `sluice:1:{PROFILE:MODEL}:learned`,
exchanged once a second (`exchange`). Each reader merges the records by
`gateway.estimate.merge`, which explains why order and repetition do not matter.
"""

import logging
import secrets
from collections.abc import Mapping
from typing import Final

import msgspec

from gateway.estimate.merge import Learned, PartState, PeerRecord
from gateway.ports import ExchangeResult
from gateway.store.redis.exchange import RedisExchange

INTERVAL_S: Final = 1.0
SILENT_S: Final = 600
TTL_S: Final = 7 * 86400
MAX_RECORD_BYTES: Final = 1 << 20
KIND: Final = "learned"

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(dict[str, PartState]).decode

_log = logging.getLogger("sluice.state")


class RedisState:
    """EstimatorState shared through one Redis server."""

    interval_s = INTERVAL_S

    def __init__(self, url: str, *, replica: str | None = None) -> None:
        """`url` as in `route`; `replica` must be unique among the replicas."""
        self._exchange = RedisExchange(
            url,
            kind=KIND,
            replica=replica or secrets.token_hex(8),
            silent_s=SILENT_S,
            ttl_s=TTL_S,
        )
        self._warned = False

    async def exchange(self, records: Mapping[str, Learned | None]) -> ExchangeResult:
        reported = await self._exchange.exchange(
            {s: b"" if record is None else _encode(record) for s, record in records.items()}
        )
        peers: dict[str, tuple[PeerRecord, ...]] = {}
        for subject, received in reported.items():
            found = [
                peer
                for age_s, record in received.records
                if (peer := self._peer(age_s, record)) is not None
            ]
            if found:
                peers[subject] = tuple(found)
        held = {subject for subject, received in reported.items() if received.held}
        missing = frozenset(records.keys() - held)
        return ExchangeResult(peers=peers, missing=missing)

    async def close(self) -> None:
        await self._exchange.close()

    def _peer(self, age_s: float, record: bytes) -> PeerRecord | None:
        try:
            if len(record) <= MAX_RECORD_BYTES:
                return PeerRecord(age_s=age_s, parts=_decode(record))
        except msgspec.MsgspecError:
            pass
        if not self._warned:
            self._warned = True
            _log.warning("ignoring records in Redis that are not of this version")
        return None
