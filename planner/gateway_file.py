"""Write the chosen fleet as the gateway's configuration, sluice.yaml.

Into a file that is given, the fleet goes as a change of one model: its pools, boundary and
compression. Names, aliases, tenants, keys and all else stay as they are written there. Without
one, all that the gateway can do is on: QUARTZ, boundaries that are observed, a token pool with one
entitlement for everybody. Keys come from the environment.

What is planned is what is enabled: compression cuts where gamma is above 1, under the rule
(`when`) that p_c holds for and however full the larger pool is, and nowhere else.

Nodes without a URL get placeholders under `.invalid`, which never resolves. In mode paged a
short pool's window is twice its boundary (at most the whole window): with KV allocated by block,
a wider window costs nothing, and an answer longer than estimated can finish in its pool.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import yaml

from gateway.admission.entitlement_terms import GIB
from gateway.estimate.learners import MAX_TOKENS, bucket_of, upper_edge
from planner.errors import PlanError
from planner.records import PhasesPlan, PlanResult, PoolPlan, Question
from planner.workload.workload import Workload

_OF_ENGINES: Final = {"tls", "gpu_hour", "gpus", "flow_headers"}
"""What prefill takes over from a pool that was without phases."""
_NEW: Final = """\
version: 1
server: {host: 0.0.0.0, admin_key: "${SLUICE_ADMIN_KEY}"}
request_log: {path: sluice-requests.jsonl}
"""


def gateway_file(
    plan: PlanResult,
    workers: Mapping[str, Sequence[str]] | None = None,
    base: str = "",
    model: str = "",
) -> str:
    """YAML that `sluice check` accepts; `workers` maps pools to URLs.

    `base` is a sluice.yaml to change, "" for none; `model` the one of it that was planned. Without
    `models` it is a file of entitlements, and the rest is as if there were no file.
    """
    root = _mapping(yaml.compose(base)) if base else _mapping(None)
    _complete(root, plan, model, everybody=not base)
    models = _items(root, "models")
    named = [m for m in models if _text(m, "name") == _name(plan, model)]
    if not named and len(models) > 1:
        raise PlanError(f"no model is called {_name(plan, model)}", "write its name in the file")
    written = (named or models)[0]
    urls = _workers(plan, _mapping(_get(written, "pools")), workers or {})
    _set_model(written, plan, urls)
    _sum_baselines(root, _text(written, "name"))
    return "\n".join(
        [*_header(plan, urls, own=not base), yaml.serialize(root, allow_unicode=True, width=100)]
    )


def assign_workers(plan: PlanResult, given: Sequence[str]) -> dict[str, list[str]]:
    """Assign each `POOL=URL` to its pool; bare URLs fill the pools in order, up to their nodes."""
    pools = dict(_engines(plan))
    assigned: dict[str, list[str]] = {name: [] for name in pools}
    bare = []
    for text in given:
        name, _, url = text.partition("=")
        if url and name in pools:
            assigned[name].append(url)
        else:
            bare.append(text)
    for name, nodes in pools.items():
        while bare and len(assigned[name]) < nodes:
            assigned[name].append(bare.pop(0))
    if bare and pools:
        assigned[next(reversed(pools))].extend(bare)
    return assigned


def _engines(plan: PlanResult) -> Iterator[tuple[str, int]]:
    """Sets of engines and their nodes: `POOL`, and `POOL/prefill` before it in phases."""
    for pool in plan.chosen.pools:
        if pool.phases is not None:
            yield f"{pool.name}/prefill", pool.phases.prefill_nodes
        yield pool.name, pool.decode_nodes


def _name(plan: PlanResult, model: str) -> str:
    return model or plan.question.workload.model or plan.chosen.pools[0].node.model


def _complete(root: yaml.MappingNode, plan: PlanResult, model: str, *, everybody: bool) -> None:
    """Add what a file must have: all of it where none was given."""
    for key, value in _pairs(_mapping(yaml.compose(_NEW))):
        if _get(root, key) is None and (key == "version" or _get(root, "models") is None):
            _set(root, key, value)
    if _get(root, "models") is None:
        named = {"name": _escaped(_name(plan, model)), "scheduling": {"policy": "quartz"}}
        _set(root, "models", _node([named]))
    if everybody:
        _set(root, "entitlements", _node([_everybody(plan, model)]))


def _set_model(
    model: yaml.MappingNode, plan: PlanResult, urls: Mapping[str, Sequence[yaml.Node]]
) -> None:
    question, fleet = plan.question, plan.chosen
    node = fleet.pools[0].node
    if node.kv_bytes_per_token:
        _set(model, "kv_bytes_per_token", _node(node.kv_bytes_per_token))
    _set(model, "boundary", _boundary(_get(model, "boundary"), plan))
    compression = _mapping(_get(model, "compression"))
    if len(fleet.pools) > 1 and fleet.gamma > 1:
        when = {"when": question.compress_when, "only_when_busy": False}
        _update(compression, {"enabled": True, **when, "max_cut": question.max_cut})
    elif compression.value:
        _update(compression, {"enabled": False})
    if compression.value:
        _set(model, "compression", compression)
    before, pools = _mapping(_get(model, "pools")), _mapping(None)
    for pool in fleet.pools:
        written = _mapping(_get(before, pool.name))
        _set(pools, pool.name, _pool(pool, plan, written, urls))
    _set(model, "pools", pools)


def _boundary(written: yaml.Node | None, plan: PlanResult) -> yaml.MappingNode:
    fleet, boundary = plan.chosen, _mapping(written)
    single = len(fleet.pools) < 2
    gone = ("b_short", "b_short_min", "gamma", "planned", *(("auto", "mode") * single))
    boundary.value = [pair for pair in boundary.value if pair[0].value not in gone]
    if not single:
        b_short = list(fleet.boundaries) if len(fleet.boundaries) > 1 else fleet.boundaries[0]
        _update(boundary, {"b_short": b_short, "gamma": max(fleet.gamma, 1.0)})
        if written is None:
            _update(boundary, {"auto": True, "mode": "observe"})  # enforce lets boundaries move
    _set(boundary, "planned", _node(_planned(plan.question.workload), flow=True))
    return boundary


def _pool(
    pool: PoolPlan,
    plan: PlanResult,
    before: yaml.MappingNode,
    urls: Mapping[str, Sequence[yaml.Node]],
) -> yaml.MappingNode:
    """A pool; what the file says of its engines stays with them, into phases and out of them."""
    window = pool.window_tokens
    if pool.boundary_tokens is not None and plan.question.mode == "paged":
        window = min(2 * window, plan.question.window)
    engines = _mapping(_get(before, "decode") or before)
    figures = _figures(pool, pool.slots_per_node, urls[pool.name])
    if pool.phases is None:
        _update(engines, {"max_model_len": window, **figures})
        _set(engines, "workers", yaml.SequenceNode(_SEQ, list(urls[pool.name])))
        return engines
    engines.value = [pair for pair in engines.value if pair[0].value != "max_model_len"]
    _update(engines, figures)
    _set(engines, "workers", yaml.SequenceNode(_SEQ, list(urls[pool.name])))
    listed = urls[f"{pool.name}/prefill"]
    prefill = _mapping(_get(before, "prefill"))
    if not prefill.value:
        prefill.value = [pair for pair in engines.value if pair[0].value in _OF_ENGINES]
    _update(prefill, _figures(pool, pool.phases.prefill_slots, listed))
    if _get(engines, "tokens_per_second") is not None:  # stated for all engines, or for none
        _update(prefill, {"tokens_per_second": int(pool.phases.prefill_tokens_per_s)})
    _set(prefill, "workers", yaml.SequenceNode(_SEQ, list(listed)))
    transfer = _mapping(_get(before, "transfer"))
    _update(transfer, _transfer(transfer, pool.phases, plan.question))
    phased = _mapping(_node({"max_model_len": window}))
    for key, value in (("prefill", prefill), ("decode", engines), ("transfer", transfer)):
        _set(phased, key, value)
    return phased


def _figures(pool: PoolPlan, slots: int, workers: Sequence[yaml.Node]) -> dict[str, Any]:
    """Slots and KV cache of engines, those of one rank."""
    ranks = _ranks(workers)
    figures: dict[str, Any] = {"max_num_seqs": max(1, slots // ranks)}
    if pool.node.kv_bytes_per_token:
        kv_bytes = pool.node.kv_tokens * pool.node.kv_bytes_per_token
        figures["kv_cache_gib"] = round(kv_bytes / GIB / ranks, 1)
    return figures


def _transfer(written: yaml.MappingNode, phases: PhasesPlan, question: Question) -> dict[str, Any]:
    """The hand-over; vLLM's protocol unless the file names another."""
    return {
        "kind": _text(written, "kind") or "vllm",
        "bytes_per_second": question.transfer_bytes_per_s,
        "skip_below_tokens": phases.skip_below_tokens,
    }


