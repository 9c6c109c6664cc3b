"""The C library's allocator, told to give large blocks back.

glibc maps a large block by itself and gives it back when it is freed, but each that is freed
raises the size from which it does so, up to 32 MiB. From then on the table of a dictionary that
is made anew, 20 MiB of a full prefix index, comes from the heap, and the old one leaves a hole
that stays resident. A size that is set does not move.

Where the library is another one, nothing is done, and nothing is needed.
"""

import contextlib
import ctypes
import os
import sys
from typing import Final

MAPPED_FROM_BYTES: Final = 4 * 1024 * 1024
"""Larger than bodies usually are: mapping costs a fault for each page."""
TRIMMED_FROM_BYTES: Final = 2 * MAPPED_FROM_BYTES
"""Free at the heap's end: kept up to this, so that bodies come and go without system calls."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_SET_BY_USER: Final = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def give_back_large_blocks() -> bool:
    """Set both sizes for this process, once at its start; whether that was done.

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
