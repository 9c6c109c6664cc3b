"""Something else in the place of one method of an object."""

from typing import Any


class Around:
    """Is asked instead of `inner`, and passes on whatever a subclass does not have.

    Subclassing would not do: what is compiled has no subclasses that are not.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
