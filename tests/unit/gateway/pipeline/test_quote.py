"""What a quote says of a refusal."""

from types import SimpleNamespace
from typing import Any

import msgspec

from gateway.admission.terms import Denial
from gateway.payload.head import read_head
from gateway.pipeline.quote import Quoter
from tests.builders import attempts_of, chat_body, incoming, served_model


async def test_a_wait_beyond_every_calendar_is_told_as_a_very_late_time() -> None:
    """A rate of a token in 30,000 years refills no bucket."""
    denial = Denial(reason="tokens", wait_s=1e15, limit=1.0, used=1.0, requested=9)
    asked = attempts_of(served_model(), incoming()).asked

    async def answer(given: Any) -> Any:
        return given

    store: Any = SimpleNamespace(quote=lambda *_: answer(denial))
    pipeline: Any = SimpleNamespace(ask=lambda *_: answer(asked))
    quoter = Quoter(
        pipeline=pipeline,
        store=store,
        clock=lambda: 0.0,
        wall_clock=lambda: 0.0,
        currency="USD",
    )
    quote = await quoter.quote(read_head([]), chat_body())
    assert (quote["admitted"], quote["reason"], quote["retry_after_s"]) == (False, "tokens", 60.0)
    assert quote["enters_at"] > "2001"
    assert msgspec.json.encode(quote)
