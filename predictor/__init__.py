"""Prefill times and output lengths, predicted from what a router sees and learned online.

Pure Python without numpy: what a gateway imports is here. Training is `predictor.train`, which
needs scikit-learn and is imported by name.
"""

from predictor.artifact import Artifact, ArtifactError, load
from predictor.features import FEATURES, features
from predictor.online import PrefillPredictor
from predictor.prior import PriorRates
from predictor.survival import OutputSurvival

__all__ = [
    "FEATURES",
    "Artifact",
    "ArtifactError",
    "OutputSurvival",
    "PrefillPredictor",
    "PriorRates",
    "features",
    "load",
]
