"""An input file as it comes in: the form around it, the checks of its lines, and its storage.

Nothing of the file is held but the line that is being read. A bad line refuses no upload: the file
notes it, and a batch of the file fails with it, as at OpenAI.
"""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
import numpy as np
import xxhash
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.batches.contents import Contents
from gateway.errors import BadRequest, TooLarge
from gateway.payload.schema import undecodable
from gateway.records.batch import LineProblem, StoredFile
from gateway.records.record import Record, plain

Endpoint = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages"
]
"""What the requests of a batch may be for."""
ENDPOINTS: Final[tuple[Endpoint, ...]] = get_args(Endpoint)
MAX_LINES: Final = 1_000_000
MAX_PROBLEMS: Final = 100
SLICE_BYTES: Final = 32 * 1024
"""What is read of a file before the event loop turns to others; lines cost 2 us each."""
_MAX_FIELD_BYTES: Final = 1024
_DISPOSITION: Final = b"content-disposition"
KeepSeconds = Annotated[int, msgspec.Meta(ge=3600)]
_LIMITS: Final = ("max_completion_tokens", "max_output_tokens", "max_tokens")


class Bounds(Record, frozen=True, kw_only=True):
    """Limits of one tenant's files and batches."""

    max_file_bytes: int
    max_line_bytes: int
    max_files: int
    """Output files count, too."""
    max_open: int
    """Batches that have not ended."""
    keep_s: int
    """From a file's creation to its expiry, unless its creator asks for less."""


class UploadFields(Record, frozen=True, kw_only=True, rename={"keep_s": "expires_after[seconds]"}):
    """What a form says beside its file."""

    purpose: Literal["batch"]
    keep_s: KeepSeconds | None = None


class _Body(msgspec.Struct, gc=False):
    """Of a request's body what concerns the batch; the pipeline reads it whole when it is sent."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    stream: Any = None
    n: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    max_tokens: Any = None


class _Line(msgspec.Struct, gc=False):
    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    url: Endpoint
    body: _Body
    method: Literal["POST"] = "POST"


_decode: Final = msgspec.json.Decoder(_Line).decode
_CODES: Final = {
    **dict.fromkeys(("invalid_json", "invalid_utf8", "too_deep"), "invalid_json_line"),
    "missing_field": "missing_required_parameter",
    "invalid_type": "invalid_type",
}
"""OpenAI's codes of bad lines, by the reasons of bad bodies."""


