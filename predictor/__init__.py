"""Predicts prefill times from what a router sees, and learns online.

What the gateway imports is pure Python without numpy. Training (`predictor.train`) needs
scikit-learn and is not imported here.
"""

from predictor.artifact import Artifact, ArtifactError, PoolSection, load
from predictor.features import FEATURES, features
from predictor.online import PrefillPredictor
from predictor.prior import PriorRates

__all__ = [
    "FEATURES",
    "Artifact",
    "ArtifactError",
    "PoolSection",
    "PrefillPredictor",
    "PriorRates",
    "features",
    "load",
]
