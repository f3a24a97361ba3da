"""DFlash (Chen et al. 2026, arXiv 2602.06036): a block of masks becomes a block of tokens in one pass.

The trunk is :class:`repairzoo.draft_layers.Trunk`; what is DFlash's own is that slots are predicted independently
(there is no corrector) and that a block row predicts the token at its own position, so that row 0, the anchor,
predicts nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from repairzoo.draft_backbone import BlockBackbone
from repairzoo.draft_layers import DraftCache

from .config import DFlashConfig

DFlashCache = DraftCache


class DFlash(BlockBackbone):
    """The DFlash backbone, with the published parameter names ``fc``, ``hidden_norm``, ``layers.*`` and ``norm``."""

    kind = "dflash"
    config_type = DFlashConfig
    first_slot = 1


def read_config(folder: str | os.PathLike[str]) -> DFlashConfig:
    """The config of a published folder, strictly read; see :meth:`DFlashConfig.from_dict`."""
    config = DFlash.read_config(Path(folder))
    assert isinstance(config, DFlashConfig)
    return config
