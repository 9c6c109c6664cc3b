"""A tenant's view of its own requests: their figures; of workers only what the headers say."""

from collections.abc import Callable
from typing import Final

import msgspec

from gateway.errors import NotFound
from gateway.records.decision import NO_SCHEDULING, AdmissionSection, DecisionRecord
from gateway.records.story import story_of

FindDecision = Callable[[str, str], bytes | None]
"""(request id, tenant) -> the record of that request, or what the tenant may see of it, as JSON."""

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(DecisionRecord).decode


def finder(newest: FindDecision) -> FindDecision:
    """Shows the record that `newest` has of a request id and a tenant, if it is the tenant's."""

    def find(request_id: str, tenant: str) -> bytes | None:
        line = newest(request_id, tenant)
        record = None if line is None else _decode(line)
        if record is None or (record.request_id, record.tenant) != (request_id, tenant):
            return None  # nothing, or another record with the same hash
        return tenants_view(record)

    return find


def tenants_view(record: DecisionRecord) -> bytes:
    """A record without what is other tenants' or the operator's business, and its story."""
    known = record.admission
    own = msgspec.structs.replace(
        record,
        attempts=(),  # other workers' names and faults
        scheduling=NO_SCHEDULING,  # other workers' scores and load
        admission=AdmissionSection(
            service_class=known.service_class,
            spilled=known.spilled,
            admitted_unix_s=known.admitted_unix_s,
            settled_unix_s=known.settled_unix_s,
            reserved_tokens=known.reserved_tokens,
            reserved_kv_bytes=known.reserved_kv_bytes,
            priority=known.priority,
            would_deny=known.would_deny,
            evicted=known.evicted,
            charge_tokens=known.charge_tokens,
        ),
        prompt=None,
    )
    fields = msgspec.to_builtins(own)
    return _encode({**fields, "story": story_of(own)})


def decision_not_found(request_id: str) -> NotFound:
    """The refusal of a look-up; the same for a request of somebody else."""
    return NotFound(
        f"No decision is kept for request id '{request_id[:128]}': it is unknown or too old.",
        reason="decision_not_found",
    )
