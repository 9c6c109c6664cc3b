"""What became of each request of a run, in columns."""

from array import array
from math import nan
from typing import Final

import numpy as np

from simulator.fleet import outcome as fates
from simulator.fleet.outcome import FleetOutcome
from simulator.pipeline.records import BROKEN, NO_WORKER, REFUSED_LENGTH, TenantTraffic

_FATES: Final = {
    "": fates.DONE,
    REFUSED_LENGTH: fates.REFUSED_LENGTH,
    NO_WORKER: fates.UNAVAILABLE,
    BROKEN: fates.BROKEN,
}


class Columns:
    """Times in seconds, NaN for events that did not happen; everything by request."""

    def __init__(self, requests: TenantTraffic) -> None:
        n = len(requests)
        self._requests = requests
        self.sent_s, self.start_s, self.first_s, self.end_s = (
            array("d", [nan]) * n for _ in range(4)
        )
        self.planned, self.pool, self.worker = (array("q", [-1]) * n for _ in range(3))
        self.prompts: list[int] = requests.traffic.prompt_tokens.tolist()
        """As sent."""
        self.outputs: list[int] = requests.traffic.output_tokens.tolist()
        self.compressed = array("b", [0]) * n
        self.reasons = [""] * n
        """Why it was not served to its end; "" if it was."""
        self.retried = 0

    def outcome(self, preemptions: tuple[int, ...]) -> FleetOutcome:
        """In the form of any simulated fleet's."""
        status = [_FATES.get(reason, fates.REFUSED_BY_GATE) for reason in self.reasons]
        return FleetOutcome(
            arrival_s=self._requests.traffic.arrival_s,
            start_s=np.frombuffer(self.start_s),
            first_s=np.frombuffer(self.first_s),
            end_s=np.frombuffer(self.end_s),
            prompt_tokens=np.array(self.prompts, dtype=np.int64),
            output_tokens=np.array(self.outputs, dtype=np.int64),
            compressed=np.frombuffer(self.compressed, dtype=np.int8) > 0,
            planned=np.frombuffer(self.planned, dtype=np.int64),
            pool=np.frombuffer(self.pool, dtype=np.int64),
            worker=np.frombuffer(self.worker, dtype=np.int64),
            status=np.array(status, dtype=np.int8),
            preemptions=preemptions,
            retried=self.retried,
        )
