"""The base of all records: frozen, and not tracked by the garbage collector.

msgspec structs because they cost .05 us to make; `gc=False` because none of them can be part of a
reference cycle.
"""

import msgspec


class Record(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Base of all records: immutable, not tracked by the garbage collector."""
