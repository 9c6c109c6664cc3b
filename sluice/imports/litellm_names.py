"""What the names that LiteLLM's keys and teams list open: models, adapters, access groups."""

from collections.abc import Collection

from sluice.imports.litellm_models import covered
from sluice.imports.litellm_router import Models, adapted, named


class ModelNames:
    """Names of the imported models. A LoRA adapter is opened by its own name."""

    def __init__(
        self, models: Models, groups: dict[str, list[str]], rows: Collection[str] = ()
    ) -> None:
        """`groups`: access groups, each with the names in it; `rows`: names with a row."""
        self._models = models
        self._rows = rows
        self._groups = groups
        self.every = [name for m in models.values() for name in (m.name, *m.loras)]
        """Every model and adapter that a key can open."""

    def base(self, name: str) -> str:
        """The model of an adapter; a model is its own."""
        found = adapted(self._models, name)
        return name if found is None else found.name

    def listed(self, names: list[str]) -> tuple[list[str], list[str]]:
        """(models and adapters that a list opens, all if it is empty; names that open none)."""
        if not names:
            return self.every, []
        found: dict[str, None] = {}
        unknown = []
        for name in names:
            members = [name] if self._opened(name) else self._groups.get(name, [])
            opened = [each for member in members if (each := self._opened(member)) is not None]
            found.update(dict.fromkeys(opened))
            if not opened:
                unknown.append(name)
        return list(found), unknown

    def _opened(self, name: str) -> str | None:
        model = named(self._models, name)
        if model is None and adapted(self._models, name) is not None:
            return name
        if model is None and name not in self._rows:
            model = covered(self._models, name)
        return None if model is None else model.name
