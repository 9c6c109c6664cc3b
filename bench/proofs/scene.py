"""The scene of `bench proofs`: a configuration, a demand, and changes of which some break it.

A model with two pools and compression between them, three tenants with promises, and one of class
spot that floods a quarter of the time. The rates of the demand are the same in every cycle, so that
one cycle is a short run, and all of them are the log.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from hashlib import sha256
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec
import orjson
import yaml

from bench.common.fleet import MODEL
from bench.common.raw_client import TimedRequest
from bench.compressor.prompts import english
from simulator.engine.profiles import EngineProfile
from simulator.mock_server import tokenizer

CYCLE_S: Final = 15.0
CYCLES: Final = 8
FLOOD_S: Final = (6.0, 9.5)
"""Of a cycle."""

ENGINE: Final = EngineProfile(
    name="proofs",
    w_s=0.25,
    h_s_per_token=1e-7,
    timing="kv",
    prefill_s_per_token=4e-5,
    max_num_batched_tokens=8192,
    kv_blocks=4096,
    max_model_len=4096,
    max_num_seqs=64,
    prefix_cache_tokens=0,
)
"""A quarter of a second an iteration: beside it, delays of a loaded machine are small."""
_WORDS: Final = (
    *("the", "and", "for", "you", "was", "are", "but", "not", "had", "her", "all", "one"),
    *("out", "day", "get", "has", "how", "man", "new", "now", "old", "see", "two", "way"),
)
"""Of one token, with its space: 4 bytes each, about as many as those of passages."""
_PLACES: Final = {
    **{name: f"model.pools.{name}" for name in ("short", "long")},
    **{name: f"entitlements.{name}" for name in ("chat", "tools", "docs", "batch")},
    "key": "tenants.docs.keys.app",
}
"""What paths of changes begin with."""
_SCENE: Final = Path(__file__).with_name("scene.yaml")


@cache
def _scene() -> Any:
    """The base configuration, and its changes by name."""
    return yaml.safe_load(_SCENE.read_text("utf-8"))


class Mutation(msgspec.Struct, frozen=True):
    """A change of the configuration, or of the rate."""

    name: str
    settings: Mapping[str, Any]

    @property
    def rate(self) -> float:
        """How much faster requests come."""
        return float(self.settings.get("rate", 1.0))

    def config(self) -> dict[str, Any]:
        """The changed configuration."""
        config: dict[str, Any] = deepcopy(_scene()["base"])
        for name, tenant in config["tenants"].items():
            tenant["keys"] = {"app": {"sha256": sha256(f"sk-{name}".encode()).hexdigest()}}
        for given, value in self.settings.items():
            first, dot, rest = given.partition(".")
            *parents, last = f"{_PLACES.get(first, first)}{dot}{rest}".split(".")
            section = config
            for part in parents:
                section = section[part]
            section[last] = value
            if value is None:
                del section[last]
        return config


MUTATIONS: Final = tuple(Mutation(name, settings) for name, settings in _scene()["changes"].items())


def written(config: Mapping[str, Any], urls: Mapping[str, list[str]]) -> str:
    """The configuration as a file has it, before these engines."""
    model = config["model"]
    pools = {name: {**pool, "workers": urls[name]} for name, pool in model["pools"].items()}
    owned = config["entitlements"].items()
    entitled = {name: {**terms, "tenant": name, "model": MODEL} for name, terms in owned}
    tenants = {
        name: {**tenant, "keys": _named(tenant["keys"])}
        for name, tenant in config["tenants"].items()
    }
    file = {name: section for name, section in config.items() if name not in {"model", "rate"}}
    file |= {"models": [{**model, "pools": pools}]}
    file |= {"entitlements": _named(entitled), "tenants": _named(tenants)}
    return yaml.safe_dump(file, sort_keys=False)


def _named(sections: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{**section, "name": name} for name, section in sections.items()]


# -- the demand


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant sends."""

    rate_per_s: float
    flood_per_s: float = 0.0
    """More, during the flood."""
    prompt_tokens: tuple[tuple[int, int], ...]
    """One of these ranges for each request."""
    output_tokens: tuple[int, int] = (4, 8)
    passages: float = 0.0
    """Share of questions over passages, which a compressor may cut."""


LOADS: Final = {
    "chat": Load(rate_per_s=7.5, prompt_tokens=((40, 200),)),
    "tools": Load(rate_per_s=7.5, prompt_tokens=((100, 300),)),
    "docs": Load(
        rate_per_s=7.5, prompt_tokens=((700, 1300),), output_tokens=(6, 10), passages=0.35
    ),
    "batch": Load(
        rate_per_s=3.75, flood_per_s=20, prompt_tokens=((60, 250),), output_tokens=(5, 9)
    ),
}


def demand(cycle: int, repeat: int = 0) -> list[TimedRequest]:
    """The requests of a cycle, from its begin on; passages differ each time it is repeated."""
    asks = [ask for name, load in LOADS.items() for ask in _asks(name, load, cycle, repeat)]
    return sorted(asks, key=lambda ask: ask.at_s)


def busiest(cycle: int) -> int:
    """Most bytes that are asked within two seconds."""
    asks = demand(cycle)
    return max(
        sum(len(ask.body) for ask in asks if 0 <= ask.at_s - first.at_s < 2) for first in asks
    )


def _asks(name: str, load: Load, cycle: int, repeat: int) -> Iterator[TimedRequest]:
    draw, number = Random(f"proofs/{name}/{cycle}"), count()
    steady = _times(draw, load.rate_per_s, 0.0, CYCLE_S)
    for at_s in [*steady, *_times(draw, load.flood_per_s, *FLOOD_S)]:
        output = draw.randint(*load.output_tokens)
        if draw.random() < load.passages:
            first, *others = draw.choice(_passages())
            question = f"Question {repeat:04}.{cycle}.{next(number)}. {first['content']}"
            messages = [{**first, "content": question}, *others]
        else:
            tokens = draw.randint(*draw.choice(load.prompt_tokens))
            messages = [{"role": "user", "content": " ".join(draw.choices(_WORDS, k=tokens))}]
        asked = {"max_tokens": 2 * output, "mock_output_tokens": output, "stream": True}
        body = {"model": MODEL, "messages": messages, **asked}
        yield TimedRequest(at_s=at_s, client=name, body=orjson.dumps(body))


def _times(draw: Random, rate_per_s: float, low_s: float, high_s: float) -> Iterator[float]:
    at_s = low_s
    while rate_per_s and (at_s := at_s + draw.expovariate(rate_per_s)) < high_s:
        yield at_s


@cache
def _passages() -> list[list[dict[str, str]]]:
    """Passages with a question, a little longer than the boundary."""
    cases = [case.messages for case in english((800, 1300))]
    return [m for m in cases if 430 < len(tokenizer.encode_chat(m)) < 570]
