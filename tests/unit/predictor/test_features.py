from hypothesis import given
from hypothesis import strategies as st

from predictor.features import FEATURES, HIT, PARTIAL, UNCACHED, features
from tests.unit.predictor.made import x_of


def test_every_feature_has_its_place() -> None:
    x = features(
        prompt_tokens=1000,
        hit_tokens=250,
        cap_tokens=64,
        output_tokens=32,
        stream=False,
        active=7,
        backlog_tokens=99,
        kv_usage=0.5,
    )
    assert dict(zip(FEATURES, x, strict=True)) == {
        "prompt_tokens": 1000,
        "uncached_tokens": 750,
        "backlog_tokens": 99,
        "active": 7,
        "kv_usage": 0.5,
        "hit_tokens": 250,
        "locality_share": 0.25,
        "locality_class": PARTIAL,
        "cap_tokens": 64,
        "output_tokens": 32,
        "stream": 0.0,
    }


@given(st.integers(0, 1 << 20), st.integers(-5, 1 << 21))
def test_a_hit_leaves_a_token_to_compute_and_never_adds_one(prompt: int, hit: int) -> None:
    x = x_of(prompt, max(hit, 0))
    assert 0 <= x[HIT] <= max(prompt - 1, 0)
    assert x[UNCACHED] == prompt - x[HIT] >= min(prompt, 1)
