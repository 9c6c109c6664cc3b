"""Standard output and error through which no text of others steers the terminal."""

import io
import sys

from gateway.records.record import plain


def plain_lines(text: str) -> str:
    """The text with all but its line ends spelled out."""
    return "\n".join(map(plain, text.split("\n")))


class PlainOutput(io.TextIOWrapper):
    """Standard output or error: what would steer the terminal is spelled out, whoever writes it."""

    def write(self, text: str) -> int:
        """Write it; only line ends pass as they are."""
        return super().write(plain_lines(text))


def plain_output() -> None:
    """From now on nothing but a `PlainConsole` can steer the terminal."""
    for name in ("stdout", "stderr"):
        raw = getattr(sys, f"__{name}__")
        if isinstance(raw, io.TextIOWrapper):  # absent where a service manager closed it
            raw.reconfigure(write_through=True)
            own = PlainOutput(raw.buffer, raw.encoding, raw.errors, write_through=True)
            setattr(sys, name, own)
