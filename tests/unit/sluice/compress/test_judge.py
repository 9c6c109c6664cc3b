import pytest

from sluice.compress.judge import agree, judge


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("Nine.", "The mayor keeps nine bees.", True),
        ("The mayor keeps nine bees", "the mayor, he keeps nine bees!", True),
        ("Nine bees.", "Seven wasps.", False),
        ("", "", True),
        ("", "Nine.", False),
        ("九", "九", True),
    ],
)
def test_answers_agree_by_their_words(first: str, second: str, *, same: bool) -> None:
    assert agree(first, second) is same
    assert agree(second, first) is same


def test_a_model_that_disagrees_with_itself_is_seen() -> None:
    words = ["alpha beta", "gamma delta", "alpha beta", "gamma delta"]

    def ask(messages: object, seed: int) -> tuple[str, int]:
        return words[seed], 10

    verdict = judge(ask, [], [], 4)
    assert (verdict.agreement, verdict.self_agreement) == (1.0, 0.0)
    assert judge(ask, [], [], 1).self_agreement is None
