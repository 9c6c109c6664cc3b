"""Names of models, and patterns of names: `*` stands for any text, also none."""


def matches(pattern: str, name: str) -> bool:
    """Whether a name is of a pattern, which may be a name itself; as long as the two at most."""
    first, *inner = pattern.split("*")
    if not inner:
        return name == pattern
    last = inner.pop()
    at, end = len(first), len(name) - len(last)
    if end < at or not (name.startswith(first) and name.endswith(last)):
        return False
    for part in inner:
        at = name.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True
