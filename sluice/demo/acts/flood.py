"""A spot tenant floods the short pool; the guaranteed tenant's first token comes as before.

The same flood then goes to the same engines through a plain relay with one pool and no tenants.
"""

import asyncio
from collections.abc import Sequence

from sluice.demo import prompts
from sluice.demo.client import Answer, Client
from sluice.demo.stage import Stage, high_ms, ms

NAME = "flood"
CAPTION = "A spot tenant floods; a guaranteed one should not notice."
_CLIENTS = 150
_PROBE_EVERY_S = 0.25
_CALM_S, _FLOOD_S, _RISE_S = 4.0, 8.0, 2.0
_ANSWER_TOKENS = 200
_PROMPT_CHARS = 500


async def play(stage: Stage) -> str:
    """Probe in calm, in the flood, and in the flood without Sluice; what was measured."""
    calm = await _probes(stage, stage.gateway, _CALM_S, "probe")
    protected, spot = await _flooded(stage, stage.gateway, "probe")
    bare = None
    if stage.unmanaged is not None:
        await asyncio.sleep(0.5)  # the engines drop what the flood left behind
        bare, _ = await _flooded(stage, stage.unmanaged, "unmanaged")
        await asyncio.sleep(0.5)
    return said(calm, protected, spot, bare)


async def _probes(stage: Stage, client: Client, usual_s: float, what: str) -> list[Answer]:
    """Short questions of the guaranteed tenant, sent whether earlier ones are answered or not."""
    asked = []
    async with asyncio.TaskGroup() as running:
        for number in range(max(4, round(usual_s * stage.pace / _PROBE_EVERY_S))):
            text = prompts.question(f"{number}: {stage.rng.choice(prompts.QUESTIONS[:3])}")
            probe = client.ask("guaranteed", what, text, max_tokens=32)
            asked.append(running.create_task(stage.ask(probe)))
            await asyncio.sleep(_PROBE_EVERY_S)
    return [task.result() for task in asked]


async def _flooded(stage: Stage, client: Client, what: str) -> tuple[list[Answer], list[Answer]]:
    """The guaranteed tenant's answers during a flood, and the flood's own."""
    spot: list[Answer] = []
    clients = []
    for _ in range(_CLIENTS):
        clients.append(asyncio.create_task(_flooding(stage, client, spot)))
        await asyncio.sleep(_RISE_S / _CLIENTS)
    try:
        return await _probes(stage, client, _FLOOD_S, what), spot
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def _flooding(stage: Stage, client: Client, ended: list[Answer]) -> None:
    """One of the spot tenant's clients: asks again at once, or when it was told to."""
    while True:
        text = prompts.document(stage.rng, _PROMPT_CHARS)
        answer = await stage.ask(
            client.ask(
                "spot", "flood", text, max_tokens=_ANSWER_TOKENS, stream=False, whole_length=True
            )
        )
        ended.append(answer)
        if not answer.served:
            await asyncio.sleep(min(2.0, answer.retry_after_s))


def said(
    calm: Sequence[Answer],
    protected: Sequence[Answer],
    spot: Sequence[Answer],
    bare: Sequence[Answer] | None,
) -> str:
    """The act's figures; `bare`: the guaranteed tenant's answers without Sluice."""
    refused = sum(answer.refused for answer in spot)
    text = (
        f"Guaranteed tenant's first token (p95): {ms(high_ms(calm))} in calm, "
        f"{ms(high_ms(protected))} in the flood; {sum(a.served for a in protected)} of "
        f"{len(protected)} answered. Spot: {sum(a.served for a in spot)} served, {refused} told "
        "to wait (429)."
    )
    if bare is None:
        return text
    return f"{text} Same flood, same engines, one unmanaged pool: {ms(high_ms(bare))}."
