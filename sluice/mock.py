"""`sluice mock`: one mock engine on a port."""

import asyncio
import socket
from math import ceil
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
import uvicorn

from simulator.engine.engine import PROFILES, EngineProfile
from simulator.mock_server import FaultError, Faults, MockApp, MockConfig, parse_faults
from simulator.mock_server.api.config import KvTransferKind, OverflowWording


class _MockServer(uvicorn.Server):
    """Prints its address once it listens; on SIGTERM it stops at once without draining."""

    def __init__(self, config: uvicorn.Config, app: MockApp) -> None:
        super().__init__(config)
        self._app = app

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for listener in server.sockets:
                host, port = listener.getsockname()[:2]
                typer.echo(f"MOCK READY http://{host}:{port} {self._app.config.model}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port, drop all connections, and let their tasks end."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(0.02)
        self._app.close()


def make_server(config: MockConfig, *, host: str, port: int) -> uvicorn.Server:
    """A server for one mock engine; SIGTERM drops its streams and ends it at once."""
    app = MockApp(config)
    options = uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="auto",
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        backlog=4096,
        timeout_keep_alive=75,
    )
    return _MockServer(options, app)


def _profile(
    name: str,
    file: Path | None,
    *,
    max_model_len: int | None,
    max_num_seqs: int | None,
    prefix_cache_tokens: int | None,
    scheduling: Literal["fcfs", "priority"] | None,
) -> EngineProfile:
    """A profile with the flags applied; raises ValueError on contradictions."""
    base = PROFILES.get(name) if file is None else _read_profile(file)
    if base is None:
        raise ValueError(f"--profile {name} is unknown; there are {', '.join(sorted(PROFILES))}")
    window = max_model_len or base.max_model_len
    sequences = max_num_seqs or base.max_num_seqs
    return msgspec.structs.replace(
        base,
        max_model_len=window,
        max_num_seqs=sequences,
        # At least one sequence of full length must fit, and one token of every sequence.
        kv_blocks=max(base.kv_blocks, ceil(window / base.block_tokens)),
        max_num_batched_tokens=max(base.max_num_batched_tokens, sequences),
        prefix_cache_tokens=(
            base.prefix_cache_tokens if prefix_cache_tokens is None else prefix_cache_tokens
        ),
        scheduling=scheduling or base.scheduling,
    )


def _read_profile(file: Path) -> EngineProfile:
    """Read an `EngineProfile` (JSON), alone or as `engine` of a file by `sluice calibrate`."""
    try:
        document = msgspec.json.decode(file.read_bytes())
        if isinstance(document, dict) and "engine" in document:
            document = document["engine"]
        return msgspec.convert(document, EngineProfile)
    except (OSError, ValueError) as error:
        raise ValueError(f"--profile-file {file}: {error}") from error


def _faults(spec: str) -> Faults:
    try:
        return parse_faults(spec)
    except FaultError as error:
        raise typer.BadParameter(str(error), param_hint="--fail") from error


def mock(
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")],
    model: Annotated[str, typer.Option(help="The model's name.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="The window, tokens. [default: the profile's]")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Slots. [default: the profile's]")
    ] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="Speed relative to real time.")] = 1.0,
    profile: Annotated[str, typer.Option(help="The engine's constants.")] = "llama-3-70b-a100",
    profile_file: Annotated[
        Path | None, typer.Option(help="The same from JSON, or from `sluice calibrate`.")
    ] = None,
    prefix_cache_tokens: Annotated[
        int | None, typer.Option(min=0, help="Tokens kept for reuse; 0: no prefix cache.")
    ] = None,
    dp_ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks in lockstep.")] = 1,
    fail: Annotated[str, typer.Option(help="Faults, as stall:3@0.1,usage-zero.")] = "",
    max_num_queued: Annotated[
        int | None, typer.Option(min=1, help="503 busy once so many sequences wait.")
    ] = None,
    scheduling: Annotated[
        Literal["fcfs", "priority"] | None, typer.Option(help="Order of the queue.")
    ] = None,
    lora: Annotated[
        list[str] | None, typer.Option(help="Name of a LoRA adapter that it has; repeatable.")
    ] = None,
    max_loras: Annotated[
        int, typer.Option(min=1, help="Adapters that it says it can run at once.")
    ] = 1,
    api_key: Annotated[str | None, typer.Option(help="Bearer token to require.")] = None,
    mean_output_tokens: Annotated[
        float, typer.Option(min=1, help="Mean natural length of an answer, tokens.")
    ] = 200.0,
    overflow_wording: Annotated[
        OverflowWording, typer.Option(help="Context overflow as said by v1, v2, v3, v4 or sglang.")
    ] = "v3",
    kv_transfer: Annotated[
        KvTransferKind, typer.Option(help="How KV is exchanged with other engines.")
    ] = "none",
    kv_tokens_per_second: Annotated[
        float, typer.Option(min=1, help="How fast KV is sent, prompt tokens.")
    ] = 150_000.0,
    kv_events: Annotated[
        str | None, typer.Option(help="Where it says what it caches and evicts: tcp://*:5557.")
    ] = None,
    kv_hold_seconds: Annotated[
        float, typer.Option(min=0.001, help="How long KV is held, and partners are waited for.")
    ] = 30.0,
) -> None:
    """Run the engine model in real time behind vLLM's HTTP surface."""
    try:
        engine = _profile(
            profile,
            profile_file,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            prefix_cache_tokens=prefix_cache_tokens,
            scheduling=scheduling,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    config = MockConfig(
        model=model,
        profile=engine,
        speed=speed,
        dp_ranks=dp_ranks,
        max_num_queued=max_num_queued,
        loras=tuple(lora or ()),
        max_loras=max_loras,
        api_key=api_key,
        mean_output_tokens=mean_output_tokens,
        overflow_wording=overflow_wording,
        kv_transfer=kv_transfer,
        kv_tokens_per_s=kv_tokens_per_second,
        kv_hold_s=kv_hold_seconds,
        kv_events=kv_events,
        faults=_faults(fail),
    )
    try:
        make_server(config, host=host, port=port).run()
    except SystemExit:  # uvicorn exits after logging why it cannot listen
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(mock)
