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
_LENGTH_BITS = 40
_LENGTH = (1 << _LENGTH_BITS) - 1


class Conversations:
    """Message lists that engines were sent unchanged."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._lists: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        """Digest of the start -> whole lists, newest last: digest << 40 | length. Numbers in a
        tuple are a third of what pairs in a list take, and nothing to the garbage collector."""

    def __len__(self) -> int:
        return len(self._lists)

    def remember(self, tenant: str, members: Members) -> None:
        """Note a body that was served as it came, by its members."""
        turns = turns_of(members)
        if not turns:
            return
        key = hash((tenant, turns[:_START_BYTES]))
        known = self._lists.pop(key, ())
        entry = hash(turns) << _LENGTH_BITS | len(turns)
        if entry not in known:
            known = (*known[1 - PER_START :], entry)
        self._lists[key] = known
        if len(self._lists) > self._kept:
            self._lists.popitem(last=False)

    def continues(self, tenant: str, members: Members) -> bool:
        """Whether an earlier turn of this conversation was served as it came."""
        turns = turns_of(members)
        known = self._lists.get(hash((tenant, turns[:_START_BYTES])), ())
        for entry in known:
            size = entry & _LENGTH
            if size <= len(turns) and hash(turns[:size]) == entry >> _LENGTH_BITS:
                return True
        return False


def turns_of(members: Members) -> bytes:
    """The messages of a body as sent, without the list's end; b"" where there is no list."""
    for name in _MEMBERS:
        turns = bytes(members.get(name, b""))
        if turns.startswith(b"["):
            return turns[:-1].rstrip()
    return b""
