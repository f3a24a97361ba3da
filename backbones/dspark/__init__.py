"""DSpark: a DFlash trunk with a Markov head and a confidence that cuts the proposal (arXiv 2607.05147)."""

from .backbone import DSpark
from .config import DSparkConfig, new_config

__all__ = ["DSpark", "DSparkConfig", "new_config"]
