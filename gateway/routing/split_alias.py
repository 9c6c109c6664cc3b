"""A name that stands for several models by weight; a conversation stays with its model."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final
from zlib import crc32

import msgspec

from gateway.payload.members import Members

_FIRST_BYTES: Final = 4096
"""Of a prompt without messages: its beginning stands for the conversation."""
_NAMES: Final = ("prompt_cache_key", "user", "safety_identifier")
"""Members by which clients name a conversation or a user, the narrowest first."""
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode
_role = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class SplitAlias:
    """One name and the weights of its models."""

    def __init__(self, name: str, weights: Mapping[str, int]) -> None:
        self.name = name
        self.models = tuple(weights)
        self._weights = weights

    def choose(self, open_to: Sequence[str], tenant: str, key: bytes) -> str:
        """The model for a conversation's key, among those of `models` that are open to it."""
        ends = list(accumulate(self._weights[name] for name in open_to))
        point = crc32(f"{self.name}\0{tenant}\0".encode() + key) % ends[-1]
        return open_to[bisect_right(ends, point)]


def conversation_key(members: Members) -> bytes:
    """Bytes that all requests of a conversation, or of a named user, have in common."""
    for name in _NAMES:
        if name in members and bytes(members[name]) != b"null":
            return bytes(members[name])
    for name in ("messages", "input"):
        if name not in members:
            continue
        if bytes(memoryview(members[name])[:1]) != b"[":
            return bytes(members[name])[:_FIRST_BYTES]
        beginning = []  # up to the first message of the user, which every further turn repeats
        for message in _elements(members[name]):
            beginning.append(bytes(message))
            if beginning[-1][:1] != b"{" or bytes(_role(message).get("role", b"")) == b'"user"':
                break
        return b"".join(beginning)[:_FIRST_BYTES]
    return bytes(members["prompt"])[:_FIRST_BYTES] if "prompt" in members else b""
