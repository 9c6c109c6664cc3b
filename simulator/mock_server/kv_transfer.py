"""KV between mock engines: a prefill engine holds it, a decode engine fetches it by HTTP.

As in vLLM (NixlConnector, 0.32): the request decides. A prefill's blocks are held for a lease; a
decode engine whose producer is gone answers 500; one that comes after the lease reads whatever lies
there and says nothing, so its answer is wrong. As in SGLang (0.5): both engines get the request at
once and pair by `bootstrap_room`; the prefill answers once its KV is sent; a side that waits in
vain, or whose partner fails, answers 500. `bootstrap_port` is the prefill mock's own port.
"""

import asyncio
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
import orjson

from simulator.mock_server.api.config import MockConfig
from simulator.mock_server.api.dialects import dumps
from simulator.mock_server.api.faults import Active
from simulator.mock_server.api.problems import ApiError
from simulator.mock_server.api.requests import Body, CheckedRequest, field_int
from simulator.mock_server.driver import Driver, Ticket
from simulator.mock_server.transport import Receive

T = TypeVar("T")
_REMOTE = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class KvTransferError(ApiError):
    """The KV did not come; a stream says so in an event, under status 200."""


class Room:
    """A pair of SGLang's, on its prefill engine."""

    def __init__(self) -> None:
        self.decode_is_here = asyncio.Event()
        self.sent: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The prefill's cached tokens; cancelled if a side failed."""


class KvLeg(msgspec.Struct, frozen=True, kw_only=True):
    """What a request does with KV."""

    job: CheckedRequest
    remote: bool = False
    """Whether the prompt's KV has come."""
    hold: bool = False
    """Whether its KV stays after its end."""
    cached_tokens: int | None = None
    """Of the prefill, to be reported in place of its own."""
    room: Room | None = None


class _Held(msgspec.Struct, frozen=True):
    rank: int
    tokens: int
    lease: asyncio.TimerHandle


