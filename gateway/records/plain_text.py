"""Text of others as people may read it: what would steer a terminal or hide is spelled out."""

import re
from typing import Final

_HIDDEN: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""C0 and C1 controls, bidirectional overrides, what has no width, lone surrogates, tags."""


def plain(text: str) -> str:
    r"""The text with control, bidirectional and invisible characters as \x1b, \u202e and so on."""
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def without_credentials(url: str) -> str:
    """The text of a URL with its credentials masked, as read or as written."""
    return re.sub(r"//.*@", "//***@", url)
