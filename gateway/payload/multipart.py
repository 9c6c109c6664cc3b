"""Form bodies (audio uploads): the gateway reads them and writes a new form for the engine.

An engine's parser could read a client's form differently from the gateway's. So the gateway sends
its own boundary and part headers, with the names that it read; the part `model` holds the
engine's name of the model. Contents stay byte for byte. A part keeps its `name`, `filename` and
(files only) content type; its other headers and options are dropped.
"""

import re
from collections.abc import Sequence
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.errors import BadRequest
from gateway.payload.counting import MEDIA_TOKENS
from gateway.payload.members import steering
from gateway.payload.schema import invalid
from gateway.records.request import BodyFacts, FormPart, Measure

MAX_PARTS: Final = 128
_MAX_MODEL_BYTES: Final = 256
_MAX_TYPE_BYTES: Final = 1024
_NAME: Final = re.compile(r'[^\x00-\x1f\x7f"\\]{1,256}')
_TYPE: Final = re.compile(rb"[\x20-\x7e]{1,256}")
_UNSAFE: Final = re.compile(r'[\x00-\x1f\x7f"\\]')
_PLAIN_ENCODINGS: Final = frozenset({b"7bit", b"8bit", b"binary"})


class _Parts:
    """Callbacks of the parser, which note each part's offsets. The body is fed in one piece."""

    def __init__(self) -> None:
        self.parts: list[FormPart] = []
        self.ended = False
        """The closing boundary was seen."""
        self._headers: dict[bytes, bytes] = {}
        self._name = b""
        self._start = self._end = 0

    def begin(self) -> None:
        if len(self.parts) >= MAX_PARTS:
            raise invalid("form", f"more than {MAX_PARTS} parts.")
        self._headers = {}
        self._start = self._end = 0

    def header_name(self, data: bytes, start: int, end: int) -> None:
        self._name = data[start:end].lower()
        if self._name in self._headers:
            raise _bad(f"a part repeats the header {self._name[:64].decode('latin-1')}")

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._headers[self._name] = data[start:end].strip()

    def content(self, data: bytes, start: int, end: int) -> None:
        self._start = self._start or start
        self._end = end

    def part_end(self) -> None:
        headers = self._headers
        kind, options = parse_options_header(headers.get(b"content-disposition", b""))
        if kind != b"form-data" or b"name" not in options:
            raise _bad("a part has no 'content-disposition: form-data; name=...'")
        encoding = headers.get(b"content-transfer-encoding", b"binary").lower()
        if encoding not in _PLAIN_ENCODINGS:
            raise _bad("a part has a content-transfer-encoding; send its bytes as they are")
        name = _text(options[b"name"])
        if not _NAME.fullmatch(name):
            raise _bad("a part's name is empty, too long or has quotes or control characters")
        content_type = headers.get(b"content-type")
        if content_type is not None and not _TYPE.fullmatch(content_type):
            raise _bad("a part's content-type is not a line of ASCII")
        filename = options.get(b"filename")
        self.parts.append(
            FormPart(
                name=name,
                start=self._start,
                end=self._end,
                filename=None if filename is None else _UNSAFE.sub("_", _text(filename))[:256],
                content_type=content_type,
            )
        )

    def end(self) -> None:
        self.ended = True


def read_form(body: bytes, content_types: Sequence[bytes]) -> BodyFacts:
    """Facts of a form, by its request's content-type headers.

    Raises BadRequest unless the form is well formed and has exactly one usable field `model`.
    The text of its other fields counts as prompt; fields that steer an engine are left out.
    """
    kind, options = parse_options_header(b"")
    if len(content_types) == 1 and len(content_types[0]) <= _MAX_TYPE_BYTES:
        kind, options = parse_options_header(content_types[0])
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise BadRequest(
            "Send the form with one header 'content-type: multipart/form-data; boundary=...'.",
            reason="invalid_form",
        )
    every_part = _parse(body, options[b"boundary"])
    models = [part for part in every_part if part.name == "model"]
    if len(models) != 1 or models[0].filename is not None:
        raise BadRequest(
            "Send the form with exactly one field 'model'.",
            reason="duplicate_key" if models else "missing_field",
            code=None,
            param="model",
        )
    name = body[models[0].start : models[0].end]
    if not 0 < len(name) <= _MAX_MODEL_BYTES:
        raise invalid("model", f"expected 1 to {_MAX_MODEL_BYTES} bytes.")
    try:
        model = name.decode()
    except UnicodeDecodeError:
        raise BadRequest(
            "The field 'model' is not UTF-8.", reason="invalid_utf8", param="model"
        ) from None
    steered = steering([part.name for part in every_part])
    parts = tuple(part for part in every_part if part.name not in steered)
    text_bytes = sum(
        part.end - part.start for part in parts if part.filename is None and part.name != "model"
    )
    return BodyFacts(
        model=model,
        measure=Measure(
            text_bytes=text_bytes,
            longest_text_bytes=text_bytes,
            media_parts=1,
            media_tokens=MEDIA_TOKENS,
            category="mixed",
        ),
        steering_fields=steered,
        parts=parts,
    )


def written(
    body: bytes, parts: Sequence[FormPart], model: str, boundary: bytes
) -> list[bytes | memoryview]:
    """The pieces of the form for an engine that knows the model as `model`.

    `boundary` must occur in none of the contents: make it at random.
    """
    pieces: list[bytes | memoryview] = []
    view = memoryview(body)
    for part in parts:
        head = f'content-disposition: form-data; name="{part.name}"'
        if part.filename is not None:
            head += f'; filename="{part.filename}"'
        pieces.append(b"--%b\r\n%b\r\n" % (boundary, head.encode()))
        # A field's content type could name a charset other than UTF-8 for its text.
        if part.content_type is not None and part.filename is not None:
            pieces.append(b"content-type: %b\r\n" % part.content_type)
        pieces.append(b"\r\n")
        pieces.append(model.encode() if part.name == "model" else view[part.start : part.end])
        pieces.append(b"\r\n")
    pieces.append(b"--%b--\r\n" % boundary)
    return pieces


def _parse(body: bytes, boundary: bytes) -> list[FormPart]:
    parts = _Parts()
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": parts.begin,
                "on_header_field": parts.header_name,
                "on_header_value": parts.header_value,
                "on_part_data": parts.content,
                "on_part_end": parts.part_end,
                "on_end": parts.end,
            },
        )
        # The parser logs a warning for every malformed form, so a client could fill the log.
        parser.logger.disabled = True
        parser.write(body)
    except FormParserError as error:
        raise _bad(str(error)[:200].rstrip(".")) from None
    if not parts.ended:
        raise _bad("it does not end with its boundary")
    return parts.parts


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _bad("a part's name is not UTF-8") from None


def _bad(why: str) -> BadRequest:
    return BadRequest(f"The form could not be parsed: {why}.", reason="invalid_form")
