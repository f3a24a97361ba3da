"""The published config of a DFlash draft (z-lab), strictly read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from repairzoo.draft_config import NEST, DraftConfig, Reader, default_target_layers, read_common

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(slots=True)
class DFlashConfig(DraftConfig):
    """A DFlash draft; see :class:`repairzoo.draft_config.DraftConfig`."""

    name: ClassVar[str] = "DFlash"

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.refuse_kinds("DFlash", ["DFlashDraftModel"])
        reader.refuse_features()
        return cls(**read_common(reader))


def new_config(
    *,
    block_size: int,
    mask_token_id: int,
    num_target_layers: int,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    rope_theta: float,
    target_layer_ids: Sequence[int] | None = None,
    rms_norm_eps: float = 1e-6,
    sliding_window: int | None = None,
    layer_types: Sequence[str] | None = None,
    max_position_embeddings: int = 8192,
    dtype: str = "float32",
) -> DFlashConfig:
    """The config of a new draft in the published layout; tapped layers default to :func:`default_target_layers`."""
    if target_layer_ids is None:
        target_layer_ids = default_target_layers(num_target_layers, num_hidden_layers)
    types = list(layer_types) if layer_types is not None else ["full_attention"] * num_hidden_layers
    return DFlashConfig.from_dict(
        {
            "architectures": ["DFlashDraftModel"],
            "attention_bias": False,
            "block_size": block_size,
            NEST: {"mask_token_id": mask_token_id, "target_layer_ids": list(target_layer_ids)},
            "dtype": dtype,
            "head_dim": head_dim,
            "hidden_act": "silu",
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "layer_types": types,
            "max_position_embeddings": max_position_embeddings,
            "max_window_layers": num_hidden_layers,
            "model_type": "qwen3",
            "num_attention_heads": num_attention_heads,
            "num_hidden_layers": num_hidden_layers,
            "num_key_value_heads": num_key_value_heads,
            "num_target_layers": num_target_layers,
            "rms_norm_eps": rms_norm_eps,
            "rope_scaling": None,
            "rope_theta": rope_theta,
            "sliding_window": sliding_window,
            "tie_word_embeddings": False,
            "use_sliding_window": "sliding_attention" in types,
            "vocab_size": vocab_size,
        },
        "new config",
    )
