"""Tokens of an inline image from its header's dimensions, without decoding the image.

An image costs width x height / 750 tokens, within [64, 4096]. This is Anthropic's published
rule of thumb and a fair first guess for other models; the estimator learns each model's real
cost from usage. Only the first bytes of a data URL are decoded, so a 3 MB image takes no longer
than a small one. Unknown formats and remote URLs cost the configured default.
"""

import binascii
import math

import msgspec

PIXELS_PER_TOKEN = 750
MIN_IMAGE_TOKENS = 64
MAX_IMAGE_TOKENS = 4096
HEAD_CHARS = 4096
"""Base64 characters decoded: enough for a JPEG whose EXIF block is small."""

_PREFIX_BYTES = 256
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def image_tokens(source: msgspec.Raw, default: int) -> int:
    """Tokens of an image given as JSON: a data URL, or Anthropic's base64 source."""
    view = memoryview(source)
    start = _base64_start(bytes(view[:_PREFIX_BYTES]))
    if start < 0:
        return default
    text = bytes(view[start : start + HEAD_CHARS]).replace(b"\\/", b"/")
    text = text.partition(b'"')[0]
    try:
        head = binascii.a2b_base64(text[: len(text) // 4 * 4])
    except binascii.Error:
        return default
    size = dimensions(head)
    if size is None:
        return default
    tokens = math.ceil(size[0] * size[1] / PIXELS_PER_TOKEN)
    return min(max(tokens, MIN_IMAGE_TOKENS), MAX_IMAGE_TOKENS)


def _base64_start(prefix: bytes) -> int:
    at = prefix.find(b";base64,")
    if at >= 0:
        return at + 8
    at = prefix.find(b'"data"')
    if at < 0:
        return -1
    return prefix.find(b'"', at + 6) + 1 or -1


def dimensions(head: bytes) -> tuple[int, int] | None:
    """(width, height) in pixels of a PNG, GIF, WebP or JPEG; None if `head` does not show them."""
    if head.startswith(b"\x89PNG\r\n\x1a\n") and len(head) >= 24:
        return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])
    if head[:6] in (b"GIF87a", b"GIF89a") and len(head) >= 10:
        return int.from_bytes(head[6:8], "little"), int.from_bytes(head[8:10], "little")
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP" and len(head) >= 30:
        return _webp(head)
    if head.startswith(b"\xff\xd8"):  # a JPEG: its first frame says
        at = 2
        while at + 9 <= len(head) and head[at] == 0xFF:
            if head[at + 1] in _FRAMES:
                return int.from_bytes(head[at + 7 : at + 9]), int.from_bytes(head[at + 5 : at + 7])
            at += 2 + int.from_bytes(head[at + 2 : at + 4])
    return None


def _webp(head: bytes) -> tuple[int, int] | None:
    kind = head[12:16]
    if kind == b"VP8X":
        return (
            int.from_bytes(head[24:27], "little") + 1,
            int.from_bytes(head[27:30], "little") + 1,
        )
    if kind == b"VP8 ":
        return (
            int.from_bytes(head[26:28], "little") & 0x3FFF,
            int.from_bytes(head[28:30], "little") & 0x3FFF,
        )
    if kind == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return None
