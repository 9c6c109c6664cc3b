"""GPUs and models, from which rooflines are built.

Memory, bandwidth and dense BF16 rates are from the makers' data sheets. Prices are assumptions
to override: $2.21 is FleetOpt's A100 (section 7.1), $3.67 the token-budget paper's MI300X
(Table 5), the others are rounded public on-demand prices. Layers, KV heads and parameters are
those of each model's published configuration.
"""

from typing import Final

import msgspec

from planner.errors import PlanError

GIB: Final = 2**30


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator."""

    name: str
    memory_bytes: float
    bandwidth_bytes_per_s: float
    flops_per_s: float
    """Dense BF16 rate."""
    fp8: bool
    """Whether FP8 runs at twice the BF16 rate."""
    usd_per_hour: float
    source: str


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """One model's memory and arithmetic."""

    name: str
    parameters: float
    active_parameters: float
    """Parameters used by one token; fewer than `parameters` for mixtures of experts."""
    layers: int
    kv_heads: int
    head_size: int
    experts: int = 1
    experts_per_token: int = 1
    latent_kv_values: int = 0
    """Values per layer and token of a latent cache (MLA), which tensor parallelism does not split;
    0 for models that cache keys and values per head.
    """
    native_dtype: str = "bf16"

    def kv_bytes_per_token(self, dtype_bytes: float) -> float:
        """KV bytes of one token over all GPUs, without copies (token-budget paper, eq. 1)."""
        if self.latent_kv_values:
            return self.layers * self.latent_kv_values * dtype_bytes
        return 2 * self.layers * self.kv_heads * self.head_size * dtype_bytes

    def kv_copies(self, gpus: int) -> float:
        """Copies of each KV value under tensor parallelism over `gpus`."""
        if self.latent_kv_values:
            return gpus
        return max(1.0, gpus / self.kv_heads)

    def touched_parameters(self, sequences: int) -> float:
        """Expected parameters read in an iteration of so many sequences, with even routing."""
        if self.experts <= 1:
            return self.parameters
        share = self.experts_per_token / self.experts
        in_experts = (self.parameters - self.active_parameters) / (1 - share)
        return self.parameters - in_experts * (1 - share) ** sequences


def _gpu(
    name: str, gib: float, tb_s: float, tflops: float, usd: float, source: str, *, fp8: bool = True
) -> Gpu:
    return Gpu(
        name=name,
        memory_bytes=gib * GIB,
        bandwidth_bytes_per_s=tb_s * 1e12,
        flops_per_s=tflops * 1e12,
        fp8=fp8,
        usd_per_hour=usd,
        source=source,
    )


_PAPERS = "arXiv:2603.16514 (price); NVIDIA A100 80GB SXM data sheet"

GPUS: Final = {
    g.name: g
    for g in (
        _gpu("A100", 80, 2.039, 312, 2.21, _PAPERS, fp8=False),
        _gpu("H100", 80, 3.35, 989, 3.0, "NVIDIA H100 SXM data sheet; price assumed"),
        _gpu("H200", 141, 4.8, 989, 3.8, "NVIDIA H200 SXM data sheet; price assumed"),
        _gpu("B200", 180, 7.7, 2250, 5.5, "NVIDIA DGX B200 data sheet; price assumed"),
        _gpu("L40S", 48, 0.864, 362, 1.0, "NVIDIA L40S data sheet; price assumed"),
        _gpu(
            "MI300X",
            192,
            5.3,
            1307,
            3.67,
            "AMD MI300X data sheet; arXiv:2604.09613 Table 5 (price)",
        ),
    )
}


def _dense(name: str, billions: float, layers: int, kv_heads: int) -> Model:
    return Model(
        name=name,
        parameters=billions * 1e9,
        active_parameters=billions * 1e9,
        layers=layers,
        kv_heads=kv_heads,
        head_size=128,
    )


def _sparse(
    name: str, billions: tuple[float, float], layers: int, kv_heads: int, experts: tuple[int, int]
) -> Model:
    return Model(
        name=name,
        parameters=billions[0] * 1e9,
        active_parameters=billions[1] * 1e9,
        layers=layers,
        kv_heads=kv_heads,
        head_size=128,
        experts=experts[0],
        experts_per_token=experts[1],
    )


MODELS: Final = {
    m.name: m
    for m in (
        _dense("llama-3-8b", 8.03, 32, 8),
        _dense("llama-3-70b", 70.6, 80, 8),
        _dense("llama-3.1-405b", 405.9, 126, 8),
        _dense("qwen3-8b", 8.19, 36, 8),
        _dense("qwen3-32b", 32.8, 64, 8),
        _sparse("qwen3-30b-a3b", (30.5, 3.3), 48, 4, (128, 8)),
        _sparse("qwen3-235b-a22b", (235.1, 22.1), 94, 4, (128, 8)),
        _sparse("mixtral-8x7b", (46.7, 12.9), 32, 8, (8, 2)),
        _sparse("mixtral-8x22b", (140.6, 39.1), 56, 8, (8, 2)),
        Model(
            name="deepseek-v3",
            parameters=671e9,
            active_parameters=37e9,
            layers=61,
            kv_heads=128,
            head_size=128,
            experts=256,
            experts_per_token=8,
            latent_kv_values=576,
            native_dtype="fp8",
        ),
    )
}


def gpu_named(name: str) -> Gpu:
    """Look up a GPU, ignoring case; raises PlanError with the known names."""
    gpu = {key.lower(): gpu for key, gpu in GPUS.items()}.get(name.lower())
    if gpu is None:
        raise PlanError(f"unknown GPU {name}", f"use one of {', '.join(GPUS)}, or a profile file")
    return gpu


def model_named(name: str) -> Model:
    """Look up a model, ignoring case; raises PlanError with the known names."""
    model = MODELS.get(name.lower())
    if model is None:
        raise PlanError(
            f"unknown model {name}", f"use one of {', '.join(MODELS)}, or a profile file"
        )
    return model
