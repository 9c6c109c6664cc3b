"""`sluice check --live` against a real engine: what people get wrong, each with its fix."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench.common.report import Row
from bench.real_engine.engines import BASE, RealEngine, sluice, written

MISTAKES: Final = {
    "wrong name": ("it serves 'tiny'", "set the worker's `model`"),
    "wrong window": ("max_model_len", "set it to the engine's"),
    "`/v1` at the end of the URL": ("is read as", "remove /v1"),
    "`/v1/...` in the URL": ("404", "without /v1"),
    "no key": ("it wants a key", "set the worker's `api_key`"),
    "wrong key": ("refuses the key", "set the worker's `api_key`"),
}
"""What is wrong -> words of the finding and of its fix."""


def scene(folder: Path, engine: RealEngine, key: str) -> Iterator[Row]:
    """Checks one good file and one file for each mistake."""
    yield _row("a good file", folder, _file(engine, key), None)
    files = {
        "wrong name": _file(engine, key, name="tinny"),
        "wrong window": _file(engine, key, window=engine.window * 2),
        "`/v1` at the end of the URL": _file(engine, key, "/v1"),
        "`/v1/...` in the URL": _file(engine, key, "/v1/chat/completions"),
        "no key": _file(engine, None),
        "wrong key": _file(engine, "sk-other"),
    }
    for mistake, config in files.items():
        yield _row(mistake, folder, config, MISTAKES[mistake])


def _row(metric: str, folder: Path, config: dict[str, Any], words: tuple[str, str] | None) -> Row:
    code, found = sluice("check", "-c", written(folder, config), "--live")
    said = [f"{each['problem']}: {each['fix']}" for each in found["workers"] if each["problem"]]
    said += found["remarks"]
    holds = not said if words is None else any(all(w in text for w in words) for text in said)
    return Row(
        f"check --live: {metric}",
        "; ".join(said) or "nothing",
        target="nothing" if words is None else " ... ".join(words),
        holds=holds,
        note=f"exit {code}",
    )


def _file(
    engine: RealEngine,
    key: str | None,
    path: str = "",
    *,
    name: str = BASE,
    window: int | None = None,
) -> dict[str, Any]:
    worker = {"url": engine.url + path, **({"api_key": key} if key else {})}
    pool = {
        "max_model_len": window or engine.window,
        "max_num_seqs": engine.slots,
        "workers": [worker],
    }
    return {"models": [{"name": name, "pools": {"all": pool}}]}
