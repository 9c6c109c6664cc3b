"""The data-parallel rank of a request: the one it names, else the least loaded.

vLLM reads the header `X-data-parallel-rank` and ignores values that are not numbers. SGLang
reads `routed_dp_rank` of the body, or its deprecated name `data_parallel_rank` (the only one in
older versions); newer versions let the header win over both.
"""

from collections.abc import Mapping

from simulator.mock_server.api.problems import ApiError
from simulator.mock_server.api.requests import Body, field_int
from simulator.mock_server.driver import Driver

_HEADER = "x-data-parallel-rank"
_FIELDS = ("routed_dp_rank", "data_parallel_rank")


def choose_rank(driver: Driver, headers: Mapping[str, str], body: Body) -> int:
    """The rank's number; ApiError (400) if the requested one does not exist."""
    asked = _asked(headers, body)
    if asked is None:
        return driver.pick_rank()
    ranks = len(driver.ranks)
    if not 0 <= asked < ranks:
        raise ApiError(400, f"data_parallel_rank {asked} is out of range [0, {ranks}).")
    return asked


def _asked(headers: Mapping[str, str], body: Body) -> int | None:
    try:
        return int(headers.get(_HEADER, "")[:20])
    except ValueError:
        pass
    for name in _FIELDS:
        value = field_int(body, name)
        if value is not None:
            return value
    return None
