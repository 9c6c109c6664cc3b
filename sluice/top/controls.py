"""What the keys of `sluice top` change: order, filter, pause."""

from dataclasses import dataclass
from typing import Final

ENTITLEMENT_ORDERS: Final = ("load", "refused", "debt", "priority", "name")
WORKER_ORDERS: Final = ("state", "load", "name")
"""Those that are out come first."""
_MAX_TEXT: Final = 64


@dataclass(slots=True)
class Controls:
    """The state that keys change; `press` takes one key at a time."""

    entitlements_order: str = ENTITLEMENT_ORDERS[0]
    workers_order: str = WORKER_ORDERS[0]
    text: str = ""
    typing: bool = False
    """Whether keys are letters of the filter."""
    paused: bool = False
    done: bool = False

    def press(self, key: str) -> bool:
        """Apply a key; returns whether the gateway must be asked anew."""
        if self.typing:
            return self._type(key)
        if key in {"q", "\x03"}:
            self.done = True
        elif key == "s":
            self.entitlements_order = _next(ENTITLEMENT_ORDERS, self.entitlements_order)
            return True
        elif key == "w":
            self.workers_order = _next(WORKER_ORDERS, self.workers_order)
            return True
        elif key == "/":
            self.typing = True
        elif key == " ":
            self.paused = not self.paused
        elif key == "\x1b" and self.text:
            self.text = ""
            return True
        return False

    def _type(self, key: str) -> bool:
        if key in {"\r", "\n"}:
            self.typing = False
        elif key in {"\x1b", "\x03"}:
            self.typing, self.text = False, ""
        elif key in {"\x7f", "\b"}:
            self.text = self.text[:-1]
        elif key.isprintable() and len(self.text) < _MAX_TEXT:
            self.text += key
        else:
            return False
        return True

    def query(self) -> dict[str, str]:
        """The view to ask for."""
        found = {"entitlements_order": self.entitlements_order, "workers_order": self.workers_order}
        if self.text:
            found |= dict.fromkeys(("entitlements", "workers", "decisions"), self.text)
        return found

    def help(self) -> str:
        """The keys, and the orders that two of them change."""
        return (
            f"q quit  s entitlements by {self.entitlements_order}  "
            f"w workers by {self.workers_order}  / filter  space pause"
        )

    def note(self) -> str:
        """What is in force, for the first line."""
        parts = []
        if self.text or self.typing:
            parts.append(f"/{self.text}{'_' if self.typing else ''}")
        if self.paused:
            parts.append("paused")
        return " ".join(parts)


def _next(orders: tuple[str, ...], now: str) -> str:
    return orders[(orders.index(now) + 1) % len(orders)]
