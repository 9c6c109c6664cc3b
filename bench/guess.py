"""`make guess SEED=n`: twelve random lines of the gateway; where do they belong?

Measures how well docs/architecture.md leads. Each line is printed with three lines before and
after it and without its file's name; write down folder and file of each, then ask for the solution
(`ARGS=--solve`) and count.
"""

import random
from pathlib import Path
from typing import Annotated, Final

import typer

GATEWAY: Final = Path(__file__).parents[1] / "gateway"
LINES: Final = 12
AROUND: Final = 3


def drawn(seed: int) -> list[tuple[Path, int]]:
    """(file, line from 0) of twelve lines that say something, each as likely as any other."""
    said = [
        (file, number)
        for file in sorted(GATEWAY.rglob("*.py"))
        for number, line in enumerate(file.read_text("utf-8").splitlines())
        if len(line.strip()) > 3 and not line.startswith(("import ", "from "))
    ]
    return random.Random(seed).sample(said, LINES)


def main(
    seed: Annotated[int, typer.Argument(help="Another seed draws other lines.")] = 1,
    solve: Annotated[bool, typer.Option("--solve", help="Say where they are.")] = False,
) -> None:
    """Print the lines, or their places."""
    for place, (file, number) in enumerate(drawn(seed), start=1):
        if solve:
            typer.echo(f"{place:2} {file.relative_to(GATEWAY.parent)}:{number + 1}")
            continue
        lines = file.read_text("utf-8").splitlines()
        typer.echo(f"--- {place}")
        for at in range(max(0, number - AROUND), min(len(lines), number + AROUND + 1)):
            typer.echo(f"{'>' if at == number else ' '} {lines[at]}")


if __name__ == "__main__":
    typer.run(main)
