"""One node's timing, KV cache, slots and price; measured profiles win over rooflines."""

import math
from typing import Any, Final

import msgspec

from planner.catalogue import Gpu, Model, gpu_named, model_named
from planner.errors import PlanError

PAPER_WINDOW_TOKENS: Final = 8192
"""The window for which FleetOpt states H; one resident token costs H / 8192."""
HOURS_PER_YEAR: Final = 8760

_DTYPE_BYTES: Final = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
_BANDWIDTH_REACHED: Final = 0.8
"""Share of peak bandwidth that decode kernels reach; an assumption."""
_FLOPS_REACHED: Final = 0.5
"""Share of peak FLOPS that prefill reaches; an assumption."""
_STEP_OVERHEAD_S: Final = 0.002
"""Launches, scheduling and collectives of one iteration; an assumption."""
_MEMORY_USED: Final = 0.9
"""vLLM's default --gpu-memory-utilization."""
_BATCHED_TOKENS: Final = 2048
"""vLLM's default token budget of an iteration, which a single prompt may use up."""
_TOUCHING_SEQUENCES: Final = 64
"""Sequences assumed in an iteration when counting the experts that are read."""


class MeasuredRange(msgspec.Struct, frozen=True, kw_only=True):
    """The loads that a profile was measured on; beyond them it is a guess."""

    longest_prompt_tokens: int
    """Longest prompt that was timed."""
    most_sequences: int
    """Most sequences that ran at once."""


class NodeProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One node: `gpus` accelerators that hold one copy of the model."""

    name: str
    gpu: str
    model: str
    gpus: int
    w_s: float
    """W, seconds every iteration takes; > 0."""
    h_s_per_token: float
    """h, seconds per resident token and iteration; >= 0."""
    prefill_s_per_token: float = 0.0
    """Seconds each prompt token adds to its iteration; >= 0."""
    attention_s_per_pair: float = 0.0
    """Seconds more for each pair of a prompt token and one before it; >= 0."""
    chunk_tokens: int = 512
    """C: prompt tokens of one request in one iteration."""
    kv_tokens: int
    """K: tokens that fit in the node's KV cache."""
    block_tokens: int = 16
    max_num_seqs: int = 256
    """Most sequences that run at once, whatever their length."""
    max_num_batched_tokens: int = 2048
    """Most prompt tokens of one iteration, over all requests."""
    kv_bytes_per_token: int = 0
    usd_per_gpu_hour: float = 0.0
    source: str = ""
    verified: bool | None = None
    """Whether a held-out load confirmed a measured profile; None if none was run."""
    measured: MeasuredRange | None = None
    """None for rooflines, published constants and profiles that do not say."""

    def prompt_s(self, tokens: float) -> float:
        """Seconds that a prompt of so many tokens adds to its iterations."""
        return tokens * (self.prefill_s_per_token + self.attention_s_per_pair * tokens / 2)

    @property
    def usd_per_node_hour(self) -> float:
        """Price of all GPUs of the node."""
        return self.usd_per_gpu_hour * self.gpus

    def window_slots(self, window_tokens: int) -> int:
        """n_max: sequences if each is given a whole window, as the papers count."""
        blocks = self.kv_tokens // self.block_tokens
        return min(
            self.kv_tokens // window_tokens,
            blocks // math.ceil(window_tokens / self.block_tokens),
        )


PAPER_A100: Final = NodeProfile(
    name="llama-3-70b-a100",
    gpu="A100",
    model="llama-3-70b",
    gpus=8,
    w_s=0.008,
    h_s_per_token=0.00065 / PAPER_WINDOW_TOKENS,
    kv_tokens=2**20,
    kv_bytes_per_token=327_680,
    usd_per_gpu_hour=2.21,
    source="FleetOpt, arXiv:2603.16514, section 7.1: W = 8 ms, H = 0.65 ms at 8,192 tokens",
)
"""The published constants: eight A100-80GB serving one Llama-3-70B."""


