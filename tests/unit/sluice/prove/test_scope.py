"""Which settings a proof covers."""

from collections.abc import Iterator
from typing import Any, get_args

from gateway.settings import Config
from gateway.settings.types import Section
from sluice.prove.scope import COUNTED, IGNORED, SIMULATED


def sections(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for inner in get_args(annotation):
        yield from sections(inner)


def settings(section: type[Section], path: str = "") -> Iterator[str]:
    """Paths of all settings, sections included."""
    for name, field in section.model_fields.items():
        yield f"{path}{name}"
        for inner in sections(field.annotation):
            yield from settings(inner, f"{path}{name}.")


def test_settings_that_a_proof_covers_or_ignores_are_there() -> None:
    listed = [*SIMULATED, *COUNTED, *(path for paths in IGNORED.values() for path in paths)]
    assert len(listed) == len(set(listed))
    assert set(listed) <= set(settings(Config))