class KvTransfer:
    """One engine's side of all transfers."""

    def __init__(self, config: MockConfig, driver: Driver) -> None:
        self._config, self._driver = config, driver
        self._engine_id = str(uuid.uuid4())
        self._held: dict[str, _Held] = {}
        self._rooms: dict[int, Room] = {}
        self._releases: set[asyncio.Task[object]] = set()
        driver.on_held = self._hold

    # A request on its engine

    async def begin(
        self, body: Body, job: CheckedRequest, receive: Receive, active: Active
    ) -> KvLeg | None:
        """Wait for the KV, or for the partner; None if the client left. Raises KvTransferError."""
        kind = self._config.kv_transfer
        params = body.get("kv_transfer_params")
        if kind == "vllm" and isinstance(params, dict):
            if params.get("do_remote_decode") is True:
                return KvLeg(job=job, hold=True)
            if _complete(params):
                return await connected(receive, self._pull(params, job, active))
        if kind == "sglang-prefill":
            return await connected(receive, self._meet(self._room(body), job))
        if kind == "sglang-decode":
            return await connected(receive, self._receive(body, job, active))
        return KvLeg(job=job)

    async def end(
        self, leg: KvLeg, ticket: Ticket, active: Active, address: tuple[str, int]
    ) -> dict[str, Any] | None:
        """Before a prefill's answer: its `kv_transfer_params`; SGLang's KV is sent. Or raises."""
        ids = list(ticket.held)
        if "kv-lost" in active:
            for sequence_id in ids:
                self._expire(sequence_id)
        cached = ticket.cached_tokens.get(0, 0)
        if leg.room is not None:
            await self._send(leg.room, ids, cached)
            return None
        if not leg.hold or not ids:
            return None
        tokens = ticket.held[ids[0]]
        blocks = -(-tokens // self._config.profile.block_tokens)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, blocks + 1))],
            "remote_engine_id": self._engine_id,
            "remote_request_id": ids[0],
            "remote_host": address[0],
            "remote_port": address[1],
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": cached,
        }

    def rejected(self, body: Body) -> None:
        """A request was refused before it ran: the producer is told to free what it holds."""
        params = body.get("kv_transfer_params")
        if self._config.kv_transfer == "vllm" and isinstance(params, dict) and _complete(params):
            task = asyncio.create_task(self._fetch(params))
            self._releases.add(task)
            task.add_done_callback(self._released)

    def _released(self, task: asyncio.Task[object]) -> None:
        self._releases.discard(task)
        task.exception()

    # vLLM

    def _hold(self, rank: int, sequence_id: str, tokens: int) -> None:
        real_s = self._config.kv_hold_s / self._config.speed
        lease = asyncio.get_running_loop().call_later(real_s, self._expire, sequence_id)
        self._held[sequence_id] = _Held(rank, tokens, lease)

    def _expire(self, sequence_id: str) -> None:
        if self._free(sequence_id):
            self._driver.kv.expired += 1

    def _free(self, sequence_id: str) -> bool:
        held = self._held.pop(sequence_id, None)
        if held is None:
            return False
        held.lease.cancel()
        self._driver.release(held.rank, sequence_id)
        return True

    async def _pull(self, params: Body, job: CheckedRequest, active: Active) -> KvLeg:
        if "kv-stall" in active:
            try:
                await asyncio.Event().wait()
            finally:
                self.rejected({"kv_transfer_params": params})
        try:
            if "kv-fail" in active:
                raise OSError("injected")
            valid = await self._fetch(params)
        except (OSError, ValueError, LookupError):
            self._driver.kv.failed += 1
            raise KvTransferError(
                500, "Internal server error", kind="InternalServerError"
            ) from None
        if not valid:  # the blocks hold something else by now: another answer
            wrong = [msgspec.structs.replace(c, seed=c.seed + 7) for c in job.choices]
            job = msgspec.structs.replace(job, choices=tuple(wrong))
        cached = field_int(params, "remote_prefill_cached_tokens", 0)
        return KvLeg(job=job, remote=True, cached_tokens=cached)

    async def _fetch(self, params: Body) -> bool:
        """Fetch and free what a producer holds; False if it holds it no more. Raises OSError."""
        asked = {"engine": params["remote_engine_id"], "request": params["remote_request_id"]}
        host, port = str(params["remote_host"]), int(params["remote_port"])
        return bool((await _post(host, port, "/mock/kv/fetch", asked))["valid"])

    # SGLang

    def _room(self, body: Body) -> Room:
        number = _room_of(body)
        if number in self._rooms:
            return self._rooms[number]
        room = self._rooms[number] = Room()
        room.sent.add_done_callback(lambda _: self._rooms.pop(number, None))
        return room

    async def _meet(self, room: Room, job: CheckedRequest) -> KvLeg:
        try:
            await asyncio.wait_for(room.decode_is_here.wait(), self._patience_s)
        except BaseException as error:
            room.sent.cancel()
            if isinstance(error, TimeoutError):
                raise _sglang_error("Prefill bootstrap failed") from None
            raise
        one = [
            msgspec.structs.replace(c, output_tokens=1, finish_reason="length") for c in job.choices
        ]
        return KvLeg(job=msgspec.structs.replace(job, choices=tuple(one)), hold=True, room=room)

    async def _send(self, room: Room, ids: list[str], cached: int) -> None:
        try:
            tokens = sum(self._held[i].tokens for i in ids if i in self._held)
            if not room.sent.done() and tokens:
                await asyncio.sleep(self._transfer_s(tokens))
            else:
                room.sent.cancel()
            if room.sent.done():
                raise _sglang_error("Prefill transfer failed")
            room.sent.set_result(cached)
        finally:
            room.sent.cancel()
            for sequence_id in ids:
                self._free(sequence_id)

    def left(self, leg: KvLeg) -> None:
        """A prefill ended without its answer: its partner fails."""
        if leg.room is not None:
            leg.room.sent.cancel()

    async def _receive(self, body: Body, job: CheckedRequest, active: Active) -> KvLeg:
        number = _room_of(body)
        if "kv-stall" in active:
            await asyncio.Event().wait()
        try:
            if "kv-fail" in active:
                raise OSError("injected")
            host, port = str(body["bootstrap_host"]), int(body["bootstrap_port"])
            asked = {"bootstrap_room": number}
            sent = await _post(host, port, "/mock/kv/join", asked)
        except (OSError, ValueError, LookupError, TypeError):
            self._driver.kv.failed += 1
            raise _sglang_error("Decode transfer failed") from None
        return KvLeg(job=job, remote=True, cached_tokens=int(sent["cached_tokens"]))

    # Questions of decode engines

    async def serve(self, path: str, body: Body, receive: Receive) -> tuple[int, bytes] | None:
        """Status and body for a decode engine's question; None if it left."""
        answer = self._serve_fetch if path == "/mock/kv/fetch" else self._serve_join
        return await connected(receive, answer(body))

    async def _serve_fetch(self, body: Body) -> tuple[int, bytes]:
        if body["engine"] != self._engine_id:
            return 404, b"{}"
        held = self._held.pop(body["request"], None)
        if held is None:
            self._driver.kv.late += 1
            return 200, dumps({"valid": False})
        held.lease.cancel()
        try:
            await asyncio.sleep(self._transfer_s(held.tokens))
        finally:
            self._driver.release(held.rank, body["request"])
        return 200, dumps({"valid": True})

    async def _serve_join(self, body: Body) -> tuple[int, bytes]:
        room = self._room(body)
        room.decode_is_here.set()
        try:
            async with asyncio.timeout(self._patience_s):
                await asyncio.wait({room.sent})
        except TimeoutError:
            pass
        finally:
            failed = not room.sent.done() or room.sent.cancelled()
            room.sent.cancel()
        if failed:
            return 409, b"{}"
        return 200, dumps({"cached_tokens": room.sent.result()})

    # Durations, real seconds

    def _transfer_s(self, tokens: int) -> float:
        return tokens / self._config.kv_tokens_per_s / self._config.speed

    @property
    def _patience_s(self) -> float:
        return self._config.kv_hold_s / self._config.speed

    def state(self) -> dict[str, Any]:
        """What leak tests look at; all zero when nothing is under way."""
        engines = [rank.engine for rank in self._driver.ranks]
        return {
            "held": sum(engine.held for engine in engines),
            "rooms": len(self._rooms),
            "running": sum(engine.running for engine in engines),
            "waiting": sum(engine.waiting for engine in engines),
            "kv_usage": max(engine.kv_usage for engine in engines),
        }


def _complete(params: Body) -> bool:
    """Whether a decode request names its producer; vLLM computes the prompt if it does not."""
    named = all(params.get(name) is not None for name in _REMOTE)
    return params.get("do_remote_prefill") is True and named


def _room_of(body: Body) -> int:
    number = field_int(body, "bootstrap_room")
    if number is None:
        raise ApiError(
            400,
            "Invalid request: Disaggregated request received without bootstrap room id.",
            flat=True,
        )
    return number


def _sglang_error(what: str) -> KvTransferError:
    message = f"{what} for request rank=0"
    return KvTransferError(500, message, kind="500", flat=True)


async def connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The work's result; None, and the work is cancelled, if the client leaves first."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _post(host: str, port: int, path: str, fields: Body) -> Body:
    """A question to another mock; OSError, ValueError or LookupError without a good answer."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        body = dumps(fields)
        writer.write(
            b"POST %b HTTP/1.1\r\nHost: kv\r\nConnection: close\r\nContent-Type: application/json"
            b"\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)
        )
        head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    if head.split(b" ", 2)[1] != b"200":
        raise ValueError(f"{host}:{port} has no KV")
    reply: Body = orjson.loads(answer)
    return reply
