"""`bench overhead --profile`, scheduling: cost of binding and queueing with a scheduler.

One request at a time passes the shipped stages, hot: its prefix is looked up, a job is made and
placed, gets a first token and ends. Prompts are 2 KB of a conversation that grows.
"""

import time
from collections.abc import Sequence
from math import inf
from typing import Final

import orjson

from bench.common.report import Row
from gateway.fleet.model_runtime import ModelRuntime
from gateway.payload.members import by_name
from gateway.pipeline import bind, estimate, plan
from gateway.pipeline.dispatcher import require
from gateway.records.endpoint import CHAT
from gateway.records.estimate import LengthEstimate
from gateway.records.lease import Lease
from gateway.records.request import Principal, RequestHead
from gateway.settings import parse
from gateway.wiring.models import served_model

_OWNER: Final = Principal(entitlement="e", tenant="t")
_LEASE: Final = Lease(
    id="l", model="m", entitlement="e", pool=0, spilled=False, cost_tokens=600, sequences=1
)
_REQUESTS: Final = 400
_ROUNDS: Final = 7


def scheduling_rows() -> list[Row]:
    """CPU-us of one request's binding and queueing, by policy and number of workers."""
    rows = []
    for workers in (4, 256):
        plain = _spent_us("least-loaded", workers, shadow=False)["bind"]
        rows.append(Row(metric=f"7 bind, least-loaded, {workers} workers, us", measured=plain))
        for rate_per_s in (100, 1000):
            shadow = _spent_us("least-loaded", workers, shadow=True, rate_per_s=rate_per_s)
            note = ", ".join(f"{part} {us:.1f}" for part, us in shadow.items())
            metric = f"quartz in its shadow, {workers} workers, {rate_per_s}/s, all parts, us"
            rows.append(Row(metric=metric, measured=sum(shadow.values()) - plain, note=note))
        spent = _spent_us("quartz", workers, shadow=False)
        name = f"quartz, {workers} workers, us"
        rows.append(Row(metric=f"7 bind + 8 queue, {name}", measured=spent["bind"]))
        rows.append(Row(metric=f"3 prefix look-up, {name}", measured=spent["look"]))
        rows.append(Row(metric=f"9 prefix kept, {name}", measured=spent["keep"]))
        rows.append(Row(metric=f"9 first token learned, {name}", measured=spent["learn"]))
    return rows


def _spent_us(
    policy: str, workers: int, *, shadow: bool, rate_per_s: int = 100
) -> dict[str, float]:
    """Least over rounds of the mean cost of a request, by part."""
    served = _served(policy, workers, shadow=shadow)
    bodies = _bodies()
    lengths = estimate.estimate(served, CHAT, _FACTS, _OWNER)
    found: dict[str, float] = {}
    now_s = 0.0
    for _ in range(_ROUNDS):
        spent = dict.fromkeys(("look", "bind", "keep", "learn"), 0.0)
        for body in bodies:
            now_s += 1 / rate_per_s
            _one(served, lengths, now_s, body, spent)
        for part, seconds in spent.items():
            found[part] = min(found.get(part, inf), seconds / len(bodies) * 1e6)
    return found


def _one(
    served: ModelRuntime,
    lengths: LengthEstimate,
    now_s: float,
    body: bytes,
    spent: dict[str, float],
) -> None:
    clock = time.thread_time
    members = by_name(body)  # which stage 2 has found
    begin_s = clock()
    if not served.scheduling.schedulers:
        bind.bind(served, (0,), (), now_s)
        spent["bind"] += clock() - begin_s
        return
    scheduler = served.scheduling.schedulers[0]
    assert scheduler is not None
    prefix = plan.look_up(
        served.scheduling, CHAT, _OWNER, _FACTS, members, lengths.input_tokens_total
    )
    looked_s = clock()
    job = bind.job_of(served, _OWNER, _FACTS, lengths, _LEASE, now_s)
    bind.place(served, (0,), (), now_s, None, job, prefix)
    bind.binding_of(served.fleet, 0, job)
    bound_s = clock()
    points = prefix.points
    tokens_per_byte = job.prompt_tokens / points[-1][0]
    require(served.scheduling.prefixes[0]).insert(points, job.worker, tokens_per_byte)
    kept_s = clock()
    scheduler.first_token(job, now_s + 0.002)
    scheduler.finished(job, now_s + 0.004)
    spent["learn"] += clock() - kept_s
    spent["keep"] += kept_s - bound_s
    spent["bind"] += bound_s - looked_s
    spent["look"] += looked_s - begin_s


_FACTS: Final = estimate.read(
    CHAT,
    b'{"model":"m","stream":true,"messages":[{"role":"user","content":"%b"}]}' % (b"word " * 400),
    RequestHead(),
)


def _served(policy: str, workers: int, *, shadow: bool) -> ModelRuntime:
    urls = ", ".join(f'"http://w{number}:1"' for number in range(workers))
    config = parse(
        f"""version: 1
models:
  - name: m
    scheduling: {{policy: {policy}, shadow: {str(shadow).lower()}}}
    pools:
      main: {{max_model_len: 8192, max_num_seqs: 128, workers: [{urls}]}}
""",
        "scheduling.yaml",
        {},
    )
    return served_model(config, config.models[0])


def _bodies() -> Sequence[bytes]:
    """Conversations of about 2 KB that share a system prompt and grow by turns."""
    sentence = "The river rose in the night and by morning the lower road was gone. "
    found = []
    for number in range(_REQUESTS // 4):
        told = [{"role": "system", "content": sentence * 6}]
        for turn in range(4):
            told.append({"role": "user", "content": f"{number} {turn} " + sentence * 4})
            found.append(orjson.dumps({"model": "m", "stream": True, "messages": told}))
            told.append({"role": "assistant", "content": sentence * 2})
    return found
