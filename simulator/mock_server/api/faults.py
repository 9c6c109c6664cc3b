"""Faults on demand, as `--fail` and POST /mock/fail accept them.

A spec is a comma-separated list of `name[:argument][@probability]`. Probabilities are per
request and drawn from the request's number, so the same sequence of requests meets the same
faults.
"""

from typing import Final

import msgspec

from simulator.mock_server.api.answers import uniform


class FaultError(ValueError):
    """A fault spec that cannot be parsed; the message says which specs are valid."""


class _Kind(msgspec.Struct, frozen=True):
    """A kind of fault: its help, and its argument's type and default."""

    help: str
    argument: str = "none"
    """none, count (integer >= 0), factor (number >= 1), rate (0..1), text."""
    default: str | None = None


KINDS: Final[dict[str, _Kind]] = {
    "refuse": _Kind("close the connection without an answer (all paths but /mock/)"),
    "reset-before": _Kind("TCP reset before any byte of the response"),
    "reset-mid": _Kind("TCP reset after K chunks, or half a body", "count", "3"),
    "stall": _Kind("stop sending after K chunks (0: before the head), keep it open", "count", "0"),
    "slow": _Kind("X times slower", "factor"),
    "500": _Kind("answer 500", "rate"),
    "503": _Kind("answer 503, not the busy one", "rate"),
    "busy": _Kind("answer 503 busy", "rate"),
    "usage-zero": _Kind("report 0 tokens"),
    "usage-huge": _Kind("report 1e9 tokens"),
    "usage-none": _Kind("report no usage"),
    "usage-every": _Kind("put usage on the last content chunk always"),
    "interval": _Kind("K tokens in an event of a stream", "count", "4"),
    "no-done": _Kind("end streams without [DONE]"),
    "no-finish": _Kind("end streams without finish_reason and [DONE]"),
    "empty-200": _Kind("answer a streamed overflow with 200 and an empty body"),
    "models-500": _Kind("answer 500 on /v1/models"),
    "no-metrics": _Kind("answer 404 on /metrics"),
    "sglang-metrics": _Kind("show metrics under SGLang's names"),
    "kv-fail": _Kind("as a decode engine, do not get the KV"),
    "kv-stall": _Kind("as a decode engine, wait for the KV until the client leaves"),
    "kv-lost": _Kind("as a prefill engine, lose the KV before it is fetched"),
    "model-name": _Kind("echo another model name", "text"),
}


class InjectedFault(msgspec.Struct, frozen=True, kw_only=True):
    """A requested fault."""

    name: str
    value: float = 0.0
    """Its count or factor."""
    text: str = ""
    rate: float = 1.0
    """Chance per request, 0..1."""


class Active(msgspec.Struct, frozen=True):
    """The faults that one request meets."""

    by_name: dict[str, InjectedFault]

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    def value(self, name: str) -> float | None:
        """The fault's count or factor; None if the request does not meet it."""
        fault = self.by_name.get(name)
        return None if fault is None else fault.value


NONE: Final = Active({})


class Faults(msgspec.Struct, frozen=True):
    """A parsed spec."""

    faults: tuple[InjectedFault, ...] = ()

    def draw(self, request_number: int) -> Active:
        """The faults that request number `request_number` meets."""
        if not self.faults:
            return NONE
        return Active(
            {
                fault.name: fault
                for position, fault in enumerate(self.faults)
                if fault.rate >= 1 or uniform(request_number * 64 + position) < fault.rate
            }
        )

    @property
    def slow_factor(self) -> float:
        """Slowdown of the whole engine: `slow` without a probability."""
        return next((f.value for f in self.faults if f.name == "slow" and f.rate >= 1), 1.0)


def _number(text: str, what: str, lowest: float, highest: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise FaultError(f"{what} must be a number, not {text!r}") from None
    if not lowest <= value <= highest:
        raise FaultError(f"{what} must be in [{lowest:g}, {highest:g}], not {text}")
    return value


def _split(item: str) -> tuple[str, str | None, float | None]:
    """(name, argument, probability) of one item; None where it is absent."""
    head, at, rate_text = item.rpartition("@")
    if not at:
        head = item
    name, colon, argument = head.partition(":")
    if name not in KINDS:
        raise FaultError(f"unknown fault {name!r}; known faults:\n{help_text()}")
    rate = _number(rate_text, f"the probability of {name}", 0, 1) if at else None
    return name, argument if colon else None, rate


def _fault(item: str) -> InjectedFault:
    name, argument, rate = _split(item)
    kind = KINDS[name]
    chance = 1.0 if rate is None else rate
    if kind.argument == "none":
        if argument is not None:
            raise FaultError(f"{name} takes no argument: {kind.help}")
        return InjectedFault(name=name, rate=chance)
    if kind.argument == "rate":
        if argument is not None and rate is not None:
            raise FaultError(f"{name} takes its probability once: {name}:RATE or {name}@RATE")
        if argument is not None:
            chance = _number(argument, f"the probability of {name}", 0, 1)
        return InjectedFault(name=name, rate=chance)
    text = argument or kind.default
    if text is None:
        raise FaultError(f"{name} needs an argument, as {name}:X: {kind.help}")
    if kind.argument == "text":
        return InjectedFault(name=name, text=text, rate=chance)
    return InjectedFault(name=name, value=_argument(name, kind.argument, text), rate=chance)


def _argument(name: str, kind: str, text: str) -> float:
    """A factor or a count."""
    if kind == "factor":
        return _number(text, f"{name}'s factor", 1, 1e6)
    value = _number(text, f"{name}'s count", 0, 1e9)
    if value != int(value):
        raise FaultError(f"{name}'s count must be a whole number, not {text}")
    return value


def parse_faults(spec: str) -> Faults:
    """Parse a spec; empty means none. Raises FaultError naming the valid specs."""
    faults = tuple(_fault(item.strip()) for item in spec.split(",") if item.strip())
    names = [fault.name for fault in faults]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise FaultError(f"{', '.join(twice)} is given twice")
    return Faults(faults)


def help_text() -> str:
    """The known faults, one per line."""
    argument = {"count": ":K", "factor": ":X", "rate": ":RATE", "text": ":NAME"}
    return "\n".join(
        f"  {name}{argument.get(kind.argument, '')}  {kind.help}" for name, kind in KINDS.items()
    )
