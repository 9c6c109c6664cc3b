"""A pool: engines with the same context window."""

from itertools import accumulate, starmap
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator, Field

from gateway.records.attempt import WorkerAddress
from gateway.settings.model_parts import PoolSchedulingConfig
from gateway.settings.prices import Price
from gateway.settings.tls import EngineTlsConfig
from gateway.settings.types import Amount, Count, Drain, Flag, Gib, Natural, Section
from gateway.settings.worker import Worker, WorkerConfig

DISCOVERED: Final = 64
"""Most discovered workers of a pool that reservations may count on, unless `replicas.max` says."""


def _listed(value: object) -> object:
    """One URL is short for a list of it."""
    return (value,) if isinstance(value, str) else value


class ReplicasConfig(Section):
    """How many workers a pool may have. The gateway itself starts and stops none."""

    min: Natural | None = None
    """Fewest workers; default: the number of listed workers, 0 if workers are discovered."""
    max: Count | None = None
    """Most workers; default: the number of listed workers, 64 more if workers are discovered.
    Reservations must fit this number."""
    cooldown_s: Drain = 300.0
    """Seconds of less demand after which `sluice_pool_desired_replicas` falls."""


class PoolConfig(Section):
    """Engines with the same context window."""

    max_model_len: Count
    """The engines' --max-model-len: the window, in tokens."""
    max_num_seqs: Count
    """The engines' --max-num-seqs: slots per worker (per rank, if engines have ranks)."""
    workers: Annotated[
        tuple[Worker, ...],
        Field(min_length=1, max_length=10_000),
        BeforeValidator(_listed, json_schema_input_type=str | tuple[str | WorkerConfig, ...]),
    ]
    """URLs, or mappings for workers that need a key, a served name or a CA. A URL such as
    dns://host:port or k8s://service/NAME.NAMESPACE:port finds engines at run time."""
    tokens_per_second: Amount | None = None
    """Input and output tokens per second of one worker; absent: as many as its slots make."""
    kv_cache_gib: Gib | None = None
    """KV cache of one worker, in GiB; absent: as the engine reports, else no limit."""
    tls: EngineTlsConfig | None = None
    """TLS towards this pool's https engines, and the certificate that the gateway shows them."""
    replicas: ReplicasConfig = ReplicasConfig()
    """Bounds of `sluice_pool_desired_replicas`; each rank counts as one worker."""
    scheduling: PoolSchedulingConfig = PoolSchedulingConfig()
    """The choice of worker in this pool."""
    gpu_hour: Price | None = None
    """Cost of one GPU for an hour, in the gateway's `currency`. A request then costs the share of
    its worker's slots that it holds while it runs; what nobody holds is reported as idle."""
    gpus: Count = 1
    """GPUs of one worker (of one rank, if engines have ranks); for `gpu_hour`."""

    flow_headers: Flag | None = None
    """Tell an llm-d router or another Inference Gateway before the engines each request's tenant
    and class: x-llm-d-inference-fairness-id and -objective, x-gateway-inference-fairness-id and
    -objective. Default: only where an inferencepool:// names the engines."""

    @property
    def worker_hour(self) -> float | None:
        """What an hour of one worker costs; None where it has no price."""
        return None if self.gpu_hour is None else self.gpu_hour * self.gpus

    @property
    def ranked(self) -> bool:
        """Whether an engine has data-parallel ranks."""
        return any(worker.ranks > 1 for worker in self.workers)

    @property
    def tells_flow(self) -> bool:
        """Whether requests tell an inference gateway before the engines whose they are."""
        if self.flow_headers is not None:
            return self.flow_headers
        return any((w.discover or "").startswith("inferencepool:") for w in self.workers)

    @property
    def may_be_empty(self) -> bool:
        """Whether workers come and go at run time, so that there may be none."""
        return any(worker.discover is not None for worker in self.workers)

    @property
    def listed(self) -> tuple[WorkerConfig, ...]:
        """The engines that the file names itself."""
        return tuple(worker for worker in self.workers if worker.url is not None)

    @property
    def addresses(self) -> tuple[WorkerAddress, ...]:
        """Every listed worker; each rank of an engine is one."""
        return tuple(address for worker in self.listed for address in worker.addresses)

    @property
    def engines(self) -> tuple[range, ...]:
        """For each engine, the indices of its ranks in `addresses`."""
        ends = list(accumulate(worker.ranks for worker in self.listed))
        return tuple(starmap(range, zip([0, *ends], ends, strict=False)))

    @property
    def worker_count(self) -> int:
        """Number of listed workers; each rank of an engine is one."""
        return sum(worker.ranks for worker in self.listed)

    @property
    def slots(self) -> int:
        """Sequences that the whole pool runs at once."""
        return self.max_num_seqs * self.worker_count

    @property
    def replica_bounds(self) -> tuple[int, int]:
        """Fewest and most workers, with defaults applied."""
        listed = self.worker_count
        fewest, most = self.replicas.min, self.replicas.max
        if most is None:
            most = max(listed + DISCOVERED * self.may_be_empty, fewest or 0)
        if fewest is None:
            fewest = 0 if self.may_be_empty else min(listed, most)
        return fewest, most


def _with_tls(pool: PoolConfig) -> PoolConfig:
    if pool.tls is None:
        return pool
    tls = pool.tls.address()
    return pool.model_copy(update={"workers": tuple(w.of_pool(tls) for w in pool.workers)})


Pool = Annotated[PoolConfig, AfterValidator(_with_tls)]
