"""The three workloads on which FleetOpt is evaluated, as figures.

Source: the length distributions of fleet-sim (inference-fleet-sim, vLLM Semantic Router
Project, Apache-2.0), written here as numbers of requests up to each length. Azure: the LLM
inference trace of 2023 (AzurePublicDataset, CC BY 4.0), 28,185 requests. LMSYS: LMSYS-Chat-1M
with the context of earlier turns. Agent-heavy: synthetic, from published statistics of
SWE-bench, BFCL and RAG pipelines (FleetOpt, section 7.1).
"""

from typing import Final

import msgspec

from planner.workload.distribution import Cdf
from planner.workload.workload import Workload, from_cdf

_TOKENS: Final = (
    *(64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
    *(12_288, 16_384, 24_576, 32_768, 49_152, 65_536),
)
_AZURE: Final = (
    *(236, 794, 1905, 8135, 10_267, 11_400, 18_514, 21_980, 24_483, 25_316, 27_503, 28_184),
    *(28_184, 28_185, 28_185, 28_185, 28_185, 28_185),
)
_LMSYS: Final = (
    *(53_076, 95_277, 154_447, 257_761, 306_079, 335_427, 367_004, 382_924, 392_850, 397_242),
    *(400_934, 402_406, 403_255, 403_510, 403_668, 403_724, 403_742, 403_807),
)
_AGENT: Final = (
    *(0, 0, 7, 407, 2237, 5757, 15_871, 26_459, 43_163, 53_802, 65_987, 74_042, 85_213),
    *(91_717, 97_282, 99_046, 99_849, 100_000),
)


class Shipped(msgspec.Struct, frozen=True, kw_only=True):
    """A workload of the paper, with the boundary and compressibility used in its evaluation."""

    workload: Workload
    b_short: int
    compressible: float
    """p_c, section 7.1."""


def _shipped(
    name: str, counts: tuple[int, ...], source: str, b_short: int, compressible: float
) -> Shipped:
    cdf = Cdf(_TOKENS, tuple(count / counts[-1] for count in counts))
    return Shipped(
        workload=from_cdf(cdf, name=name, source=source),
        b_short=b_short,
        compressible=compressible,
    )


SHIPPED: Final = {
    s.workload.name: s
    for s in (
        _shipped("azure", _AZURE, "fleet-sim (Apache-2.0); Azure 2023 (CC BY 4.0)", 4096, 1.0),
        _shipped("lmsys", _LMSYS, "fleet-sim (Apache-2.0); LMSYS-Chat-1M", 1536, 1.0),
        _shipped("agent-heavy", _AGENT, "fleet-sim (Apache-2.0); synthetic", 8192, 0.75),
    )
}
