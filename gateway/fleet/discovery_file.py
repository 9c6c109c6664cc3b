"""Engines listed in a YAML file that other software writes (Slurm, Ray, Ansible).

The file is a list of URLs or of mappings with `url`, and `model` and `ranks` if they differ from
the configuration; or a mapping with that list under `workers`. It is watched by content: a
replaced file and a swapped symbolic link are changes, a touched one is not. A file that is being
written is left alone until two readings agree: half of it would take engines out. An empty file,
as a full disk leaves one, is a failure for the same reason: `[]` stands for no engines.
"""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Final

import yaml

from gateway.ports import DiscoveryFailure
from gateway.records.attempt import FoundEngine

LOOK_EVERY_S: Final = 1.0
SETTLE_S: Final = 0.05
"""Between two readings of a changed file that must agree."""
MAX_BYTES: Final = 2 * 1024 * 1024
"""Enough for 10,000 engines; the parser takes seconds for more."""
_KEYS: Final = frozenset({"url", "model", "ranks"})
MAX_RANKS: Final = 256


class FileDiscovery:
    """The Discovery of a file."""

    def __init__(self, path: str, *, every_s: float = LOOK_EVERY_S) -> None:
        self._path = Path(path)
        self._every_s = every_s

    async def sets(self) -> AsyncGenerator[tuple[FoundEngine, ...], None]:
        before: bytes | None = None
        while True:
            content = await asyncio.to_thread(self._read)
            while content != before:
                await asyncio.sleep(SETTLE_S)
                again = await asyncio.to_thread(self._read)
                if again == content:
                    break
                content = again
            if content != before:
                yield await asyncio.to_thread(engines_of, content)
                before = content
            await asyncio.sleep(self._every_s)

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise DiscoveryFailure(f"{self._path}: {error.strerror}") from error
        if len(content) > MAX_BYTES:
            raise DiscoveryFailure(f"{self._path} is over {MAX_BYTES >> 20} MiB")
        return content


def engines_of(content: bytes) -> tuple[FoundEngine, ...]:
    """The engines that a file's content lists. Raises DiscoveryFailure, which names the entry."""
    try:
        document = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise DiscoveryFailure(f"not YAML: {' '.join(str(error).split())}") from error
    if isinstance(document, dict) and set(document) == {"workers"}:
        document = document["workers"]
    if document is None:
        raise DiscoveryFailure("empty: write [] for no workers")
    if not isinstance(document, list):
        raise DiscoveryFailure("not a list of workers")
    return tuple(_engine(number, entry) for number, entry in enumerate(document, start=1))


def _engine(number: int, entry: Any) -> FoundEngine:
    fields = {"url": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, dict) or "url" not in fields or set(fields) - _KEYS:
        raise DiscoveryFailure(f"entry {number} is no URL and no mapping of url, model, ranks")
    url, model, ranks = fields["url"], fields.get("model"), fields.get("ranks", 0)
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise DiscoveryFailure(f"entry {number}: url is not http://host:port")
    if not isinstance(model, str | None) or type(ranks) is not int or not 0 <= ranks <= MAX_RANKS:
        raise DiscoveryFailure(f"entry {number}: model is a name, ranks a number up to {MAX_RANKS}")
    return FoundEngine(urls=(url,), model=model, ranks=ranks)
