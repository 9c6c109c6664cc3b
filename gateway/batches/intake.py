"""An input file as it comes in: the form around it, the checks of its lines, and its storage.

Nothing of the file is held but the line that is being read. A bad line refuses no upload: the file
notes it, and a batch of the file fails with it, as at OpenAI.
"""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec
import numpy as np
import xxhash
from msgspec import UNSET, UnsetType
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.batches.contents import Contents
from gateway.errors import BadRequest, TooLarge
from gateway.records.batch import LineProblem, StoredFile
from gateway.records.endpoint import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES
from gateway.records.record import plain

ENDPOINTS: Final = {e.path: e for e in (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES)}
"""What the requests of a batch may be for."""
MAX_LINES: Final = 1_000_000
MAX_PROBLEMS: Final = 100
MAX_ID_CHARS: Final = 512
SLICE_BYTES: Final = 32 * 1024
"""What is read of a file before the event loop turns to others; lines cost 2 us each."""
WRITE_BYTES: Final = 1 << 20
_MAX_FIELD_BYTES: Final = 1024
_LIMITS: Final = ("max_completion_tokens", "max_output_tokens", "max_tokens")


class _Body(msgspec.Struct, gc=False):
    """Of a request's body what concerns the batch; the pipeline reads it whole when it is sent."""

    model: str
    stream: Any = None
    n: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    max_tokens: Any = None


class _Line(msgspec.Struct, gc=False):
    custom_id: str
    url: str
    body: _Body
    method: str | UnsetType = UNSET


_decode: Final = msgspec.json.Decoder(_Line).decode


class LineChecks:
    """Checks the lines of a file, which comes in pieces."""

    def __init__(self, most_line_bytes: int) -> None:
        self._most = most_line_bytes
        self._rest: list[bytes] = []
        """Pieces of the line that is not complete."""
        self.held_bytes = 0
        """Length of these."""
        self._number = 0
        self._ids = array("Q")
        """Digests of the ids, in the order of lines; 8 bytes each."""
        self._places = array("Q")
        """Their lines."""
        self.problems: list[LineProblem] = []
        self.lines = 0
        self.endpoint = ""
        self.model = ""
        self.output_tokens = 0
        self.unlimited = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the file."""
        first, *others = data.split(b"\n")
        for following in others:
            self._end_line(first)
            first = following
        self.held_bytes += len(first)
        if self.held_bytes <= self._most:
            self._rest.append(first)
        else:
            self._rest = []

    def end(self) -> None:
        """The file is whole."""
        if self.held_bytes:
            self._end_line(b"")
        if not self.lines:
            self._bad("empty_file", "The file has no requests.", line=None)
        # Equal digests are equal ids: among a million, others meet once in 40 million files.
        order = np.argsort(ids := np.frombuffer(self._ids, np.uint64), kind="stable")
        again = np.flatnonzero(ids[order][1:] == ids[order][:-1])[:MAX_PROBLEMS]
        for place in sorted(self._places[int(order[at + 1])] for at in again):
            self._bad("duplicate_custom_id", "An earlier line has this custom_id.", line=place)

    def _end_line(self, last: bytes) -> None:
        held, line = self.held_bytes + len(last), b"".join((*self._rest, last))
        self._rest, self.held_bytes = [], 0
        self._number += 1
        if not line.strip() and held <= self._most:
            return
        self.lines += 1
        if self.lines > MAX_LINES:
            if self.lines == MAX_LINES + 1:
                self._bad("too_many_tasks", f"A file has at most {MAX_LINES:,} requests.")
        elif held > self._most:
            self._bad("line_too_long", f"A line has at most {self._most} bytes.")
        elif len(self.problems) < MAX_PROBLEMS:
            self._check(line)

    def _check(self, line: bytes) -> None:
        try:
            read = _decode(line)
        except msgspec.ValidationError as error:
            code = "missing_required_parameter" if "missing" in str(error) else "invalid_type"
            self._bad(code, f"{error}.")
            return
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._bad("invalid_json_line", "The line is not a JSON object.")
            return
        body = read.body
        self.endpoint, self.model = self.endpoint or read.url, self.model or body.model
        if not 0 < len(read.custom_id) <= MAX_ID_CHARS:
            self._bad("invalid_custom_id", f"Give 1 to {MAX_ID_CHARS} characters.", "custom_id")
        elif read.method not in {"POST", UNSET}:
            self._bad("invalid_method", "Requests of a batch are POST.", "method")
        elif read.url not in ENDPOINTS:
            self._bad("invalid_url", f"Give one of {', '.join(ENDPOINTS)}.", "url")
        elif read.url != self.endpoint:
            self._bad("mismatched_url", "All requests of a file have the same url.", "url")
        elif not 0 < len(body.model) <= 256 or body.model != self.model:
            self._bad("mismatched_model", "All requests of a file have one model.", "body.model")
        elif body.stream:
            self._bad("invalid_value", "Requests of a batch do not stream.", "body.stream")
        else:
            self._ids.append(
                xxhash.xxh3_64_intdigest(read.custom_id.encode("utf-8", "surrogatepass"))
            )
            self._places.append(self._number)
            stated = [v for name in _LIMITS if isinstance(v := getattr(body, name), int)]
            answers = body.n if isinstance(body.n, int) and 0 < body.n <= 128 else 1
            self.output_tokens += min(max(stated, default=0), 1 << 31) * answers
            self.unlimited += not stated

    def _bad(
        self, code: str, message: str, param: str | None = None, line: int | None = -1
    ) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            at = self._number if line == -1 else line
            self.problems.append(LineProblem(code=code, message=message, line=at, param=param))


class UploadForm:
    """A form with a file, in pieces."""

    def __init__(self, content_type: str) -> None:
        """Raises BadRequest unless it is that of a form."""
        kind, options = parse_options_header(content_type[:1024])
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise _bad("send it as 'content-type: multipart/form-data; boundary=...'")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """None until the file begins."""
        self._ended = False
        self._content: list[bytes] = []
        self._field = b""
        self._header = self._value = b""
        self._disposition = b""
        self._name = ""
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._begin,
                    "on_header_field": self._header_field,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_finished,
                    "on_part_data": self._data,
                    "on_part_end": self._end,
                    "on_end": lambda: setattr(self, "_ended", True),
                },
            )
        except FormParserError:
            raise _bad("its boundary is too long") from None
        # The parser logs a warning for every malformed form, so a client could fill the log.
        self._parser.logger.disabled = True

    def write(self, data: bytes) -> bytes:
        """Read the next piece; returns what it holds of the file. Raises BadRequest."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _bad(str(error)[:200].rstrip(".")) from None
        content, self._content = b"".join(self._content), []
        return content

    def end(self) -> None:
        """The form is whole. Raises BadRequest if it is not, or has no file."""
        if not self._ended or self.filename is None:
            raise _bad("it has no file, or ends before its boundary")

    def _begin(self) -> None:
        self._header = self._value = self._disposition = self._field = b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == "file":
            if self.filename is not None:
                raise _bad("it has two files")
            name = options.get(b"filename", b"").decode("utf-8", "replace")
            self.filename = plain(name)[:256] or "upload.jsonl"

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._content.append(data[start:end])
        else:
            self._field += data[start:end]
            if len(self._field) > _MAX_FIELD_BYTES or len(self.fields) > 16:
                raise _bad("its fields are too long or too many")

    def _end(self) -> None:
        if self._name != "file":
            self.fields[self._name] = self._field.decode("utf-8", "replace")


