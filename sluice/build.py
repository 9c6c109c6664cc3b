"""How this Sluice was built."""

from gateway.scheduling import quartz


def compiled() -> bool:
    """Whether the decision code runs compiled (docs/adr/0007)."""
    return not str(quartz.__file__).endswith(".py")