class LineChecks:
    """Checks the lines of a file, which comes in pieces."""

    def __init__(self, most_line_bytes: int) -> None:
        self._most = most_line_bytes
        self.rest = bytearray()
        """Of the line that is not complete, as far as it may be long."""
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
        self.rest += data
        if b"\n" in data:
            *lines, self.rest = self.rest.split(b"\n")
            for line in lines:
                self._end_line(line)
        del self.rest[self._most + 1 :]

    def end(self) -> None:
        """The file is whole."""
        self._end_line(self.rest)
        if not self.lines:
            self._bad("empty_file", "The file has no requests.", line=None)
        # Equal digests are equal ids: among a million, others meet once in 40 million files.
        order = np.argsort(ids := np.frombuffer(self._ids, np.uint64), kind="stable")
        again = np.flatnonzero(ids[order][1:] == ids[order][:-1])[:MAX_PROBLEMS]
        for place in sorted(self._places[int(order[at + 1])] for at in again):
            self._bad("duplicate_custom_id", "An earlier line has this custom_id.", line=place)

    def _end_line(self, line: bytearray) -> None:
        self._number += 1
        self.lines += bool(line.strip())
        if not line.strip() or len(self.problems) == MAX_PROBLEMS:
            return
        if self.lines > MAX_LINES:
            if self.lines == MAX_LINES + 1:
                self._bad("too_many_tasks", f"A file has at most {MAX_LINES:,} requests.")
        elif len(line) > self._most:
            self._bad("line_too_long", f"A line has at most {self._most} bytes.")
        else:
            self._check(line)

    def _check(self, line: bytearray) -> None:
        try:
            read = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            refusal = undecodable(error)
            code = _CODES.get(refusal.reason, f"invalid_{refusal.param}")
            bad_json = code == "invalid_json_line"
            message = "The line is not a JSON object." if bad_json else refusal.message
            self._bad(code, message, refusal.param)
            return
        body = read.body
        self.endpoint, self.model = self.endpoint or read.url, self.model or body.model
        if read.url != self.endpoint:
            self._bad("mismatched_url", "All requests of a file have the same url.", "url")
        elif body.model != self.model:
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
        self.filename: str | None = None
        """None until the file begins."""
        self._ended = False
        self._head = b""
        """Of a part: a line for each header, its name and its value with nothing between them."""
        self._name = ""
        self._fields: dict[str, bytes] = {}
        self._content = bytearray()
        """Of the file what came in the newest piece."""
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": lambda: setattr(self, "_head", b""),
                    "on_header_field": self._header,
                    "on_header_value": self._header,
                    "on_header_end": lambda: self._header(b"\n", 0, 1),
                    "on_headers_finished": self._headers_finished,
                    "on_part_data": self._data,
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
        content, self._content = bytes(self._content), bytearray()
        return content

    def end(self) -> UploadFields:
        """The form is whole. Raises BadRequest if it is not, or has no file."""
        if not self._ended or self.filename is None:
            raise _bad("it has no file, or ends before its boundary")
        fields = {name: value.decode("utf-8", "replace") for name, value in self._fields.items()}
        try:
            return msgspec.convert(fields, UploadFields, strict=False)
        except msgspec.ValidationError as error:
            raise undecodable(error) from None

    def _header(self, data: bytes, start: int, end: int) -> None:
        self._head += data[start:end]

    def _headers_finished(self) -> None:
        options: dict[bytes, bytes] = {}
        for header in self._head.split(b"\n"):
            if header.lower().startswith(_DISPOSITION):
                options = parse_options_header(header[len(_DISPOSITION) :])[1]
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == "file":
            if self.filename is not None:
                raise _bad("it has two files")
            name = options.get(b"filename", b"").decode("utf-8", "replace")
            self.filename = plain(name)[:256] or "upload.jsonl"

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._content += data[start:end]
        else:
            self._fields[self._name] = self._fields.get(self._name, b"") + data[start:end]
            if len(self._fields[self._name]) > _MAX_FIELD_BYTES or len(self._fields) > 16:
                raise _bad("its fields are too long or too many")


async def receive(
    contents: Contents,
    stored: StoredFile,
    form: UploadForm,
    pieces: AsyncIterator[bytes],
    bounds: Bounds,
    hold: Callable[[int], None],
) -> StoredFile:
    """Store the content of the file that comes as this form; returns what is known of it then.

    `hold` is told the bytes that it holds in memory, and may refuse. Raises Refusal, StateFailure;
    then nothing of it stays.
    """
    checks, size = LineChecks(bounds.max_line_bytes), 0
    async with contents.open(stored.id) as write:
        async for piece in pieces:
            data = form.write(piece)
            size += len(data)
            if size > bounds.max_file_bytes:
                most = bounds.max_file_bytes
                raise TooLarge(f"A file has at most {most} bytes here (batches.max_file_bytes).")
            for at in range(0, len(data), SLICE_BYTES):
                checks.feed(data[at : at + SLICE_BYTES])
                await asyncio.sleep(0)
            hold(len(data) + len(checks.rest))
            if data:
                await write(data)
        fields = form.end()
        await asyncio.to_thread(checks.end)  # it sorts a million digests
    return msgspec.structs.replace(
        stored,
        filename=form.filename or "",
        bytes=size,
        expires_unix_s=stored.created_unix_s + min(fields.keep_s or bounds.keep_s, bounds.keep_s),
        lines=checks.lines,
        endpoint=checks.endpoint,
        model=checks.model,
        problems=tuple(sorted(checks.problems, key=lambda problem: problem.line or 0)),
        output_tokens=checks.output_tokens,
        unlimited=checks.unlimited,
    )


def _bad(why: str) -> BadRequest:
    return BadRequest(f"The form could not be read: {why}.", reason="invalid_form")
