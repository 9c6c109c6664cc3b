"""Write the chosen fleet as the gateway's configuration, sluice.yaml.

All that the gateway can do is on: QUARTZ, compression where gamma is above 1, boundaries that are
observed, token pools with the entitlements given, else one for everybody. Keys come from the
environment.

Nodes without a URL get placeholders under `.invalid`, which never resolves. In mode paged a
short pool's window is twice its boundary (at most the whole window): with KV allocated by block,
a wider window costs nothing, and an answer longer than estimated can finish in its pool.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from gateway.policy.entitlements.terms import GIB
from gateway.policy.estimate.length_drift import bucket_edges, plan_points
from planner.records import PlanResult, PoolPlan
from planner.workload.workload import Workload

_POINTS_A_LINE: Final = 6


def gateway_file(
    plan: PlanResult,
    workers: Mapping[str, Sequence[str]] | None = None,
    entitlements: Sequence[Mapping[str, Any]] = (),
) -> str:
    """YAML that `sluice check` accepts; `workers` maps pools to URLs.

    `entitlements` are sections of a sluice.yaml, plain values; they get the planned model.
    """
    lines = [*_lines(plan, workers or {}), "entitlements:"]
    if entitlements:
        model = plan.chosen.pools[0].node.model
        # JSON is YAML, too; a dollar sign would be read as a variable.
        texts = (json.dumps({**given, "model": model}) for given in entitlements)
        lines += [f"  - {text.replace('$', '$$')}" for text in texts]
    else:
        lines += _everybody(plan)
    return "\n".join([*lines, ""])


def assign_workers(plan: PlanResult, given: Sequence[str]) -> dict[str, list[str]]:
    """Assign each `POOL=URL` to its pool; bare URLs fill the pools in order, up to their nodes."""
    pools = {pool.name: pool for pool in plan.chosen.pools}
    found: dict[str, list[str]] = {name: [] for name in pools}
    bare = []
    for text in given:
        name, _, url = text.partition("=")
        if url and name in pools:
            found[name].append(url)
        else:
            bare.append(text)
    for name, pool in pools.items():
        while bare and len(found[name]) < pool.nodes:
            found[name].append(bare.pop(0))
    if bare and pools:
        found[next(reversed(pools))].extend(bare)
    return found


def _lines(plan: PlanResult, workers: Mapping[str, Sequence[str]]) -> Iterator[str]:
    question, fleet = plan.question, plan.chosen
    node = fleet.pools[0].node
    goals = question.goals
    yield "# Written by `sluice plan`; check it with `sluice check`, run it with `sluice serve`."
    yield (
        f"# {question.workload.name}, {goals.rate_per_s:g} requests/s, P99 TTFT "
        f"{1000 * goals.ttft_s:g} ms, mode {question.mode}."
    )
    yield "# Set SLUICE_ADMIN_KEY, and SLUICE_KEY_HASH to what `sluice hash-key` prints for a key."
    yield "version: 1"
    yield 'server: {host: 0.0.0.0, admin_key: "${SLUICE_ADMIN_KEY}"}'
    yield "request_log: {path: sluice-requests.jsonl}"
    yield "models:"
    yield f"  - name: {_quoted(node.model)}"
    if node.kv_bytes_per_token:
        yield f"    kv_bytes_per_token: {node.kv_bytes_per_token}"
    yield "    boundary:"
    if len(fleet.pools) > 1:
        listed = ", ".join(map(str, fleet.boundaries))
        b_short = f"[{listed}]" if len(fleet.boundaries) > 1 else listed
        yield f"      b_short: {b_short}"
        yield f"      gamma: {max(fleet.gamma, 1.0):g}"
        yield "      auto: true"
        yield "      mode: observe # enforce lets boundaries move"
    yield from _planned_lines(question.workload)
    if len(fleet.pools) > 1 and fleet.gamma > 1:
        yield f"    compression: {{enabled: true, max_cut: {question.max_cut:g}}}"
    yield "    scheduling: {policy: quartz}"
    yield "    pools:"
    for pool in fleet.pools:
        yield from _pool_lines(pool, plan, workers.get(pool.name, ()))


def _everybody(plan: PlanResult) -> Iterator[str]:
    """One tenant with the whole fleet: a start for the tenants that share it."""
    slots = sum(pool.nodes * pool.slots_per_node for pool in plan.chosen.pools)
    yield "  - name: everybody"
    yield "    tenant: everybody"
    yield f"    model: {_quoted(plan.chosen.pools[0].node.model)}"
    yield "    service_class: elastic"
    yield f"    concurrency: {slots}"
    yield "    mode: observe # refusals are counted, not made; enforce once tenants share the fleet"
    yield '    api_keys: ["${SLUICE_KEY_HASH}"]'


def _planned_lines(workload: Workload) -> Iterator[str]:
    """Planned length distribution, at the same edges that the gateway counts live lengths by."""
    points = plan_points([(edge, workload.share(edge)) for edge in bucket_edges()])
    yield "      planned: # lengths, for sluice_length_drift"
    for start in range(0, len(points), _POINTS_A_LINE):
        row = points[start : start + _POINTS_A_LINE]
        last = "" if start + _POINTS_A_LINE >= len(points) else ","
        listed = ", ".join(f"[{tokens}, {min(share, 1.0):.4f}]" for tokens, share in row)
        yield f"        {'[' if not start else ' '}{listed}{last or ']'}"


def _pool_lines(pool: PoolPlan, plan: PlanResult, urls: Sequence[str]) -> Iterator[str]:
    window = pool.window_tokens
    if pool.boundary_tokens is not None and plan.question.mode == "paged":
        window = min(2 * window, plan.question.window)
    needs = f"{pool.nodes} nodes of {pool.node.gpus} x {pool.node.gpu}"
    short = f"; {len(urls)} given" if urls and len(urls) != pool.nodes else ""
    yield f"      {pool.name}: # {needs}{short}"
    yield f"        max_model_len: {window}"
    yield f"        max_num_seqs: {pool.slots_per_node}"
    if pool.node.kv_bytes_per_token:
        kv_bytes = pool.node.kv_tokens * pool.node.kv_bytes_per_token
        yield f"        kv_cache_gib: {kv_bytes / GIB:.1f}"
    yield "        workers:"
    listed = urls or [f"http://{pool.name}-{i + 1}.invalid:8000" for i in range(pool.nodes)]
    for url in listed:
        yield f"          - {_quoted(url)}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{escaped}"'
