"""Which backbone a published folder holds, told by its config alone; what is no known packaging is refused by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repairzoo.draft_config import NEST
from repairzoo.draft_files import CONFIG
from repairzoo.errors import InvalidArtifact
from repairzoo.safe_file import read_json
from repairzoo.speculators import MARKS, first_slot, is_speculators
from repairzoo.speculators import kind as speculators_kind

# what other public drafts state in `architectures`, and what they are
_OTHER = {
    "DFlash2DraftModel": "DFlash 2 (candidate selector and convolutions), which is not supported yet",
    "Gemma4DSparkModel": "DSpark on Gemma-4 layers (shared K and V, sandwich norms), which are not computed here",
    "Lfm2DSparkDraftModel": "DSpark on LFM2 layers (interleaved rotary embedding), which are not computed here",
}


LAYOUTS = ("z-lab", "Domino", "DeepSpec", "SpecForge", "ModelOpt", "speculators")


@dataclass(frozen=True, slots=True)
class Packaging:
    """How a published draft is packed.

    Attributes:
        kind: registry name of the backbone. layout: whose packaging it is: one of :data:`LAYOUTS`.
        first_slot: block row of slot 0. Row ``first_slot + i`` predicts the token at ``anchor position + 1 + i``.
        told_by: the key that decided.
    """

    kind: str
    layout: str
    first_slot: int
    told_by: str


def resolve(folder: str | os.PathLike[str]) -> Packaging:
    """The packaging of a folder with a ``config.json``.

    Raises:
        InvalidArtifact: there is none, or see :func:`resolve_config`.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise InvalidArtifact(f"{path}: no such file; the folder of a draft holds {CONFIG} and its weights")
    return resolve_config(read_json(path), str(path))


def resolve_config(config: Any, where: str = CONFIG) -> Packaging:
    """The packaging that a parsed config states; its kind's own reader checks the rest.

    Raises:
        InvalidArtifact: no known packaging, or a known one that is not supported; names the key, the file, the fix.
    """
    if not isinstance(config, Mapping):
        raise InvalidArtifact(f"{where}: not a JSON object; give the config.json of a draft")
    nested = config.get(NEST)
    nested = nested if isinstance(nested, Mapping) else {}

    def stated(key: str) -> Any:
        return config.get(key) if nested.get(key) is None else nested[key]

    def refuse(key: str, what: str) -> InvalidArtifact:
        return InvalidArtifact(
            f"{where}: key {key!r}: this is {what}; use a DFlash, Domino or DSpark draft on Qwen3 layers"
        )

    if is_speculators(config):
        try:
            told_by = next(key for key in MARKS if key in config)
            return Packaging(speculators_kind(config), "speculators", first_slot(config), told_by)
        except InvalidArtifact as error:
            raise InvalidArtifact(f"{where}: {error}") from error
    architectures = config.get("architectures")
    for name in architectures if isinstance(architectures, list) else []:
        if name in _OTHER:
            raise refuse("architectures", _OTHER[name])
    projector = stated("projector_type")
    if projector in ("domino", "causal_v5"):
        shifted = stated("shift_label")
        if type(shifted) is not bool:
            raise InvalidArtifact(
                f"{where}: key 'shift_label' is {shifted!r}: it says whether slot 0 is block row 0 (true) or 1 (false) "
                "and is not guessed; add it from the draft's release"
            )
        return Packaging("domino", "Domino", 0 if shifted else 1, "projector_type")
    if projector == "lilicorr":
        raise InvalidArtifact(
            f"{where}: key 'projector_type' is 'lilicorr': this folder holds a DFlash draft and a LiLiCorr head; take "
            "them apart with `repairzoo convert SRC DST --part head` (or --part backbone)"
        )
    # only ModelOpt's exports state these beside a Markov head
    flat = next((key for key in ("has_lm_head", "sample_from_anchor") if stated(key) is not None), None)
    if projector == "dspark" or (flat and stated("markov_rank") is not None):
        if stated("sample_from_anchor") is False:
            raise InvalidArtifact(
                f"{where}: key 'sample_from_anchor' is false: this DSpark reserves block row 0 (NVIDIA's Nemotron "
                "head does), which is not computed here; use a release whose row 0 predicts"
            )
        return Packaging("dspark", "ModelOpt" if flat else "SpecForge", 0, flat or "projector_type")
    if projector not in (None, "dflash"):
        raise refuse("projector_type", f"a draft with the unknown causal head {projector!r}")
    if (key := next((key for key in config if key.startswith("dspark_")), None)) is not None:
        raise refuse(key, "the DSpark module of a DeepSeek-V4 checkpoint, which is part of its target")
    if stated("markov_rank") is not None:
        return Packaging("dspark", "DeepSpec" if NEST not in config else "SpecForge", 0, "markov_rank")
    for key in ("selector_rank", "selector_top_k", "conv_kernel_size"):
        if stated(key) is not None:
            raise refuse(key, _OTHER["DFlash2DraftModel"])
    if stated("mask_token_id") is None or stated("target_layer_ids") is None:
        missing = "mask_token_id" if stated("mask_token_id") is None else "target_layer_ids"
        raise InvalidArtifact(
            f"{where}: key {missing!r} is missing (in {NEST} or at the top level), so this is no DFlash, Domino or "
            "DSpark draft; give the folder of one, or add the key from the draft's release"
        )
    family = config.get("model_type")
    if family == "qwen3_5":
        what = "a draft on Qwen3.5 layers, whose norms are stored as an offset from one and would be read as weights"
        raise refuse("model_type", what)
    return Packaging("dflash", "z-lab", 1, NEST if NEST in config else "target_layer_ids")
