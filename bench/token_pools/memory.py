"""KV cache: clients that ask for 32,768 tokens and get near 1,000, in a pool of 32 slots, 40 GiB.

Reserving the requested lengths fills the cache with unused room and leaves most slots idle.
Reserving L_in + min(cap, q_out), with q_out the shipped estimator's .95 quantile, lets the slots
be used. A stream that exceeds its reserve has it extended by 256 tokens once a second, as in the
gateway, and admission sees that. Rows state how far reserves and use exceed the capacity.

Targets are what admission can promise: it lets a request in beyond the capacity only if it outranks
somebody, and then up to an eighth beyond. (Here the tenant outranks itself, as its bursts go up and
down.) Extensions come on top of that and are never refused, because the streams run already: how
far they go depends on how much longer the answers are than was learned, and is shown without a
target. That the engine's use stays within its cache is the engine's doing: it preempts.
"""

from collections.abc import Iterator
from math import exp, log
from random import Random
from statistics import mean

import msgspec

from bench.common.report import Bar, Row, at_least, at_most, no_bar
from bench.token_pools.lab import AdmittedJob, Lab, RefusedJob
from gateway.admission import admission
from gateway.admission.terms import Terms
from gateway.estimate.learners import OutputLengths
from gateway.records.entitlement import Entitlement
from simulator.engine.engine import EngineProfile

SLOTS = 32
KV_BYTES = 40 << 30
BYTES_PER_TOKEN = 2 * 32 * 8 * 128 * 2
"""Llama-3-8B: 2 x layers x KV heads x head dimension x bytes."""
CAP = 32_768
ASKED_SLOTS = 28
EXTENSION_TOKENS = 256
_KV_TOKENS = KV_BYTES // BYTES_PER_TOKEN
_THREADS = 64
_LENGTH_S = 400.0
_WARM_S = 100.0
_TAIL, _TAIL_TOKENS = 0.02, 6_000
"""One answer in fifty is far longer than q_out."""


class Use(msgspec.Struct, kw_only=True):
    """One way of reserving, one seed; shares of the pool's KV."""

    slots: float
    reserved: float
    used: float
    most_reserved: float
    most_at_entry: float
    """Right after a request entered."""
    most_used: float
    extended: int
    preemptions: int
    answers: int


class Clients:
    """Closed-loop clients that wait as told."""

    def __init__(self, lab: Lab, seed: int, *, learn: bool) -> None:
        self.lab, self.learn = lab, learn
        self.extended = 0
        self.times = 1
        self._draw = Random(f"memory/{seed}")
        self._lengths = OutputLengths()

    def ask(self) -> None:
        """A new request."""
        draw = self._draw
        output = round(self.times * exp(draw.gauss(log(1_000), 0.25)))
        if draw.random() < _TAIL:
            output = _TAIL_TOKENS
        self._send(draw.randint(4_000, 12_000), output)

    def _send(self, prompt: int, output: int) -> None:
        expected = self._lengths.expected("chat", "prose", "t") if self.learn else CAP
        refused: RefusedJob | None = self.lab.offer(
            "tenant",
            prompt,
            output,
            reserve_tokens=prompt + min(CAP, expected),
            kv_bytes_per_token=BYTES_PER_TOKEN,
            done=self._answered,
        )
        if refused is not None:
            self.lab.at(self.lab.now_s + refused.retry_after_s, lambda: self._send(prompt, output))

    def _answered(self, job: AdmittedJob) -> None:
        self._lengths.add("chat", "prose", "t", job.emitted, cut=False)
        self.lab.at(self.lab.now_s, self.ask)

    def grow(self) -> None:
        """From now on answers are three times as long."""
        self.times = 3

    def extend(self) -> None:
        """Reserve more for streams past their reserve; and again in a second."""
        token_pool = self.lab.token_pool
        assert token_pool is not None
        for job in self.lab.live.values():
            used = job.prompt_tokens + job.emitted
            if used > job.reserved_tokens:
                job.reserved_tokens = used + EXTENSION_TOKENS
                kv_bytes = job.reserved_tokens * BYTES_PER_TOKEN
                admission.resize(token_pool, job.id, job.reserved_tokens, kv_bytes, self.lab.unix_s)
                self.extended += 1
        self.lab.at(self.lab.now_s + 1.0, self.extend)


