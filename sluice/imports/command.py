"""`sluice import`: another gateway's configuration as sluice.yaml, with a report."""

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from gateway.settings import ConfigError
from gateway.settings.source import MAX_BYTES, Document, read
from sluice.imports import crd as of_crd
from sluice.imports import litellm as of_litellm
from sluice.imports import production_stack as of_stack
from sluice.imports.litellm_api import fetch
from sluice.imports.report import Report, told
from sluice.imports.sections import dumped, problems_of, references, written
from sluice.terminal import JsonOption, echo_json, stop

MAX_DUMP_BYTES: Final = 512 << 20

import_ = typer.Typer(
    name="import",
    help="Another gateway's configuration as sluice.yaml, and a report of every setting.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
FileArgument = Annotated[Path, typer.Argument(help="The file to import.")]
OutputOption = Annotated[
    Path | None,
    typer.Option("-o", "--output", help="Write here; a file that exists is never replaced."),
]


@import_.command("litellm")
def litellm(
    file: FileArgument,
    keys: Annotated[
        str | None,
        typer.Option(
            help="The running proxy's URL, with its master key in $LITELLM_MASTER_KEY; or a file: "
            "JSON of keys and teams, of /key/list and /team/list, or a table dump."
        ),
    ] = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """A LiteLLM proxy: models, teams and keys. Clients keep their keys. Exit 1 if none fits."""
    document, report = _document(file)
    of_keys = None if keys is None else Report(keys)
    dump = None if keys is None else _dump(keys)
    config = of_litellm.convert(document, report, dump, of_keys)
    _finish(config, [report, *([] if of_keys is None else [of_keys])], output, as_json=as_json)


@import_.command("production-stack")
def production_stack(
    file: FileArgument, output: OutputOption = None, as_json: JsonOption = False
) -> None:
    """VLLM's production-stack: values.yaml. Exit 1 if no backend fits."""
    document, report = _document(file)
    _finish(of_stack.convert(document, report), [report], output, as_json=as_json)


@import_.command("crd")
def crd(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Manifests; those of `kubectl get -o yaml`, too."),
    ],
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """TokenEntitlements, with their TokenPools and Secrets: the section `entitlements`."""
    manifests, reports = [], []
    for file in files:
        text = _text(file)
        line = 0
        for part in _NEXT_DOCUMENT.split(text):
            above, line = line, line + part.count("\n")
            if not _HAS_CONTENT.search(part):
                continue
            # Lines before it are empty, so that the report has the file's own.
            document = _read(file, "\n" * above + part)
            report = _report(file, document)
            manifests += [(manifest, report) for manifest in of_crd.objects_of(document.data)]
            reports.append(report)
    config = of_crd.convert(manifests)
    _finish(config, reports, output, as_json=as_json, whole=False)


_NEXT_DOCUMENT: Final = re.compile(r"^---(?=\s)", re.MULTILINE)
_HAS_CONTENT: Final = re.compile(r"^\s*[^#\s]", re.MULTILINE)


def _document(file: Path) -> tuple[Document, Report]:
    document = _read(file, _text(file))
    return document, _report(file, document)


def _report(file: Path, document: Document) -> Report:
    return Report(str(file), lambda path: document.key_place(path).line)


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(MAX_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        stop(f"{file}: {getattr(error, 'strerror', None) or 'not UTF-8'}", 2)


def _read(file: Path, text: str) -> Document:
    try:
        document = read(text, str(file), {})
    except ConfigError as error:
        stop(str(error), 2)
    if document.problems:
        stop(str(ConfigError(document.problems)), 2)
    return document


def _dump(source: str) -> Any:
    """Keys and teams, of a proxy's URL or of a file."""
    if source.startswith(("http://", "https://")):
        return fetch(source)
    file = Path(source)
    try:
        if file.stat().st_size > MAX_DUMP_BYTES:
            stop(f"{file}: over {MAX_DUMP_BYTES >> 20} MiB", 2)
        return json.loads(file.read_bytes())
    except OSError as error:
        stop(f"{file}: {error.strerror}", 2)
    except ValueError:
        stop(f"{file}: not JSON", 2)


def _finish(
    config: dict[str, Any],
    reports: list[Report],
    output: Path | None,
    *,
    as_json: bool,
    whole: bool = True,
) -> None:
    """Print the report and write the file. Exit 1 if there is nothing to write.

    `whole`: it is a gateway's file, not sections to put into one.
    """
    lines = [line for report in reports for line in report.lines]
    counts = Counter(line.fate for line in lines)
    text = ""
    if config and not whole:
        text = dumped(config, "Sections to put into the gateway's sluice.yaml.")
    elif config:
        try:
            text = written(config, "Imported; `mode: observe` decides nothing until it is removed.")
        except ConfigError as error:
            stop(f"the import made a file that Sluice refuses:\n{problems_of(error)}", 1)
    if text and output is not None:
        _write(output, text)
    needed = references(text)
    if as_json:
        echo_json(
            {
                "ok": bool(text),
                "output": None if output is None else str(output),
                "environment": needed,
                "counts": counts,
                "lines": [msgspec.to_builtins(line) for line in lines],
                **({} if output is not None else {"text": text}),
            }
        )
    else:
        if text and output is None:
            typer.echo(text, nl=False)
        for line in told(lines):
            typer.echo(line, err=True)
        if needed:
            typer.echo(f"set before you start: {', '.join(needed)}", err=True)
    if not text:
        raise typer.Exit(1)


def _write(output: Path, text: str) -> None:
    try:
        with open(output, "x", encoding="utf-8", opener=_owners) as file:
            file.write(text)
    except FileExistsError:
        stop(f"{output} exists: give another name, or move it away", 2)
    except OSError as error:
        stop(f"cannot write {output}: {error.strerror}", 2)


def _owners(path: str, flags: int) -> int:
    """Open for the owner alone: the file has hashes of keys."""
    return os.open(path, flags, 0o600)
