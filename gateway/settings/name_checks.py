"""Checks of names: unique, and of something that exists."""

from collections.abc import Sequence

from gateway.settings.config import Config
from gateway.settings.explain import nearest
from gateway.settings.model import ModelConfig
from gateway.settings.problems import KeyPath
from gateway.settings.source import Document

Models = Sequence[tuple[int, ModelConfig]]
"""The valid models, each with its index in the file."""


def check_references(document: Document, config: Config) -> None:
    """Fallbacks and split aliases name models, and no alias takes a name."""
    models = [model.name for model in config.models]
    lines: dict[str, KeyPath] = {n: ("models", at, "name") for at, n in enumerate(models)}
    for index, model in enumerate(config.models):
        lines.update({a: ("models", index, "aliases", n) for n, a in enumerate(model.aliases)})
        lines.update({a: ("models", index, "loras", n) for n, a in enumerate(model.loras)})
        for at, name in enumerate(model.fallbacks):
            path: KeyPath = ("models", index, "fallbacks", at)
            if name == model.name:
                document.add(path, "the model itself", "name another model, or remove it")
            elif name not in models:
                document.add(path, f"no model is named `{name}`", nearest(name, models))
    for index, alias in enumerate(config.aliases):
        where: KeyPath = ("aliases", index)
        if "*" in alias.name:
            fix = "write each name, or put the pattern in a model's `aliases`"
            document.add((*where, "name"), f"`{alias.name}` is a pattern of names", fix)
        first = lines.setdefault(alias.name, (*where, "name"))
        if first[:2] != where:
            document.add(
                (*where, "name"),
                f"`{alias.name}` is taken on line {document.place(first).line}",
                "give every model and alias a name of its own",
            )
        for name in alias.split:
            if name not in models:
                document.add(
                    (*where, "split", name),
                    f"no model is named `{name}`",
                    nearest(name, models),
                    key=True,
                )


def check_names(document: Document, models: Models) -> None:
    """Models, aliases and LoRA adapters have names of their own."""
    seen: dict[str, KeyPath] = {}
    names = [(("models", i, "name"), m.name) for i, m in models]
    aliases = [
        (("models", i, "aliases", n), alias) for i, m in models for n, alias in enumerate(m.aliases)
    ]
    loras = [(("models", i, "loras", n), lora) for i, m in models for n, lora in enumerate(m.loras)]
    path: KeyPath
    for path, name in [*names, *loras, *aliases]:
        if "*" in name and path[2] != "aliases":
            fix = "give a name, and put the pattern in a model's `aliases`"
            document.add(path, f"`{name}` is a pattern of names", fix)
            continue
        first = seen.setdefault(name, path)
        if first == path:
            continue
        taken = f"`{name}` is taken on line {document.place(first).line}"
        fix = "give every model, alias and LoRA adapter a name of its own"
        if len(first) > 2 and first[2] == "loras":
            taken = f"`{name}` is a LoRA adapter, named on line {document.place(first).line}"
            fix = "remove it here: an adapter is a model's name by itself, and is never rewritten"
        document.add(path, taken, fix)


def unique(
    document: Document, seen: dict[str, KeyPath], name: str, path: KeyPath, fix: str
) -> None:
    """No item that was seen before has the name."""
    first = seen.setdefault(name, path)
    if first != path:
        document.add(path, f"`{name}` is taken on line {document.place(first).line}", fix)
