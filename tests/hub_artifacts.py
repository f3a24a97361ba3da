"""Small heads and backbones as their own code saves them."""

from __future__ import annotations

from pathlib import Path

import torch

from repairzoo.backbones.dflash import DFlash, new_config
from repairzoo.heads.dels import DeLS, DeLSConfig
from repairzoo.statement import KEY, make

TOY = {"id": "owner/toy", "revision": None, "fingerprint": None}
SIZES = {"vocab_size": 32, "hidden_size": 16}


def save_head(folder: Path, seed: int = 0) -> Path:
    config = DeLSConfig(
        variant="gru", rank=4, hidden=6, input_rank=4, block_size=4, padded_vocab_size=32, target_id="owner/toy",
        **SIZES,
    )  # fmt: skip
    head = DeLS(config, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        head.up.normal_(0, 4, generator=torch.Generator().manual_seed(seed + 1))
    head.save_pretrained(folder)
    return folder


def save_backbone(folder: Path, seed: int = 0) -> Path:
    config = new_config(
        block_size=4, mask_token_id=31, num_target_layers=3, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, rope_theta=10000.0, target_layer_ids=[0, 2],
        dtype="float64", **SIZES,
    )  # fmt: skip
    backbone = DFlash(config, seed=seed).double()
    backbone.config.published[KEY] = make("dflash", 1, 32, TOY)
    backbone.save_pretrained(folder)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
