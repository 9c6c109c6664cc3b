"""`sluice replay`: send a log's or a trace's requests through a running gateway, check the SLO."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sluice.calibrate.command import fast_loop, public_url
from sluice.operate.admin_client import URL_VARIABLE
from sluice.plan.command import (
    FieldsOption,
    PlotOption,
    TpotOption,
    TtftOption,
)
from sluice.terminal import JsonOption, PlainConsole, need_libraries, need_plots, refuse

if TYPE_CHECKING:
    from sluice.replay.load import ReplayRequest
    from sluice.replay.run import Replayed, Say

_DURATION_S = 60.0


def replay(
    url: Annotated[str, typer.Option(envvar=URL_VARIABLE, help="The gateway, http://host:port.")],
    log: Annotated[
        Path | None, typer.Option(help="A request log or a trace with times: lengths and times.")
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help="Instead: what `sluice plan` takes; arrivals are Poisson.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests/s. [default: as the log has it]")
    ] = None,
    speed: Annotated[float, typer.Option(help="Speed relative to the log.")] = 1.0,
    arrivals: Annotated[
        Literal["recorded", "poisson"], typer.Option(help="The log's times, or its lengths only.")
    ] = "recorded",
    duration: Annotated[
        float | None,
        typer.Option(help="Seconds; a shorter log is repeated. [default: the log's; 60]"),
    ] = None,
    model: Annotated[str | None, typer.Option(help="[default: the only one served]")] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable that holds the client's key.")
    ] = None,
    tenant_key: Annotated[
        list[str] | None,
        typer.Option(help="ENTITLEMENT=VARIABLE: send its requests with this key; repeat it."),
    ] = None,
    most_open: Annotated[int, typer.Option(min=1, help="Most requests open at once.")] = 2000,
    warm_up: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="Share of the time that is not judged.")
    ] = 0.1,
    slo_ttft_ms: TtftOption = 500.0,
    slo_tpot_ms: TpotOption = None,
    fields: FieldsOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals and drawn lengths.")] = 0,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replay requests through a gateway. Exit 1 when the SLO is violated, 2 on bad input."""
    need_libraries()
    from planner.errors import PlanError
    from sluice.replay.report import report, report_json, show

    console = PlainConsole(stderr=as_json)
    try:
        key = _key(api_key_env)
        keys = _tenant_keys(tenant_key or ())
        asks = _asks(log, workload, fields, rate, speed, arrivals, duration, seed)
        shown = public_url(url)
        # The first tenant's key serves where no other is given.
        own = key or next(iter(keys.values()), None)
        served, done = _run(url, model, own, asks, most_open, keys)
        if not done.answers:
            raise PlanError("nothing was sent", "let it run longer")
    except PlanError as error:
        refuse(error.problem, error.fix)
    found = report(
        done,
        url=shown,
        model=served,
        slo_ttft_s=slo_ttft_ms / 1000,
        slo_tpot_s=None if slo_tpot_ms is None else slo_tpot_ms / 1000,
        warm_up=warm_up,
    )
    if as_json:
        typer.echo(json.dumps(report_json(found), indent=2))
    else:
        show(found, console)
    if plot is not None:
        need_plots()
        from sluice.replay.plot import draw

        console.print(f"wrote {draw(done, plot, found.slo_ttft_s)}", markup=False)
    raise typer.Exit(0 if found.holds else 1)


def _asks(
    log: Path | None,
    workload: str | None,
    fields: str | None,
    rate: float | None,
    speed: float,
    arrivals: Literal["recorded", "poisson"],
    duration_s: float | None,
    seed: int,
) -> list["ReplayRequest"]:
    from planner.errors import PlanError
    from sluice.plan.question import load_workload
    from sluice.replay.load import from_recording, from_workload
    from sluice.simulated.recorded import read_recorded

    if (log is None) == (workload is None):
        raise PlanError("no source, or two", "give one of --log and --workload")
    if duration_s is not None and not duration_s > 0:
        raise PlanError(f"a duration of {duration_s:g} s", "give one above 0")
    if log is not None:
        return from_recording(
            read_recorded(log, fields=fields),
            arrivals=arrivals,
            rate_per_s=rate,
            speed=speed,
            duration_s=duration_s,
            seed=seed,
        )
    return from_workload(
        load_workload(workload or "", fields=fields),
        rate_per_s=rate,
        duration_s=duration_s or _DURATION_S,
        seed=seed,
    )


def _run(
    url: str,
    model: str | None,
    key: str | None,
    asks: list["ReplayRequest"],
    most_open: int,
    keys: dict[str, str],
) -> tuple[str, "Replayed"]:
    """Replay under a progress bar; returns the model's name and all results."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    stderr = PlainConsole(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bars = Progress(
        *columns,
        TimeElapsedColumn(),
        console=stderr,
        transient=True,
        disable=not stderr.is_terminal,
    )
    with bars:
        sent = bars.add_task("sent", total=len(asks))
        ended = bars.add_task("answered", total=len(asks))

        def say(so_far: int, answered: int) -> None:
            bars.update(sent, completed=so_far)
            bars.update(ended, completed=answered)

        with asyncio.Runner(loop_factory=fast_loop()) as runner:
            return runner.run(_talk(url, model, key, asks, most_open, say, keys))


async def _talk(
    url: str,
    model: str | None,
    key: str | None,
    asks: list["ReplayRequest"],
    most_open: int,
    say: "Say",
    keys: dict[str, str],
) -> tuple[str, "Replayed"]:
    from sluice.replay.client import ReplayClient
    from sluice.replay.run import replay as send
    from sluice.replay.texts import Texts

    stop = asyncio.Event()
    client = ReplayClient(url, model, key)
    try:
        await client.about()
        await client.learn()
        texts = Texts()
        await texts.learn({ask.category or "prose" for ask in asks}, client.tokens_of)
        with _stopped_by_ctrl_c(stop):
            done = await send(
                client, texts, asks, most_open=most_open, stop=stop, say=say, keys=keys
            )
        return client.model, done
    finally:
        await client.close()


@contextlib.contextmanager
def _stopped_by_ctrl_c(stop: asyncio.Event) -> Iterator[None]:
    """The first Ctrl-C stops sending, a second one ends the program."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    with contextlib.suppress(NotImplementedError):  # on Windows
        loop.add_signal_handler(signal.SIGINT, first)
    try:
        yield
    finally:
        with contextlib.suppress(NotImplementedError):
            loop.remove_signal_handler(signal.SIGINT)


def _key(variable: str | None) -> str | None:
    from planner.errors import PlanError

    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise PlanError(
            f"{variable} holds no key", f"export {variable} with the client's key in it"
        )
    return key


def _tenant_keys(given: Sequence[str]) -> dict[str, str]:
    """Entitlement -> key, read from the variables named."""
    from planner.errors import PlanError

    found = {}
    for text in given:
        name, _, variable = text.partition("=")
        key = _key(variable) if name and variable else None
        if key is None:
            raise PlanError(f"--tenant-key {text}", "write ENTITLEMENT=VARIABLE")
        found[name] = key
    return found
