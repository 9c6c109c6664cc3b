"""Stage 6, adjust the lease: down to the cost of the prompt that will be served.

A prompt that could not be compressed takes its lease along to the pool that holds it, if it may
enter there; else it is refused, and what it had reserved is refunded.
"""

import msgspec

from gateway.fleet.model_runtime import ModelAdmission
from gateway.ports import LeaseStore
from gateway.records.estimate import LengthEstimate, Plan
from gateway.records.lease import Lease
from gateway.records.request import Prompt


async def adjust(
    store: LeaseStore,
    terms: ModelAdmission,
    lease: Lease,
    planned: Plan,
    prompt: Prompt,
    estimate: LengthEstimate,
) -> Lease:
    """The lease as it is now. `planned`: where the whole prompt belongs. Raises Refusal."""
    if prompt.only_pool is None:
        return await store.transfer(lease, planned.pool, force=False)
    kv_bytes = estimate.cost_tokens * terms.kv_bytes_per_token
    store.resize(lease, estimate.cost_tokens, kv_bytes)
    return msgspec.structs.replace(lease, cost_tokens=estimate.cost_tokens, kv_bytes=kv_bytes)