def _ranks(workers: Sequence[yaml.Node]) -> int:
    ranks = (_text(_mapping(worker), "ranks") for worker in workers)
    return max((int(text) for text in ranks if text.isdecimal()), default=1)


def _workers(
    plan: PlanResult, before: yaml.MappingNode, given: Mapping[str, Sequence[str]]
) -> dict[str, list[yaml.Node]]:
    """Workers by pool: those given, else those that the file lists for it or for pools that go."""
    engines = dict(_engines(plan))
    workers = {name: [_node(_escaped(url)) for url in given.get(name, ())] for name in engines}
    spare: list[yaml.Node] = []
    for name, listed in _listed(before):
        if name not in workers:
            spare += [] if any(given.values()) else listed
        elif not workers[name]:
            workers[name] += listed
    for name, nodes in engines.items():
        room = max(0, nodes - len(workers[name]))
        workers[name] += spare[:room]
        del spare[:room]
    workers[plan.chosen.pools[-1].name] += spare
    for name, nodes in engines.items():
        host = name.replace("/", "-")
        workers[name] = workers[name] or [
            _node(f"http://{host}-{i + 1}.invalid:8000") for i in range(nodes)
        ]
    return workers


def _listed(pools: yaml.MappingNode) -> Iterator[tuple[str, list[yaml.Node]]]:
    """The workers that a file lists, by set of engines."""
    for name, pool in _pairs(pools):
        sides = ((f"{name}/prefill", "prefill"), (name, "decode"), (name, ""))
        for engines, key in sides:
            side = _mapping(_get(_mapping(pool), key) if key else pool)
            workers = _get(side, "workers")
            if isinstance(workers, yaml.SequenceNode):
                yield engines, workers.value
            elif workers is not None:
                yield engines, [workers]


