"""Where a prompt's beginning may be shared: digests of it at a few positions.

An engine's prefix cache reuses what two prompts have in common from the start. A router that
hashed every block of a prompt would spend longer on it than on the rest of the request, so a
prompt is digested at 62 positions at most:

- fixed ones, the same for every prompt, in steps of an octave up to 4 KiB and of a fifth of
  one up to 4 MiB: what two prompts share is found to within 13 % of its length;
- after tools and system prompt, after the first message, after each of the last few, and at
  the end: the next turn of a conversation begins with this list, and finds its end exactly;
- a prompt over MOST_BYTES, which only images make so long, has the fixed ones and the end.

Rules:
- Digests are of the client's own bytes, in the order in which chat templates render them:
  tools, system prompt, messages. Bytes that spell the same text differently do not match.
- A digest covers all bytes before its position, and the salt; the end's of a prompt over
  MOST_BYTES those, its length and its last _TAIL_BYTES. It is XXH3 with a secret seed, which no
  client is told. That is no cryptographic hash: whoever finds collisions spoils where prompts
  are sent, and nothing else. Processes that tell one another of prompts have one seed
  (`use_seed`), and tell digests to one another only.
"""

from collections.abc import Iterable, Sequence
from sys import maxsize
from typing import Final

from msgspec import Raw
from xxhash import xxh3_64_intdigest

from gateway.policy.request.members import Members

Points = tuple[tuple[int, int], ...]
"""(length, digest of what lies before it), ascending; the last is the whole prompt's."""

LEAST_BYTES: Final = 256
"""Shorter texts, and beginnings, are not worth remembering: fewer than five KV blocks."""
MOST_POINTS: Final = 62

_OCTAVES: Final = (512, 1024, 2048)
_FIFTHS: Final = tuple(round(4096 * 2 ** (n / 5)) for n in range(51))
POSITIONS: Final = (*_OCTAVES, *_FIFTHS)
"""Bytes, the same for every prompt."""
_AHEAD: Final = (*POSITIONS, maxsize)
BYTES_PER_TOKEN: Final = 4
"""Of positions counted in tokens."""

_LAST: Final = 5
"""Messages from the end after which there is a point."""
MOST_BYTES: Final = POSITIONS[-1]
"""Of a prompt that is looked at whole: that takes a millisecond a megabyte and more."""
_TAIL_BYTES: Final = 65_536
_BRACES: Final = 8
"""Closing braces looked at for the end of the first message."""
_NEXT: Final = tuple(comma + mark for comma in (b",", b", ") for mark in (b'{"role":', b'{"type":'))
_NO_VALUE: Final = Raw(b"")


_MARKS: Final[dict[str, tuple[bytes, ...]]] = {
    "chat": (b'{"role":',),
    "messages": (b'{"role":',),
    "responses": (b'{"role":', b'{"type":'),
    "completions": (),
}
"""Endpoint -> how a message begins, as clients write it."""


_seed: int = hash(b"sluice prefixes") & maxsize
"""Python's own is random, but the same where replicas were given one PYTHONHASHSEED."""


def seed() -> int:
    """The seed of digests, below 2**63. Two prompts compare only under one seed."""
    return _seed


def use_seed(value: int) -> None:
    """Digest by another seed from now on: what was digested before is void."""
    global _seed  # noqa: PLW0603 - one for the process
    _seed = value & maxsize


