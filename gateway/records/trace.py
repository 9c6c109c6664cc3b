"""A request's place in a distributed trace."""

from gateway.records.record import Record


class Trace(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Ids of W3C Trace Context, in hexadecimal digits; all empty while telemetry is off."""

    trace_id: str = ""
    span_id: str = ""
    """The span of the request in the gateway. Its last two digits are 0: other spans of the request
    count there (`gateway.payload.trace_context`)."""
    parent_span_id: str = ""
    """The client's own span, from its `traceparent`; empty without one."""
    sampled: bool = False
    """Whether spans of the request are exported."""


NO_TRACE = Trace()
