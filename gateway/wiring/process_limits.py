"""Limits of this process: open files, memory, and when the C library returns it to the system."""

import contextlib
import ctypes
import os
import sys
from pathlib import Path
from typing import Final

OTHERS: Final = 256
"""Files besides connections: listening sockets, logs, the state store, probes."""


def allow_open_files(connections: int, workers: int) -> str | None:
    """Raise the soft limit of open files to what is needed, as far as the hard limit allows.

    Needed are two files per client connection (client, engine), and one per worker for probes.
    Systems start a process with a low soft limit (usually 1,024) and a much higher hard limit, up
    to which the process may raise the soft one. Returns a message for the operator if the limit in
    force is too low for `server.max_connections`.
    """
    import resource  # noqa: PLC0415 - not on Windows

    needed = 2 * connections + workers + OTHERS
    allowed, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != allowed < needed:
        wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):  # a further limit of the system's own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            allowed = wanted
    if allowed == resource.RLIM_INFINITY or allowed >= needed:
        return None
    fits = max(1, (allowed - workers - OTHERS) // 2)
    return (
        f"this process may open {allowed} files, but {connections} client connections "
        f"(server.max_connections, divided among the processes) and as many to engines need "
        f"{needed}: raise the limit (ulimit -n {needed}; LimitNOFILE={needed} for systemd; "
        f"--ulimit nofile={needed} for Docker), or set server.max_connections so that a process "
        f"gets {fits}"
    )


PARTS: Final = 4
"""Of the memory limit: bodies, two processes that read large ones, and everything else."""


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes that this process and those it starts may use, as cgroups and rlimits say."""
    limits = [sys.maxsize]
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, inside = line.split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            above = root / "sys/fs/cgroup" / ("memory" if kinds else "")
            own = above / inside.lstrip("/")  # in a container perhaps the path on its host
            for folder in (own, *own.parents):
                with contextlib.suppress(OSError, ValueError):  # "max" is none
                    name = "memory.limit_in_bytes" if kinds else "memory.max"
                    limits.append(int((folder / name).read_text()))
    with contextlib.suppress(ImportError):  # on Windows, where `sluice check` runs, too
        import resource  # noqa: PLC0415

        address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
        limits += [address_space] if address_space != resource.RLIM_INFINITY else []
    return min(limits)


def memory_shortage(held_bytes: int, limit_bytes: int) -> str | None:
    """A message for the operator if `server.max_held_body_bytes` does not fit into the limit."""
    if held_bytes <= limit_bytes // PARTS:
        return None
    return (
        f"server.max_held_body_bytes is {held_bytes:,}, but the gateway may use {limit_bytes:,} "
        f"bytes of memory here, and of these {limit_bytes // PARTS:,} for bodies: leave it out, "
        "or raise the limit"
    )


MAPPED_FROM_BYTES: Final = 4 * 1024 * 1024
"""Above the size of most bodies, because mapping a block costs a fault for each page."""
TRIMMED_FROM_BYTES: Final = 2 * MAPPED_FROM_BYTES
"""Free memory kept at the heap's end, so that most bodies need no system calls."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_SET_BY_USER: Final = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def give_back_large_blocks() -> bool:
    """Make glibc return large freed blocks to the system; call once at the start.

    glibc maps a large block separately and unmaps it when freed. But each freed block raises the
    size from which glibc does so, up to 32 MiB. Above it, a dictionary that grows (20 MiB for a
    full prefix index) takes its table from the heap, and the old table leaves a resident hole.
    An explicitly set size stays fixed.

    Returns whether it took effect. Does nothing with another C library, or where the environment
    sets these sizes.
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