def points_of(endpoint_name: str, members: Members, text_bytes: int, salt: str = "") -> Points:
    """The points of a body, by its members; none where no prefix can be shared.

    Lengths are bytes of tools, system prompt and messages as sent. `text_bytes` is the
    measure's. `salt` is the tenant where engines keep tenants' caches apart, else "".
    Embeddings, rerank, score and audio have none. Raises nothing for such a body.
    """
    marks = _MARKS.get(endpoint_name)
    if marks is None or text_bytes < LEAST_BYTES:
        return ()
    member = members.get
    if endpoint_name == "completions":
        start = _start(endpoint_name, salt, b"")
        prompt = member("prompt", _NO_VALUE)
        if len(prompt) > MOST_BYTES:
            first = bytes(memoryview(prompt)[:1])
            return _long_points((), prompt, start) if first == b'"' else ()
        return _plain_points(bytes(prompt), start)
    responses = endpoint_name == "responses"
    sent = member("input" if responses else "messages", _NO_VALUE)
    system = "instructions" if responses else "system"
    before = [members[name] for name in ("tools", "functions", system) if name in members]
    kwargs = bytes(member("chat_template_kwargs", _NO_VALUE))
    start = _start(endpoint_name, salt, kwargs)
    if sum(map(len, before)) + len(sent) > MOST_BYTES:
        return _long_points(before, sent, start)
    listed = bytes(sent)
    data = b"".join((*before, listed)) if before else listed
    lead = len(data) - len(listed)
    return digests(data, _edges(data, lead, marks), start)


def _plain_points(data: bytes, start: int) -> Points:
    """Of a plain prompt: one text; batches and token ids have none."""
    return digests(data, (len(data) - 1,), start) if data.startswith(b'"') else ()


def _long_points(before: Sequence[Raw], listed: Raw, start: int) -> Points:
    """Of a prompt over MOST_BYTES: the same in what it begins with as any other's."""
    length = sum(map(len, before)) + len(listed)
    views = [memoryview(part)[:MOST_BYTES] for part in (*before, listed)]
    head = b"".join(views)[:MOST_BYTES]
    found = digests(head, (MOST_BYTES,), start)
    tail = bytes(memoryview(listed)[-_TAIL_BYTES:])
    return (*found, (length, xxh3_64_intdigest(tail, found[-1][1] ^ length) >> 1))


def _start(endpoint_name: str, salt: str, kwargs: bytes) -> int:
    """Where a chain of digests begins. Lengths keep neighbours apart."""
    name, tenant = endpoint_name.encode(), salt.encode()
    told = b"%d %d %b%b%b" % (len(name), len(tenant), name, tenant, kwargs)
    return xxh3_64_intdigest(told, _seed) >> 1


def digests(data: bytes, edges: Iterable[int], start: int) -> Points:
    """Chained digests of `data` at the fixed positions and at `edges`, which ascend.

    The last edge is the end of the prompt. `start` is where the chain begins.
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
        if at < edge >= LEAST_BYTES:
            add((edge, xxh3_64_intdigest(data[at:edge], chain) >> 1))
    return tuple(found)


def _edges(data: bytes, lead: int, marks: Sequence[bytes]) -> list[int]:
    """Ends of lead, first message, last messages and list; `data` ends with the list."""
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
        before = _end_before(data, at)
        if before:
            edges.append(before)
    else:
        first = _first_end(data, lead, at)
        if 0 < first < edges[-1]:
            edges.append(first)
    if lead:
        edges.append(lead)
    edges.reverse()
    return edges


def _first_end(data: bytes, lead: int, most: int) -> int:
    """The end of the first message, before `most`; 0 if it holds too many braces of its own.

    One byte is found ten times faster than a word.
    """
    at = lead
    for _ in range(_BRACES):
        at = data.find(b"}", at, most) + 1
        if not at:
            break
        if data.startswith(_NEXT, at):
            return at
    return 0


def _end_before(data: bytes, at: int) -> int:
    """The end of the message before the one that begins at `at`; 0 if that is no message.

    Between them is what JSON encoders write: a comma, with or without a space.
    """
    if data[at - 2 : at] == b"},":
        return at - 1
    return at - 2 if data[at - 3 : at] == b"}, " else 0


def block_points(
    hashes: Sequence[int], block_tokens: int, ends_tokens: Sequence[int] = ()
) -> Points:
    """Points, in tokens, of a prompt given by its blocks' chained hashes (the engine model's).

    `ends_tokens` are other positions that are looked at, such as the ends of earlier turns.
    """
    last = len(hashes)
    asked = {position // (BYTES_PER_TOKEN * block_tokens) for position in POSITIONS}
    asked.update(end // block_tokens for end in ends_tokens)
    asked.add(last)
    return tuple(
        (blocks * block_tokens, hashes[blocks - 1])
        for blocks in sorted(asked)
        if 0 < blocks <= last
    )
