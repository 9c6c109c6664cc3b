"""Headers of answers as they are written: lines of bytes, each with its end.

A dozen headers go with every answer. As one block they are made by one formatting and written by
one join; as pairs each would be made, held, formatted and joined. Where pairs are needed (ASGI,
the control plane) they are read from the block.
"""

from collections.abc import Iterable, Sequence


def lines_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The block of some headers."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def pairs_of(lines: bytes) -> Sequence[tuple[bytes, bytes]]:
    """The headers of a block, in order."""
    found = []
    for line in lines.split(b"\r\n")[:-1]:
        name, _, value = line.partition(b": ")
        found.append((name, value))
    return found
