"""What several gateways of `scheduling` tell one another."""

from collections import deque
from collections.abc import Sequence

from gateway.policy.quartz import Quartz
from simulator.experiments.scheduling_records import Gateway


def merge(gateways: Sequence[Gateway], now_s: float) -> None:
    """What gateways tell one another every second: what they learned, assigned and sent."""
    learned = {str(i): g.predictor.state() for i, g in enumerate(gateways) if g.predictor}
    states = {
        str(i): g.scheduler.state()
        for i, g in enumerate(gateways)
        if isinstance(g.scheduler, Quartz)
    }
    told = {str(i): g.news.tell() for i, g in enumerate(gateways)}
    for i, gateway in enumerate(gateways):
        name = str(i)
        if gateway.predictor is not None:
            gateway.predictor.merge({k: v for k, v in learned.items() if k != name})
        if isinstance(gateway.scheduler, Quartz):
            gateway.scheduler.merge({k: v for k, v in states.items() if k != name}, now_s)
        if gateway.prefixes is not None and gateway.tells_prefixes:
            others = {k: v for k, v in told.items() if k != name}
            deque(gateway.news.hear(others, gateway.prefixes), maxlen=0)
