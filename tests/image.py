"""The image without Docker: each RUN and COPY of the Dockerfile, run here, in a folder.

    python -m tests.image FOLDER

Paths of the image become paths below FOLDER/root; what a stage leaves behind stands under
FOLDER/stages. The base image is an empty virtual environment: neither the working tree nor
what is installed for development can be imported, and of the environment's variables only
those are passed on that lead to a package index. Not run, for they need root and would change
this machine, but checked:

- apt-get: what the packages bring has to be here already (`_BROUGHT`);
- groupadd and useradd: USER, and every owner of a folder, has to be one that they make.

Anything else that is not understood is an error. Only Python's own modules are imported: the image
is built beside the virtual environment that tests need.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Final

ROOT: Final = Path(__file__).parents[1]
_BROUGHT: Final = {
    "gcc": "int main(void) { return 0; }",
    "libc6-dev": "#include <stdlib.h>\nint main(void) { return EXIT_SUCCESS; }",
}
"""Debian package -> a program that can be compiled where it is installed."""
_PASSED_ON: Final = re.compile(r"(?i)PIP_\w+|\w+_proxy|SSL_CERT_\w+|REQUESTS_CA_BUNDLE")
_KNOWN: Final = re.compile("ARG|LABEL|EXPOSE|STOPSIGNAL|HEALTHCHECK|ENTRYPOINT|CMD|RUN|COPY|USER")


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, arguments), with continued lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text("utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in lines if line]


class Image:
    """The Dockerfile in a folder: `build` runs it, the rest is read from it."""

    def __init__(self, folder: Path) -> None:
        """Nothing is run yet."""
        self._folder = folder.resolve()
        self.root = self._folder / "root"
        self.workdir = self.root
        self.environment: dict[str, str] = {}
        """As ENV leaves it, with paths of this machine."""
        self._users: set[str] = set()
        self._stage = ""
        self._follow(run=False)

    @property
    def wheel(self) -> Path:
        """The one that was built."""
        (wheel,) = self._folder.glob("stages/build/wheels/*.whl")
        return wheel

    def build(self) -> None:
        """Run the Dockerfile.

        Raises subprocess.CalledProcessError, or ValueError for what is not understood.
        """
        self._follow(run=True)

    def here(self, text: str) -> str:
        """Absolute paths of the image as paths of this machine."""
        return re.sub(r"(?<![^\s\"'=(])(?=/\w)", str(self.root), text)

    def command(self, words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        """A command as a container runs it: in its environment and its folder alone."""
        variables = {**self.environment, **environment}
        given = [f"{name}={value}" for name, value in variables.items()]
        return ["env", "-i", f"--chdir={self.workdir}", *given, *words]

    def _follow(self, *, run: bool) -> None:
        for name, arguments in dockerfile():
            if name == "FROM":
                self._begin(arguments, run=run)
            elif name == "WORKDIR":
                self.workdir = Path(self.here(arguments))
            elif name == "ENV":
                for variable, _, value in (w.partition("=") for w in shlex.split(arguments)):
                    path = self.environment["PATH"]
                    self.environment[variable] = self.here(value).replace("$PATH", path)
            elif name == "RUN" and run:
                for command in arguments.split(" && "):
                    self._run(command)
            elif name == "COPY" and run:
                self._copy(arguments.split())
            elif name == "USER" and run and not set(arguments.split(":")) <= self._users:
                raise ValueError(f"USER {arguments}: nobody made it")
            elif not _KNOWN.fullmatch(name):
                raise ValueError(f"{name} is not understood")

    def _begin(self, arguments: str, *, run: bool) -> None:
        """A stage; what the one before left behind is put aside."""
        image, _, stage = arguments.partition(" AS ")
        if image != "${PYTHON_IMAGE}":
            raise ValueError(f"FROM {image}: only Python's own image is stood in for")
        python = self._folder / "python"
        self.workdir = self.root
        self.environment = {"PATH": f"{python}/bin:{os.defpath}"}
        if run:
            if self.root.exists():
                self.root.rename(self._folder / "stages" / self._stage)
            for folder in (self.root, self._folder / "stages", self._folder / "home"):
                folder.mkdir(exist_ok=True)
            shutil.rmtree(python, ignore_errors=True)
            base = getattr(sys, "_base_executable", sys.executable)
            subprocess.run([base, "-m", "venv", str(python)], check=True)
        self._stage, self._users = stage, set()

    def _run(self, command: str) -> None:
        words = shlex.split(command)
        if words[0] == "apt-get":
            self._check_packages(words[1:])
            return
        if words[0] in {"groupadd", "useradd"}:
            self._users |= {words[-1], *(b for a, b in _options(words) if a in {"--gid", "--uid"})}
            return
        if words[:2] == ["rm", "-rf"] and words[2].startswith("/var/lib/apt/"):
            return
        if words[0] == "install":
            owners = {b for a, b in _options(words) if a in {"-o", "-g"}}
            if not owners <= self._users:
                raise ValueError(f"{command}: nobody made {owners - self._users}")
            command = re.sub(r" -[og] \w+", "", command)
        self.workdir.mkdir(parents=True, exist_ok=True)
        passed_on = {n: v for n, v in os.environ.items() if _PASSED_ON.fullmatch(n)}
        home = str(self._folder / "home")
        subprocess.run(
            ["sh", "-c", self.here(command)],
            cwd=self.workdir,
            env={**passed_on, "HOME": home, **self.environment},
            check=True,
        )

    def _check_packages(self, words: list[str]) -> None:
        if words == ["update"]:
            return
        for package in (word for word in words[1:] if not word.startswith("-")):
            command = ["gcc", "-x", "c", "-o", "/dev/null", "-"]
            subprocess.run(command, input=_BROUGHT[package], text=True, check=True)

    def _copy(self, words: list[str]) -> None:
        *sources, target = words
        origin = ROOT
        if sources[0].startswith("--from="):
            origin = self._folder / "stages" / sources.pop(0).removeprefix("--from=")
        to = self.workdir / self.here(target)
        for source in sources:
            if origin != ROOT:
                shutil.copytree(origin / source.lstrip("/"), to, symlinks=True)
            else:
                into = to / Path(source).name if target.endswith("/") else to
                _copy_context(ROOT / source, into)


def in_context(path: PurePosixPath) -> bool:
    """Whether .dockerignore lets a file of the repository in."""
    kept = True
    for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines():
        pattern = line.removeprefix("!")
        if not line.startswith("#") and any(_matches(p, pattern) for p in (path, *path.parents)):
            kept = line.startswith("!")
    return kept


def _matches(path: PurePosixPath, pattern: str) -> bool:
    if pattern.startswith("**/"):
        return fnmatch(path.name, pattern[3:])
    return len(path.parts) == len(pattern.split("/")) and fnmatch(str(path), pattern)


def _copy_context(source: Path, target: Path) -> None:
    files = [p for p in source.rglob("*") if p.is_file()] if source.is_dir() else [source]
    let_in = [p for p in files if in_context(PurePosixPath(p.relative_to(ROOT).as_posix()))]
    if not let_in:
        raise ValueError(f"COPY {source.name}: .dockerignore lets nothing of it in")
    for file in let_in:
        to = target / file.relative_to(source) if source.is_dir() else target
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, to)


def _options(words: list[str]) -> Iterator[tuple[str, str]]:
    return pairwise(words)


def main(folder: Path) -> None:
    """Build into `folder`, anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    Image(folder).build()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
