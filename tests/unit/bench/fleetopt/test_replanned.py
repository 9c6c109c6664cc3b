"""A plan from the log of the gateway that an earlier plan configured.

A third of the prompts come to a gateway a little longer than its boundary, and most of them are
cut. A fleet is planned from its log, served by the file that `plan -o` writes, and planned again
from the second log: the same requests must give the same fleet, though engines saw shorter prompts.
The gateways are whole ones in virtual time; p_c is stated nowhere but in their logs.
"""

from typing import Final

import msgspec
import numpy as np

from gateway.records.decision import DECISION_SCHEMA
from planner.goals import Goals
from planner.plan import make_plan
from planner.readers.traces import read_workload
from planner.records import PlanResult, Question
from planner.workload.workload import GRID_TOKENS, Workload, from_lengths
from simulator.fleet.arrivals import poisson
from simulator.fleet.traffic import Traffic, traffic
from simulator.pipeline.records import PipelineOutcome
from simulator.pipeline.run import run_pipeline
from sluice.plan.question import Kinds, make_question
from sluice.plan.through_gateway import planned_gateway
from sluice.simulated.fleet import lengths_of
from sluice.simulated.gateway import tenant_traffic, tenants_of

RATE: Final = 300.0
REQUESTS: Final = 3000
P_C: Final = 0.9


def test_the_second_plan_is_the_first_one() -> None:
    random = np.random.default_rng(7)
    sent = traffic(lengths_of(_workload()), poisson(RATE, REQUESTS, random), random)
    before = Question(
        workload=_workload(),
        goals=Goals(rate_per_s=RATE, ttft_s=5.0),
        compressible=P_C,
        b_short=(4096,),
        gamma=1.5,
        max_cut=0.5,
    )
    first = _plan_from(_log(make_plan(before), sent))
    second = _plan_from(_log(first, sent))
    assert abs(_step(first) - _step(second)) <= 1
    nodes = [{p.name: p.nodes for p in plan.chosen.pools} for plan in (first, second)]
    pools = nodes[0].keys() | nodes[1].keys()
    assert all(abs(nodes[0].get(pool, 0) - nodes[1].get(pool, 0)) <= 1 for pool in pools)


def _workload() -> Workload:
    """Chat, a third around 5,000 tokens, and one prompt in a hundred of up to 30,000."""
    random = np.random.default_rng(1)
    kind = random.random(REQUESTS)
    prompts = np.where(
        kind < 1 / 3,
        random.uniform(4200, 5400, REQUESTS),
        random.lognormal(6.6, 0.7, REQUESTS).clip(20, 3800),
    )
    prompts = np.where(kind > 0.99, random.uniform(8000, 30_000, REQUESTS), prompts)
    answers = random.lognormal(5, 0.6, REQUESTS).clip(1, 600)
    return from_lengths(np.rint(prompts), np.rint(answers), name="a third at 5,000 tokens")


def _plan_from(log: str) -> PlanResult:
    workload = read_workload(log, name="requests.jsonl")
    return make_plan(
        make_question(
            workload, Kinds(), rate=RATE, mode="paged", slo_ttft_ms=5000.0, slo_tpot_ms=None
        )
    )


def _step(plan: PlanResult) -> int:
    """The boundary's place among those that a search tries; one pool has the last."""
    boundaries = plan.chosen.boundaries
    return GRID_TOKENS.index(boundaries[0]) if boundaries else len(GRID_TOKENS)


def _log(plan: PlanResult, sent: Traffic) -> str:
    """The request log of the gateway that the plan configures."""
    # The compressor cuts what it can, whatever the plan thinks of it.
    gateway = msgspec.structs.replace(planned_gateway(plan, "paged"), compressible=P_C)
    random = np.random.default_rng(11)
    shares = tenants_of(gateway.entitlements, None)
    found = run_pipeline(gateway, tenant_traffic(sent, shares, random), seed=3)
    return _lines(found, sent)


def _lines(found: PipelineOutcome, sent: Traffic) -> str:
    fleet, uncut = found.fleet, set(found.uncut)
    lines = []
    for i, reason in enumerate(found.reasons):
        prompt, answer = int(sent.prompt_tokens[i]), int(fleet.output_tokens[i])
        compression: dict[str, object] = {}
        if fleet.compressed[i]:
            compression = {"kept_share": int(fleet.prompt_tokens[i]) / prompt, "when": "any"}
        elif i in uncut:
            compression = {"not_compressed": "category", "when": "any"}
        line = {
            "schema": DECISION_SCHEMA,
            "time_unix_s": float(sent.arrival_s[i]),
            "outcome": "refused" if reason else "ok",
            "status": 429 if reason else 200,
            "model": "m",
            "usage": {"prompt_tokens": int(fleet.prompt_tokens[i]), "completion_tokens": answer},
            "compression": compression,
        }
        lines.append(msgspec.json.encode(line).decode())
    return "\n".join(lines)
