"""Stage 5, compress: a prompt in the window is made to fit the smaller pool, T_c = B - L_out.

Only after admission, so that rejected traffic costs no work; off the event loop, within a time
limit. Whatever goes wrong, the request goes on as it came, to the pool that holds it.
"""

from gateway.fleet.model_runtime import ModelRuntime
from gateway.ports import CompressRunner, CompressTask
from gateway.records.estimate import LengthEstimate
from gateway.records.request import BodyFacts, Incoming, Prompt
from gateway.routing.routing import fixed_tokens, lowered
from gateway.routing.routing_table import CompressionRules, CompressionWindow


async def compress(
    runner: CompressRunner,
    served: ModelRuntime,
    incoming: Incoming,
    facts: BodyFacts,
    estimate: LengthEstimate,
    found: CompressionWindow,
) -> tuple[Prompt, LengthEstimate]:
    """The compressed prompt and its estimate; on failure the client's own, with the reason."""
    rules = CompressionRules() if served.compression is None else served.compression.rules
    result = await runner.compress(
        CompressTask(
            endpoint=incoming.endpoint.name,
            body=incoming.body,
            budget_tokens=found.budget_tokens,
            bytes_per_token=estimate.ratio,
            fixed_tokens=fixed_tokens(facts, estimate),
            category=estimate.category,
            max_cut=rules.max_cut,
            tokenizer=rules.tokenizer,
            when="asked" if rules.when == "asked" else "any",
            mark=rules.mark,
        )
    )
    if result.body is None:
        return Prompt(body=incoming.body, not_compressed=result.reason), estimate
    now = lowered(
        estimate, facts, result.text_bytes_after, result.tokens_after, found.budget_tokens
    )
    return (
        Prompt(
            body=result.body,
            compressed=f"{estimate.input_tokens}->{now.input_tokens}",
            only_pool=found.pool,
            kept_share=result.text_bytes_after / max(1, result.text_bytes_before),
        ),
        now,
    )
