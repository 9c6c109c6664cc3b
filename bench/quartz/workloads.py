"""The QUARTZ paper's workloads, as seeded request streams with exact prefixes.

Section 5.2 names the families but no numbers; the numbers here put four of
`simulator.experiments.scheduling.WORKER` near their knee at the given rates. Prompts consist of
numbered segments (system prompt, passages, turns); a block's hash follows from the segments up to
its end, so equal beginnings have equal hashes.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final
from zlib import crc32

import msgspec
import numpy as np

from simulator.experiments.scheduling import BLOCK_TOKENS, Demand

REQUESTS: Final = 3000
CLIENTS: Final = 28
CHAT_SLO_S: Final = 2.0
LONG_SLO_S: Final = 4.0
MOONCAKE_FILE: Final = "mooncake_conversation_trace.jsonl"
MOONCAKE_BLOCK: Final = 512
HEAVY: Final = "heavy"
"""The client that asks for as much as all others together."""

Segments = tuple[tuple[int, int], ...]
"""(number, tokens) of each part of a prompt."""
Random = np.random.Generator


class StreamShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream is made of."""

    rate: float = 10.0
    """Requests a second."""
    rag: float = 0.45
    """Share of long requests."""
    again: float = 0.35
    """Share of long requests that ask again about the passages of the client's last one."""
    turns: float = 5.0
    """Turns of a conversation, on average."""
    documents: int = 600
    output_factor: float = 1.0
    cap_tokens: int = 1024
    bursts: float = 0.0
    """Short bursts a minute, each of `burst` requests within a second."""
    burst: int = 24
    clients: int = CLIENTS
    heavy: float = 0.0
    """Requests a second of one more client."""
    heavy_rag: float = 0.45


def fresh_segment(number: int, tokens: float) -> tuple[int, int]:
    """A segment that no other prompt of a stream has."""
    return 1_000_000 + number, max(8, int(tokens))


