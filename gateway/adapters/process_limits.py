"""Limits of this process: how many files it may have open, when the C library returns memory."""

import contextlib
import ctypes
import os
import sys
from typing import Final

OTHERS: Final = 256
"""Beyond the connections: listening sockets, logs, the state store, probes."""


def files_needed(connections: int, workers: int) -> int:
    """Open files at most: so many client connections, one to an engine for each, and probes."""
    return 2 * connections + workers + OTHERS


def allow_open_files(needed: int) -> int:
    """Raise the soft limit to what is needed, as far as the hard one allows; what is allowed.

    Each connection is an open file. Systems start a process with a low soft limit (1,024 as a
    rule) and a hard one far above it, up to which the process may raise the soft one itself.

    A limit that is higher stays. Where the system has no such limit, `needed`.
    """
    if sys.platform == "win32":
        return needed
    import resource  # noqa: PLC0415 - not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return needed
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # a further limit of the system's own
        return soft
    return wanted


def shortage(connections: int, workers: int, allowed: int) -> str | None:
    """What to tell an operator whose limit is too low for `server.max_connections`; else None."""
    needed = files_needed(connections, workers)
    if allowed >= needed:
        return None
    fits = max(1, (allowed - workers - OTHERS) // 2)
    return (
        f"this process may open {allowed} files, but {connections} client connections "
        f"(server.max_connections, divided among the processes) and as many to engines need "
        f"{needed}: raise the limit (ulimit -n {needed}; LimitNOFILE={needed} for systemd; "
        f"--ulimit nofile={needed} for Docker), or set server.max_connections so that a process "
        f"gets {fits}"
    )


MAPPED_FROM_BYTES: Final = 4 * 1024 * 1024
"""Larger than bodies usually are: mapping costs a fault for each page."""
TRIMMED_FROM_BYTES: Final = 2 * MAPPED_FROM_BYTES
"""Free at the heap's end: kept up to this, so that bodies come and go without system calls."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_SET_BY_USER: Final = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def give_back_large_blocks() -> bool:
    """Have the C library's allocator return large blocks, once at the start; whether it will.

    glibc maps a large block by itself and gives it back when it is freed, but each that is freed
    raises the size from which it does so, up to 32 MiB. From then on the table of a dictionary
    that is made anew, 20 MiB of a full prefix index, comes from the heap, and the old one leaves a
    hole that stays resident. A size that is set does not move. Another C library is left alone.

    Whoever set them in the environment is left alone.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _SET_BY_USER):
        return False
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        if not hasattr(library, "gnu_get_libc_version"):
            return False
        mapped = library.mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)
        return bool(mapped and library.mallopt(_M_TRIM_THRESHOLD, TRIMMED_FROM_BYTES))
    return False
