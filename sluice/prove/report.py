"""Show a proof: for people, as Markdown for a pull request, as JSON."""

from typing import Any, Final

from rich.console import Console
from rich.markup import escape

from sluice.prove.proof import Proof
from sluice.prove.verdict import Finding
from sluice.simulated.fleet import plain

_COLOURS: Final = {"breaks": "red", "cannot tell": "yellow", "holds": "green"}
_COLOURS_OF_CHANGES: Final = {"better": "green", "worse": "red", "different": "yellow"}


def show(proof: Proof, console: Console) -> None:
    """One line for each subject, what changes, and the verdict."""
    for one in _ordered(proof):
        verdict = f"[{_COLOURS[one.verdict]}]{one.verdict}[/]"
        console.print(f"{one.kind} [bold]{escape(one.name)}[/] {verdict}: {escape(one.reason)}")
    for change in proof.changes or ():
        direction = f"[{_COLOURS_OF_CHANGES[change.direction]}]{change.direction}[/]"
        console.print(f"{direction}: {change.kind} {escape(change.name)}: {escape(change.words)}")
    if proof.changes == ():
        console.print("nothing changes for anybody")
    for note in proof.notes:
        console.print(f"[dim]-[/] {escape(note)}")
    console.print(f"[bold {_COLOURS[proof.verdict]}]{proof.verdict}[/]")


def markdown_of(proof: Proof) -> str:
    """The same as a comment of a pull request."""
    lines = [f"**sluice prove: {proof.verdict}**", "", "| | Verdict | Why |", "|---|---|---|"]
    lines += [
        f"| {one.kind} {_cell(one.name)} | {one.verdict} | {_cell(one.reason)} |"
        for one in _ordered(proof)
    ]
    if proof.changes is not None:
        lines += ["", "Against the configuration in force:" if proof.changes else "No change."]
        lines += [
            f"- **{c.direction}**: {c.kind} {_cell(c.name)}: {_cell(c.words)}"
            for c in proof.changes
        ]
    lines += ["", *(f"- {note}" for note in proof.notes)] if proof.notes else []
    return "\n".join(lines)


def proof_json(proof: Proof) -> Any:
    """Everything."""
    return plain(proof)


def _ordered(proof: Proof) -> list[Finding]:
    """What breaks first."""
    return sorted(proof.findings, key=lambda one: list(_COLOURS).index(one.verdict))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
