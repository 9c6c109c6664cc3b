"""Digest a prompt at a few positions where another prompt may share its beginning.

An engine's prefix cache reuses the common beginning of two prompts. Hashing every block of a
prompt would take longer than the rest of the request, so a prompt is digested at 62 positions
at most:

- fixed positions, the same for every prompt, in steps of an octave up to 4 KiB and of a fifth
  of one up to 4 MiB: they find a shared beginning to within 13 % of its length;
- after tools and system prompt, after the first message, after each of the last few, and at
  the end: the next turn of a conversation begins with the same messages and finds the end
  exactly;
- a prompt over MAX_BYTES (only images make one so long) has the fixed positions and the end.

Rules:
- Digests are of the client's own bytes, in the order in which chat templates render them:
  tools, system prompt, messages. Bytes that spell the same text differently do not match.
- A digest covers the salt and all bytes before its position. Over MAX_BYTES, the last digest
  covers the first MAX_BYTES, the length and the last _TAIL_BYTES.
- The hash is XXH3 with a secret seed that no client learns. It is not cryptographic: a client
  that finds collisions can only mislead the routing of prompts. Replicas that exchange digests
  share one seed (`use_seed`) and send digests to nobody else.
"""

from collections.abc import Iterable, Sequence
from sys import maxsize
from typing import Final

from msgspec import Raw
from xxhash import xxh3_64_intdigest

from gateway.payload.members import Members
from gateway.scheduling.scheduler import Points

MIN_BYTES: Final = 256
"""Shorter prompts and beginnings have no points: they are fewer than five KV blocks."""
MAX_POINTS: Final = 62

_OCTAVES: Final = (512, 1024, 2048)
_FIFTHS: Final = tuple(round(4096 * 2 ** (n / 5)) for n in range(51))
POSITIONS: Final = (*_OCTAVES, *_FIFTHS)
"""The fixed positions in bytes, the same for every prompt."""
_AHEAD: Final = (*POSITIONS, maxsize)

_LAST: Final = 5
"""The last messages, each of which has a point where it begins."""
MAX_BYTES: Final = POSITIONS[-1]
"""Longest prompt that is digested whole, which takes a millisecond per megabyte or more."""
_TAIL_BYTES: Final = 65_536
_BRACES: Final = 8
"""Closing braces tried as the end of the first message."""
_NEXT: Final = tuple(comma + mark for comma in (b",", b", ") for mark in (b'{"role":', b'{"type":'))
_NO_VALUE: Final = Raw(b"")
_MARKS: Final[dict[str, tuple[bytes, ...]]] = {
    "chat": (b'{"role":',),
    "messages": (b'{"role":',),
    "responses": (b'{"role":', b'{"type":'),
    "completions": (),
}
"""Endpoint -> the bytes with which clients begin a message."""


_seed: int = hash(b"sluice prefixes") & maxsize
"""The default seed comes from Python's random hash seed, unless PYTHONHASHSEED fixes that."""


def seed() -> int:
    """The seed of digests, below 2**63. Digests compare only under the same seed."""
    return _seed


def use_seed(value: int) -> None:
    """Use another seed from now on; digests made before no longer match."""
    global _seed  # noqa: PLW0603 - one for the process
    _seed = value & maxsize


