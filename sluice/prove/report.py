"""Show a proof: for people, or as Markdown for a pull request."""

from datetime import UTC, datetime
from typing import Final

from rich.console import Console
from rich.markup import escape

from sluice.prove.proof import Proof
from sluice.prove.review import Review
from sluice.prove.verdict import Change, Finding

_COLOURS: Final = {"breaks": "red", "cannot tell": "yellow", "holds": "green"}
_COLOURS_OF_CHANGES: Final = {"better": "green", "worse": "red", "different": "yellow"}

_COLOURS_OF_RESULTS: Final = {
    "agreed": "green",
    "wrong": "red",
    "cannot tell": "yellow",
    "not proved": "dim",
}


def show(proof: Proof, console: Console) -> None:
    """One line for each subject, what changes, and the verdict."""
    for row in proof.findings:
        verdict = f"[{_COLOURS[row.verdict]}]{row.verdict}[/]"
        console.print(f"[bold]{escape(_label(proof, row))}[/] {verdict}: {escape(row.reason)}")
    for change in proof.changes or ():
        direction = f"[{_COLOURS_OF_CHANGES[change.direction]}]{change.direction}[/]"
        console.print(f"{direction}: {escape(_label(proof, change))}: {escape(change.words)}")
    if proof.changes == ():
        console.print("nothing changes for anybody")
    for note in proof.notes:
        console.print(f"[dim]-[/] {escape(note)}")
    console.print(f"[bold {_COLOURS[proof.verdict]}]{proof.verdict}[/]")


def markdown_of(proof: Proof) -> str:
    """The same as a comment of a pull request."""
    lines = [f"**sluice prove: {proof.verdict}**", "", "| | Verdict | Why |", "|---|---|---|"]
    lines += [
        f"| {_cell(_label(proof, row))} | {row.verdict} | {_cell(row.reason)} |"
        for row in proof.findings
    ]
    if proof.changes is not None:
        lines += ["", "Against the configuration in force:" if proof.changes else "No change."]
        lines += [
            f"- **{c.direction}**: {_cell(_label(proof, c))}: {_cell(c.words)}"
            for c in proof.changes
        ]
    lines += ["", *(f"- {note}" for note in proof.notes)] if proof.notes else []
    return "\n".join(lines)


def show_review(review: Review, console: Console) -> None:
    """One line for each verdict, and whether they agree with reality."""
    hours = (review.until_unix_s - review.since_unix_s) / 3600
    since = datetime.fromtimestamp(review.since_unix_s, UTC)
    console.print(f"proof {review.id}, {hours:.1f} h since {since:%Y-%m-%d %H:%M} UTC")
    for row in review.compared:
        result = f"[{_COLOURS_OF_RESULTS[row.result]}]{row.result}[/]"
        name = escape(f"{row.kind} {row.name}")
        console.print(f"[bold]{name}[/] {result}: {escape(row.words)}")
    console.print(f"[bold {_COLOURS_OF_RESULTS[review.result]}]{review.result}[/]")


def _label(proof: Proof, subject: Finding | Change) -> str:
    several = len({row.model for row in proof.findings if row.model}) > 1
    of = f" of {subject.model}" if several and subject.kind == "pool" else ""
    return f"{subject.kind} {subject.name}{of}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
