"""vLLM speculators' packaging of a draft, translated into the backbone's own and back.

It differs in three ways that raise nothing when overlooked: layer ids count the embedding as 0, so they are one higher
than z-lab's (vllm#40727); block rows that predict follow from ``block_size - speculative_tokens``; and the vocabulary
may be reduced, with ``d2t`` and ``t2d`` mapping it (speculators 0.9: ``models/dflash``, ``models/dspark``).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from repairzoo.errors import InvalidArtifact

NEST = "dflash_config"  # where z-lab's, Domino's and SpecForge's configs keep a draft's own keys
MARKS = ("speculators_config", "speculators_model_type", "transformer_layer_config")
ALGORITHMS = ("dflash", "dspark")
DOMINO_PREFIX = "domino_head."
MAPS = ("d2t", "t2d")
VERIFIER = ("verifier_norm.weight", "verifier_lm_head.weight")  # the target's, for training
_MARKOV = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_DOMINO = ("shift_label", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim")

# `transformer_layer_config` is written without what equals its class: an absent key has Qwen3Config's value. The sizes
# are then held to the tensors. The rotary base is not: it must be stated.
_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "use_sliding_window": False,
}
# of training, or of the wrapper: they change nothing that is drafted
_NOISE = frozenset(
    (
        "architectures", "auto_map", "auf", "ce_loss_alpha", "confidence_head_alpha", "converted_from", "dtype",
        "l1_loss_alpha", "lambda_base_decay_ratio", "lambda_base_start", "loss_decay_gamma", "model_type",
        "num_anchors", "speculators_version", "tie_word_embeddings", "torch_dtype", "transformers_version",
    )
)  # fmt: skip


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a config has a key that only this packaging has."""
    return any(key in config for key in MARKS)


def _mark(config: Mapping[str, Any]) -> str:
    return next(key for key in MARKS if key in config)


def first_slot(config: Mapping[str, Any]) -> int:
    """Block row of slot 0: ``block_size - speculative_tokens``, else ``sample_from_anchor``, else 1.

    Old files omit ``sample_from_anchor`` and reserve row 0, whatever the default of the class is now.
    """
    block = _integer(config, "block_size")
    stated = config.get("sample_from_anchor")
    if stated is not None and type(stated) is not bool:
        raise InvalidArtifact(f"key 'sample_from_anchor' must be true or false, not {stated!r}")
    reserved = block - _speculative_tokens(config)
    if reserved not in (0, 1):  # fewer tokens are proposed than are drafted
        return 0 if stated else 1
    if stated is not None and reserved != (0 if stated else 1):
        warnings.warn(
            f"'sample_from_anchor' is {stated} but block_size - speculative_tokens is {reserved}; the latter is what "
            "served heads follow and is used",
            stacklevel=2,
        )
    return reserved


def kind(config: Mapping[str, Any]) -> str:
    """Which backbone it is: ``dflash``, ``domino`` or ``dspark``.

    Raises:
        InvalidArtifact: another algorithm, or a slot convention that the backbone does not have.
    """
    algorithm = config.get("speculators_model_type")
    if algorithm is None:
        inner = config.get("speculators_config")
        algorithm = inner.get("algorithm") if isinstance(inner, Mapping) else None
    if algorithm == "dflash2":
        raise InvalidArtifact("key 'speculators_model_type': this is DFlash 2, which is not supported yet")
    if algorithm not in ALGORITHMS:
        raise InvalidArtifact(
            f"key 'speculators_model_type' is {algorithm!r} in a vLLM speculators config (told by {_mark(config)!r}); "
            "drafts of 'dflash' (with projector_type 'domino' for Domino) and 'dspark' are read here"
        )
    trunk = config.get("transformer_layer_config")
    if not isinstance(trunk, Mapping):
        raise InvalidArtifact(
            "key 'transformer_layer_config' must be an object in a vLLM speculators config (told by "
            f"{_mark(config)!r}), not {trunk!r}; fetch the config again"
        )
    first = first_slot(config)
    if algorithm == "dspark" and first == 1:
        raise InvalidArtifact(
            "key 'sample_from_anchor': this DSpark reserves block row 0, which is not computed here; its released "
            "relatives let row 0 predict (sample_from_anchor true, speculative_tokens = block_size)"
        )
    projector = config.get("projector_type")
    if algorithm == "dflash" and projector == "domino":
        if config.get("shift_label") is not (first == 0):
            raise InvalidArtifact(
                f"key 'shift_label' is {config.get('shift_label')!r} but block_size - speculative_tokens is {first}: "
                "the first must be true exactly where the second is 0; correct the one that the release does not have"
            )
        return "domino"
    if projector not in (None, "dflash"):
        raise InvalidArtifact(f"key 'projector_type' is {projector!r}; known are 'dflash' and 'domino'")
    return "dspark" if algorithm == "dspark" or first == 0 else "dflash"