def blocks_of(segments: Segments) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Block hashes, ends of the segments, and tokens of a prompt."""
    hashes: list[int] = []
    ends: list[int] = []
    chain, end, done = 0, 0, 0
    for number, tokens in segments:
        chain = hash((chain, number, tokens))
        end += tokens
        ends.append(end)
        while (done + 1) * BLOCK_TOKENS <= end:
            done += 1
            hashes.append(hash((chain, done)))
    return tuple(hashes), tuple(ends[-5:-1]), end


class _ClientStreams:
    """Conversations and passages of all clients."""

    def __init__(self, shape: StreamShape, random: Random) -> None:
        self.shape, self.random = shape, random
        self.numbers = 1_000_000
        self.talks: dict[str, tuple[Segments, float]] = {}
        self.read: dict[str, Segments] = {}
        self.lengths = np.clip(random.lognormal(6.8, 0.45, shape.documents), 200, 3000).astype(int)
        weights = 1.0 / np.arange(1, shape.documents + 1) ** 0.8
        self.popular = np.cumsum(weights / weights.sum())

    def fresh(self, tokens: float) -> tuple[int, int]:
        self.numbers += 1
        return fresh_segment(self.numbers - 1_000_000, tokens)

    def outputs(self, median: float) -> int:
        drawn = self.random.lognormal(np.log(median), 0.6) * self.shape.output_factor
        return int(min(max(8, drawn), self.shape.cap_tokens))

    def chat(self, client: str, now_s: float) -> Demand:
        talk, ready_s = self.talks.get(client, ((), 0.0))
        if not talk or ready_s > now_s or self.random.random() < 1 / self.shape.turns:
            talk = ((crc32(client.encode()) % 4, 350), self.fresh(20))
        question = self.fresh(self.random.lognormal(4.6, 0.8))
        output = self.outputs(180)
        segments = (*talk, question)
        self.talks[client] = ((*segments, self.fresh(output)), now_s + 1.0)
        return demand(now_s, client, segments, output, self.shape, CHAT_SLO_S, "chat")

    def rag(self, client: str, now_s: float) -> Demand:
        passages = self.read.get(client)
        if passages is None or self.random.random() >= self.shape.again:
            count = int(self.random.integers(3, 9))
            picks = np.searchsorted(self.popular, self.random.random(count))
            passages = tuple((10 + int(p), int(self.lengths[p])) for p in picks)
            self.read[client] = passages
        question = self.fresh(self.random.lognormal(4.0, 0.5))
        segments = ((5, 250), *passages, question)
        return demand(now_s, client, segments, self.outputs(150), self.shape, LONG_SLO_S, "rag")


def demand(
    now_s: float,
    client: str,
    segments: Segments,
    output: int,
    shape: StreamShape,
    slo_s: float,
    kind: str,
) -> Demand:
    """A request of these segments."""
    hashes, ends, tokens = blocks_of(segments)
    return Demand(
        arrival_s=now_s,
        client=client,
        prompt_tokens=tokens,
        output_tokens=output,
        cap_tokens=shape.cap_tokens,
        slo_s=slo_s,
        kind=kind,
        blocks=hashes,
        ends_tokens=ends,
    )


def mixed(seed: int, shape: StreamShape, requests: int = REQUESTS) -> list[Demand]:
    """Chat and RAG of 28 clients; with `rag` 0 or 1, one of them alone."""
    random = np.random.default_rng([seed, 7])
    stream = _ClientStreams(shape, random)
    arrivals = [
        (t, f"client-{random.integers(shape.clients)}") for t in times_of(shape, random, requests)
    ]
    if shape.heavy:
        count = int(shape.heavy * arrivals[-1][0])
        more = np.sort(random.random(count)) * arrivals[-1][0]
        arrivals = sorted(arrivals + [(float(t), HEAVY) for t in more])
    return [
        stream.rag(client, now_s)
        if random.random() < (shape.heavy_rag if client == HEAVY else shape.rag)
        else stream.chat(client, now_s)
        for now_s, client in arrivals
    ]


def times_of(shape: StreamShape, random: Random, requests: int) -> list[float]:
    """Poisson arrivals, a part of them moved into bursts."""
    span_s = requests / shape.rate
    bursts = int(shape.bursts * span_s / 60)
    in_bursts = bursts * shape.burst
    calm = random.random(requests - in_bursts) * span_s
    starts = random.random(bursts) * span_s
    sharp = (starts[:, None] + random.random((bursts, shape.burst))).ravel()
    return np.sort(np.concatenate([calm, sharp])).tolist()  # type: ignore[no-any-return]


def structured(
    seed: int, rate: float, requests: int = REQUESTS, clients: int = CLIENTS
) -> list[Demand]:
    """Shared prefixes under control: 40 templates of 3,000 tokens, a short rest each."""
    random = np.random.default_rng([seed, 11])
    shape = StreamShape(rate=rate)
    stream = _ClientStreams(shape, random)
    out = []
    for now_s in times_of(shape, random, requests):
        template = int(random.zipf(1.4)) % 40
        segments = ((900 + template, 3000), stream.fresh(random.lognormal(5.5, 0.7)))
        client = f"client-{random.integers(clients)}"
        out.append(
            demand(now_s, client, segments, stream.outputs(150), shape, CHAT_SLO_S, "structured")
        )
    return out


def agents(
    seed: int, rate: float, requests: int = REQUESTS, clients: int = CLIENTS
) -> list[Demand]:
    """Agents: 20 turns that grow to 30,000 tokens, four fifths of each prompt seen before."""
    random = np.random.default_rng([seed, 13])
    shape = StreamShape(rate=rate, cap_tokens=2048)
    stream = _ClientStreams(shape, random)
    live: list[tuple[str, Segments, float]] = []
    out: list[Demand] = []
    started = 0
    for now_s in times_of(shape, random, requests):
        ready = [i for i, (_, talk, at_s) in enumerate(live) if at_s <= now_s]
        if ready and len(live) >= clients:
            i = ready[int(random.integers(len(ready)))]
            client, talk, _ = live.pop(i)
        else:
            started += 1
            client, talk = f"agent-{started % clients}", ((started % 3, 4000), stream.fresh(2000))
        # What is new is a fifth of the prompt at first, and never less than a tool's output.
        held = sum(tokens for _, tokens in talk)
        new = stream.fresh(min(held / 4, 1500) * random.uniform(0.5, 1.5))
        talk = (*talk, new)
        output = stream.outputs(120)
        out.append(demand(now_s, client, talk, output, shape, LONG_SLO_S, "agent"))
        if len(talk) < 2 + 2 * 20 and held < 30_000:
            live.append((client, (*talk, stream.fresh(output)), now_s + random.exponential(8.0)))
    return out


def mooncake(seed: int, rate: float, data: Path | None, requests: int = REQUESTS) -> list[Demand]:
    """Requests of the Mooncake trace at this rate, or of a stream like it without `data`.

    Prompts are cut to a fourth: the trace's mean is 12,000 tokens, served by larger fleets.
    """
    random = np.random.default_rng([seed, 17])
    shape = StreamShape(rate=rate, cap_tokens=2048)
    if data is not None and (data / MOONCAKE_FILE).is_file():
        rows = _trace(data / MOONCAKE_FILE, seed, requests)
    else:
        rows = _like_mooncake(random, requests)
    out = []
    for now_s, (prompt, output, ids) in zip(times_of(shape, random, requests), rows, strict=True):
        size = MOONCAKE_BLOCK // 4
        segments: Segments = tuple((int(i), size) for i in ids[:-1])
        rest = max(1, prompt // 4 - size * len(segments))
        segments = (*segments, (int(ids[-1]), rest))
        client = f"client-{ids[min(1, len(ids) - 1)] % CLIENTS}"
        slo_s = CHAT_SLO_S if prompt < 4 * 2000 else LONG_SLO_S
        out.append(demand(now_s, client, segments, max(1, output), shape, slo_s, "mooncake"))
    return out


def _trace(file: Path, seed: int, requests: int) -> list[tuple[int, int, Sequence[int]]]:
    lines = file.read_text("utf-8").splitlines()
    first = (seed * requests) % max(1, len(lines) - requests)
    rows = [json.loads(line) for line in lines[first : first + requests]]
    return [(r["input_length"], r["output_length"], r["hash_ids"]) for r in rows]


def _like_mooncake(random: Random, requests: int) -> list[tuple[int, int, Sequence[int]]]:
    """Half of the requests go on with an earlier prompt; lengths are log-normal."""
    rows: list[tuple[int, int, Sequence[int]]] = []
    number = 1
    for _ in range(requests):
        prompt = int(np.clip(random.lognormal(8.9, 1.0), 600, 120_000))
        held: Sequence[int] = (0,)
        if rows and random.random() < 0.5:
            held = rows[max(0, len(rows) - 1 - int(random.exponential(300)))][2][:-1] or (0,)
            prompt = max(prompt, MOONCAKE_BLOCK * (len(held) + 1))
        fresh = max(1, -(-prompt // MOONCAKE_BLOCK) - len(held))
        ids = (*held, *range(number, number + fresh))
        number += fresh
        rows.append((prompt, int(np.clip(random.lognormal(5.6, 0.7), 16, 2000)), ids))
    return rows


MIXED: Final = StreamShape()
BURSTY: Final = StreamShape(rate=9.0, bursts=6.0)

Workload = Callable[[int], list[Demand]]
"""From a seed."""


def workloads(data: Path | None = None) -> dict[str, Workload]:
    """All streams of the bench, by name."""

    def of(shape: StreamShape) -> Workload:
        return lambda seed: mixed(seed, shape)

    replace = msgspec.structs.replace
    return {
        "Chat": of(StreamShape(rate=30.0, rag=0.0)),
        "RAG": of(StreamShape(rate=6.0, rag=1.0)),
        "Structured Prefix-Reuse": lambda seed: structured(seed, 26.0),
        "Mixed": of(MIXED),
        "Mixed Bursty": of(BURSTY),
        "More RAG": of(replace(MIXED, rag=0.6, rate=8.0)),
        "Low Reuse": of(replace(MIXED, rate=8.5, again=0.0, turns=1.0, documents=20_000)),
        "Large Budget": of(replace(MIXED, rate=7.0, output_factor=3.0, cap_tokens=4096)),
        "Mooncake": lambda seed: mooncake(seed, 7.0, data),
        "Agents": lambda seed: agents(seed, 3.0),
    }
