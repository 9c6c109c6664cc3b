"""`make walk`: the files that one chat request crosses, in the order in which it enters them.

A gateway with every stage on (keys, a managed model, QUARTZ, metering, request log, export of
usage) answers a streamed chat in this process. A hop is a call from one file of `gateway/` or
`predictor/` into another. Resuming after an `await` is no hop; background tasks, other threads
and the engine are not traced.
"""

import asyncio
import json
import logging
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Annotated, Final, Self

import typer

from bench.common.raw_client import RawClient
from bench.common.tools import KEY, MODEL, everything
from gateway.settings import load
from gateway.wiring.serving import serve

ROOT: Final = Path(__file__).parents[1]
TRACED: Final = ("gateway", "predictor")
TIMERS: Final = frozenset({"gateway/fleet/probes.py"})
"""Files whose timers run beside requests, in no task that could tell them apart."""
ENTRY: Final = "gateway/http/protocol.py"
"""Where a request enters."""
PROBED: Final = frozenset({"gateway/upstream.py"})
"""Where the answer of a probe arrives, which may do so just before the request."""
WIDTH: Final = 80
WARM_UP: Final = 2
"""Requests before the one that is traced: they connect and import."""
_BODY: Final = json.dumps(
    {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Name three rivers of Europe. " * 40}],
        "max_tokens": 16,
        "stream": True,
    }
).encode()
_TOKEN: Final = (
    b'{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":'
    b'[{"index":0,"delta":{"content":"Rhine"},"finish_reason":"stop"}]}'
)
_USAGE: Final = (
    b'{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[],'
    b'"usage":{"prompt_tokens":280,"completion_tokens":1,"total_tokens":281}}'
)
_EVENTS: Final = b"data: %s\n\ndata: %s\n\ndata: [DONE]\n\n" % (_TOKEN, _USAGE)
_ANSWER: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n%s"
    % (len(_EVENTS), _EVENTS)
)
_HEALTHY: Final = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class Walk:
    """Records each call from one traced file into another, while its block runs."""

    def __init__(self, ignored: Iterable[asyncio.Task[object]]) -> None:
        """`ignored`: tasks that are not the request's."""
        self.hops: list[str] = []
        self._ignored = set(ignored)
        self._seen: set[FrameType] = set()
        self._names: dict[str, str | None] = {}

    def __enter__(self) -> Self:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or (name := self._name(frame)) is None or frame in self._seen:
            return
        self._seen.add(frame)
        caller = self._caller(frame)
        if caller == name or (caller is None and name in TIMERS):
            return
        if asyncio.current_task() not in self._ignored:
            self.hops.append(name)

    def _caller(self, frame: FrameType) -> str | None:
        """The nearest traced file above, across the standard library's frames."""
        above = frame.f_back
        while above is not None:
            if (name := self._name(above)) is not None:
                return name
            above = above.f_back
        return None

    def _name(self, frame: FrameType) -> str | None:
        file = frame.f_code.co_filename
        if file not in self._names:
            path = Path(file)
            inside = path.is_relative_to(ROOT) and path.relative_to(ROOT)
            traced = inside and inside.parts[0] in TRACED
            self._names[file] = inside.as_posix() if inside and traced else None
        return self._names[file]


async def walk() -> list[str]:
    """Files in the order of a request's hops."""
    listening = asyncio.get_running_loop().create_future()
    engines = [await asyncio.start_server(_engine, "127.0.0.1", 0) for _ in range(2)]
    urls = ["http://127.0.0.1:{1}".format(*e.sockets[0].getsockname()) for e in engines]
    with tempfile.TemporaryDirectory(prefix="sluice-walk-") as folder:
        config = load(everything(Path(folder), 0, urls))
        gateway = asyncio.create_task(serve(config, on_ready=listening.set_result))
        async with RawClient(f"http://127.0.0.1:{await listening}", KEY) as client:
            for _ in range(WARM_UP):
                await client.post("/v1/chat/completions", _BODY)
            with Walk(asyncio.all_tasks()) as walked:
                answer = await client.post("/v1/chat/completions", _BODY)
                await asyncio.sleep(0)  # its task ends
        signal.raise_signal(signal.SIGTERM)
        await gateway
    for engine in engines:
        engine.close()
    if answer.status != 200 or b"[DONE]" not in answer.body:
        raise RuntimeError(f"the gateway answered {answer.status}: {answer.body!r}")
    entered = walked.hops.index(ENTRY)
    if {*walked.hops[:entered]} - PROBED:
        raise RuntimeError(f"the request entered at {walked.hops[0]}")
    return walked.hops[entered:]


async def _engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer every chat alike and everything else with 200, on one connection."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length or 0))
            writer.write(_ANSWER if head.startswith(b"POST") else _HEALTHY)
    except (EOFError, ConnectionError):
        writer.close()


def page(hops: list[str]) -> str:
    """The hops folder by folder, then the totals."""
    lines = []
    for folder, files in groupby(hops, lambda name: name.rpartition("/")[0]):
        line = f"{folder}:"
        for name in files:
            word = " " + name.rpartition("/")[2].removesuffix(".py")
            if len(line + word) > WIDTH:
                lines.append(line)
                line = "   "
            line += word
        lines.append(line)
    entered = Counter(hops)
    gateway = sum(name.startswith("gateway/") for name in entered)
    total = f"{len(hops)} hops, {len(entered)} files, {gateway} of them of the gateway."
    lines += ["", total, "Entered most often:"]
    lines += [f"  {times:3} {name}" for name, times in entered.most_common(10)]
    return "\n".join(lines)


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Print the files that one chat request crosses."""
    logging.getLogger("sluice").setLevel(logging.ERROR)
    hops = asyncio.run(walk())
    print(json.dumps({"hops": hops, "entered": Counter(hops)}) if as_json else page(hops))


if __name__ == "__main__":
    typer.run(main)
