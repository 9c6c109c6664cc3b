"""Two named profiles of how a length estimator starts and learns."""

from typing import Final, Literal

from gateway.records.record import Record
from gateway.records.request import CATEGORIES

OutputMode = Literal["predicted", "cap"]


class EstimatorProfile(Record, frozen=True, kw_only=True):
    """How an estimator starts and learns."""

    name: str
    priors: dict[str, float]
    """Bytes per token by category before anything was observed."""
    gamma: float = 1.0
    """Spreads by which the conservative ratio is below the mean."""
    beta: float = 0.95
    """Decay of the ratio's average per observation."""
    bias_corrected: bool = True
    fit_template: bool = True
    output_mode: OutputMode = "predicted"


# Cautious means over common vocabularies of 100,000 to 200,000 entries.
DEFAULT: Final = EstimatorProfile(
    name="default",
    priors={
        "prose": 4.0,
        "code": 3.5,
        "json": 3.9,
        "cjk": 3.4,
        "other-script": 4.8,
        "mixed": 3.5,
    },
)
PAPER: Final = EstimatorProfile(
    name="paper",
    priors=dict.fromkeys(CATEGORIES, 4.0),
    bias_corrected=False,
    fit_template=False,
    output_mode="cap",
)
PROFILES: Final = {profile.name: profile for profile in (DEFAULT, PAPER)}
