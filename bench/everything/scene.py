"""The scene of `bench everything`: seven engine workers, four tenants, one mixed trace.

Three engines are workers of their own; a fourth has four data-parallel ranks behind its barrier.
Chat is short and interactive, retrieval has prompts just above the boundary, agents have long ones,
and a spot tenant floods the middle third of the trace with batch work.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from random import Random
from typing import Any, Final

import msgspec
import numpy as np
import orjson

from bench.common.fleet import MODEL
from bench.common.texts import document
from bench.compressor.prompts import english
from simulator.engine.profiles import EngineProfile
from simulator.fleet.traffic import Floats
from simulator.mock_server import tokenizer

REPLICAS: Final = 3
RANKS: Final = 4
SLOTS: Final = 8
"""Of each worker."""
WINDOW_TOKENS: Final = 16_384
BOUNDARY_TOKENS: Final = 1536

ENGINE: Final = EngineProfile(
    name="everything",
    w_s=0.03,
    h_s_per_token=1e-6,
    timing="kv",
    prefill_s_per_token=1 / 5000,
    max_num_batched_tokens=2048,
    kv_blocks=4096,
    max_model_len=WINDOW_TOKENS,
    max_num_seqs=SLOTS,
    prefix_cache_tokens=0,
)
"""30 ms an iteration and 5,000 prompt tokens a second; no prefix cache, which the simulation of
whole gateways does not have either."""


class TenantLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant of the trace."""

    name: str
    service_class: str
    slo_ms: int
    concurrency: tuple[int, int]
    """Its baseline in the short pool and in the long one; zeros for none."""
    rate_per_s: float
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    floods: bool = False
    """Whether all of it comes in the middle third."""


TENANTS: Final = (
    TenantLoad(
        name="chat",
        service_class="guaranteed",
        slo_ms=600,
        concurrency=(16, 1),
        rate_per_s=4.0,
        prompt_tokens=(60, 400),
        output_tokens=(20, 60),
    ),
    TenantLoad(
        name="retrieval",
        service_class="elastic",
        slo_ms=1500,
        concurrency=(4, 4),
        rate_per_s=1.2,
        prompt_tokens=(1300, 1900),
        output_tokens=(20, 60),
    ),
    TenantLoad(
        name="agents",
        service_class="elastic",
        slo_ms=4000,
        concurrency=(0, 8),
        rate_per_s=0.5,
        prompt_tokens=(4000, 9000),
        output_tokens=(40, 120),
    ),
    TenantLoad(
        name="batch",
        service_class="spot",
        slo_ms=30_000,
        concurrency=(0, 0),
        rate_per_s=7.0,
        prompt_tokens=(300, 1000),
        output_tokens=(60, 160),
        floods=True,
    ),
)


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of the trace."""

    at_s: float
    tenant: int
    """Index in TENANTS."""
    body: bytes
    prompt_tokens: int
    """By the engine's tokenizer."""
    text_bytes: int
    output_tokens: int
    cap_tokens: int
    """What the client allows: twice what the answer takes."""


def key_of(tenant: str) -> str:
    """The tenant's API key."""
    return f"sk-{tenant}"


def key_hash(tenant: str) -> str:
    """As the configuration has it."""
    return "sha256:" + sha256(key_of(tenant).encode()).hexdigest()


def trace(seconds: float, seed: int = 0) -> list[TraceRequest]:
    """The trace in order of time; the same for a seed."""
    found = [
        request
        for index, tenant in enumerate(TENANTS)
        for request in _requests(index, tenant, seconds, seed)
    ]
    return sorted(found, key=lambda request: request.at_s)


def _requests(index: int, tenant: TenantLoad, seconds: float, seed: int) -> Iterator[TraceRequest]:
    draw = Random(f"everything/{tenant.name}/{seed}")
    low_s, high_s = (seconds / 3, 2 * seconds / 3) if tenant.floods else (0.0, seconds)
    at_s = low_s + draw.expovariate(tenant.rate_per_s)
    while at_s < high_s:
        output = draw.randint(*tenant.output_tokens)
        messages = _messages(tenant, draw)
        asked = {"model": MODEL, "max_tokens": 2 * output, "mock_output_tokens": output}
        asked["stream"] = True
        yield TraceRequest(
            at_s=at_s,
            tenant=index,
            body=orjson.dumps({"messages": messages, **asked}),
            prompt_tokens=len(tokenizer.encode_chat(messages)),
            text_bytes=sum(len(m["content"].encode()) for m in messages),
            output_tokens=output,
            cap_tokens=2 * output,
        )
        at_s += draw.expovariate(tenant.rate_per_s)


def _messages(tenant: TenantLoad, draw: Random) -> list[dict[str, str]]:
    if tenant.name == "retrieval":
        return draw.choice(_retrieval(tenant.prompt_tokens))
    text = document("prose", draw.randint(*tenant.prompt_tokens), draw).text
    return [{"role": "user", "content": text}]


@cache
def _retrieval(tokens: tuple[int, int]) -> list[list[dict[str, str]]]:
    """Passages with a question, of about so many tokens: what compression is for."""
    chars = (4 * tokens[0], 4 * tokens[1])
    return [case.messages for case in english(chars)]


# -- what one run shows, live or simulated


class TenantFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant."""

    attained: float
    """Share of all that it asked with its first token within the SLO."""
    refused: float
    """Share that was not served."""
    p99_ttft_s: float
    """Of what was served."""


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One system on the trace."""

    tenants: tuple[TenantFigures, ...]
    p99_ttft_s: float
    """Of every served request."""
    tokens_per_s: float
    """Prompt and answer tokens of served requests over the whole run."""
    utilisation: float
    """Share of slot-time in use, over the whole run."""
    compressed: int
    lag_s: float = 0.0
    """How late a live mock engine wrote its tokens, P99."""

    @property
    def promised(self) -> float:
        """The least attainment of a tenant that is promised capacity."""
        found = zip(self.tenants, TENANTS, strict=True)
        return min(t.attained for t, tenant in found if tenant.service_class != "spot")


def figures(
    requests: list[TraceRequest],
    ttft_s: Floats,
    *,
    busy_s: float,
    length_s: float,
    workers: int,
    compressed: int,
    lag_s: float = 0.0,
) -> RunFigures:
    """`ttft_s` is NaN for requests that were not served; `busy_s` sums their times in engines."""
    owner = np.array([request.tenant for request in requests])
    tokens = np.array([request.prompt_tokens + request.output_tokens for request in requests])
    served = ~np.isnan(ttft_s)
    return RunFigures(
        tenants=tuple(
            _tenant(ttft_s[owner == index], tenant.slo_ms / 1000)
            for index, tenant in enumerate(TENANTS)
        ),
        p99_ttft_s=_p99(ttft_s[served]),
        tokens_per_s=float(tokens[served].sum()) / length_s,
        utilisation=busy_s / (workers * SLOTS * length_s),
        compressed=compressed,
        lag_s=lag_s,
    )


def _tenant(ttft_s: Floats, slo_s: float) -> TenantFigures:
    served = ttft_s[~np.isnan(ttft_s)]
    return TenantFigures(
        attained=float((served <= slo_s).sum()) / max(1, len(ttft_s)),
        refused=1 - len(served) / max(1, len(ttft_s)),
        p99_ttft_s=_p99(served),
    )


def _p99(values: Floats) -> float:
    return float(np.quantile(values, 0.99)) if len(values) else float("nan")


# -- the configurations of `bench everything`: all on, all off, and all on but one


ALL: Final = "all on"
OFF: Final = "all off"


class Switches(msgspec.Struct, frozen=True, kw_only=True):
    """Which systems are on."""

    pools: bool = True
    """Two pools with a boundary (token-budget routing)."""
    compression: bool = True
    """Prompts above the boundary are compressed below it (FleetOpt)."""
    token_pools: bool = True
    """Entitlements have classes and baselines."""
    quartz: bool = True
    """QUARTZ for engines of their own; else round robin."""
    bfio: bool = True
    """BF-IO for ranks; else round robin."""


SYSTEMS: Final[dict[str, Switches]] = {
    ALL: Switches(),
    "without pools": Switches(pools=False, compression=False, bfio=False),
    "without compression": Switches(compression=False),
    "without token pools": Switches(token_pools=False),
    "without QUARTZ": Switches(quartz=False),
    "without BF-IO": Switches(bfio=False),
    OFF: Switches(pools=False, compression=False, token_pools=False, quartz=False, bfio=False),
}


def config_of(
    switches: Switches, replicas: Sequence[str], ranked: Sequence[str], ranks: int
) -> dict[str, Any]:
    """The configuration, before these engines; `ranked` are URLs of engines with ranks."""
    spread = "quartz" if switches.quartz else "round-robin"
    own = list(replicas)
    grouped: list[Any] = [{"url": url, "ranks": ranks} for url in ranked]
    model: dict[str, Any] = {"name": MODEL, "output_prior_tokens": 128}
    if switches.pools:
        model |= {
            "boundary": {"b_short": BOUNDARY_TOKENS, "gamma": 1.5},
            # Whenever a prompt is in the window: the flood fills the long pool within seconds.
            "compression": {"enabled": switches.compression, "only_when_busy": False},
            "pools": {
                "short": _pool(4 * BOUNDARY_TOKENS, own, spread),
                "long": _pool(WINDOW_TOKENS, grouped, "bfio" if switches.bfio else "round-robin"),
            },
        }
    else:
        model["pools"] = {"all": _pool(WINDOW_TOKENS, [*own, *grouped], spread)}
    return {
        "version": 1,
        "models": [model],
        "entitlements": [_entitlement(tenant, switches) for tenant in TENANTS],
    }


def _pool(window: int, workers: Sequence[Any], policy: str) -> dict[str, Any]:
    return {
        "max_model_len": window,
        "max_num_seqs": SLOTS,
        "workers": list(workers),
        "scheduling": {"policy": policy},
    }


def _entitlement(tenant: TenantLoad, switches: Switches) -> dict[str, Any]:
    """Every tenant has a key; with token pools also what it was promised."""
    found: dict[str, Any] = {
        "name": tenant.name,
        "tenant": tenant.name,
        "model": MODEL,
        "api_keys": [key_hash(tenant.name)],
    }
    if not switches.token_pools:
        return found
    found |= {"service_class": tenant.service_class, "slo_target_ms": tenant.slo_ms}
    short, long = tenant.concurrency
    if not short + long:
        return found
    both = {name: n for name, n in (("short", short), ("long", long)) if n}
    return found | {"concurrency": both if switches.pools else short + long}
