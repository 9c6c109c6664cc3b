"""Names of a record in OpenTelemetry's conventions for generative AI."""

from typing import Final

from gateway.records.decision import DecisionRecord

PROVIDER: Final = "sluice"
"""The conventions name who serves the model; which engine it is, the gateway does not know."""
_OPERATIONS: Final = {
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "completions": "text_completion",
}


def operation(record: DecisionRecord) -> str:
    """`gen_ai.operation.name`; the endpoint's own name where the conventions know none."""
    return _OPERATIONS.get(record.endpoint, record.endpoint)


def error_type(record: DecisionRecord) -> str | None:
    """`error.type`: the reason of a refusal, else how the request ended; None of a success."""
    return None if record.outcome == "ok" else record.reason or record.outcome
