"""An entitlement's fields as options of the command line."""

from typing import Annotated, Any

import typer

from sluice.terminal import stop


def _option(flag: str, words: str) -> Any:
    return typer.Option(flag, help=words, show_default=False)


Tenant = Annotated[str | None, _option("--tenant", "Whose it is.")]
Class = Annotated[
    str | None, _option("--class", "dedicated, guaranteed, elastic, spot or preemptible.")
]
Slo = Annotated[float | None, _option("--slo-target-ms", "Time to first token that it expects.")]
Rate = Annotated[float | None, _option("--tokens-per-second", "Input and output tokens.")]
RateLimit = Annotated[float | None, _option("--max-tokens-per-second", "The same with borrowing.")]
Kv = Annotated[float | None, _option("--kv-cache-gib", "KV cache of its requests in flight.")]
KvLimit = Annotated[float | None, _option("--max-kv-cache-gib", "The most of it.")]
Concurrency = Annotated[str | None, _option("--concurrency", "Baseline: 32, or short=28,long=4.")]
Limit = Annotated[int | None, _option("--max-concurrency", "The most sequences in flight.")]
Mode = Annotated[str | None, _option("--mode", "enforce or observe.")]
Expires = Annotated[
    str | None, _option("--expires-at", "2030-12-31T23:59:59Z; UTC without an offset.")
]


def fields_of(*, concurrency: str | None, **given: object) -> dict[str, object]:
    """The fields that were given; `concurrency` as a number or by pool."""
    fields = {name: value for name, value in given.items() if value is not None}
    if concurrency is not None:
        try:
            if "=" in concurrency:
                parts = [part.partition("=") for part in concurrency.split(",")]
                fields["concurrency"] = {pool.strip(): int(most) for pool, _, most in parts}
            else:
                fields["concurrency"] = int(concurrency)
        except ValueError:
            stop("--concurrency: give a whole number, or pool=number,pool=number", 2)
    return fields