def native(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config in the backbone's own packaging, the original under ``converted_from``; any other config as it is.

    Raises:
        InvalidArtifact: a key that is missing, unknown, contradictory, or asks for what is not computed; names it.
    """
    if not is_speculators(config):
        return dict(config)
    found = kind(config)
    trunk = {**_QWEN3, **config["transformer_layer_config"]}
    ids = config.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise InvalidArtifact(
            "key 'aux_hidden_state_layer_ids' must list the tapped layers, the embedding counted as 0, the first "
            f"decoder layer as 1; it is {ids!r} and is not guessed"
        )
    inner: dict[str, Any] = {
        "mask_token_id": _integer(config, "mask_token_id", least=0),
        "target_layer_ids": [i - 1 for i in ids],
    }
    read = {*MARKS, "aux_hidden_state_layer_ids", "block_size", "mask_token_id", "sample_from_anchor", *_NOISE}
    read |= {"draft_vocab_size", "target_hidden_size", "projector_type", "sliding_window_non_causal"}
    if found == "domino":
        inner |= {"projector_type": "domino"} | {key: config[key] for key in _DOMINO if key in config}
    elif found == "dspark":
        rank_0 = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
        own = config if config.get("speculators_model_type") == "dspark" else rank_0
        inner |= {"projector_type": "dspark"} | {key: own[key] for key in _MARKOV if key in own}
    read |= set(_MARKOV) | set(_DOMINO)  # the classes write them all, whatever the projector
    unknown = sorted(key for key in config if key not in read)
    if unknown:
        raise InvalidArtifact(
            f"key {unknown[0]!r} is unknown in a vLLM speculators config and may change what the draft computes; "
            "remove it if it does not"
        )
    vocabulary = trunk["vocab_size"]
    if config.get("draft_vocab_size", vocabulary) != vocabulary:
        raise InvalidArtifact(
            f"key 'draft_vocab_size' is {config['draft_vocab_size']!r}, the target's vocabulary has {vocabulary!r}: a "
            "reduced draft vocabulary is not computed here; use a release with the whole one"
        )
    if config.get("target_hidden_size") not in (None, trunk["hidden_size"]):
        raise InvalidArtifact(
            f"key 'target_hidden_size' is {config['target_hidden_size']!r}, the draft's hidden_size "
            f"{trunk['hidden_size']!r}: a target of another width is not computed here"
        )
    out = {key: copy.deepcopy(value) for key, value in trunk.items() if key not in ("architectures", "auto_map")}
    for key in ("dtype", "torch_dtype", "num_target_layers"):
        if config.get(key) is not None:
            out[key] = config[key]
    if config.get("sliding_window_non_causal") is True:
        out["is_causal"] = False
    names = {"dflash": "DFlashDraftModel", "domino": "DominoDraftModel", "dspark": "DSparkDraftModel"}
    out |= {"architectures": [names[found]], "block_size": config["block_size"], NEST: inner}
    return out | {"converted_from": {"layout": "speculators", "config": copy.deepcopy(dict(config))}}


def tensors(found: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """The tensors of such a file under the backbone's own names, without what only describes the whole vocabulary.

    Raises:
        InvalidArtifact: ``d2t`` or ``t2d`` do not map the whole vocabulary to itself.
    """
    for name, identity in (("d2t", 0), ("t2d", 1)):
        if name in found and not bool((found[name] == identity).all()):
            raise InvalidArtifact(
                f"{where}: tensor {name!r} maps a reduced draft vocabulary, which is not computed here; use a release "
                "with the whole one"
            )
    return {name.removeprefix(DOMINO_PREFIX): t for name, t in found.items() if name not in (*MAPS, *VERIFIER)}


def packed(published: Mapping[str, Any], backbone: str, first: int, target: str) -> dict[str, Any]:
    """The inverse of :func:`native`, for a draft that never was in this packaging.

    Args:
        published: the draft's own config. backbone: its kind. first: block row of its slot 0.
        target: Hub id of the target (``verifier``).

    Raises:
        InvalidArtifact: a draft that this packaging cannot hold.
    """
    inner = published.get(NEST) or {}

    def stated(key: str) -> Any:
        return inner[key] if inner.get(key) is not None else published.get(key)

    outside = {NEST, "architectures", "auto_map", "block_size", "num_target_layers", "repairzoo", "converted_from"}
    outside |= {"num_anchors", "confidence_temperatures", "mask_token_id", "target_layer_ids", "dtype", "torch_dtype"}
    trunk = {key: value for key, value in published.items() if key not in {*outside, *_MARKOV, *_DOMINO}}
    if published.get("confidence_temperatures") is not None:
        raise InvalidArtifact("key 'confidence_temperatures': speculators has no calibrated confidences; remove it")
    ids, layers = stated("target_layer_ids"), published.get("num_target_layers")
    if layers is not None and layers - 1 in ids:
        raise InvalidArtifact(
            f"key 'target_layer_ids' holds the target's last layer {layers - 1}, which speculators reads after the "
            "final norm: its features would differ from the ones that this draft was trained with"
        )
    block = stated("block_size")
    out: dict[str, Any] = {
        "architectures": ["DSparkDraftModel" if backbone == "dspark" else "DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [i + 1 for i in ids],
        "block_size": block,
        "draft_vocab_size": published["vocab_size"],
        "mask_token_id": stated("mask_token_id"),
        "sample_from_anchor": first == 0,
        "speculators_config": {
            "algorithm": "dspark" if backbone == "dspark" else "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": block - first}],
            "verifier": {"architectures": [], "name_or_path": target},
        },
        "speculators_model_type": "dspark" if backbone == "dspark" else "dflash",
        "transformer_layer_config": trunk,
    }
    out |= {key: published[key] for key in ("dtype", "torch_dtype") if published.get(key) is not None}
    if backbone == "domino":
        out |= {"projector_type": "domino"} | {key: stated(key) for key in _DOMINO if stated(key) is not None}
    elif backbone == "dspark":
        out |= {key: stated(key) for key in _MARKOV if stated(key) is not None}
    return out


def _speculative_tokens(config: Mapping[str, Any]) -> int:
    inner = config.get("speculators_config")
    methods = inner.get("proposal_methods") if isinstance(inner, Mapping) else None
    if inner is None or methods is None:
        return -1
    assert isinstance(inner, Mapping)
    default = inner.get("default_proposal_method")
    if not isinstance(methods, list) or not all(isinstance(m, Mapping) for m in methods):
        raise InvalidArtifact(f"key 'speculators_config.proposal_methods' must be a list of objects, not {methods!r}")
    chosen = [m for m in methods if m.get("proposal_type") == default] or methods
    tokens = chosen[0].get("speculative_tokens") if chosen else None
    if tokens is not None and type(tokens) is not int:
        raise InvalidArtifact(f"key 'speculative_tokens' must be an integer, not {tokens!r}")
    return -1 if tokens is None else tokens


def _integer(config: Mapping[str, Any], key: str, least: int = 1) -> int:
    value = config.get(key)
    if type(value) is not int or value < least:
        raise InvalidArtifact(
            f"key {key!r} must be an integer of at least {least} in a vLLM speculators config (told by "
            f"{_mark(config)!r}), not {value!r}; it is not guessed"
        )
    return value