def _header(
    plan: PlanResult, urls: Mapping[str, Sequence[yaml.Node]], *, own: bool
) -> Iterator[str]:
    question = plan.question
    goals = question.goals
    yield "# Written by `sluice plan`; check it with `sluice check`, run it with `sluice serve`."
    yield (
        f"# {question.workload.name}, {goals.rate_per_s:g} requests/s, P99 TTFT "
        f"{1000 * goals.ttft_s:g} ms, mode {question.mode}."
    )
    node = {pool.name: pool.node for pool in plan.chosen.pools}
    for name, nodes in _engines(plan):
        count, kind = len(urls[name]), node[name.removesuffix("/prefill")]
        listed = "" if count == nodes else f"; {count} listed"
        yield f"# Pool {name}: {nodes} nodes of {kind.gpus} x {kind.gpu}{listed}."
    if own:
        yield "# Set SLUICE_ADMIN_KEY, and SLUICE_KEY_HASH to what `sluice hash-key` prints."


def _everybody(plan: PlanResult, model: str) -> dict[str, Any]:
    """One tenant with the whole fleet: a start for the tenants that share it."""
    return {
        "name": "everybody",
        "tenant": "everybody",
        "model": _escaped(_name(plan, model)),
        "service_class": "elastic",
        "concurrency": sum(
            pool.decode_nodes * pool.slots_per_node
            + (p.prefill_nodes * p.prefill_slots if (p := pool.phases) else 0)
            for pool in plan.chosen.pools
        ),
        "mode": "observe",  # refusals are counted, not made, until tenants share the fleet
        "api_keys": ["${SLUICE_KEY_HASH}"],
    }


