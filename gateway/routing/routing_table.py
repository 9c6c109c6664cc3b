"""Records of pool choice: the table of boundaries, and the compression windows above them."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class PoolShape:
    """A pool as routing sees it. Pools are ordered by `window_tokens`."""

    name: str
    window_tokens: int
    """max_model_len of its engines."""
    boundary_tokens: int | None
    """b_short of this pool: requests with expected totals up to it go here; None for the last."""
    tells_flow: bool = False
    """Whether requests tell an inference gateway before its engines whose they are."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """A model's routing table. `observe` computes the boundary and does not apply it."""

    pools: tuple[PoolShape, ...]
    default_max_tokens: int | None = None
    observe: bool = False


@dataclass(frozen=True, kw_only=True)
class CompressionRules:
    """A model's settings for compression above a boundary."""

    gamma: float = 1.5
    max_cut: float = 0.5
    tokenizer: str | None = None
    """Path of the model's tokenizer.json, which makes counts exact."""
    when: Literal["asked", "any", "header"] = "asked"
    """Which tasks: questions over retrieved passages, all, or all of requests that ask for it."""
    mark: bool = True
    """Whether cuts are marked in the text."""
    only_when_busy: bool = False
    """Whether to compress only while the larger pool has no room."""


@dataclass(frozen=True, kw_only=True)
class CompressionWindow:
    """Target of a request in a compression window: the smaller pool, and T_c in tokens."""

    pool: int
    budget_tokens: int
