"""`sluice compress`: show which parts of a prompt compression removes, and why."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sluice.terminal import JsonOption, console, needs_extra, stop

if TYPE_CHECKING:
    from compressor import Compressed, Refused
    from sluice.compress.input import Given
    from sluice.compress.judge import Agreement

    Found = Compressed[Any] | Refused

_STYLES = {"question": "bold cyan", "edge": "cyan", "scored": "", "furniture": "magenta"}
_BYTES_PER_TOKEN = 4.0
_KEY = "SLUICE_JUDGE_KEY"
_TIMEOUT_S = 120.0
_STDOUT = Path("-")

BudgetOption = Annotated[int, typer.Option(min=1, help="Tokens that the prompt may have.")]
RatioOption = Annotated[float, typer.Option(min=0.1, help="Mean bytes per token of such text.")]


def compress(
    file: Annotated[
        Path | None,
        typer.Argument(help="A request or messages as JSON, or plain text; stdin without it."),
    ] = None,
    budget: BudgetOption = 4096,
    question: Annotated[str | None, typer.Option(help="Question about a plain text.")] = None,
    bytes_per_token: RatioOption = _BYTES_PER_TOKEN,
    tokenizer: Annotated[
        Path | None, typer.Option(help="The model's tokenizer.json: counts exactly.")
    ] = None,
    profile: Annotated[str, typer.Option(help="default or paper.")] = "default",
    max_cut: Annotated[float, typer.Option(min=0.0, max=0.99, help="Largest share to cut.")] = 0.5,
    when: Annotated[
        str, typer.Option(help="any, or asked: only a question over retrieved passages.")
    ] = "any",
    mark: Annotated[bool, typer.Option(help="Mark each gap with [...].")] = True,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File for what is left of the prompt; - is stdout."),
    ] = None,
    judge_url: Annotated[
        str | None, typer.Option("--judge", help="Base URL of a model to ask both prompts.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Its name; else the first it lists.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="How often each prompt is asked.")] = 10,
    temperature: Annotated[float, typer.Option(min=0.0, help="Temperature of the judge.")] = 0.7,
    as_json: JsonOption = False,
) -> None:
    """Compress a prompt and show what is removed and why. Exit code 1 when it is refused.

    The judge's key is taken from SLUICE_JUDGE_KEY. The judge receives both prompts.
    """
    if as_json and out == _STDOUT:
        stop("--json and -o - both write to stdout: give -o a file", 2)
    given = _given(file, question)
    options = {"profile": profile, "max_cut": max_cut, "when": when, "mark": mark}
    found = _compressed(given, budget, bytes_per_token, tokenizer, options)
    report: dict[str, Any] = _summary(found)
    out_console = console(stderr=as_json or out == _STDOUT)
    if not as_json:
        _show(out_console, found)
    if found:
        if out is not None:
            _write(out, given, found)
        if judge_url is not None:
            from sluice.compress.input import as_chat

            full, part = as_chat(given.kind, given.body), as_chat(given.kind, found.body)
            verdict = _judged(judge_url, model, full, part, samples, temperature)
            report["judge"] = _verdict(verdict)
            if not as_json:
                _show_verdict(out_console, verdict)
    if as_json:
        typer.echo(json.dumps(report))
    if not found:
        raise typer.Exit(1)


def _write(out: Path, given: "Given", found: "Compressed[Any]") -> None:
    """Write the compressed prompt: text for a text, otherwise JSON."""
    if given.plain:
        text = found.body[-1]["content"]
    else:
        text = json.dumps(found.body, ensure_ascii=False, indent=2)
    data = text.encode("utf-8", "surrogatepass")
    try:
        if out == _STDOUT:
            sys.stdout.buffer.write(data + b"\n")
        else:
            out.write_bytes(data)
    except OSError as error:
        stop(f"{out}: {error.strerror}", 2)


def _given(file: Path | None, question: str | None) -> "Given":
    from sluice.compress.input import given_of

    try:
        text = sys.stdin.read() if file is None else file.read_text(encoding="utf-8")
        return given_of(text, question)
    except (OSError, ValueError) as error:
        stop(f"{file or 'stdin'}: {error}", 2)


def _compressed(
    given: "Given",
    budget: int,
    bytes_per_token: float,
    tokenizer: Path | None,
    options: dict[str, Any],
) -> "Found":
    import compressor

    try:
        return given.compressor()(
            given.body,
            budget,
            bytes_per_token,
            exact_counter=compressor.load_counter(tokenizer) if tokenizer else None,
            **options,
        )
    except ImportError:
        needs_extra("--tokenizer needs tokenizers", "exact")
    except ValueError as error:
        stop(str(error), 2)


def _summary(found: "Found") -> dict[str, Any]:
    shared = {"bytes_before": found.bytes_before, "budget_bytes": found.budget_bytes}
    if not found:
        return {
            "compressed": False,
            "reason": found.reason,
            "detail": found.detail,
            "protected_bytes": found.protected_bytes,
            **shared,
        }
    return {
        "compressed": True,
        "changed": found.changed,
        "profile": found.profile,
        "bytes_after": found.bytes_after,
        "tokens_after": found.tokens_after,
        "cut": found.cut,
        "question": found.question,
        **shared,
        "messages": found.body,
        "units": [
            {
                "text": unit.text,
                "tier": unit.tier,
                "score": unit.score,
                "passage": unit.passage,
                "kept": unit.kept,
            }
            for unit in found.units
        ],
    }


def _show(console: Console, found: "Found") -> None:
    if not found:
        console.print(f"[bold red]refused[/]: {found.reason}: {escape(found.detail)}")
        return
    if not found.changed:
        console.print("[green]it fits as it is[/]")
        return
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    # The other columns never shrink in favour of the text, however narrow the terminal is.
    for name, width in (("", 1), ("tier", 9), ("score", 5)):
        table.add_column(name, justify="right" if name == "score" else "left", min_width=width)
    table.add_column("text", overflow="ellipsis", no_wrap=True, ratio=1)
    for unit in found.units:
        text = escape(" ".join(_printable(unit.text).split()))
        style = _STYLES[unit.tier] if unit.kept else "red strike"
        table.add_row("+" if unit.kept else "-", unit.tier, f"{unit.score:.2f}", text, style=style)
    console.print(table)
    console.print(_footer(found))


def _footer(found: "Compressed[Any]") -> str:
    kept = sum(unit.kept for unit in found.units)
    tokens = "" if found.tokens_after is None else f", {found.tokens_after} tokens"
    return (
        f"\n[bold]{found.bytes_before} -> {found.bytes_after} bytes[/] "
        f"({found.cut:.1%} gone, {kept} of {len(found.units)} units kept{tokens}); "
        f"the budget is {found.budget_bytes} bytes.\n"
        f"Asked: [cyan]{escape(_printable(found.question)) or 'none found'}[/]"
    )


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _judged(
    url: str,
    model: str | None,
    full: list[dict[str, Any]],
    compressed: list[dict[str, Any]],
    samples: int,
    temperature: float,
) -> "Agreement":
    import httpx

    from sluice.compress.judge import JudgeError, asker, judge

    try:
        with httpx.Client(timeout=_TIMEOUT_S) as client:
            ask = asker(client, url, model, os.environ.get(_KEY), temperature)
            return judge(ask, full, compressed, samples)
    except JudgeError as error:
        stop(str(error), 1)


def _verdict(verdict: "Agreement") -> dict[str, Any]:
    return {
        "samples": verdict.samples,
        "agreement": verdict.agreement,
        "interval_95": [verdict.low, verdict.high],
        "self_agreement": verdict.self_agreement,
        "prompt_tokens": [verdict.full_tokens, verdict.compressed_tokens],
        "answers": verdict.answers,
    }


def _show_verdict(console: Console, verdict: "Agreement") -> None:
    own = "" if verdict.self_agreement is None else (
        f" The full prompt's own answers agree in {verdict.self_agreement:.0%}."
    )  # fmt: skip
    console.print(
        f"\n[bold]{verdict.agreed} of {verdict.samples} answers agree[/] "
        f"(95 % interval {verdict.low:.0%} to {verdict.high:.0%}).{own}"
    )
    if verdict.full_tokens:
        console.print(
            f"Prompt tokens by the engine: {verdict.full_tokens} -> {verdict.compressed_tokens}."
        )
