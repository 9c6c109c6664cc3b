"""`sluice calibrate`: measure a running engine's profile through its HTTP API."""

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import msgspec
import typer

from sluice.plan.command import PlotOption
from sluice.terminal import JsonOption, PlainConsole, need_libraries, need_plots, refuse

if TYPE_CHECKING:
    from planner.calibration.check import Check
    from planner.calibration.profile import StatedValues
    from sluice.calibrate.client import About
    from sluice.calibrate.sweeps import Say, SweepBounds, Swept

_WINDOW_TOKENS = 4096
"""Window assumed when neither the engine nor the user states it."""
_PROMPT_TOKENS = 8192
"""Longest prompt that is probed unless the user asks for more."""


def calibrate(
    url: Annotated[str, typer.Option(help="The engine: http://host:8000.")],
    model: Annotated[
        str | None, typer.Option(help="Its model's name. [default: the only one]")
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with its key.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the profile (JSON).")
    ] = None,
    most_concurrency: Annotated[
        int, typer.Option(min=2, max=1024, help="Most requests at once.")
    ] = 32,
    most_requests: Annotated[int, typer.Option(min=40, help="Most requests in all.")] = 400,
    max_prompt: Annotated[
        int | None,
        typer.Option(
            min=128, help="Longest prompt to probe, tokens. [default: the window, at most 8192]"
        ),
    ] = None,
    budget_s: Annotated[float, typer.Option(min=5, help="Most seconds.")] = 120.0,
    gpu: Annotated[str, typer.Option(help="Its GPU, for the profile.")] = "unknown",
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs it runs on.")] = 1,
    usd_per_gpu_hour: Annotated[float, typer.Option(min=0, help="Price of a GPU.")] = 0.0,
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="KV cache, tokens, where it does not tell.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=256, help="Its window, tokens, where it does not tell.")
    ] = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a running engine. Exit 1 when its profile is not verified, 2 on bad input."""
    need_libraries()
    from planner.errors import PlanError
    from sluice.calibrate.report import show
    from sluice.calibrate.sweeps import SweepBounds

    bounds = SweepBounds(
        most_concurrency=most_concurrency,
        most_requests=most_requests,
        budget_s=budget_s,
        longest_prompt_tokens=max_prompt or _PROMPT_TOKENS,
    )
    console = PlainConsole(stderr=as_json)
    try:
        shown = public_url(url)
        key = _key(api_key_file)
        given = {"window_tokens": max_model_len, "kv_tokens": kv_tokens}
        # The key replaces credentials in the URL, which httpx would send instead.
        about, swept, load = _measure(shown if key else url, model, key, bounds, given)
        reported = _stated_values(
            about, swept, gpu=gpu, gpus=gpus, usd_per_gpu_hour=usd_per_gpu_hour
        )
        document, checks = _document(about, swept, load, reported, url=shown)
    except PlanError as error:
        refuse(error.problem, error.fix)
    if output is not None:
        output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        show(swept, checks, document, console)
    if output is not None:
        console.print(f"wrote {output}", markup=False)
    if plot is not None:
        need_plots()
        from sluice.calibrate.plot import draw

        console.print(f"wrote {draw(swept, checks, plot)}", markup=False)
    raise typer.Exit(0 if document["verified"] else 1)


def _measure(
    url: str,
    model: str | None,
    key: str | None,
    bounds: "SweepBounds",
    given: dict[str, int | None],
) -> tuple["About", "Swept", list[Any]]:
    """Run sweeps, fit and held-out load under a progress bar."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = PlainConsole(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("asking the engine", total=1.0)

        def say(what: str, done: float) -> None:
            bar.update(task, description=what, completed=done)

        with asyncio.Runner(loop_factory=fast_loop()) as runner:
            return runner.run(_talk(url, model, key, bounds, given, say))


def fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Makes the event loop that adds least to measured times."""
    try:
        from uvloop import new_event_loop
    except ImportError:  # on Windows
        return None
    return new_event_loop


async def _talk(
    url: str,
    model: str | None,
    key: str | None,
    bounds: "SweepBounds",
    given: dict[str, int | None],
    say: "Say",
) -> tuple["About", "Swept", list[Any]]:
    from planner.errors import PlanError
    from sluice.calibrate.client import EngineClient
    from sluice.calibrate.sweeps import Sweeps

    client = EngineClient(url, model, key)
    try:
        # Ends at twice the budget even if a request hangs.
        async with asyncio.timeout(2 * bounds.budget_s):
            about = await client.about()
            about = msgspec.structs.replace(
                about,
                window_tokens=given["window_tokens"] or about.window_tokens or _WINDOW_TOKENS,
                kv_tokens=given["kv_tokens"] or about.kv_tokens,
            )
            window = about.window_tokens or _WINDOW_TOKENS
            if (
                bounds.longest_prompt_tokens > window
                and bounds.longest_prompt_tokens != _PROMPT_TOKENS
            ):
                raise PlanError(
                    f"--max-prompt {bounds.longest_prompt_tokens} exceeds the window of {window}",
                    f"give at most {window - 64}",
                )
            first = await client.learn()
            sweeps = Sweeps(client, bounds, window=window, kv_tokens=about.kv_tokens, say=say)
            swept = await sweeps.run(first)
            return about, swept, await sweeps.held_out(swept)
    except TimeoutError:
        raise PlanError(
            "the engine took more than twice the budget", "give a larger --budget-s"
        ) from None
    finally:
        await client.close()


def _stated_values(
    about: "About", swept: "Swept", *, gpu: str, gpus: int, usd_per_gpu_hour: float
) -> "StatedValues":
    from planner.calibration.profile import StatedValues

    window = about.window_tokens or _WINDOW_TOKENS
    return StatedValues(
        name=f"{about.model.rsplit('/', 1)[-1]}-measured",
        model=about.model,
        gpu=gpu,
        gpus=gpus,
        usd_per_gpu_hour=usd_per_gpu_hour,
        window_tokens=window,
        kv_tokens=about.kv_tokens or max(swept.most_resident_tokens, window),
        block_tokens=about.block_tokens or 16,
        caches_prefixes=about.caches_prefixes,
    )


def _document(
    about: "About", swept: "Swept", load: list[Any], reported: "StatedValues", *, url: str
) -> tuple[dict[str, Any], tuple["Check", ...]]:
    """The profile's file, and the held-out load's figures (empty if there was no time for it)."""
    from planner.calibration.check import compare, modelled
    from planner.calibration.profile import engine_profile, node_profile, profile_document

    engine = engine_profile(swept.fit, reported, swept.limits)
    checks = compare(load, modelled(engine, load, swept.overhead)) if load else ()
    verified = bool(checks) and all(check.holds for check in checks)
    resident = [t.prompt_tokens + t.output_tokens / 2 for t in load]
    date = datetime.now(UTC).date().isoformat()
    version = f" {about.version}" if about.version else ""
    node = node_profile(
        swept.fit,
        reported,
        swept.limits,
        tokens_per_sequence=sum(resident) / len(resident) if resident else 1024.0,
        verified=verified,
        source=f"measured on {date} at {url}, engine version{version or ' unknown'}",
    )
    provenance = {
        "date": date,
        "url": url,
        "engine_version": about.version,
        "busy_before": about.busy,
        "slots_met": swept.limits.slots is not None,
        "chunk_met": swept.limits.chunk_tokens is not None,
        "kv_told": about.kv_tokens is not None,
        "overhead_s": swept.overhead.fixed_s,
        "overhead_s_per_prompt_token": swept.overhead.per_token_s,
        "held_out_requests": len(load),
        "prompt_tokens_asked": swept.longest_asked_tokens,
    }
    return profile_document(node, engine, swept.fit, checks, provenance), checks


def public_url(url: str) -> str:
    """The URL without credentials, query and fragment."""
    from planner.errors import PlanError

    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        parts, port = urlsplit(""), ""
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise PlanError("--url is no URL of an engine", "give http://host:port")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}{port}{parts.path.rstrip('/')}"


def _key(file: Path | None) -> str | None:
    from planner.errors import PlanError

    if file is None:
        return None
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{file}: {error}", "give a file with the key") from None
    if not key or not key.isascii() or not key.isprintable():
        raise PlanError(f"{file}: no key of printable ASCII", "write the key alone in the file")
    return key
