"""Pools in phases, over scripted engines: whatever happens, nothing is left behind.

Each history is one request: what its engines do, call by call, and when its client leaves. The
engines hold KV cache as vLLM's do, or meet in rooms as SGLang's do.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Literal

import orjson
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.errors import FailureKind
from gateway.fleet.model_runtime import ModelRuntime, Phases, Pool
from gateway.ports import UpstreamCall, UpstreamResponse
from gateway.records.attempt import WorkerAddress
from tests.builders import (
    address,
    answer_body,
    changed,
    chat_body,
    chunk,
    error_answer,
    incoming,
    routing,
    served_model,
    usage_chunk,
)
from tests.fakes import Answer, FakeResponse, FakeUpstream, failure, stream, whole
from tests.pipeline_bench import PipelineBench

Kind = Literal["vllm", "sglang"]
DOES = ("ok", "connect", "reset", "timeout", "500", "busy", "400", "hang")
PROMPT = 40


def in_phases(kind: Kind, *, prefill: int = 2, decode: int = 2, **more: Any) -> ModelRuntime:
    """A model of one pool in phases."""
    served = served_model(table=routing(("only", 8192, None)), workers=(decode,), eject_after=100)
    first = Pool("only/prefill", [address(f"p{n}", host=f"p{n}") for n in range(prefill)], 4)
    port = 8998 if kind == "sglang" else 0
    known = {"skip_below_tokens": 0, "bytes_per_second": 0.0, "bootstrap_port": port, **more}
    phases = Phases(prefill=1, kind=kind, **known)
    return changed(served, pools=(*served.fleet.pools, first), phases={0: phases})


class Engines(FakeUpstream):
    """Prefill engines (p0, p1) and decode engines; each call does what its turn says."""

    def __init__(self, does: Sequence[str]) -> None:
        super().__init__([])
        self.does = list(does)
        self.held: set[int] = set()
        """KV caches that nobody fetched."""
        self.twice = 0
        """Places that two decode requests had."""
        self.rooms: dict[int, asyncio.Event] = {}
        self.open_calls = 0
        self._made = 0

    async def open(self, worker: WorkerAddress, call: UpstreamCall) -> UpstreamResponse:
        """See Upstream."""
        body = orjson.loads(call.body)
        release = body.get("prompt") == "a"
        does = "ok" if release or not self.does else self.does.pop(0)
        self.calls.append((worker, call))
        if does == "connect":
            raise failure("connect")
        self.open_calls += 1
        try:
            answer = await self._answer(worker, body, does)
        finally:
            self.open_calls -= 1
        response = FakeResponse(answer, self)
        self.responses.append(response)
        return response

    async def _answer(self, worker: WorkerAddress, body: dict[str, Any], does: str) -> Answer:
        params, room = body.get("kv_transfer_params") or {}, body.get("bootstrap_room")
        prefills = worker.id.startswith("p")
        if "place" in params and does in ("ok", "400"):
            # Read, or told to be freed: engines do that also where they refuse a request.
            self.twice += params["place"] not in self.held
            self.held.discard(params["place"])
        kinds: dict[str, FailureKind] = {"reset": "reset", "timeout": "timeout"}
        if does in kinds:
            raise failure(kinds[does])
        if does == "hang":
            try:
                await self.hang()
            finally:  # an engine whose client leaves has the place freed, too
                self.held.discard(params.get("place", 0))
        if does == "500":
            return whole(500, error_answer("Internal server error", code=500))
        if does == "busy":
            return whole(503, error_answer("The engine is busy", code=503))
        if does == "400":
            return whole(400, error_answer("temperature must be positive"))
        if room is not None:
            met = self.rooms.setdefault(room, asyncio.Event())
            if prefills:
                met.set()
            else:
                await met.wait()
        if prefills and room is None:
            assert body["max_tokens"] == 1
            assert not body["stream"]
            self._made += 1
            self.held.add(self._made)
            more = {"kv_transfer_params": {"place": self._made, "do_remote_prefill": True}}
            return whole(200, answer_body("h", prompt=PROMPT, completion=1, **more))
        if body.get("stream"):
            ends = (chunk(finish="stop"), usage_chunk(PROMPT, 3), b"data: [DONE]\n\n")
            return stream(chunk("hi"), *ends)
        return whole(200, answer_body("hi", prompt=PROMPT, completion=3))


def nothing_is_left(bench: PipelineBench, engines: Engines) -> None:
    """Of a request that has ended."""
    assert bench.store.active == 0
    assert len(bench.store.settlements) == 1, "settled exactly once"
    for pool in bench.served.fleet.pools:
        assert (pool.total_active, pool.total_tokens) == (0, 0), pool.name
        assert not pool.queued
        assert sum(pool.scheduler.waiting) == 0
        assert not any(engine.progress.pending for engine in pool.engines)
    assert engines.open_calls == 0
    assert all(answer.ended or answer.aborted for answer in engines.responses)
    if bench.served.fleet.pools[0].alive:  # else nobody can be asked to free it
        assert not engines.held, "KV cache that nobody will fetch is given back"
    assert engines.twice == 0, "a place is for one engine"


async def history(kind: Kind, does: Sequence[str], *, streams: bool, leaves_after: int) -> None:
    engines = Engines(does)
    bench = PipelineBench(served=in_phases(kind), upstream=engines)
    request = bench.begin(incoming(chat_body(stream=streams)))
    for turn in range(10_000):
        if request.done():
            break
        if turn == leaves_after or engines.hanging.is_set():
            request.cancel()
        await asyncio.sleep(0)
    with contextlib.suppress(asyncio.CancelledError):
        await request
    for _ in range(20):  # what is given back is done beside it
        await asyncio.sleep(0)
    if bench.store.settlements or not request.cancelled():  # it was admitted
        nothing_is_left(bench, engines)
    if not request.cancelled():
        assert bench.reply.finished, "the client was told once how it ended"


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(("vllm", "sglang")),
    does=st.lists(st.sampled_from(DOES), max_size=7),
    streams=st.booleans(),
    leaves_after=st.integers(-1, 40),
)
@example(kind="vllm", does=["ok", "connect", "connect"], streams=True, leaves_after=-1)
@example(kind="vllm", does=["ok", "reset", "ok", "ok"], streams=True, leaves_after=-1)
@example(kind="sglang", does=["400", "ok"], streams=False, leaves_after=-1)
def test_whatever_happens_nothing_is_left(
    kind: Kind, does: list[str], streams: bool, leaves_after: int
) -> None:
    asyncio.run(history(kind, does, streams=streams, leaves_after=leaves_after))
