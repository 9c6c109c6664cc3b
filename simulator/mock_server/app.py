"""The mock engine as a raw ASGI application: routes, authentication, early faults.

No framework: it runs beside the gateway being measured, so a request must cost little.
"""

import base64
import time
from collections import deque
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from simulator.mock_server import transport
from simulator.mock_server.api import problems
from simulator.mock_server.api.catalog import Catalog
from simulator.mock_server.api.config import MockConfig
from simulator.mock_server.api.dialects import StreamDialect, dumps
from simulator.mock_server.api.faults import Active, FaultError, Faults, parse_faults
from simulator.mock_server.api.problems import ApiError, ContextOverflowError
from simulator.mock_server.api.requests import Body, field_int, parse_json
from simulator.mock_server.driver import Driver
from simulator.mock_server.endpoints import Endpoints, Handler
from simulator.mock_server.generation import MockExchange, run_stream, run_whole
from simulator.mock_server.kv_events import session_of
from simulator.mock_server.kv_transfer import KvTransfer, KvTransferError
from simulator.mock_server.state import render_metrics, render_sglang
from simulator.mock_server.transport import Receive, Scope, Send

VERSION = "0.32.0+mock"
_INJECTED = {"500": problems.internal, "503": problems.unavailable, "busy": problems.busy}
_PLAIN = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


class ReceivedRequests:
    """The last requests received, for tests of what was sent; bounded in number and bytes."""

    def __init__(self, entries: int, size: int) -> None:
        self._entries = entries
        self._size = size
        self._held = 0
        self._ring: deque[tuple[str, str, list[tuple[bytes, bytes]], bytes]] = deque()

    def add(self, scope: Scope, body: bytes) -> None:
        """Store one request; the oldest are dropped."""
        self._ring.append((scope["method"], scope["path"], scope["headers"], body))
        self._held += len(body)
        while len(self._ring) > self._entries or (self._held > self._size and len(self._ring) > 1):
            self._held -= len(self._ring.popleft()[3])

    def last(self, number: int) -> list[dict[str, Any]]:
        """The last `number`, oldest first."""
        return [
            {
                "method": method,
                "path": path,
                "headers": headers_of(headers),
                "body": body.decode("utf-8", "replace"),
                "body_base64": base64.b64encode(body).decode(),
            }
            for method, path, headers, body in list(self._ring)[-number:]
        ]


