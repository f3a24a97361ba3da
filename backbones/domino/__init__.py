"""Domino: a DFlash trunk whose slots learn of one another through a GRU (arXiv 2605.29707)."""

from .backbone import Domino
from .config import DominoConfig, new_config

__all__ = ["Domino", "DominoConfig", "new_config"]
