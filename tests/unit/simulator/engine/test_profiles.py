"""Engine profiles: the published constants, and what cannot be."""

import pytest

from simulator.engine.profiles import PROFILES, EngineProfile
from tests.unit.simulator.drive import profile


def test_the_published_constants() -> None:
    p = PROFILES["llama-3-70b-a100"]
    assert (p.w_s, p.h_s, p.chunk_tokens) == (0.008, 0.00065, 512)
    assert p.kv_blocks * p.block_tokens == 2**20
    assert p.h_s_per_token == pytest.approx(0.00065 / 8192)


def test_the_cost_of_a_token_follows_that_of_a_slot_unless_given() -> None:
    assert EngineProfile(name="x", h_s=8.192).h_s_per_token == pytest.approx(0.001)
    assert EngineProfile(name="x", h_s_per_token=0.0).h_s_per_token == 0.0


@pytest.mark.parametrize(
    "changes",
    [
        {"w_s": 0.0},
        {"h_s": -1.0},
        {"prefill_s_per_token": -1.0},
        {"attention_s_per_pair": -1.0},
        {"kv_blocks": 0},
        {"max_model_len": 1},
        {"kv_blocks": 15},  # 60 tokens, window 64
        {"prefix_cache_tokens": -1},
        {"max_num_batched_tokens": 3},  # 4 slots
    ],
)
def test_contradictions_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        profile(**changes)