def points_of(
    endpoint_name: str,
    members: Members,
    text_bytes: int,
    tenant: str = "",
    adapter: str = "",
    *,
    salted: bool = True,
) -> Points:
    """The points of a body, by its members; () if no prefix can be shared.

    Lengths are bytes of tools, system prompt and messages as sent. `text_bytes` is the
    measure's. `salted` if engines keep tenants' caches separate. They always keep those of LoRA
    adapters separate; "" is the model itself. Embeddings, rerank, score and audio bodies have no
    points.
    """
    marks = _MARKS.get(endpoint_name)
    if marks is None or text_bytes < MIN_BYTES:
        return ()
    salt = tenant if salted else ""
    if adapter:
        salt = f"{salt}\0{adapter}"
    member = members.get
    if endpoint_name == "completions":
        start = _start(endpoint_name, salt, b"")
        prompt = member("prompt", _NO_VALUE)
        if len(prompt) > MAX_BYTES:
            first = bytes(memoryview(prompt)[:1])
            return _long_points((), prompt, start) if first == b'"' else ()
        data = bytes(prompt)  # batches and token ids have no points
        return digests(data, (len(data) - 1,), start) if data.startswith(b'"') else ()
    responses = endpoint_name == "responses"
    sent = member("input" if responses else "messages", _NO_VALUE)
    system = "instructions" if responses else "system"
    before = [members[name] for name in ("tools", "functions", system) if name in members]
    kwargs = bytes(member("chat_template_kwargs", _NO_VALUE))
    start = _start(endpoint_name, salt, kwargs)
    if sum(map(len, before)) + len(sent) > MAX_BYTES:
        return _long_points(before, sent, start)
    listed = bytes(sent)
    data = b"".join((*before, listed)) if before else listed
    lead = len(data) - len(listed)
    return digests(data, _edges(data, lead, marks), start)


def _long_points(before: Sequence[Raw], listed: Raw, start: int) -> Points:
    """Points of a prompt over MAX_BYTES; its fixed ones match those of shorter prompts."""
    length = sum(map(len, before)) + len(listed)
    views = [memoryview(part)[:MAX_BYTES] for part in (*before, listed)]
    head = b"".join(views)[:MAX_BYTES]
    found = digests(head, (MAX_BYTES,), start)
    tail = bytes(memoryview(listed)[-_TAIL_BYTES:])
    return (*found, (length, xxh3_64_intdigest(tail, found[-1][1] ^ length) >> 1))


def _start(endpoint_name: str, salt: str, kwargs: bytes) -> int:
    """The start of a chain of digests. The lengths make the concatenation unambiguous."""
    name, tenant = endpoint_name.encode(), salt.encode()
    reported = b"%d %d %b%b%b" % (len(name), len(tenant), name, tenant, kwargs)
    return xxh3_64_intdigest(reported, _seed) >> 1


def digests(data: bytes, edges: Iterable[int], start: int) -> Points:
    """Chained digests of `data` at the fixed positions and at `edges`, which ascend.

    The last edge is the end of the prompt. `start` is the chain's first value.
    """
    found: list[tuple[int, int]] = []
    add = found.append
    chain, at = start, 0
    fixed = 0
    ahead = _AHEAD[0]
    for edge in edges:
        while ahead <= edge:
            chain = xxh3_64_intdigest(data[at:ahead], chain) >> 1
            at = ahead
            add((at, chain))
            fixed += 1
            ahead = _AHEAD[fixed]
        if at < edge >= MIN_BYTES:
            add((edge, xxh3_64_intdigest(data[at:edge], chain) >> 1))
    return tuple(found)


def _edges(data: bytes, lead: int, marks: Sequence[bytes]) -> list[int]:
    """Ends of tools and system prompt (`lead`), first message, last messages and the list.

    `data` ends with the list of messages.
    """
    end = len(data)
    if data.endswith(b"]"):
        end = len(data[: end - 1].rstrip()) if data[end - 2 : end - 1].isspace() else end - 1
    edges = [end]
    at = end
    find = data.rfind
    for _ in range(_LAST):
        at = find(marks[0], lead, at) if len(marks) == 1 else max(find(m, lead, at) for m in marks)
        if at <= lead + 1:
            break
        # Encoders separate this message from the one before by a comma, with or without a space.
        if data[at - 2 : at] == b"},":
            edges.append(at - 1)
        elif data[at - 3 : at] == b"}, ":
            edges.append(at - 2)
    else:
        first = _first_end(data, lead, at)
        if 0 < first < edges[-1]:
            edges.append(first)
    if lead:
        edges.append(lead)
    edges.reverse()
    return edges


def _first_end(data: bytes, lead: int, most: int) -> int:
    """The end of the first message, before `most`; 0 if it contains too many braces.

    Searching for one byte is ten times faster than searching for a word.
    """
    at = lead
    for _ in range(_BRACES):
        at = data.find(b"}", at, most) + 1
        if not at:
            break
        if data.startswith(_NEXT, at):
            return at
    return 0
