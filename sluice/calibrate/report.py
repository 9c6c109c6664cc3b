"""Print a calibration: the constants, their accuracy, the held-out load."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table

from planner.calibration.check import TOLERANCE, Check
from sluice.calibrate.sweeps import Swept


def show(swept: Swept, checks: Sequence[Check], document: dict[str, Any], console: Console) -> None:
    """Print two tables, limits that were not reached, and the verdict."""
    console.print(f"[bold]{escape(document['name'])}[/]: {escape(document['source'])}")
    console.print(_constants(swept, document))
    fit = swept.fit
    console.print(
        f"{len(fit.residuals)} windows, residual {_percent(fit.median_residual)} median, "
        f"{_percent(fit.p95_residual)} P95; with the other timing {_percent(fit.other_residual)}"
    )
    if checks:
        console.print(_held_out(checks))
    for line in notes(swept, document):
        console.print(f"[dim]-[/] {escape(line)}")
    console.print(verdict(checks), markup=False)


def verdict(checks: Sequence[Check]) -> str:
    """Whether the held-out load confirmed the profile."""
    if not checks:
        return "unverified: no time was left for the held-out load; give a larger --budget-s"
    missed = [check.name for check in checks if not check.holds]
    if missed:
        return f"unverified: over {TOLERANCE:.0%} off in {', '.join(missed)}"
    return f"verified: the held-out load is within {TOLERANCE:.0%}"


def notes(swept: Swept, document: dict[str, Any]) -> Iterator[str]:
    """Limitations of the figures."""
    provenance = document["provenance"]
    if provenance["busy_before"]:
        yield f"{provenance['busy_before']} other requests were in the engine when we came"
    if not provenance["slots_met"]:
        yield f"no plateau of slots was met: {document['max_num_seqs']} is vLLM's default"
    if not provenance["chunk_met"]:
        longest = swept.limits.longest_prompt_tokens
        yield f"no chunk was met up to {longest} tokens: {document['chunk_tokens']} is assumed"
    measured = swept.limits.longest_prompt_tokens
    if measured < 0.9 * swept.longest_asked_tokens:
        yield (
            f"prompts were timed up to {measured} tokens of {swept.longest_asked_tokens}: give a "
            "larger --budget-s"
        )
    yield (
        f"measured on prompts up to {measured} tokens and {swept.limits.most_sequences} sequences "
        "at once; give --max-prompt and --most-concurrency for more"
    )
    if not provenance["kv_told"]:
        yield f"the engine does not tell its KV cache: {document['kv_tokens']} was seen in use"
    if swept.fit.timing == "slots":
        yield (
            "an iteration's cost goes by sequences; the planner's goes by resident tokens: H is "
            "spread over the held-out load's mean"
        )


def _constants(swept: Swept, document: dict[str, Any]) -> Table:
    fit = swept.fit
    table = _table("constant", "value", "+-")
    table.add_row("W", f"{1e3 * fit.w_s:.4g} ms", f"{1e3 * fit.errors[0]:.2g}")
    if fit.timing == "slots":
        table.add_row("H a sequence", f"{1e3 * fit.h_s:.4g} ms", f"{1e3 * fit.errors[1]:.2g}")
    else:
        value, error = 1e6 * fit.h_s_per_token, 1e6 * fit.errors[1]
        table.add_row("h a resident token", f"{value:.4g} us", f"{error:.2g}")
    e_s = fit.prefill_s_per_token
    table.add_row("prompt token", f"{1e6 * e_s:.4g} us", f"{1e6 * fit.errors[2]:.2g}")
    table.add_row("prefill rate", f"{1 / e_s:,.0f} tokens/s" if e_s > 1e-9 else "no limit", "")
    if fit.attention_s_per_pair:
        value, error = 1e9 * fit.attention_s_per_pair, 1e9 * fit.errors[3]
        table.add_row("more per 1,000 tokens before it", f"{value:.4g} us", f"{error:.2g}")
    table.add_row("chunk", f"{document['chunk_tokens']} tokens", "")
    table.add_row("slots", str(document["max_num_seqs"]), "")
    table.add_row("KV cache", f"{document['kv_tokens']:,} tokens", "")
    for tokens in (100, 1000):
        before_s = swept.overhead.seconds(tokens)
        table.add_row(f"before the engine, {tokens} tokens", f"{1e3 * before_s:.2g} ms", "")
    return table


def _held_out(checks: Sequence[Check]) -> Table:
    table = _table("held-out load", "measured", "modelled", "off", "95 % bounds")
    for check in checks:
        colour = "green" if check.holds else "red"
        table.add_row(
            check.name,
            f"{check.measured:.4g}",
            f"{check.modelled:.4g}",
            f"[{colour}]{100 * check.off:+.1f} %[/]",
            "" if check.bounds is None else "{:.4g} ... {:.4g}".format(*check.bounds),
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        justify: JustifyMethod = "right" if index else "left"
        table.add_column(column, justify=justify)
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"