def headers_of(raw: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers as text, names in lower case."""
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in raw}


class MockApp:
    """One mock engine. Serve it with uvicorn (resets need its transport)."""

    def __init__(self, config: MockConfig) -> None:
        self.config = config
        self.recorded = ReceivedRequests(config.recorded_requests, config.recorded_bytes)
        self.catalog = Catalog(config.model, config.loras, config.max_loras)
        self._endpoints = Endpoints(config)
        self._handlers = self._endpoints.handlers
        self._faults = config.faults
        self._driver: Driver | None = None
        self._kv: KvTransfer | None = None
        self._requests = 0
        self._in_flight = 0
        self._gets = {
            "/v1/models": self._models,
            "/health": self._health,
            "/ping": self._health,
            "/version": self._version,
            "/load": self._load,
            "/metrics": self._metrics,
            "/mock/last": self._last,
            "/mock/kv": self._kv_state,
            "/is_sleeping": self._is_sleeping,
        }
        self._posts = {
            "/tokenize": self._tokenize,
            "/v1/messages/count_tokens": self._count_tokens,
            "/v1/load_lora_adapter": self._load_lora,
            "/v1/unload_lora_adapter": self._unload_lora,
            "/mock/fail": self._fail,
            "/mock/model": self._swap,
        }

    @property
    def driver(self) -> Driver:
        """The engine; created by the first request, since it needs the running event loop."""
        if self._driver is None:
            self._driver = Driver(self.config)
            self._driver.slow_down(self._faults.slow_factor)
        return self._driver

    @property
    def kv(self) -> KvTransfer:
        """Its KV that others fetch, and theirs."""
        if self._kv is None:
            self._kv = KvTransfer(self.config, self.driver)
        return self._kv

    def set_faults(self, faults: Faults) -> None:
        """Replace the faults from now on."""
        self._faults = faults
        self.driver.slow_down(faults.slow_factor)

    def close(self) -> None:
        """Free what it holds beside the server's own sockets."""
        if self._driver is not None and self._driver.events is not None:
            self._driver.events.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        self._requests += 1
        active = self._faults.draw(self._requests)
        if "refuse" in active and not path.startswith("/mock/"):
            await _read(receive)  # unread bytes would make the close a reset
            await transport.close(receive, send)
            return
        handler = self._handlers.get(path)
        try:
            self._authenticate(path, scope)
            if path.startswith("/mock/kv/"):
                await self._serve_kv(path, receive, send)
            elif handler is not None and method == "POST":
                await self._generate(handler, active, scope, receive, send)
            else:
                await self._side(path, method, active, scope, receive, send)
        except ApiError as error:
            await self._refuse(send, path, error)
        except RecursionError:
            await self._refuse(send, path, problems.invalid("the body is nested too deep"))

    def _authenticate(self, path: str, scope: Scope) -> None:
        if self.config.api_key is None or not path.startswith("/v1"):
            return
        expected = f"Bearer {self.config.api_key}".encode()
        if all(v != expected for k, v in scope["headers"] if k == b"authorization"):
            raise ApiError(401, "Unauthorized")

    @staticmethod
    async def _refuse(send: Send, path: str, error: ApiError) -> None:
        if error.status == 401:
            await transport.answer(send, 401, b'{"error":"Unauthorized"}')
            return
        body = error.body(anthropic=path.startswith("/v1/messages"))
        await transport.answer(send, error.status, dumps(body))

    async def _generate(
        self, handler: Handler, active: Active, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serve an endpoint that runs on the engine."""
        data = await _read(receive)
        if data is None:
            return
        self.recorded.add(scope, data)
        if "reset-before" in active:
            await transport.reset(receive, send)
            return
        for name, error in _INJECTED.items():
            if name in active:
                raise error()
        headers = headers_of(scope["headers"])
        body = parse_json(data, headers.get("content-type", ""))
        try:
            await self._run(handler, body, headers, active, scope, receive, send)
        except KvTransferError as error:
            if body.get("stream") is not True:
                raise
            fields = error.body()
            event = dumps({"error": fields.get("error", fields)})
            await transport.start(send, 200, transport.SSE_HEADERS)
            await transport.write(send, b"data: %b\n\ndata: [DONE]\n\n" % event, more=False)
        except ApiError as error:
            if error.status < 500:
                self.kv.rejected(body)
            overflows = isinstance(error, ContextOverflowError) and body.get("stream") is True
            if not overflows or "empty-200" not in active:
                raise
            await transport.start(send, 200, transport.SSE_HEADERS)
            await transport.write(send, b"", more=False)

    async def _run(
        self,
        handler: Handler,
        body: Body,
        headers: dict[str, str],
        active: Active,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Check a request, get its KV if it has any elsewhere, run it, and answer."""
        renamed = active.by_name.get("model-name")
        asked = self.catalog.check(body)
        model_name = renamed.text if renamed is not None else asked
        self._in_flight += 1
        if asked in self.catalog.loras:
            self.catalog.running[asked] += 1
        leg = None
        try:
            job, dialect = handler(body, headers, model_name)
            rank = _rank_of(self.driver, headers, body)
            leg = await self.kv.begin(body, job, receive, active)
            if leg is None:
                return
            exchange = MockExchange(
                driver=self.driver,
                receive=receive,
                send=send,
                active=active,
                rank=rank,
                kv=self.kv,
                leg=leg,
                address=scope["server"],
                session=session_of(body, headers),
            )
            if job.stream and isinstance(dialect, StreamDialect):
                await run_stream(exchange, leg.job, dialect)
            else:
                await run_whole(exchange, leg.job, dialect)
        finally:
            if leg is not None:
                self.kv.left(leg)
            self._in_flight -= 1
            if self.catalog.running[asked] > 1:
                self.catalog.running[asked] -= 1
            else:
                del self.catalog.running[asked]

    async def _serve_kv(self, path: str, receive: Receive, send: Send) -> None:
        """Answer a decode engine that fetches KV."""
        data = await _read(receive)
        if data is None:
            return
        served = await self.kv.serve(path, parse_json(data, "application/json"), receive)
        if served is not None:
            await transport.answer(send, *served)

    async def _side(
        self, path: str, method: str, active: Active, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serve everything that does not run on the engine."""
        get, post = self._gets.get(path), self._posts.get(path)
        if get is not None and method == "GET":
            status, body, kind = get(scope, active)
        elif post is not None and method == "POST":
            data = await _read(receive)
            if data is None:
                return
            if not path.startswith("/mock/"):
                self.recorded.add(scope, data)
            status, body, kind = post(
                parse_json(data, headers_of(scope["headers"]).get("content-type", ""))
            )
        elif path in ("/sleep", "/wake_up") and method == "POST":
            await _read(receive)
            self.catalog.asleep = path == "/sleep"
            status, body, kind = 200, b"{}", transport.JSON_TYPE
        elif get is None and post is None and path not in self._handlers:
            status, body, kind = 404, b'{"detail":"Not Found"}', transport.JSON_TYPE
        else:
            allowed = b"GET" if get is not None else b"POST"
            detail = b'{"detail":"Method Not Allowed"}'
            await transport.answer(send, 405, detail, headers=((b"allow", allowed),))
            return
        await transport.answer(send, status, body, kind)

    # Answers to GET: (status, body, content type)

    def _models(self, scope: Scope, active: Active) -> tuple[int, bytes, tuple[bytes, bytes]]:
        if "models-500" in active:
            raise problems.internal()
        page = self.catalog.cards(self.config.profile.max_model_len)
        return 200, dumps(page), transport.JSON_TYPE

    def _is_sleeping(self, scope: Scope, active: Active) -> tuple[int, bytes, tuple[bytes, bytes]]:
        return 200, dumps({"is_sleeping": self.catalog.asleep}), transport.JSON_TYPE

    def _health(self, scope: Scope, active: Active) -> tuple[int, bytes, tuple[bytes, bytes]]:
        return 200, b"", _PLAIN

    def _version(self, scope: Scope, active: Active) -> tuple[int, bytes, tuple[bytes, bytes]]:
        return 200, dumps({"version": VERSION}), transport.JSON_TYPE

    def _load(self, scope: Scope, active: Active) -> tuple[int, bytes, tuple[bytes, bytes]]:
        return 200, dumps({"server_load": self._in_flight}), transport.JSON_TYPE

    def _metrics(self, scope: Scope, active: Active) -> tuple[int, bytes, tuple[bytes, bytes]]:
        if "no-metrics" in active:
            return 404, b'{"detail":"Not Found"}', transport.JSON_TYPE
        if "sglang-metrics" in active:
            return 200, render_sglang(self.driver), _PLAIN
        loras = self.catalog.lora_info(time.time()) if self.catalog.loras else None
        return 200, render_metrics(self.driver, loras), _PLAIN

    def _kv_state(self, scope: Scope, active: Active) -> tuple[int, bytes, tuple[bytes, bytes]]:
        return 200, dumps(self.kv.state()), transport.JSON_TYPE

    def _last(self, scope: Scope, active: Active) -> tuple[int, bytes, tuple[bytes, bytes]]:
        query = parse_qs(scope["query_string"].decode("latin-1"))
        number = query.get("n", ["1"])[0]
        if not number.isdecimal() or int(number) < 1:
            raise ApiError(400, f"n must be a whole number above 0, not {number!r}")
        return 200, dumps(self.recorded.last(int(number))), transport.JSON_TYPE

    # Answers to POST

    def _tokenize(self, body: Body) -> tuple[int, bytes, tuple[bytes, bytes]]:
        self.catalog.check(body)
        return 200, dumps(self._endpoints.tokenize(body)), transport.JSON_TYPE

    def _count_tokens(self, body: Body) -> tuple[int, bytes, tuple[bytes, bytes]]:
        self.catalog.check(body)
        return 200, dumps(self._endpoints.count_tokens(body)), transport.JSON_TYPE

    def _load_lora(self, body: Body) -> tuple[int, bytes, tuple[bytes, bytes]]:
        self.catalog.load(body)
        return 200, b"Success", _PLAIN

    def _unload_lora(self, body: Body) -> tuple[int, bytes, tuple[bytes, bytes]]:
        self.catalog.unload(body)
        return 200, b"Success", _PLAIN

    def _swap(self, body: Body) -> tuple[int, bytes, tuple[bytes, bytes]]:
        self.catalog.model = str(body.get("model") or self.config.model)
        return 200, dumps({"model": self.catalog.model}), transport.JSON_TYPE

    def _fail(self, body: Body) -> tuple[int, bytes, tuple[bytes, bytes]]:
        spec = body.get("spec")
        if not isinstance(spec, str):
            raise ApiError(400, "spec must be a string; an empty one ends all faults")
        try:
            self.set_faults(parse_faults(spec))
        except FaultError as error:
            raise ApiError(400, str(error)) from error
        return 200, dumps({"spec": spec}), transport.JSON_TYPE


def _rank_of(driver: Driver, headers: Mapping[str, str], body: Body) -> int:
    """The data-parallel rank that a request names, else the least loaded.

    vLLM reads the header `X-data-parallel-rank` and ignores values that are not numbers. SGLang
    reads `routed_dp_rank` of the body, or its deprecated name `data_parallel_rank` (the only one
    in older versions); newer versions let the header win over both. ApiError (400) if the rank
    does not exist.
    """
    asked: int | None
    try:
        asked = int(headers.get("x-data-parallel-rank", "")[:20])
    except ValueError:
        asked = field_int(body, "routed_dp_rank")
        if asked is None:
            asked = field_int(body, "data_parallel_rank")
    if asked is None:
        return driver.pick_rank()
    ranks = len(driver.ranks)
    if not 0 <= asked < ranks:
        raise ApiError(400, f"data_parallel_rank {asked} is out of range [0, {ranks}).")
    return asked


async def _read(receive: Receive) -> bytes | None:
    """The request's body; None if the client left before its end."""
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        body: bytes = message["body"]
        return body
    chunks = bytearray()
    while message["type"] == "http.request":
        chunks += message["body"]
        if not message.get("more_body"):
            return bytes(chunks)
        message = await receive()
    return None