def experiment(seed: int, *, learn: bool, grows: bool = False, length_s: float = _LENGTH_S) -> Use:
    """Reserve what is expected (`learn`) or what was asked for.

    `grows`: halfway all answers become three times as long as was learned.
    """
    tenant = Entitlement(name="tenant", model="m", baseline=(SLOTS,), created=1)
    terms = Terms(slots=(SLOTS,), kv_bytes=(KV_BYTES,))
    profile = EngineProfile(
        name="kv",
        kv_blocks=_KV_TOKENS // 16,
        max_model_len=65_536,
        max_num_seqs=SLOTS,
        prefix_cache_tokens=0,
    )
    lab = Lab(terms, [profile], seed, tenants=[tenant], every_token=True)
    clients = Clients(lab, seed, learn=learn)
    for _ in range(_THREADS):
        lab.at(lab.random.uniform(0, 5), clients.ask)
    lab.at(1.0, clients.extend)
    if grows:
        lab.at(length_s / 2, clients.grow)
    lab.run(length_s)
    warm = [s for s in lab.samples if s.at_s >= min(_WARM_S, length_s / 2)]
    reserved = [s.kv_bytes / KV_BYTES for s in warm]
    return Use(
        slots=mean(s.running for s in warm),
        reserved=mean(reserved),
        used=mean(s.kv_used for s in warm),
        most_reserved=max(reserved),
        most_at_entry=lab.most_kv_at_entry / KV_BYTES,
        most_used=max(s.kv_used for s in warm),
        extended=clients.extended,
        preemptions=lab.engines[0].preemptions_total,
        answers=sum(j.done_s >= 0 for j in lab.jobs),
    )


def rows(seeds: range, bar: Bar = no_bar) -> list[Row]:
    """Both ways of reserving, and answers that grow."""
    step = bar("memory", 3 * len(seeds))
    ways: list[list[Use]] = []
    for learn, grows in ((False, False), (True, False), (True, True)):
        ways.append([])
        for seed in seeds:
            ways[-1].append(experiment(seed, learn=learn, grows=grows))
            step()
    cap, ours, grown = ways
    name = "KV, reserve of L_in + min(cap, q_out)"
    worst, most = min(u.slots for u in ours), max(u.most_used for u in ours)
    times = sum(u.answers for u in ours) / sum(u.answers for u in cap)
    preempted = f"engine preemptions: {sum(u.preemptions for u in ours)}"
    metric = f"{name}: slots in use of {SLOTS}, worst seed"
    return [
        Row(
            f"KV, reserve of the cap: slots in use of {SLOTS}",
            *(mean(u.slots for u in cap), _used(cap)),
        ),
        at_least(metric, worst, ASKED_SLOTS, _used(ours)),
        Row(f"{name}: answers, times those with the cap", times),
        *_reserved(name, ours),
        at_most(f"{name}: most used, share of KV", most, 1.0, preempted),
        *_reserved("KV, answers suddenly three times as long", grown),
    ]


def _used(found: list[Use]) -> str:
    reserved, used = mean(u.reserved for u in found), mean(u.used for u in found)
    return f"{100 * reserved:.0f} % of KV reserved, {100 * used:.0f} % used"


def _reserved(name: str, found: list[Use]) -> Iterator[Row]:
    metric, entry = f"{name}: most reserved when a request entered, share of KV", 1.125
    note = f"{mean(u.slots for u in found):.1f} slots in use"
    yield at_most(metric, max(u.most_at_entry for u in found), entry, note)
    note = (
        f"extended {sum(u.extended for u in found)} times by {EXTENSION_TOKENS} tokens; "
        f"engine preemptions: {sum(u.preemptions for u in found)}"
    )
    yield Row(f"{name}: most reserved, share of KV", max(u.most_reserved for u in found), note)
