"""DFlash: block diffusion drafting with injected target features (arXiv 2602.06036)."""

from .backbone import DFlash, DFlashCache, read_config
from .config import DFlashConfig, default_target_layers, new_config

__all__ = ["DFlash", "DFlashCache", "DFlashConfig", "default_target_layers", "new_config", "read_config"]
