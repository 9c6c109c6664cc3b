"""A model's boundary section as the policy takes it: what is watched, and what may move."""

from gateway.policy.pools.boundary_control import BoundaryControl, Bounds
from gateway.policy.pools.boundary_watch import BoundaryWatch
from gateway.settings.fleet import ModelConfig


def watch_of(model: ModelConfig) -> BoundaryWatch | None:
    """None where nothing would read it."""
    asked = model.boundary
    if not asked.auto and asked.planned is None:
        return None
    return BoundaryWatch(len(model.pools), asked.planned or ())


def control_of(model: ModelConfig) -> BoundaryControl | None:
    """None where the boundaries stay as they are."""
    if not model.boundary.auto:
        return None
    rows = zip(model.pools.items(), model.boundaries, model.least_boundaries, strict=False)
    return BoundaryControl(
        [
            Bounds(pool=name, start=start, least=least, most=pool.max_model_len)
            for (name, pool), start, least in rows
        ],
        observe=model.observes_boundary,
    )
