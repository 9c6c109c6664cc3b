"""The compressor's bench measures what it says."""

import pytest

from bench.compressor.prompts import english, multi_hop, other_languages
from bench.compressor.trials import (
    METHODS,
    VOCABULARIES,
    bag,
    cosine,
    counter,
    inverse_frequencies,
    kept_in,
    quantiles,
    rouge_l_recall,
    trial,
)


def test_there_are_enough_prompts_and_each_holds_its_answer() -> None:
    qa = [*english(), *(p for p in other_languages() if p.kind == "qa")]
    assert len(qa) >= 200
    assert len({p.language for p in qa}) >= 5
    for prompt in [*qa, *multi_hop()]:
        assert kept_in(prompt.messages, prompt.gold), prompt.gold


@pytest.mark.parametrize("method", METHODS)
def test_each_method_fits_and_gold_that_is_gone_is_not_called_kept(method: str) -> None:
    prompt = multi_hop()[1]
    found = trial(prompt, method, 0.5)  # type: ignore[arg-type]
    assert found.fits
    assert 0.5 <= found.cut < 0.6
    assert not kept_in([{"content": "nothing"}], prompt.gold)


def test_fidelity_of_known_extracts() -> None:
    before = [{"role": "user", "content": "one two three four one"}]
    after = [{"role": "user", "content": "one three"}]
    assert rouge_l_recall(before, after) == pytest.approx(2 / 5)
    idf = inverse_frequencies([bag(before), bag(after)])
    assert cosine(bag(before), bag(before), idf) == pytest.approx(1)
    assert 0 < cosine(bag(before), bag(after), idf) < 1
    assert quantiles([1.0, 2.0, 3.0]) == pytest.approx((2, 1.2, 2, 2.8))


def test_vocabularies_count_as_published() -> None:
    for vocabulary in VOCABULARIES:
        count = counter(vocabulary)
        if count is not None:
            assert count("Hello world") == 2
