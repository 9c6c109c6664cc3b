"""A model has list prices, or a price by the hour for each of its pools, or neither."""

from gateway.settings.fleet.model import ModelConfig
from gateway.settings.problems import KeyPath
from gateway.settings.source import Document


def check_prices(document: Document, path: KeyPath, model: ModelConfig) -> None:
    """`price` and `gpu_hour` of one model; `path` leads to it."""
    by_hour = [name for name, pool in model.pools.items() if pool.gpu_hour is not None]
    if by_hour and model.price is not None:
        document.add(
            (*path, "pools", by_hour[0], "gpu_hour"),
            "the model has list prices as well, so a request would have two costs",
            "remove `price` at the model, or `gpu_hour` at its pools",
        )
    elif by_hour and len(by_hour) < len(model.pools):
        without = next(name for name in model.pools if name not in by_hour)
        document.add(
            (*path, "pools", without),
            f"pool `{by_hour[0]}` has a price by the hour, and this one has none",
            "give `gpu_hour` at every pool of the model, or at none",
        )
    for name, pool in model.pools.items():
        if pool.gpu_hour is None and pool.gpus != 1:
            document.add(
                (*path, "pools", name, "gpus"),
                "counts for `gpu_hour` only, which this pool has not",
                "give `gpu_hour`, or remove `gpus`",
            )
