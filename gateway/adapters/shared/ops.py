"""What the parent and its worker processes say to one another, by the kind of message."""

from enum import IntEnum


class Op(IntEnum):
    """What a frame is about."""

    ANSWER = 0
    """value"""
    FAILED = 1
    """text"""
    PART = 2
    """bytes: one of several that come before the answer"""
    # Of leases, from a worker.
    ADMIT = 10
    TRANSFER = 11
    RESIZE = 12
    SETTLE = 13
    RECLAIM = 14
    RENEW = 15
    LEASES = 17
    """what was done with leases while there was plenty of room (`untold`)"""
    # Of connections, from a worker.
    COUNTS = 16
    """connections that ended, requests that were answered, since the last time"""
    # To a worker.
    EVICT = 20
    LIVE = 21
    """indices of the workers that are connected"""
    PLEDGE = 22
    """room for leases that the worker may take by itself"""
    # Between workers, by way of the parent.
    ASK = 30
    TELL = 31
    BOARD = 32
    GONE = 33
    # To the parent.
    CALL = 40
    """name, payload: everything that is not asked for with each request"""
