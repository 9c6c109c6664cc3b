"""Stated limits become limits that admission counts, to the unit."""

from gateway.records.limit import Budget, KeyLimits, budget_limits, key_limits


def test_money_is_exact_to_a_billionth_and_tokens_have_no_currency() -> None:
    budgets = (Budget(money=0.1, warn_at=0.5), Budget(tokens=7, window="30d", on_exceed="spot"))
    money, tokens = key_limits("t", "k", KeyLimits(budgets=budgets), "EUR")
    assert (money.id, money.amount, money.warn) == ("key:t/k:money:month", 10**8, 5 * 10**7)
    assert (money.currency, tokens.currency) == ("EUR", "")
    assert (tokens.id, tokens.amount, tokens.spot) == ("key:t/k:tokens:30d", 7, True)


def test_a_changed_amount_has_the_same_counter() -> None:
    small, large = (
        [limit.id for limit in budget_limits("tenant", "t", [Budget(tokens=amount)], "EUR")]
        for amount in (1, 2)
    )
    assert small == large
