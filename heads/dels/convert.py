"""Published DeLS checkpoints (``.pt``) -> ``DeLS``. The only pickle that this head opens, with weights only."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repairzoo.errors import InvalidArtifact, InvalidInput
from repairzoo.learned_head import DTYPES

from .head import DeLS, DeLSConfig

NAMES = {  # published name -> ours
    "prefix_gru.weight_ih_l0": "gru_input",
    "prefix_gru.weight_hh_l0": "gru_hidden",
    "rank_proj.weight": "rank_proj",
    "rank_to_hidden.weight": "up",
    "low_rank_lm_head.weight": "readout",
    "embed_down_proj.weight": "down",
    "embed_tokens.weight": "table",
}


def convert_published(
    path: str | Path,
    *,
    target_id: str,
    target_revision: str | None,
    hidden_size: int,
    vocab_size: int,
    padded_vocab_size: int | None = None,
    unigram: str | Path | Tensor | None = None,
    smoothing: float = 1.0,
    alpha: float = 0.3,
    beta: float = 0.3,
    pure_draft_prefix_len: int | None = None,
    anchor_input: bool = True,
    block_size: int | None = None,
) -> DeLS:
    """Read a local head in any published layout of the DeLS-Spec and SpecForge repositories.

    GRU on the target's embedding (older layout, with a target or a low-rank output head), GRU with an input projection
    (newer layout; the published runtime asks for the merged file, here it is folded in when the head is bound), merged
    GRU, and Markov, merged or not.

    Args:
        path: the ``.pt`` file.
        target_id, target_revision: the target that the head was trained for.
        hidden_size, vocab_size, padded_vocab_size: sizes of that target; tables are cut to ``vocab_size`` rows.
        unigram: ``loss_mask_unigram.pt``, or counts ``[<= V]``; needed unless ``beta`` is 0.
        smoothing: added to every count.
        alpha, beta: fusion weights (0.3 each in the paper's runs).
        pure_draft_prefix_len: overrides what the file states. Newer GRU files state none and are run with 0 by
            the published loader; Markov files state none, so it must be given.
        anchor_input: False reproduces the released loop, whose GRU never sees the anchor (needs a prefix of 1).
        block_size: overrides what the file states. A Markov head is trained on pairs: 2.

    Raises:
        InvalidArtifact: not such a file, a tensor too many, too few or of a wrong shape, contradictory sizes.
        InvalidInput: a value that the file does not state was not given.
    """
    data = _load(path)
    model_config = data.get("model_config")
    model_config = model_config if isinstance(model_config, dict) else {}
    state = data.get("model_state_dict")
    state = dict(state) if isinstance(state, dict) else {}
    named: dict[str, Tensor] = {}
    hidden: int | None = None
    if any(name.startswith("prefix_gru.") for name in state):
        for name, tensor in state.items():
            if name not in NAMES:
                raise InvalidArtifact(f"{path}: unknown tensor {name!r} in model_state_dict")
            named[NAMES[name]] = tensor
        variant, hidden = "gru", _stated(model_config, "gru_hidden_dim", path)
        activation = _stated(model_config, "rank_activation", path)
        rank = _stated(model_config, "low_rank_dim", path)
        if pure_draft_prefix_len is None:
            newer = "rnn_parameterization" in model_config
            pure_draft_prefix_len = model_config.get("pure_draft_prefix_len", 0 if newer else None)
        block_size = model_config.get("block_size") if block_size is None else block_size
    elif {"down_proj", "up_proj"} == set(state):
        # stored as right factors: embedding [V, D] @ down_proj [D, R] @ up_proj [R, D]
        named = {"down": state["down_proj"].T, "up": state["up_proj"].T}
        variant, activation, rank = "markov", "identity", _stated(model_config, "rank", path)
    elif not state and {"embedding_weight", "lm_head_weight"} <= set(data):
        named = {"table": data["embedding_weight"], "readout": data["lm_head_weight"]}
        variant, activation, rank = "markov", "identity", _stated(data, "rank", path)
    else:
        raise InvalidArtifact(f"{path}: neither a GRU nor a Markov local head; it holds {sorted(map(str, data))}")
    for key, value in (("pure_draft_prefix_len", pure_draft_prefix_len), ("block_size", block_size)):
        if value is None and not (key == "block_size" and variant == "markov"):
            raise InvalidInput(f"{path} does not state {key}; pass {key}=")

    rows = int(_stated(model_config, "vocab_size", path))
    padded = rows if padded_vocab_size is None else padded_vocab_size
    if not vocab_size <= rows <= padded:
        raise InvalidArtifact(f"{path}: made for {rows} tokens; the target has {vocab_size}, padded {padded}")
    for name in ("table", "readout"):
        if name in named:
            if len(named[name]) != rows:
                raise InvalidArtifact(f"{path}: {name} has {len(named[name])} rows, model_config.vocab_size is {rows}")
            named[name] = named[name][:vocab_size]
    dtypes = {tensor.dtype for tensor in named.values()}
    dtype = next((n for n, d in DTYPES.items() if dtypes == {d}), None)
    if dtype is None:
        raise InvalidArtifact(f"{path}: tensors of dtype {sorted(map(str, dtypes))}; expected one floating type")
    input_table = "factored" if "down" in named else "vocabulary" if "table" in named else "target"
    width = rank if variant == "markov" else model_config.get("input_rank_dim")
    config = DeLSConfig(
        variant=variant,
        rank=rank,
        hidden=hidden,
        input_table=input_table,
        input_rank=None if input_table == "target" else width,
        output_table="target" if "up" in named else "vocabulary",
        activation=activation,
        alpha=alpha,
        beta=beta,
        pure_draft_prefix_len=pure_draft_prefix_len,  # type: ignore[arg-type]
        anchor_input=anchor_input,
        block_size=2 if block_size is None else block_size,
        vocab_size=vocab_size,
        padded_vocab_size=padded,
        hidden_size=hidden_size,
        dtype=dtype,
        target_id=target_id,
        target_revision=target_revision,
    )
    tensors = {name: tensor.contiguous() for name, tensor in named.items()}
    head = DeLS.from_config_and_tensors(config, tensors | {"log_prior": torch.zeros(vocab_size)}, str(path))
    if unigram is not None:
        head.set_prior(unigram if isinstance(unigram, Tensor) else load_counts(unigram), smoothing)
    elif beta:
        raise InvalidInput(f"beta is {beta}, which needs a unigram prior; pass unigram= or beta=0")
    return head


def load_counts(path: str | Path) -> Tensor:
    """Token counts of a published ``loss_mask_unigram.pt``, ``[<= V]``."""
    counts = _load(path).get("counts")
    if not isinstance(counts, Tensor) or counts.ndim != 1:
        raise InvalidArtifact(f"{path}: no one-dimensional tensor 'counts'")
    return counts


def _load(path: str | Path) -> dict[str, Any]:
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise InvalidArtifact(f"{path}: cannot be read as a weights-only checkpoint: {error}") from error
    if not isinstance(data, dict):
        raise InvalidArtifact(f"{path}: holds a {type(data).__name__}; expected a dictionary")
    return data


def _stated(data: dict[str, Any], key: str, path: str | Path) -> Any:
    if data.get(key) is None:
        raise InvalidArtifact(f"{path}: the key {key!r} is missing")
    return data[key]
