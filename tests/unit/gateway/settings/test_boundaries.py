"""The boundary section: what may move, what was planned for, and what contradicts itself."""

import pytest

from gateway.settings import ConfigError, ModelConfig, parse
from gateway.settings.model import control_of, watch_of

FILE = """\
version: 1
models:
  - name: m
    {mode}boundary: {{b_short: 4096, {more}}}
    pools:
      short: {{max_model_len: 8192, max_num_seqs: 8, workers: ["http://127.0.0.1:1"]}}
      long: {{max_model_len: 65536, max_num_seqs: 8, workers: ["http://127.0.0.1:2"]}}
"""


def model(more: str, mode: str = "") -> ModelConfig:
    return parse(FILE.format(more=more, mode=mode), "sluice.yaml", {}).models[0]


def test_auto_moves_within_half_of_the_boundary_and_the_window() -> None:
    found = model("auto: true")
    control, watch = control_of(found), watch_of(found)
    assert control is not None
    assert watch is not None
    assert (control.boundaries, control.observe) == ((4096,), False)
    assert found.least_boundaries == (2048,)
    assert watch.drift is None
    assert model("auto: true, b_short_min: 3000").least_boundaries == (3000,)


@pytest.mark.parametrize(
    ("more", "mode"),
    [("auto: true, mode: observe", ""), ("auto: true", "mode: observe\n    ")],
)
def test_observe_of_the_boundary_or_of_the_model(more: str, mode: str) -> None:
    control = control_of(model(more, mode))
    assert control is not None
    assert control.observe


def test_planned_lengths_are_watched() -> None:
    watch = watch_of(model("planned: [[1000, 0.5], [8000, 1.0]]"))
    assert watch is not None
    assert watch.drift is not None
    assert control_of(model("planned: [[1000, 0.5], [8000, 1.0]]")) is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("b_short_min: 5000", "over the boundary it belongs to"),
        ("b_short_min: [1, 2]", "2 given for 2 pools"),
        ("planned: [[1000, 0.5], [900, 1.0]]", "not ascending"),
        ("planned: [[1000, 0.5], [1900, 0.4]]", "not ascending"),
        ("planned: [[1000, 1.5]]", "must be at most 1"),
        ("mode: never", "boundary.mode"),
    ],
)
def test_contradictions_are_refused(more: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model(more)
    assert said in str(caught.value)


def test_one_pool_has_no_boundary_to_move() -> None:
    text = FILE.format(more="auto: true", mode="").rsplit("      long", 1)[0]
    with pytest.raises(ConfigError, match="one pool has no boundary to move"):
        parse(text.replace("b_short: 4096, ", ""), "sluice.yaml", {})
