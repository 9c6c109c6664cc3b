"""Options of `sluice simulate`, checked and made ready to run."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from gateway.settings import Config, ModelConfig
from planner.errors import PlanError
from planner.profile import NodeProfile
from planner.workload.workload import Workload
from simulator.fleet.fleet import FleetSpec, Outage, outages
from simulator.fleet.traffic import Traffic
from simulator.pipeline.records import Gateway, TenantTraffic
from sluice.simulated.fleet import Arrivals, Counting, Stream, fleet_of, fleet_of_model, traffic_of
from sluice.simulated.gateway import gateway_of, tenant_traffic, tenants_of
from sluice.simulated.recorded import RecordedTraffic, read_recorded, scaled

DEFAULT_REQUESTS = 100_000
DEFAULT_WINDOW_TOKENS = 65_536


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """The command line's options; times in the units of its flags."""

    source: str
    """Source of the workload."""
    fields: str | None
    workload: Workload
    node: NodeProfile
    config: Config | None
    served: ModelConfig | None
    """A sluice.yaml and one of its models, instead of `fleet`."""
    fleet: str | None
    b_short: str
    gamma: float
    pc: float
    spill_queue: int | None
    counting: Counting
    dispatch: str | None
    window_tokens: int | None
    rate: float | None
    requests: int | None
    duration_s: float | None
    arrivals: Arrivals
    cv: float
    peak: float
    burst_share: float
    burst_s: float
    mtbf_h: float | None
    repair_s: float
    seed: int


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet, its traffic, and the outages of its nodes."""

    spec: FleetSpec
    traffic: Traffic
    failures: Sequence[Outage]
    gateway: Gateway | None = None
    """The gateway of a sluice.yaml; None for a fleet of the command line."""
    requests: TenantTraffic | None = None
    """What that gateway is sent."""
    tenants_said: str = ""
    """What the tenants' shares of the traffic come from."""


def p_c_of(workload: Workload, given: float | None, gamma: float) -> float:
    """The share of prompts in the compression window that are cut: 0 where it is not known.

    Raises PlanError if a gamma asks for it.
    """
    if given is not None:
        return given
    if workload.compressible is None and gamma <= 1:
        return 0.0
    if workload.compressible is None:
        raise PlanError(
            "p_c, the share of prompts above a boundary that can be cut, is not known",
            "give --pc, or the log of a gateway that compresses",
        )
    return workload.compressible.share


def prepare(asked: Scenario) -> Ready:
    """Draw the traffic and build the fleet; PlanError says what to change."""
    spec = _fleet(asked)
    random = np.random.default_rng(asked.seed)
    recorded = _recorded(asked)
    if recorded is None:
        requests = traffic_of(asked.workload, _stream(asked), random)
    else:
        requests = Traffic(
            arrival_s=scaled(recorded, Path(asked.source).name, asked.rate),
            prompt_tokens=recorded.prompts,
            output_tokens=recorded.answers,
        )
    ready = Ready(spec=spec, traffic=requests, failures=_failures(asked, spec, requests, random))
    if asked.config is None or asked.served is None:
        return ready
    gateway = gateway_of(
        asked.config, asked.served, asked.node, counting=asked.counting, compressible=asked.pc
    )
    tenants = tenants_of(gateway.entitlements, asked.workload)
    return msgspec.structs.replace(
        ready,
        gateway=gateway,
        requests=tenant_traffic(requests, tenants, random, recorded),
        tenants_said=tenants.said,
    )


def _fleet(asked: Scenario) -> FleetSpec:
    if (asked.served is None) == (asked.fleet is None):
        raise PlanError(
            "a fleet is needed, once", "give --fleet with --b-short, or --config sluice.yaml"
        )
    if asked.served is not None:
        if asked.dispatch is not None:
            raise PlanError(
                f"--dispatch {asked.dispatch} beside a file",
                "state scheduling.policy in the file, which is what is simulated",
            )
        return fleet_of_model(
            asked.served,
            asked.node,
            counting=asked.counting,
            compressible=asked.pc,
        )
    # 65,536 tokens, or the power of two that holds the longest request.
    window = max(DEFAULT_WINDOW_TOKENS, 1 << (asked.workload.longest_tokens - 1).bit_length())
    return fleet_of(
        asked.fleet or "",
        asked.b_short,
        asked.node,
        window_tokens=asked.window_tokens or window,
        counting=asked.counting,
        gamma=asked.gamma,
        compressible=asked.pc,
        dispatch=asked.dispatch or "least-loaded",
        spill_queue=asked.spill_queue,
    )


def _recorded(asked: Scenario) -> RecordedTraffic | None:
    if asked.arrivals != "recorded":
        return None
    if asked.duration_s is not None:
        raise PlanError("a recording has its own length", "give --requests, or nothing")
    return read_recorded(Path(asked.source), fields=asked.fields, requests=asked.requests)


def _stream(asked: Scenario) -> Stream:
    rate = asked.workload.rate_per_s if asked.rate is None else asked.rate
    if rate is None or not rate > 0:
        raise PlanError("no rate of arrivals", "give --rate above 0, in requests/s")
    count = asked.requests or DEFAULT_REQUESTS
    if asked.duration_s is not None:
        if asked.requests is not None or not asked.duration_s > 0:
            raise PlanError(
                f"--duration {asked.duration_s:g}",
                "give seconds above 0, and --requests or --duration but not both",
            )
        count = max(1, round(asked.duration_s * rate))
    return Stream(
        arrivals=asked.arrivals,
        rate_per_s=rate,
        requests=count,
        cv=asked.cv,
        peak=asked.peak,
        burst_share=asked.burst_share,
        burst_s=asked.burst_s,
    )


def _failures(
    asked: Scenario, spec: FleetSpec, requests: Traffic, random: np.random.Generator
) -> Sequence[Outage]:
    if asked.mtbf_h is None:
        return ()
    if not (asked.mtbf_h > 0 and asked.repair_s > 0):
        raise PlanError(
            f"--mtbf-h {asked.mtbf_h:g} --repair-s {asked.repair_s:g}", "give times above 0"
        )
    last_s = float(requests.arrival_s[-1])
    return outages(spec, last_s, mtbf_s=3600 * asked.mtbf_h, repair_s=asked.repair_s, random=random)
