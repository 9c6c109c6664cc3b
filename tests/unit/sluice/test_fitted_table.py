"""Tables that leave out columns instead of breaking words."""

import io

from rich.console import Console

from sluice.fitted_table import fitted

ROWS = [{"name": "a-long-name-of-a-tenant", "model": "llama-3-70b", "in flight": "12"}]


def drawn(width: int) -> tuple[str, tuple[str, ...]]:
    table, left_out = fitted(
        ROWS, ("name", "model", "in flight"), width, drop=("model", "in flight")
    )
    out = Console(file=io.StringIO(), width=width)
    with out.capture() as captured:
        out.print(table)
    return captured.get(), left_out


def test_what_fits_is_whole() -> None:
    text, left_out = drawn(23 + 2 + 11 + 2 + 9)
    assert left_out == ()
    assert text.splitlines()[1] == "a-long-name-of-a-tenant  llama-3-70b  12       "


def test_columns_go_in_the_given_order() -> None:
    assert drawn(46)[1] == ("model",)
    assert drawn(33)[1] == ("model", "in flight")


def test_what_cannot_go_is_shortened_with_a_sign_on_one_line() -> None:
    text, _ = drawn(10)
    assert text.splitlines()[1] == "a-long-na…"
