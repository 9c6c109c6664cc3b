"""Stage 6, adjust the lease: down to the cost of the prompt that will be served."""

from gateway.domain import Lease


def adjust(lease: Lease) -> Lease:
    """The lease unchanged, because an uncompressed prompt costs what was reserved."""
    return lease
