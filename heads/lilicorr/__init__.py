"""LiLiCorr: attention over the lattice of all candidates of a block, then a walk over pairwise scores."""

from .convert import convert_published, published_config, save_published
from .head import LiLiCorr, LiLiCorrConfig
from .train import BASE, MARGIN, Weights, rows_after, supervision, terms

__all__ = [
    "BASE",
    "LiLiCorr",
    "LiLiCorrConfig",
    "MARGIN",
    "Weights",
    "convert_published",
    "published_config",
    "rows_after",
    "save_published",
    "supervision",
    "terms",
]
