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


@pytest.mark.parametrize("kind", texts.KINDS)
def test_a_seed_gives_the_same_document_again(kind: texts.Kind) -> None:
    first, again = (texts.document(kind, 500, random.Random(1)) for _ in range(2))
    assert first == again
    assert first != texts.document(kind, 500, random.Random(2))


def test_documents_of_a_kind_differ_in_bytes_per_token() -> None:
    for kind in texts.KINDS:
        ratios = [len(d.text.encode()) / tokenizer.count(d.text) for d in documents(kind, 1000)]
        mean = sum(ratios) / len(ratios)
        assert max(ratios) / mean > 1.02
        assert min(ratios) / mean < 0.98


def test_json_documents_are_json() -> None:
    for document in documents("json", 1000):
        assert isinstance(orjson.loads(document.text), list)


def test_pieces_make_the_document() -> None:
    document = documents("prose", 4000)[0]
    assert "".join(document.pieces) == document.text
    assert len(document.pieces) > 1
