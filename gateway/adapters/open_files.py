"""How many files this process may have open at once; each connection is one.

Systems start a process with a low soft limit (1,024 as a rule) and a hard one far above it, up
to which the process may raise the soft one itself.
"""

import sys
from typing import Final

OTHERS: Final = 256
"""Beyond the connections: listening sockets, logs, the state store, probes."""


def files_needed(connections: int, workers: int) -> int:
    """Open files at most: so many client connections, one to an engine for each, and probes."""
    return 2 * connections + workers + OTHERS


def allow_open_files(needed: int) -> int:
    """Raise the soft limit to what is needed, as far as the hard one allows; what is allowed.

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
