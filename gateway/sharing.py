"""What one worker process of several shares with the others; a process that is alone: nothing.

Part of the composition root. `gateway.adapters.shared` has the means, the parent
(`gateway.supervisor`) the other end.
"""

from collections.abc import Sequence
from functools import partial

from gateway.adapters.decision_ring import DecisionRing
from gateway.adapters.registry import Registry
from gateway.adapters.shared.board import PeerBoard
from gateway.adapters.shared.figures import SharedFigures
from gateway.adapters.shared.learned import SharedState
from gateway.adapters.shared.link import Link
from gateway.adapters.shared.seat import Seat
from gateway.adapters.store.learning import open_state
from gateway.policy.served import ServedModel
from gateway.ports import EstimatorState
from gateway.telemetry import Metrics
from gateway.web.admin import drain_worker
from gateway.web.admission_desk import AdmissionDesk
from gateway.web.metrics import MetricsPage
from gateway.web.metrics_shared import SharedMetricsPage
from gateway.web.peers import (
    NoPeers,
    Peers,
    answer_audit,
    answer_decisions,
    answer_load,
    answer_refusals,
    answer_usage,
)
from gateway.web.tenant_api import refusals


class Sharing:
    """A process's part in what several share."""

    def __init__(self, seat: Seat | None) -> None:
        """Without a seat the process is alone."""
        self.seat = seat
        self.board = PeerBoard() if seat is None else seat.board
        """Notes for the other processes, and theirs."""
        self._figures: SharedFigures | None = None

    @property
    def link(self) -> Link | None:
        """To the parent."""
        return None if self.seat is None else self.seat.link

    @property
    def peers(self) -> Peers:
        """The other processes."""
        return self.seat or NoPeers()

    @property
    def count(self) -> int:
        """Processes as configured."""
        return 1 if self.seat is None else self.seat.processes

    @property
    def replicas(self) -> int:
        """Processes that are live, this one included; each has that share of every gate."""
        return 1 if self.seat is None else self.seat.replicas

    @property
    def leads(self) -> bool:
        """Whether this process does what only one may; alone it does."""
        return self.seat is None or self.seat.leads

    def state(self, url: str) -> EstimatorState:
        """Where what was learned is exchanged: by way of the parent, but for Redis."""
        if self.seat is None or url.startswith("redis"):
            return open_state(url)
        return SharedState(self.seat.link)

    def page(self, own: MetricsPage, metrics: Metrics) -> MetricsPage | SharedMetricsPage:
        """The page for /metrics: this process's own, or that of all."""
        if self.seat is None:
            return own
        page = SharedMetricsPage(own, metrics, self._others)
        self._figures = SharedFigures(self.seat.link, page.counts, page.figures)
        return page

    def connect(
        self,
        models: Sequence[ServedModel],
        ring: DecisionRing,
        desk: AdmissionDesk,
        registry: Registry,
        metrics: Metrics,
    ) -> None:
        """Answer the other processes from these, and hear of theirs."""
        answer_decisions(self.peers, ring.find, ring.latest)
        answer_audit(self.peers, registry.audit)
        answer_load(self.peers, models)
        answer_usage(self.peers, desk.settle)
        answer_refusals(self.peers, partial(refusals, metrics))
        if self.seat is not None:
            self.seat.share_homes({served.name: served.homes for served in models})
            self.seat.follow_drains(partial(_drain, models))

    def start(self) -> None:
        """Begin to send what is sent now and then; call within the running loop."""
        if self._figures is not None:
            self._figures.start()

    async def close(self) -> None:
        """Say what is left, and leave."""
        if self._figures is not None:
            await self._figures.close()
        if self.seat is not None:
            await self.seat.close()

    async def _others(self) -> Sequence[bytes]:
        return () if self._figures is None else await self._figures.others()


def _drain(models: Sequence[ServedModel], worker: str, on: bool) -> None:  # noqa: FBT001
    drain_worker(models, worker, on=on)
