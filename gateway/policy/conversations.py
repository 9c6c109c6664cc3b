"""Which conversations were served as they came: their next turn begins with the same bytes.

A turn's messages are a prefix of the next turn's. Kept are digests of whole message lists, under
the digest of their first bytes; bounded, the longest unused goes first. A look-up compares
only lists that began alike, a few at most.
"""

from collections import OrderedDict

from gateway.policy.members import Members

KEPT = 20_000
PER_START = 4
_START_BYTES = 256
_MEMBERS = ("messages", "input")


class Conversations:
    """Message lists that engines were sent unchanged."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._lists: OrderedDict[int, list[tuple[int, int]]] = OrderedDict()
        """Digest of the start -> (length, digest) of whole lists, newest last."""

    def __len__(self) -> int:
        return len(self._lists)

    def remember(self, tenant: str, members: Members) -> None:
        """Note a body that was served as it came, by its members."""
        turns = turns_of(members)
        if not turns:
            return
        key = hash((tenant, turns[:_START_BYTES]))
        known = self._lists.pop(key, [])
        entry = (len(turns), hash(turns))
        if entry not in known:
            known = [*known[1 - PER_START :], entry]
        self._lists[key] = known
        if len(self._lists) > self._kept:
            self._lists.popitem(last=False)

    def continues(self, tenant: str, members: Members) -> bool:
        """Whether an earlier turn of this conversation was served as it came."""
        turns = turns_of(members)
        known = self._lists.get(hash((tenant, turns[:_START_BYTES])), ())
        return any(size <= len(turns) and hash(turns[:size]) == digest for size, digest in known)


def turns_of(members: Members) -> bytes:
    """The messages of a body as sent, without the list's end; b"" where there is no list."""
    for name in _MEMBERS:
        turns = bytes(members.get(name, b""))
        if turns.startswith(b"["):
            return turns[:-1].rstrip()
    return b""
