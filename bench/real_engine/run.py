"""`python -m bench real-engine`: Sluice before vLLM itself (docs/develop/benches/real-engine.md).

Two engines on the CPU with a tiny model of random weights. Their answers are nonsense; how
they schedule, answer, refuse and report is the real thing. Skipped, with the reason, where the
wheel cannot be had.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from rich.console import Console

from bench.common.report import Report, Row
from bench.real_engine import adapters, all_on, mistakes, planned, suite
from bench.real_engine.commands import gateway
from bench.real_engine.engines import RealEngine
from bench.real_engine.environment import (
    VERSION,
    Unavailable,
    default_folder,
    engine_python,
    suite_of_openai,
)
from bench.real_engine.tiny_model import SMALL, TINY, Size, make_adapter, make_model
from sluice.children import Children

WINDOW, SLOTS = 4096, 8
SHORT_WINDOW, SHORT_SLOTS = 1024, 16
KEY = "sk-engine"
MAX_TOKENS = 32
"""Of an answer where clients set no limit: the model ends none by itself."""
_BUSY = 1.0
"""Load of the machine above which figures of time are said to be busy."""


def run() -> Report:
    """Every scene; $SLUICE_REAL_ENGINE_SCENES names some of them, with commas."""
    wanted = os.environ.get("SLUICE_REAL_ENGINE_SCENES")
    folder, console = default_folder(), Console(stderr=True)
    folder.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    rows = [Row(metric="load of the machine before", measured=load, note=_said_of(load))]
    try:
        python = engine_python(folder)
    except Unavailable as reason:
        return Report(name="real-engine", rows=[Row(metric="skipped", measured=str(reason))])
    rows.append(Row(metric="engine", measured=f"vLLM {VERSION} on the CPU"))
    for name, scene in _SCENES.items():
        if wanted is None or name in wanted.split(","):
            console.print(f"real-engine: {name}")
            rows += scene(python, folder)
    return Report(name="real-engine", rows=rows)


def _said_of(load: float) -> str:
    return "busy: other programs ran, figures of time are worth little" if load > _BUSY else ""


class _Lab:
    """Engines that end with the block."""

    def __init__(self, python: Path, folder: Path, size: Size = TINY) -> None:
        self._python, self._folder = python, folder
        self._children = Children()
        self.model = make_model(folder / f"model-{size.hidden}", WINDOW, size)
        self.adapter = make_adapter(folder / "tiny-lora")

    def __enter__(self) -> Self:
        self._children.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._children.__exit__(*error)

    def engine(
        self,
        window: int = WINDOW,
        slots: int = SLOTS,
        *,
        lora: bool = False,
        api_key: str | None = None,
        most_tokens: int | None = None,
    ) -> RealEngine:
        """One more engine, which starts meanwhile: `wait` for it."""
        return RealEngine(
            self._children,
            self._python,
            self.model,
            self._folder / f"engine-{window}.log",
            window=window,
            slots=slots,
            adapter=self.adapter if lora else None,
            api_key=api_key,
            most_tokens=most_tokens,
        )


def _planned(python: Path, folder: Path) -> Iterator[Row]:
    with _Lab(python, folder, SMALL) as lab, tempfile.TemporaryDirectory() as there:
        engine = lab.engine()
        engine.wait()
        yield from planned.scene(Path(there), engine)


def _adapters(python: Path, folder: Path) -> Iterator[Row]:
    with _Lab(python, folder) as lab:
        engines = lab.engine(lora=True), lab.engine()
        for engine in engines:
            engine.wait()
        yield from adapters.scene(*engines)


def _mistakes(python: Path, folder: Path) -> Iterator[Row]:
    with _Lab(python, folder) as lab, tempfile.TemporaryDirectory() as there:
        engine = lab.engine(api_key=KEY)
        engine.wait()
        yield from mistakes.scene(Path(there), engine, KEY)


def _all_on(python: Path, folder: Path) -> Iterator[Row]:
    with _Lab(python, folder) as lab:
        short = lab.engine(SHORT_WINDOW, SHORT_SLOTS, lora=True, most_tokens=MAX_TOKENS)
        long = lab.engine(lora=True, most_tokens=MAX_TOKENS)
        for engine in (short, long):
            engine.wait()
        with gateway(all_on.config(short, long)) as url:
            yield from all_on.scene(url)
            try:
                source = suite_of_openai(python, folder / "openai")
            except Unavailable as reason:
                yield Row(metric="openai-python's tests: skipped", measured=str(reason))
                return
            yield from suite.scene(python, source, long.url, url)


_SCENES: dict[str, Callable[[Path, Path], Iterator[Row]]] = {
    "adapters": _adapters,
    "mistakes": _mistakes,
    "all-on": _all_on,
    "planned": _planned,
}
