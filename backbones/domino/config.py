"""The published config of a Domino draft, strictly read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from repairzoo.draft_config import DraftConfig, Reader, nested_config, read_common
from repairzoo.errors import InvalidArtifact

if TYPE_CHECKING:
    from typing_extensions import Self

ARCHITECTURES = ("DominoDraftModel", "DFlashDraftModel")  # the first public drafts state DFlash's
PROJECTORS = ("domino", "causal_v5")  # the second is the name of early drafts
OPTIONS = ("use_bias_norm", "use_bias_gate")
MEANING = {
    "projector_type": "the kind of causal head, 'domino'; without it the file would be read as a DFlash draft",
    "shift_label": "whether block row k predicts the token after position k (true) or at it (false)",
    "pure_draft_prefix_len": "leading slots that the causal head leaves alone (1 in the released drafts)",
    "emb_dim": "inner width of embed_proj, in dflash_config, at the top level, or both",
    "gru_hidden_dim": "width of the GRU's state",
    "use_bias_norm": "whether the GRU's state is normalised before it corrects the logits",
    "use_bias_gate": "whether a gate scales the correction",
}


@dataclass(slots=True)
class DominoConfig(DraftConfig):
    """A Domino draft; see :class:`repairzoo.draft_config.DraftConfig`.

    Attributes:
        shift_label: block row k predicts position ``anchor + k + 1``, so all rows are used; otherwise row 0 is not.
        pure_draft_prefix_len: slots before this one keep their base logits.
        emb_dim, gru_hidden_dim: inner width of the correction, and of the GRU.
        use_bias_norm, use_bias_gate: see the README.
    """

    shift_label: bool
    pure_draft_prefix_len: int
    emb_dim: int
    gru_hidden_dim: int
    use_bias_norm: bool
    use_bias_gate: bool

    name: ClassVar[str] = "Domino"
    meaning: ClassVar[Mapping[str, str]] = MEANING

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.refuse_kinds("Domino", ARCHITECTURES, own=("gru_hidden_dim", "pure_draft_prefix_len"))
        reader.refuse_features(own=("projector_type", "shift_label", *OPTIONS))
        projector = reader.get("projector_type", nested=True)
        if projector not in PROJECTORS:
            raise InvalidArtifact(
                f"key 'projector_type' is {projector!r}; a Domino draft states 'domino' (or 'causal_v5'); load it as "
                "the backbone that it is"
            )
        config = cls(
            **read_common(reader),
            shift_label=reader.boolean("shift_label", nested=True),
            pure_draft_prefix_len=reader.integer("pure_draft_prefix_len", least=0, nested=True),
            emb_dim=reader.integer("emb_dim", nested=True),
            gru_hidden_dim=reader.integer("gru_hidden_dim", nested=True),
            use_bias_norm=reader.boolean("use_bias_norm", nested=True, absent=False),
            use_bias_gate=reader.boolean("use_bias_gate", nested=True, absent=False),
        )
        _check(config)
        return config


def _check(config: DominoConfig) -> None:
    slots = config.block_size - (not config.shift_label)
    if config.pure_draft_prefix_len > slots:
        raise InvalidArtifact(
            f"key 'pure_draft_prefix_len' is {config.pure_draft_prefix_len}, a block has {slots} slots"
        )
    for key, neutral in (("input_embedding_scale", 1.0), ("output_multiplier", 1.0), ("final_logit_softcapping", None)):
        if getattr(config, key) != neutral:
            raise InvalidArtifact(
                f"key {key!r} is {getattr(config, key)!r}: no published Domino draft has it, and whether it applies to "
                "the GRU's input and to the correction is not known; it is not guessed"
            )


def new_config(
    trunk: DraftConfig,
    *,
    shift_label: bool = True,
    pure_draft_prefix_len: int = 1,
    emb_dim: int = 256,
    gru_hidden_dim: int = 1024,
    block_size: int | None = None,
) -> DominoConfig:
    """The config of a new Domino draft in the published layout, with the trunk of another draft.

    Args:
        trunk: a draft's config (DFlash's, or this one's own); what it states of the trunk is taken over.
        block_size: default the trunk's.
    """
    own = {
        "projector_type": "domino",
        "pure_draft_prefix_len": pure_draft_prefix_len,
        "emb_dim": emb_dim,
        "gru_hidden_dim": gru_hidden_dim,
        "shift_label": shift_label,
    }
    published = nested_config(trunk, "DominoDraftModel", own, block_size)
    return DominoConfig.from_dict(published | {"emb_dim": emb_dim}, "new config")
