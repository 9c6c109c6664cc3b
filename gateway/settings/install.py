"""How extras of the package are installed; no package index has it."""


def install(extra: str) -> str:
    """The command, from the checkout or from a wheel."""
    return f"pip install '.[{extra}]' in Sluice's checkout, or 'FILE.whl[{extra}]' with its wheel"
