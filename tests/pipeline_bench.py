"""A pipeline over fakes, for tests of requests; each bench of a file states only what matters."""

import asyncio
from typing import Any, Self

import orjson
import pytest

from gateway.fleet.model_runtime import ModelRuntime
from gateway.metrics import Metrics
from gateway.pipeline.pipeline import Pipeline
from gateway.records.decision import DecisionRecord
from gateway.records.request import Incoming
from gateway.tenancy.keyring import Keyring
from tests.builders import incoming, served_model
from tests.fakes import FakeClock, FakeReply, FakeStore, FakeUpstream, ListSink, Script


class PipelineBench:
    """`serve` runs one request through it. Its engines answer by the script."""

    def __init__(
        self,
        *script: Script,
        served: ModelRuntime | None = None,
        store: Any = None,
        upstream: FakeUpstream | None = None,
        clock: FakeClock | None = None,
        keyring: Keyring | None = None,
        **more: Any,
    ) -> None:
        """`store`: the lease store, else a fake; `more`: further arguments of the pipeline."""
        self.served = served or served_model()
        self.upstream = upstream or FakeUpstream(list(script))
        self.store: Any = store or FakeStore()
        self.clock = clock or FakeClock()
        self.metrics, self.sink, self.reply = Metrics(), ListSink(), FakeReply()
        known: dict[str, Any] = {"wall_clock": lambda: 0.0, "models": {"m": self.served}, **more}
        self.pipeline = Pipeline(
            keyring=keyring or Keyring(),
            store=self.store,
            upstream=self.upstream,
            metrics=self.metrics,
            records=self.sink.append,
            clock=self.clock,
            **known,
        )

    async def serve(self, request: Incoming | None = None, reply: FakeReply | None = None) -> None:
        """Serve one request to its end."""
        await self.pipeline.serve(request or incoming(), reply or self.reply)
        await asyncio.sleep(0)  # it is noted when all of this turn have ended

    @classmethod
    async def answered(cls, *script: Script, asked: Incoming | None = None, **more: Any) -> Self:
        """One that has served one request; `more` as it is made."""
        bench = cls(*script, **more)
        await bench.serve(asked)
        return bench

    def begin(
        self, request: Incoming | None = None, reply: FakeReply | None = None
    ) -> asyncio.Task[None]:
        """Serve one beside others."""
        return asyncio.create_task(self.serve(request, reply))

    async def leave(self, task: "asyncio.Task[Any]") -> None:
        """Go as a client does."""
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    @property
    def record(self) -> DecisionRecord:
        """The only record."""
        assert len(self.sink.records) == 1, "one decision record a request"
        return self.sink.records[0]

    def record_of(self, request_id: str) -> DecisionRecord:
        """The only record of a request."""
        (found,) = [r for r in self.sink.records if r.request_id == request_id]
        return found

    @property
    def sent(self) -> Any:
        """The body that the last engine received."""
        return orjson.loads(self.upstream.calls[-1][1].body)
