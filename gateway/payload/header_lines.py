"""Headers as one block of bytes, as they go on the wire: lines that each end with CRLF.

Every answer has a dozen headers. One block takes one formatting and one write, where pairs would
take one of each per header. ASGI and the control plane need pairs and read them from the block.
"""

from collections.abc import Iterable, Sequence


def lines_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The block of these (name, value) pairs."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def pairs_of(lines: bytes) -> Sequence[tuple[bytes, bytes]]:
    """The (name, value) pairs of a block, in order."""
    found = []
    for line in lines.split(b"\r\n")[:-1]:
        name, _, value = line.partition(b": ")
        found.append((name, value))
    return found
