"""The x-sluice-* and x-ratelimit-* headers of an answer."""

from gateway.policy.admission.denials import limit_lines
from gateway.policy.admission.limit_refusals import title
from gateway.policy.model_runtime import ModelRuntime
from gateway.ports import Lines
from gateway.records.attempt import Binding
from gateway.records.estimate import LengthEstimate
from gateway.records.lease import Lease
from gateway.records.request import Prompt


def response_lines(
    request_id: str,
    served: ModelRuntime | None,
    estimate: LengthEstimate | None,
    lease: Lease | None,
    binding: Binding | None,
    prompt: Prompt | None,
    queue_s: float,
    asked_model: str | None = None,
) -> Lines:
    """The x-sluice-* headers known so far."""
    lines = f"x-request-id: {request_id}\r\n"
    if served is not None and asked_model is not None and served.name != asked_model:
        lines += f"x-sluice-model: {served.name}\r\n"
    if estimate is not None:
        lines += f"x-sluice-estimated-tokens: {estimate.fit_tokens}\r\n"
    if served is not None and lease is not None and binding is not None:
        pool = served.fleet.pools[binding.pool]
        lines += (
            f"x-sluice-pool: {pool.name}\r\n"
            f"x-sluice-worker: {pool.workers[binding.worker]}\r\n"
            f"x-sluice-spilled: {'true' if lease.spilled else 'false'}\r\n"
            f"x-sluice-compressed: {'none' if prompt is None else prompt.compressed}\r\n"
            f"x-sluice-queue-ms: {int(queue_s * 1000)}\r\n"
        )
    if lease is not None and lease.uses:
        lines += _warnings(lease)
    if lease is not None and lease.limits is not None and _applied(served, lease):
        lines += limit_lines(lease.limits)
    return lines.encode()


def _warnings(lease: Lease) -> str:
    """Budgets that reached the level that warns, in one header."""
    warned = [
        f"{limit.scope} {limit.name}: {title(limit)} {100 * use.level // max(1, use.amount)}% used"
        for limit, use in zip(lease.asked, lease.uses, strict=True)
        if 0 < limit.warn <= use.level
    ]
    return f"x-sluice-budget: {', '.join(warned)}\r\n" if warned else ""


def _applied(served: ModelRuntime | None, lease: Lease) -> bool:
    """Whether the limits are in force, not only observed."""
    observed = served is not None and (served.routing.observe or served.admission.observe)
    return not (observed or lease.would_deny)
