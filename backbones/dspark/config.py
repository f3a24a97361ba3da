"""The published config of a DSpark draft, flat (DeepSpec) or nested (SpecForge, ModelOpt), strictly read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from repairzoo.draft_config import DraftConfig, Reader, nested_config, positive, read_common
from repairzoo.errors import InvalidArtifact

if TYPE_CHECKING:
    from typing_extensions import Self

ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")  # DeepSpec's, SpecForge's
TYPES = ("vanilla", "gated", "rnn")
HEADS = ("enable_confidence_head", "confidence_head_with_markov")
CALIBRATION = "confidence_temperatures"
# they change nothing that is drafted; has_lm_head is ModelOpt's, and the tensors show it anyway
TRAINING = ("num_anchors", "confidence_head_alpha", "attention_mode", "has_lm_head")
MEANING = {
    "markov_rank": "rank of the Markov head; 0 is no such head",
    "markov_head_type": "'vanilla', 'gated' or 'rnn'",
    "enable_confidence_head": "whether the draft has a confidence head",
    "confidence_head_with_markov": "whether the confidence also reads the Markov embedding of the token before",
    "sample_from_anchor": "whether block row 0 predicts (true in all drafts that are computed here)",
    "num_anchors": "a number of DeepSpec's training, which its own configs always state",
}


@dataclass(slots=True)
class DSparkConfig(DraftConfig):
    """A DSpark draft; see :class:`repairzoo.draft_config.DraftConfig`.

    Attributes:
        markov_rank: 0 for no Markov head. markov_head_type: ``"vanilla"``, ``"gated"``, ``"rnn"``, or None at rank 0.
        confidence: whether there is a confidence head. confidence_with_markov: whether it reads the token before.
        confidence_temperatures: this project's own key: a divisor of each slot's confidence logit, or None.
    """

    markov_rank: int
    markov_head_type: str | None
    confidence: bool
    confidence_with_markov: bool
    confidence_temperatures: tuple[float, ...] | None

    name: ClassVar[str] = "DSpark"
    meaning: ClassVar[Mapping[str, str]] = MEANING

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.refuse_kinds("DSpark", ARCHITECTURES, own=("markov_rank", "markov_head_type"))
        reader.refuse_features(own=("projector_type", "sample_from_anchor", *HEADS))
        projector = reader.get("projector_type", nested=True, required=False)
        if projector not in (None, "dspark"):
            raise InvalidArtifact(
                f"key 'projector_type' is {projector!r}; a DSpark draft states 'dspark' (SpecForge) or nothing "
                "(DeepSpec); load it as the backbone that it is"
            )
        if not reader.boolean("sample_from_anchor", nested=True, absent=True):
            raise InvalidArtifact(
                "key 'sample_from_anchor' is false: this draft reserves block row 0 (NVIDIA's Nemotron head does), "
                "which is not computed here; use a release whose row 0 predicts"
            )
        common = read_common(reader, ("qwen3", "dspark"))
        rank = reader.integer("markov_rank", least=0, nested=True)
        kind = reader.get("markov_head_type", nested=True, required=rank > 0)
        if rank and kind not in TYPES:
            raise InvalidArtifact(f"key 'markov_head_type' is {kind!r}; known are {', '.join(TYPES)}")
        confidence = reader.boolean("enable_confidence_head", nested=True)
        absent = None if confidence else False
        with_markov = reader.boolean("confidence_head_with_markov", nested=True, absent=absent) and confidence
        for key, neutral in (("output_multiplier", 1.0), ("final_logit_softcapping", None)):
            if common[key] != neutral:
                raise InvalidArtifact(
                    f"key {key!r} is {common[key]!r}: whether it applies to the Markov head's bias, too, is not known; "
                    "it is not guessed"
                )
        if with_markov and not rank:
            raise InvalidArtifact("key 'confidence_head_with_markov' is true but 'markov_rank' is 0")
        if projector is None and common["published"].get("model_type") == "qwen3":
            reader.integer("num_anchors")
        reader.read |= set(TRAINING)
        return cls(
            **common,
            markov_rank=rank,
            markov_head_type=kind if rank else None,
            confidence=confidence,
            confidence_with_markov=with_markov,
            confidence_temperatures=_temperatures(reader, confidence, common["block_size"]),
        )


def _temperatures(reader: Reader, confidence: bool, slots: int) -> tuple[float, ...] | None:
    values: Any = reader.get(CALIBRATION, required=False)
    if values is None:
        return None
    if not confidence or not isinstance(values, list) or len(values) != slots:
        raise InvalidArtifact(
            f"key {CALIBRATION!r} must be a list of block_size = {slots} numbers, in a draft with a confidence head; "
            f"it is {values!r}"
        )
    return tuple(positive(CALIBRATION, value) for value in values)


def new_config(
    trunk: DraftConfig,
    *,
    markov_rank: int = 256,
    markov_head_type: str = "vanilla",
    confidence: bool = True,
    confidence_with_markov: bool = True,
    block_size: int | None = None,
) -> DSparkConfig:
    """The config of a new DSpark draft with the trunk of another draft, in SpecForge's layout (tables are borrowed).

    Args:
        trunk: a draft's config (DFlash's, or this one's own); what it states of the trunk is taken over.
        block_size: default the trunk's.
    """
    own = {
        "projector_type": "dspark",
        "markov_rank": markov_rank,
        "markov_head_type": markov_head_type,
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": confidence and confidence_with_markov and markov_rank > 0,
    }
    published = nested_config(trunk, "DSparkDraftModel", own, block_size)
    published.pop(CALIBRATION, None)  # of another head
    return DSparkConfig.from_dict(published, "new config")