def roofline(
    gpu: Gpu,
    model: Model,
    *,
    gpus: int | None = None,
    dtype: str | None = None,
    usd_per_gpu_hour: float | None = None,
) -> NodeProfile:
    """A node from data sheets: W reads the weights, h one token's KV, prefill 2 FLOPs a parameter.

    `gpus` is the tensor parallelism; by default the fewest of 1, 2, 4, 8, 16 that leave at least
    half the weights' size for KV. Raises PlanError if the weights do not fit.
    """
    weight_bytes = model.parameters * _bytes_of(dtype or model.native_dtype)
    count = gpus if gpus is not None else _fewest_gpus(gpu, weight_bytes)
    room = count * gpu.memory_bytes * _MEMORY_USED - weight_bytes
    kv_bytes = model.kv_bytes_per_token(_bytes_of("bf16")) * model.kv_copies(count)
    if count < 1 or room < kv_bytes * PAPER_WINDOW_TOKENS:
        raise PlanError(
            f"{model.name} in {dtype or model.native_dtype} does not fit {count} x {gpu.name}",
            "give more GPUs per node or a smaller dtype",
        )
    width = _bytes_of(dtype or model.native_dtype)
    bandwidth = count * gpu.bandwidth_bytes_per_s * _BANDWIDTH_REACHED
    rate = count * gpu.flops_per_s * _FLOPS_REACHED * (2 if width == 1 and gpu.fp8 else 1)
    read_bytes = model.touched_parameters(_TOUCHING_SEQUENCES) * width
    return NodeProfile(
        name=f"{model.name}-{gpu.name.lower()}-x{count}",
        gpu=gpu.name,
        model=model.name,
        gpus=count,
        w_s=read_bytes / bandwidth + _STEP_OVERHEAD_S,
        h_s_per_token=kv_bytes / bandwidth,
        prefill_s_per_token=2 * model.active_parameters / rate,
        chunk_tokens=_BATCHED_TOKENS,
        max_num_batched_tokens=_BATCHED_TOKENS,
        kv_tokens=int(room / kv_bytes) // 16 * 16,
        kv_bytes_per_token=round(kv_bytes),
        usd_per_gpu_hour=gpu.usd_per_hour if usd_per_gpu_hour is None else usd_per_gpu_hour,
        source=f"roofline, not measured; {gpu.source}",
    )


def profile_for(
    gpu: str = "A100",
    model: str = "llama-3-70b",
    *,
    gpus: int | None = None,
    dtype: str | None = None,
    usd_per_gpu_hour: float | None = None,
) -> NodeProfile:
    """The published constants for the node they were measured on, a roofline for any other."""
    hardware, served = gpu_named(gpu), model_named(model)
    paper = PAPER_A100
    measured = gpus in {None, paper.gpus} and dtype in {None, "bf16", "fp16"}
    if measured and (hardware.name, served.name) == (paper.gpu, paper.model):
        price = paper.usd_per_gpu_hour if usd_per_gpu_hour is None else usd_per_gpu_hour
        return msgspec.structs.replace(paper, usd_per_gpu_hour=price)
    return roofline(hardware, served, gpus=gpus, dtype=dtype, usd_per_gpu_hour=usd_per_gpu_hour)


def profile_from_json(document: Any, *, origin: str = "profile") -> NodeProfile:
    """Parse a measured profile with the fields of `NodeProfile`; raises PlanError if invalid."""
    try:
        profile = msgspec.convert(document, NodeProfile)
    except msgspec.ValidationError as error:
        raise PlanError(
            f"{origin}: {error}", "write the fields that docs/plan/planner.md lists"
        ) from None
    times = (profile.h_s_per_token, profile.prefill_s_per_token, profile.attention_s_per_pair)
    if not profile.w_s > 0 or min(times) < 0:
        raise PlanError(f"{origin}: negative time", "w_s is above 0, the others at least 0")
    sizes = (profile.gpus, profile.chunk_tokens, profile.kv_tokens, profile.max_num_seqs)
    if min(*sizes, profile.block_tokens, profile.max_num_batched_tokens) < 1:
        raise PlanError(f"{origin}: a size below 1", "gpus, chunk, KV, blocks and slots are >= 1")
    return profile


def _bytes_of(dtype: str) -> float:
    if dtype not in _DTYPE_BYTES:
        raise PlanError(f"unknown dtype {dtype}", f"use one of {', '.join(_DTYPE_BYTES)}")
    return _DTYPE_BYTES[dtype]


def _fewest_gpus(gpu: Gpu, weight_bytes: float) -> int:
    for count in (1, 2, 4, 8, 16):
        if count * gpu.memory_bytes * _MEMORY_USED >= 1.5 * weight_bytes:
            return count
    return 16