def _planned(workload: Workload) -> list[list[float]]:
    """Planned length distribution, at the same edges that the gateway counts live lengths by."""
    points = plan_points([(edge, workload.share(edge)) for edge in bucket_edges()])
    return [[tokens, round(min(share, 1.0), 4)] for tokens, share in points]


def _sum_baselines(root: yaml.MappingNode, model: str) -> None:
    """A baseline by pool becomes one number: the gateway splits it over the planned pools."""
    for entitlement in _items(root, "entitlements"):
        given = _get(entitlement, "concurrency")
        if isinstance(given, yaml.MappingNode) and _text(entitlement, "model") == model:
            counts = [str(count.value) for _, count in _pairs(given)]
            _set(entitlement, "concurrency", _node(sum(map(int, filter(str.isdecimal, counts)))))


# -- a file as nodes: what is not changed keeps its spelling, references to the environment included

_MAP, _SEQ = "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"


def _node(value: object, *, flow: bool = False) -> yaml.Node:
    return yaml.representer.SafeRepresenter(default_flow_style=flow).represent_data(value)


def _escaped(text: str) -> str:
    return text.replace("${", "$${")


def _mapping(node: yaml.Node | None) -> yaml.MappingNode:
    """A mapping to change: an anchor may hold the same one elsewhere; empty for anything else."""
    given = node.value if isinstance(node, yaml.MappingNode) else []
    return yaml.MappingNode(_MAP, list(given), flow_style=False)


def _pairs(node: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node]]:
    return ((key.value, value) for key, value in node.value)


def _get(node: yaml.MappingNode, key: str) -> yaml.Node | None:
    return next((value for name, value in _pairs(node) if name == key), None)


def _items(node: yaml.MappingNode, key: str) -> list[yaml.MappingNode]:
    sequence = _get(node, key)
    listed = sequence.value if isinstance(sequence, yaml.SequenceNode) else []
    return [item for item in listed if isinstance(item, yaml.MappingNode)]


def _text(node: yaml.MappingNode, key: str) -> str:
    scalar = _get(node, key)
    return str(scalar.value) if isinstance(scalar, yaml.ScalarNode) else ""


def _set(node: yaml.MappingNode, key: str, value: yaml.Node) -> None:
    place = [i for i, (name, _) in enumerate(node.value) if name.value == key]
    if place:
        node.value[place[0]] = (node.value[place[0]][0], value)
    else:
        node.value.append((_node(key), value))
    node.flow_style = False


def _update(node: yaml.MappingNode, given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        _set(node, key, _node(value))


def plan_points(shares: Sequence[tuple[int, float]], most: int = 48) -> list[tuple[int, float]]:
    """Thin (tokens, share) points at bucket edges to about `most` points for a plan.

    A point is kept where the share has grown by 1/most since the last one, and before a jump.
    The distance is then underestimated by at most 1/most.
    """
    points: list[tuple[int, float]] = []
    before: tuple[int, float] | None = None
    for tokens, share in shares:
        last = points[-1][1] if points else 0.0
        if share - last >= 1 / most or share >= 1:
            if before is not None and before[1] > last and share - before[1] >= 1 / most:
                points.append(before)
            points.append((tokens, share))
        if share >= 1:
            break
        before = (tokens, share)
    return points


def bucket_edges() -> list[int]:
    """Upper edges of all buckets in tokens, ascending; `plan_points` takes the shares at them."""
    return sorted({upper_edge(bucket) for bucket in range(bucket_of(MAX_TOKENS) + 1)})
