"""Documents of the benches: their kind as the gateway sees it, and their length."""

import random

import orjson
import pytest

from bench.common import texts
from gateway.payload.body import read_body
from gateway.records.endpoint import COMPLETIONS
from simulator.mock_server import tokenizer

LENGTHS = (250, 1000, 4000)
EACH = 25


def documents(kind: texts.Kind, tokens: int) -> list[texts.SampleText]:
    rng = random.Random(f"{kind}-{tokens}")
    return [texts.document(kind, tokens, rng) for _ in range(EACH)]


@pytest.mark.parametrize("kind", texts.KINDS)
def test_the_gateway_recognises_the_kind(kind: texts.Kind) -> None:
    seen = [
        read_body(COMPLETIONS, orjson.dumps({"model": "m", "prompt": d.text})).measure.category
        for tokens in LENGTHS
        for d in documents(kind, tokens)
    ]
    assert seen.count(kind) >= 0.95 * len(seen)


@pytest.mark.parametrize("kind", texts.KINDS)
@pytest.mark.parametrize("tokens", [40, *LENGTHS])
def test_the_length_is_hit(kind: texts.Kind, tokens: int) -> None:
    for document in documents(kind, tokens):
        true = tokenizer.count(document.text)
        assert true == pytest.approx(tokens, abs=max(12, 0.04 * tokens))
        assert document.tokens == pytest.approx(true, abs=max(12, 0.04 * tokens))
