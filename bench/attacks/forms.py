"""Forms with a file: heads of parts, boundaries and ends that parsers read differently."""

from random import Random
from typing import Final

from bench.common.everything_on import MODEL

PATHS: Final = ("/v1/audio/transcriptions", "/v1/audio/translations")
_DISPOSITIONS: Final = (
    'form-data; name="model"',
    "form-data; name=model",
    'form-data; x-name="model"',
    'form-data; name="model"; name="file"',
    'form-data; name="mod\\"el"',
    "form-data; name*=utf-8''model",
    'form-data; filename="model"; name=prompt',
    'form-data; name="priority"',
    'form-data; name="vllm_xargs"',
    'attachment; name="model"',
    'form-data;name="model";',
    'form-data; name="',
    "form-data",
    "",
    'form-data; name="model"' * 200,
    "form-data; " + 'name="a"; ' * 3000,
)
_FILES: Final = (
    b"RIFF....WAVE",
    b'\r\ncontent-disposition: form-data; name="model"\r\n\r\nother\r\n',
    b"--",
    b"\x00" * 3000,
    b"-" * 5000,
)


def form(rng: Random, *, faulty: bool) -> tuple[bytes, bytes]:
    """(content type, body)."""
    boundary = rng.choice((b"x", b"----form1", b"-" * 70, b"a'()+_,-./:=?"))
    parts = [
        ('form-data; name="model"', MODEL.encode()),
        ('form-data; name="file"; filename="a.wav"', rng.choice(_FILES) if faulty else _FILES[0]),
    ]
    if faulty:
        for _ in range(rng.randint(1, 3)):
            value = rng.choice((MODEL.encode(), b"other", b"", b"1", b"\xff" * 50))
            parts.insert(rng.randint(0, len(parts)), (rng.choice(_DISPOSITIONS), value))
        if rng.random() < 0.2:
            del parts[rng.randrange(len(parts))]
        if rng.random() < 0.05:
            parts *= rng.choice((20, 400))
    line = b"\r\n" if not faulty or rng.random() < 0.8 else rng.choice((b"\n", b"\r", b"\r\n\r\n"))
    body = b"".join(
        b"--%b%bcontent-disposition: %b%b%b%b%b"
        % (boundary, line, disposition.encode(), line, line, value, line)
        for disposition, value in parts
    )
    body += b"--%b--%b" % (boundary, line)
    media = b"multipart/form-data; boundary=" + boundary
    if faulty and rng.random() < 0.3:
        body = body[: rng.randrange(len(body))]
    if faulty and rng.random() < 0.2:
        media = rng.choice((b"multipart/form-data", media + b"; boundary=y", media.upper(), b"x/y"))
    return media, body
