"""What usage costs, cached prompts among it."""

from gateway.policy.charging import charge_tokens
from gateway.policy.entitlements import PROFILES

PAPER, DEFAULT = PROFILES["paper"], PROFILES["default"]


def test_cached_prompt_tokens_cost_a_tenth_except_in_the_paper() -> None:
    assert charge_tokens(DEFAULT, 100, 20, 50) == 75
    assert charge_tokens(PAPER, 100, 20, 50) == 120
    assert charge_tokens(DEFAULT, 100, 20, 5000) == 30
    assert charge_tokens(DEFAULT, 101, 0, 101) == 11
