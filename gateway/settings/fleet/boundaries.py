"""What moves and watches the boundaries of a model."""

from gateway.policy.pools.boundary_control import BoundaryBounds, BoundaryControl
from gateway.policy.pools.boundary_watch import BoundaryWatch
from gateway.settings.fleet.model import ModelConfig


def watch_of(model: ModelConfig) -> BoundaryWatch | None:
    """Watches errors and length drift at a model's boundaries; None if neither is in use."""
    asked = model.boundary
    if not asked.auto and asked.planned is None:
        return None
    return BoundaryWatch(len(model.pools), asked.planned or ())


def control_of(model: ModelConfig) -> BoundaryControl | None:
    """Moves a model's boundaries; None if they are fixed."""
    if not model.boundary.auto:
        return None
    rows = zip(model.pools.items(), model.boundaries, model.least_boundaries, strict=False)
    return BoundaryControl(
        [
            BoundaryBounds(pool=name, start=start, least=least, most=pool.max_model_len)
            for (name, pool), start, least in rows
        ],
        observe=model.observes_boundary,
    )
