"""Patterns of model names."""

import fnmatch
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import NotFound
from gateway.pipeline.plan import find_model
from gateway.records.endpoint import matches
from tests.builders import served_model

_text = st.text("ab*", max_size=8)


@given(pattern=_text, name=st.text("ab", max_size=12))
def test_a_star_stands_for_any_text(pattern: str, name: str) -> None:
    assert matches(pattern, name) == bool(re.match(fnmatch.translate(pattern), name))


def test_many_stars_cost_no_more_than_one() -> None:
    """A regular expression would try some 255 over 50 ways."""
    assert not matches("*a" * 127 + "*b", "a" * 256)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("claude-opus-4", "opus"),
        ("claude-opus-", "opus"),
        ("claude-haiku", "claude"),
        ("claude-", "claude"),
        ("claude-x", "exact"),
        ("gpt-4o", "rest"),
        ("my-claude-x", "rest"),
    ],
)
def test_names_go_before_patterns_and_longer_ones_before_shorter(asked: str, found: str) -> None:
    names = {"*": "rest", "claude-*": "claude", "claude-opus-*": "opus", "claude-x": "exact"}
    for order in (list(names), list(reversed(names))):
        models = {name: served_model(name=names[name]) for name in order}
        assert find_model(models, asked).name == found


def test_a_name_of_no_pattern_is_not_found() -> None:
    with pytest.raises(NotFound):
        find_model({"claude-*": served_model()}, "gpt-4o")
