"""HTTP calls between replicas, at the addresses that each registers in Redis.

A replica registers a token beside its address, and a call must carry the called replica's token.
So only processes that can read Redis may call. A replica that does not answer within LIMIT_S is
left out, but a search fails then: "not there" needs the word of every replica. At most
MAX_CONCURRENT calls run at a time, because any tenant's look-up may cause some; further calls wait.
"""

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import httpx

from gateway.errors import Unavailable

LIMIT_S: Final = 1.0
MAX_CONCURRENT: Final = 8
MAX_ANSWER_BYTES: Final = 16 << 20
RETRY_S: Final = 2.0
"""When to search again; by then a replica that died is no longer registered."""
PATH: Final = "/internal/replicas/"

_log = logging.getLogger("sluice.state")


class Address(NamedTuple):
    """The address at which a replica takes calls, and its token."""

    url: str
    token: str


class ReplicaCalls:
    """Calls other replicas over HTTP and answers theirs; see `gateway.control.peers`."""

    def __init__(self, living: Callable[[], Sequence[Address]] = tuple) -> None:
        """`living` gives the other replicas that are registered now; by default there are none."""
        self.token = secrets.token_urlsafe(24)
        """The token that other replicas must present."""
        self._living = living
        self._answers: dict[str, Callable[[bytes], bytes | None]] = {}
        self._client: httpx.AsyncClient | None = None
        self._turns = asyncio.Semaphore(MAX_CONCURRENT)

    def on(self, topic: str, respond: Callable[[bytes], bytes | None]) -> None:
        """Register the handler of a topic; it returns None if this replica has no answer."""
        self._answers[topic] = respond

    def knows(self, token: str) -> bool:
        """Whether the token is valid here."""
        return hmac.compare_digest(token.encode(), self.token.encode())

    def answer(self, topic: str, payload: bytes) -> bytes | None:
        """Answer another replica; None without an answer.

        Raises KeyError, ValueError or MsgspecError for a question of another version.
        """
        return self._answers[topic](payload)

    async def ask(self, topic: str, payload: bytes = b"") -> list[bytes]:
        """Collect the other replicas' answers. Raises nothing."""
        return [reply for reply in await self._ask_all(topic, payload) if isinstance(reply, bytes)]

    async def search(self, topic: str, payload: bytes) -> list[bytes]:
        """The same; raises Unavailable if no replica has an answer and one could not be asked."""
        replies = await self._ask_all(topic, payload)
        answers = [reply for reply in replies if isinstance(reply, bytes)]
        if not answers and any(replies):
            raise Unavailable(
                "Another gateway, which may know more, does not answer now. Try again.",
                reason="replica_silent",
                retry_after_s=RETRY_S,
            )
        return answers

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _ask_all(self, topic: str, payload: bytes) -> list[bytes | Exception | None]:
        """By replica: its answer, None if it has none, or why it did not say."""
        if not self._living():
            return []

        async def ask(client: httpx.AsyncClient, address: Address) -> bytes | Exception | None:
            headers = {"authorization": f"Bearer {address.token}"}
            url = address.url + PATH + topic
            try:
                async with (
                    asyncio.timeout(LIMIT_S),
                    client.stream("POST", url, content=payload, headers=headers) as answer,
                ):
                    if answer.status_code == 204:
                        return None
                    answer.raise_for_status()
                    body = bytearray()
                    async for part in answer.aiter_bytes():
                        body += part
                        if len(body) > MAX_ANSWER_BYTES:
                            raise OSError(f"an answer over {MAX_ANSWER_BYTES} bytes")
                    return bytes(body)
            except (httpx.HTTPError, httpx.InvalidURL, OSError, TimeoutError) as error:
                why = str(error) or type(error).__name__
                _log.info("a replica at %s did not answer '%s': %s", address.url, topic, why)
                return error

        async with self._turns:
            client = self._client = self._client or httpx.AsyncClient(
                timeout=LIMIT_S, trust_env=False
            )
            return await asyncio.gather(*(ask(client, address) for address in self._living()))