async def receive(
    contents: Contents,
    stored: StoredFile,
    form: UploadForm,
    pieces: AsyncIterator[bytes],
    *,
    most_bytes: int,
    most_line_bytes: int,
    hold: Callable[[int], None],
) -> StoredFile:
    """Store the content of the file that comes as this form; returns what is known of it then.

    `hold` is told the bytes that it holds in memory, and may refuse. Raises Refusal, StateFailure;
    then nothing of it stays.
    """
    checks, size, held = LineChecks(most_line_bytes), 0, bytearray()
    async with contents.open(stored.id) as write:
        async for piece in pieces:
            data = form.write(piece)
            size += len(data)
            if size > most_bytes:
                raise file_too_large(most_bytes)
            for at in range(0, len(data), SLICE_BYTES):
                checks.feed(data[at : at + SLICE_BYTES])
                await asyncio.sleep(0)
            held += data
            hold(len(held) + min(checks.held_bytes, most_line_bytes))
            if len(held) >= WRITE_BYTES:
                await write(bytes(held))
                held.clear()
        form.end()
        if (purpose := form.fields.get("purpose")) != "batch":
            said = f"not '{plain(purpose[:64])}'" if purpose else "as the field 'purpose'"
            raise BadRequest(
                f"Files have the purpose 'batch' here, {said}.",
                reason="invalid_value",
                param="purpose",
            )
        await asyncio.to_thread(checks.end)  # it sorts a million digests
        if held:
            await write(bytes(held))
    return msgspec.structs.replace(
        stored,
        filename=form.filename or "",
        bytes=size,
        lines=checks.lines,
        endpoint=checks.endpoint,
        model=checks.model,
        problems=tuple(sorted(checks.problems, key=lambda problem: problem.line or 0)),
        output_tokens=checks.output_tokens,
        unlimited=checks.unlimited,
    )


def file_too_large(most_bytes: int) -> TooLarge:
    """The refusal of a file over the bound."""
    return TooLarge(f"A file has at most {most_bytes} bytes here (batches.max_file_bytes).")


def _bad(why: str) -> BadRequest:
    return BadRequest(f"The form could not be read: {why}.", reason="invalid_form")
