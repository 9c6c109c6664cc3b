"""Form bodies (audio uploads): the model is found and replaced, the rest is not looked into.

The gateway reads one field of the form, `model`, which must be there exactly once; all parts
travel as the client sent them.
"""

import re

from gateway.domain import BodyFacts, Measure
from gateway.errors import BadRequest
from gateway.policy.counting import MEDIA_TOKENS

_MODEL = re.compile(
    rb'content-disposition:[^\r\n]*\bname="model"[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)\r\n--',
    re.IGNORECASE,
)
_MAX_MODEL_BYTES = 256


def read_form(body: bytes) -> BodyFacts:
    """Facts of a form body. Raises BadRequest without exactly one usable `model` field."""
    found = _MODEL.findall(body)
    name = found[0].strip() if found else b""
    if len(found) != 1 or not 0 < len(name) <= _MAX_MODEL_BYTES:
        raise BadRequest(
            "Send the form with exactly one field 'model'.",
            reason="missing_field",
            param="model",
        )
    try:
        model = name.decode()
    except UnicodeDecodeError:
        raise BadRequest(
            "The field 'model' is not UTF-8.", reason="invalid_utf8", param="model"
        ) from None
    return BodyFacts(
        model=model,
        measure=Measure(
            text_bytes=0,
            longest_text_bytes=0,
            media_parts=1,
            media_tokens=MEDIA_TOKENS,
            category="mixed",
        ),
    )


def with_model(body: bytes, model: str) -> bytes:
    """The form with another model; everything else byte for byte."""
    match = _MODEL.search(body)
    if match is None:
        return body
    start, end = match.span(1)
    return body[:start] + model.encode() + body[end:]
