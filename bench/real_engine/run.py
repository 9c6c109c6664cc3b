"""`python -m bench real-engine`: Sluice before vLLM itself (docs/develop/benches/real-engine.md).

Two engines on the CPU with a tiny model of random weights. Their answers are nonsense; how
they schedule, answer, refuse and report is the real thing. Skipped, with the reason, where the
wheel cannot be had.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.common.report import Row
from bench.real_engine import adapters as lora
from bench.real_engine import all_on as everything
from bench.real_engine import mistakes as mistaken
from bench.real_engine import planned as planning
from bench.real_engine import suite
from bench.real_engine.engines import (
    VERSION,
    RealEngine,
    Unavailable,
    default_folder,
    engine_python,
    gateway,
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


@contextlib.contextmanager
def _lab(rows: list[Row], size: Size = TINY) -> Iterator["_Lab | None"]:
    """Engines that end with the block; None, and a row that says why, where they cannot be had."""
    folder, load = default_folder(), os.getloadavg()[0]
    folder.mkdir(parents=True, exist_ok=True)
    busy = "busy: figures of time are worth little" if load > _BUSY else ""
    rows.append(Row("load of the machine before", load, busy))
    try:
        python = engine_python(folder)
    except Unavailable as reason:
        rows.append(Row("skipped", str(reason)))
        yield None
        return
    rows.append(Row("engine", f"vLLM {VERSION} on the CPU"))
    with Children() as children:
        yield _Lab(python, folder, size, children)


class _Lab:
    """Starts engines."""

    def __init__(self, python: Path, folder: Path, size: Size, children: Children) -> None:
        self.python, self.folder = python, folder
        self._children = children
        self.model = make_model(folder / f"model-{size.hidden}", WINDOW, size)
        self.adapter = make_adapter(folder / "tiny-lora")

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
            self.python,
            self.model,
            self.folder / f"engine-{window}.log",
            window=window,
            slots=slots,
            adapter=self.adapter if lora else None,
            api_key=api_key,
            most_tokens=most_tokens,
        )


def planned() -> list[Row]:
    """A plan made from one engine's own log, and what it does."""
    rows: list[Row] = []
    with _lab(rows, SMALL) as lab, tempfile.TemporaryDirectory() as there:
        if lab:
            engine = lab.engine()
            engine.wait()
            rows += planning.scene(Path(there), engine)
    return rows


def adapters() -> list[Row]:
    """A LoRA adapter that one of two engines has."""
    rows: list[Row] = []
    with _lab(rows) as lab:
        if lab:
            engines = lab.engine(lora=True), lab.engine()
            for engine in engines:
                engine.wait()
            rows += lora.scene(*engines)
    return rows


def mistakes() -> list[Row]:
    """What `sluice check --live` says of a wrong file."""
    rows: list[Row] = []
    with _lab(rows) as lab, tempfile.TemporaryDirectory() as there:
        if lab:
            engine = lab.engine(api_key=KEY)
            engine.wait()
            rows += mistaken.scene(Path(there), engine, KEY)
    return rows


def all_on() -> list[Row]:
    """All five systems before two engines, then openai-python's own tests."""
    rows: list[Row] = []
    with _lab(rows) as lab:
        if lab:
            short = lab.engine(SHORT_WINDOW, SHORT_SLOTS, lora=True, most_tokens=MAX_TOKENS)
            long = lab.engine(lora=True, most_tokens=MAX_TOKENS)
            for engine in (short, long):
                engine.wait()
            with gateway(everything.config(short, long)) as url:
                rows += everything.scene(url)
                try:
                    source = suite_of_openai(lab.python, lab.folder / "openai")
                except Unavailable as reason:
                    rows.append(Row("openai-python's tests: skipped", str(reason)))
                else:
                    rows += suite.scene(lab.python, source, long.url, url)
    return rows
