"""Reading the published ``config.json`` of a block-parallel draft, strictly.

DFlash, Domino and DSpark share these keys; each backbone adds its own. What is missing, contradictory or unknown to the
mathematics is an error: a wrong guess here raises nothing and leaves the output right, at one accepted token a round.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from repairzoo.errors import InvalidArtifact
from repairzoo.speculators import NEST, native

if TYPE_CHECKING:
    from typing_extensions import Self

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

# what a required key means, for the message that misses it
MEANING = {
    "model_type": "the layer family; DFlash drafts state 'qwen3'",
    "block_size": "rows of a block: the anchor and block_size - 1 masks (16 in the Qwen3 b16 drafts)",
    "mask_token_id": "row of the target's embedding that stands for an open slot (151669 for Qwen3)",
    "target_layer_ids": "tapped decoder layers of the target, 0-based, in the order in which they are concatenated",
    "num_target_layers": "decoder layers of the target that the draft was trained for",
    "vocab_size": "rows of the target's embedding table, padding included",
    "hidden_size": "width of the draft and of the target",
    "intermediate_size": "width of the MLP",
    "num_hidden_layers": "number of draft layers",
    "num_attention_heads": "query heads",
    "num_key_value_heads": "key and value heads",
    "head_dim": "size of one head; it need not be hidden_size / num_attention_heads",
    "rms_norm_eps": "epsilon of the RMS norms",
    "rope_theta": "rotary base, in rope_parameters (transformers 5) or at the top level (transformers 4)",
    "attention_bias": "whether q, k, v and o have biases",
    "hidden_act": "activation of the MLP; 'silu'",
    "layer_types": "'full_attention' or 'sliding_attention' for each layer",
    "sliding_window": "width of the window of the sliding layers",
    "dtype": "dtype of the stored tensors (torch_dtype in transformers 4)",
}

# key -> (values that change nothing, what any other value means)
FEATURES: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_swa": ((None, False), "non-causal sliding windows in every layer"),
    "swa_window_size": ((None,), "non-causal sliding windows in every layer"),
    "attention_sink_bias": ((None, False), "learned attention sinks"),
    "attention_sinks": ((None, False), "learned attention sinks"),
    "projector_type": ((None, "dflash"), "a causal head over the drafted tokens (Domino: 'domino', DSpark: 'dspark')"),
    "shift_label": ((None, False), "the slot convention of Domino, in which slot 0 predicts"),
    "sample_from_anchor": ((None, False), "a slot convention in which slot 0 predicts"),
    "enable_confidence_head": ((None, False), "the confidence head of DSpark"),
    "confidence_head_with_markov": ((None, False), "the confidence head of DSpark"),
    "use_bias_norm": ((None, False), "a Domino option"),
    "use_bias_gate": ((None, False), "a Domino option"),
    "draft_vocab_size": ((None,), "a reduced draft vocabulary"),
    "target_hidden_size": ((None,), "a target of another width than the draft"),
    "rope_is_neox_style": ((None, True), "interleaved rotary pairs"),
    "rope_interleave": ((None, False), "interleaved rotary pairs"),
    "partial_rotary_factor": ((None, 1, 1.0), "rotary embedding of a part of each head"),
    "attn_logit_softcapping": ((None,), "soft-capped attention scores"),
    "query_pre_attn_scalar": ((None,), "another attention scale than head_dim ** -0.5"),
    "attention_multiplier": ((None,), "another attention scale than head_dim ** -0.5"),
    "residual_multiplier": ((None, 1, 1.0), "scaled residual branches"),
    "embedding_multiplier": ((None, 1, 1.0), "another embedding scale than input_embedding_scale"),
    "logits_scaling": ((None, 1, 1.0), "another logit scale than output_multiplier"),
    "mlp_bias": ((None, False), "biases in the MLP"),
    "num_experts": ((None, 0), "mixture-of-experts layers"),
    "num_local_experts": ((None, 0), "mixture-of-experts layers"),
    "use_qk_norm": ((None, True), "attention without q/k norms"),
    "gating": ((None, False), "gated attention"),
    "attn_output_gate": ((None, False), "gated attention"),
}

# keys that exist only in artifacts of one kind, whatever they hold
KINDS: dict[str, str] = {
    "speculators_config": "a vLLM speculators artifact (layer ids shifted by one, perhaps a reduced vocabulary)",
    "speculators_model_type": "a vLLM speculators artifact",
    "transformer_layer_config": "a vLLM speculators artifact",
    "aux_hidden_state_layer_ids": "a vLLM speculators artifact; these ids are shifted by one",
    "markov_rank": "a DSpark or DeepSpec artifact, whose slot 0 predicts (also with markov_rank 0)",
    "markov_head_type": "a DSpark artifact, whose slot 0 predicts",
    "selector_rank": "a DFlash 2 artifact (candidate selector and convolutions)",
    "selector_top_k": "a DFlash 2 artifact (candidate selector)",
    "conv_kernel_size": "a DFlash 2 artifact (convolution in every sublayer)",
    "conv_group_size": "a DFlash 2 artifact (convolution in every sublayer)",
    "gru_hidden_dim": "a Domino artifact (GRU over the drafted tokens)",
    "pure_draft_prefix_len": "a Domino artifact",
    "quantization_config": "a quantised checkpoint; export the weights in float32, float16 or bfloat16",
    "compression_config": "a quantised checkpoint; export the weights in float32, float16 or bfloat16",
}

# carried along: they change nothing that is computed here
# fmt: off
NOISE = frozenset((
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "add_cross_attention", "architectures",
    "attention_dropout", "auto_map", "bos_token_id", "chunk_size_feed_forward", "converted_from",
    "cross_attention_hidden_size",
    "decoder_start_token_id", "eos_token_id", "finetuning_task", "id2label", "initializer_range", "is_decoder",
    "is_encoder_decoder", "label2id", "max_position_embeddings", "max_window_layers", "name_or_path", "num_anchors",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type", "pruned_heads",
    "repairzoo", "return_dict", "sep_token_id", "task_specific_params", "tie_encoder_decoder", "tie_word_embeddings",
    "tokenizer_class", "torchscript", "transformers_version", "use_bfloat16", "use_cache", "use_sliding_window",
))
# fmt: on


@dataclass(slots=True)
class DraftConfig:
    """A block-parallel draft, as its published config states it.

    Attributes:
        block_size: rows of a block: the anchor and ``block_size - 1`` masks.
        mask_token_id: row of the target's embedding table.
        target_layer_ids: tapped decoder layers (0-based; -1 is the embedding output), in concatenation order.
        num_target_layers, vocab_size: of the target. The former is None only where a packaging (speculators) has no
            place for it.
        hidden_size .. rms_norm_eps, attention_bias: shape of the draft's layers.
        rope: ``rope_type``, ``rope_theta`` and the parameters of the type.
        windows: per layer, None or the window ``W`` (a key is seen iff query position - key position < W).
        causal: per layer, whether a block row sees only rows up to itself.
        input_embedding_scale: factor on the raw embedding.
        output_multiplier, final_logit_softcapping: ``cap * tanh(m * logits / cap)``; None is no cap.
        dtype: of the stored tensors.
        published: the dictionary that all this was read from; ``to_dict`` gives it back unchanged.

    Raises:
        InvalidArtifact: values that contradict one another.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    rope: dict[str, Any]
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None
    dtype: torch.dtype
    published: dict[str, Any] = field(repr=False)

    name: ClassVar[str] = "block-parallel"  # of the backbone, for messages
    meaning: ClassVar[Mapping[str, str]] = {}  # of its own keys

    def __post_init__(self) -> None:
        ids = self.target_layer_ids
        checks = (
            (self.block_size >= 2, f"block_size is {self.block_size}; a block needs the anchor and at least one mask"),
            (
                0 <= self.mask_token_id < self.vocab_size,
                f"mask_token_id {self.mask_token_id} is no row of an embedding with vocab_size {self.vocab_size}; it "
                "must be the id that the draft was trained with (Model-Optimizer#1621)",
            ),
            (
                len(ids) > 0 and len(set(ids)) == len(ids),
                f"target_layer_ids {list(ids)} must be distinct, at least one",
            ),
            (
                all(i >= -1 and (self.num_target_layers is None or i < self.num_target_layers) for i in ids),
                f"target_layer_ids {list(ids)} must lie in -1 .. num_target_layers - 1, num_target_layers is "
                f"{self.num_target_layers} (0-based decoder layers, -1 is the embedding output)",
            ),
            (
                self.num_attention_heads % self.num_key_value_heads == 0,
                f"num_attention_heads {self.num_attention_heads} is no multiple of num_key_value_heads "
                f"{self.num_key_value_heads}",
            ),
            (self.head_dim % 2 == 0, f"head_dim {self.head_dim} is odd; rotary embedding needs pairs"),
            (
                len(self.windows) == len(self.causal) == self.num_hidden_layers,
                f"layer_types states {len(self.windows)} layers but num_hidden_layers is {self.num_hidden_layers}",
            ),
        )
        for sound, problem in checks:
            if not sound:
                raise InvalidArtifact(problem)

    @classmethod
    def from_dict(cls, published: Mapping[str, Any], where: str = "config.json") -> Self:
        """Read a published config.

        Args:
            published: the parsed ``config.json``, in any packaging of this kind of draft.
            where: the file, for messages.

        Raises:
            InvalidArtifact: a key is missing, contradictory, of the wrong type, or asks for what is not computed here;
                the message names the key, the file and the fix.
        """
        if not isinstance(published, Mapping):
            raise InvalidArtifact(f"{where}: not a JSON object; give the config.json of a {cls.name} draft")
        try:
            reader = Reader(native(published), cls.meaning)
            config = cls.read(reader)
            reader.refuse_unknown()
        except InvalidArtifact as error:
            raise InvalidArtifact(f"{where}: {error}") from error
        return config

    @classmethod
    def read(cls, reader: Reader) -> Self:
        """What :meth:`from_dict` reads; every backbone has its own, since what it must refuse differs."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The published dictionary, equal to what was read."""
        return copy.deepcopy(self.published)


def nested_config(
    trunk: DraftConfig, architecture: str, own: Mapping[str, Any], block_size: int | None = None
) -> dict[str, Any]:
    """The published dictionary of a new draft with the trunk of another, its own keys nested in ``dflash_config``.

    Args:
        trunk: a draft's config; what it states of the trunk is taken over, as far as ``own`` does not state it.
        block_size: default the trunk's.
    """
    published, rows = trunk.to_dict(), block_size or trunk.block_size
    taken = {"mask_token_id": trunk.mask_token_id, "target_layer_ids": list(trunk.target_layer_ids)}
    inner = {**published.get(NEST, {}), **taken, **own}
    if "block_size" in inner:
        inner["block_size"] = rows
    kept = {key: value for key, value in published.items() if key == "block_size" or key not in inner}
    return kept | {"architectures": [architecture], "block_size": rows, NEST: inner}


def default_target_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """The published choice of tapped layers: spread evenly over layers 1 to L - 3 (the middle one for ``count`` 1)."""
    if count == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count))


class Reader:
    """Typed look-ups that name the key; remembers what was read.

    Args:
        raw: the parsed config. Keys marked ``nested`` are looked up in its ``dflash_config`` and then at the top level.
        meaning: what the backbone's own keys mean, beside :data:`MEANING`.
    """

    __slots__ = ("raw", "nested", "read", "meaning")

    def __init__(self, raw: Mapping[str, Any], meaning: Mapping[str, str] | None = None):
        nested = raw.get(NEST)
        if nested is not None and not isinstance(nested, Mapping):
            raise InvalidArtifact(f"key {NEST!r} must be an object, not {nested!r}")
        self.raw, self.nested = dict(raw), dict(nested or {})
        self.read: set[str] = {NEST}
        self.meaning = {**MEANING, **(meaning or {})}

    def get(self, key: str, *, nested: bool = False, required: bool = True) -> Any:
        """The value of ``key``, from ``dflash_config`` (if ``nested``) and then the top level; None when absent."""
        self.read.add(key)
        inner = self.nested.get(key) if nested else None
        outer = self.raw.get(key)
        if inner is not None and outer is not None and inner != outer:
            raise InvalidArtifact(
                f"key {key!r} is {inner!r} in {NEST} but {outer!r} at the top level; keep the one that the draft was "
                "trained with"
            )
        value = inner if inner is not None else outer
        if value is None and required:
            place = f" (in {NEST} or at the top level)" if nested else ""
            raise InvalidArtifact(
                f"key {key!r} is missing{place}: {self.meaning[key]}. It is not guessed; add it from the "
                "draft's release"
            )
        return value

    def integer(self, key: str, *, least: int = 1, nested: bool = False) -> int:
        value = self.get(key, nested=nested)
        if type(value) is not int or value < least:
            raise InvalidArtifact(
                f"key {key!r} must be an integer of at least {least}, not {value!r}: {self.meaning[key]}"
            )
        return value

    def integers(self, key: str, *, nested: bool = False) -> tuple[int, ...]:
        value = self.get(key, nested=nested)
        if not isinstance(value, list) or not value or not all(type(i) is int for i in value):
            raise InvalidArtifact(f"key {key!r} must be a list of integers, not {value!r}: {self.meaning[key]}")
        return tuple(value)

    def boolean(self, key: str, *, nested: bool = False, absent: bool | None = None) -> bool:
        value = self.get(key, nested=nested, required=absent is None)
        if value is None and absent is not None:
            return absent
        if type(value) is not bool:
            raise InvalidArtifact(f"key {key!r} must be true or false, not {value!r}: {self.meaning[key]}")
        return value

    def positive(self, key: str, *, nested: bool = False, absent: float | None = None) -> float:
        value = self.get(key, nested=nested, required=absent is None)
        if value is None and absent is not None:
            return absent
        return positive(key, value)

    def items(self) -> list[tuple[str, str, Any]]:
        """Every setting as (where, key, value), nested ones last."""
        flat = [(key, key, value) for key, value in self.raw.items() if key != NEST]
        return flat + [(f"{NEST}.{key}", key, value) for key, value in self.nested.items()]

    def refuse_kinds(self, name: str, architectures: Sequence[str], own: Collection[str] = ()) -> None:
        """Refuse artifacts of another kind than ``name`` by the keys that only those have.

        Args:
            architectures: what ``architectures`` may state (it may be absent). own: keys of :data:`KINDS` of this kind.
        """
        for place, key, value in self.items():
            if key in KINDS and key not in own and value is not None:
                raise InvalidArtifact(f"key {place!r}: this is {KINDS[key]}, not a {name} draft")
            if key.startswith("dspark_"):
                raise InvalidArtifact(f"key {place!r}: this is a DeepSeek-V4 DSpark module, not a {name} draft")
        found = self.raw.get("architectures")
        if found is not None and found not in [[a] for a in architectures]:
            wanted = " or ".join(str([a]) for a in architectures)
            raise InvalidArtifact(
                f"key 'architectures' is {found!r}; a {name} draft states {wanted}; load it as the backbone that it is"
            )

    def refuse_features(self, own: Collection[str] = ()) -> None:
        """Refuse settings whose mathematics the trunk does not have, unless they are at their neutral value.

        Args:
            own: keys that the backbone computes itself.
        """
        for place, key, value in self.items():
            if key not in FEATURES or key in own:
                continue
            neutral, what = FEATURES[key]
            if not any(type(value) is type(n) and value == n for n in neutral):
                raise InvalidArtifact(f"key {place!r} is {value!r}: {what}; this backbone does not compute it")

    def refuse_unknown(self) -> None:
        """Refuse unread nested keys; warn of unread top-level keys that are no common noise."""
        for key in self.nested:
            if key not in self.read | NOISE and key not in FEATURES:
                raise InvalidArtifact(
                    f"key '{NEST}.{key}' is unknown and may change what the draft computes; it was not read"
                )
        unknown = sorted(key for key in self.raw if key not in self.read | NOISE and key not in FEATURES)
        if unknown:
            warnings.warn(f"config keys that are kept but have no effect: {', '.join(unknown)}", stacklevel=4)


def positive(key: str, value: Any) -> float:
    """``value`` of ``key`` as a positive finite number, or :class:`InvalidArtifact`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise InvalidArtifact(f"key {key!r} must be a positive finite number, not {value!r}")
    return float(value)


def read_common(reader: Reader, families: Sequence[str] = ("qwen3",)) -> dict[str, Any]:
    """The fields of :class:`DraftConfig`, as keyword arguments.

    Args:
        families: names of ``model_type`` that mean the Qwen3 layers of the trunk.

    Raises:
        InvalidArtifact: a key is missing, contradictory, of the wrong type, or asks for what is not computed here.
    """
    for key, wanted in (("model_type", families), ("hidden_act", ("silu",))):
        found = reader.get(key)
        if found not in wanted:
            raise InvalidArtifact(
                f"key {key!r} is {found!r}; only {wanted[0]!r} is computed here (other families differ in their norms, "
                "scales or activations and would load without an error)"
            )
    layers = reader.integer("num_hidden_layers")
    windows, causal = _layers(reader, layers)
    cap = reader.positive("final_logit_softcapping", nested=True, absent=math.inf)
    return {
        "block_size": reader.integer("block_size", nested=True),
        "mask_token_id": reader.integer("mask_token_id", least=0, nested=True),
        "target_layer_ids": reader.integers("target_layer_ids", nested=True),
        "num_target_layers": _depth(reader),
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": reader.integer("hidden_size"),
        "intermediate_size": reader.integer("intermediate_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": reader.integer("num_attention_heads"),
        "num_key_value_heads": reader.integer("num_key_value_heads"),
        "head_dim": reader.integer("head_dim"),
        "rms_norm_eps": reader.positive("rms_norm_eps"),
        "attention_bias": reader.boolean("attention_bias"),
        "rope": _rope(reader),
        "windows": windows,
        "causal": causal,
        "input_embedding_scale": reader.positive("input_embedding_scale", nested=True, absent=1.0),
        "output_multiplier": reader.positive("output_multiplier", nested=True, absent=1.0),
        "final_logit_softcapping": None if cap == math.inf else cap,
        "dtype": _dtype(reader),
        "published": copy.deepcopy(reader.raw),
    }


def _depth(reader: Reader) -> int | None:
    """Layers of the target; speculators' configs have no place for them."""
    origin = reader.get("converted_from", required=False)
    foreign = isinstance(origin, Mapping) and origin.get("layout") == "speculators"
    if foreign and reader.get("num_target_layers", required=False) is None:
        return None
    return reader.integer("num_target_layers")


def _layers(reader: Reader, count: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Window and causality of every layer. Unless stated otherwise, sliding layers are causal and full ones are not."""
    types = reader.get("layer_types", required=False)
    sliding_on = reader.get("use_sliding_window", required=False)
    window = reader.get("sliding_window", required=False)
    if types is None:
        if sliding_on is not False:
            reader.get("layer_types")  # raises
        types = ["full_attention"] * count
    if not isinstance(types, list) or len(types) != count:
        raise InvalidArtifact(f"key 'layer_types' must be a list of num_hidden_layers = {count} names, not {types!r}")
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise InvalidArtifact(
                f"key 'layer_types' holds {name!r}; known are 'full_attention' and 'sliding_attention' (recurrent or "
                "chunked layers are not computed here)"
            )
    if "sliding_attention" in types:
        if sliding_on is False:
            raise InvalidArtifact(
                "key 'use_sliding_window' is false but 'layer_types' has sliding layers; keep the one that the draft "
                "was trained with"
            )
        window = reader.integer("sliding_window")
    stated = {
        (name, place): value
        for name in ("is_causal", "causal")
        for place, mapping in ((f"{NEST}.", reader.nested), ("", reader.raw))
        if (value := mapping.get(name)) is not None
    }
    reader.read |= {"is_causal", "causal"}
    for (name, place), value in stated.items():
        if type(value) is not bool:
            raise InvalidArtifact(f"key {place + name!r} must be true or false, not {value!r}")
    if len(set(stated.values())) > 1:
        keys = ", ".join(f"{place}{name} = {value}" for (name, place), value in stated.items())
        raise InvalidArtifact(f"keys contradict one another: {keys}; keep the one that the draft was trained with")
    override = next(iter(stated.values()), None)
    sliding = [name == "sliding_attention" for name in types]
    return (
        tuple(window if s else None for s in sliding),
        tuple(s if override is None else override for s in sliding),
    )


_ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "yarn": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
_ROPE_OPTIONS = {"yarn": {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}}
# with plain text all three components of a multi-modal position are equal, so these change nothing
_ROPE_NOISE = {"mrope_section", "mrope_interleaved"}


def _rope(reader: Reader) -> dict[str, Any]:
    """The rotary parameters from ``rope_parameters``, ``rope_scaling`` and ``rope_theta``, which must agree."""
    merged: dict[str, Any] = {}
    flat = reader.get("rope_theta", required=False)
    sources = [("rope_theta", {} if flat is None else {"rope_theta": flat})]
    for key in ("rope_parameters", "rope_scaling"):
        value = reader.get(key, required=False)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise InvalidArtifact(f"key {key!r} must be an object or null, not {value!r}")
        if any(isinstance(v, Mapping) for v in value.values()):
            raise InvalidArtifact(
                f"key {key!r} differs between layer types; the DFlash backbone has one rotary embedding"
            )
        value = dict(value)
        if "type" in value:  # the name of rope_type before transformers 4.43
            old = value.pop("type")
            if value.setdefault("rope_type", old) != old:
                raise InvalidArtifact(f"key '{key}.type' is {old!r} but '{key}.rope_type' is {value['rope_type']!r}")
        sources.append((key, value))
    for key, value in sources:
        for name, setting in value.items():
            if name in merged and merged[name] != setting:
                raise InvalidArtifact(
                    f"key {name!r} is {merged[name]!r} in one place and {setting!r} in {key!r}; keep the one that "
                    "the draft was trained with (Model-Optimizer#2221)"
                )
            merged[name] = setting
    if merged.get("rope_theta") is None:
        reader.get("rope_theta")  # raises
    merged["rope_theta"] = positive("rope_theta", merged["rope_theta"])
    kind = merged.get("rope_type")
    if kind is None:
        if set(merged) - {"rope_theta"} - _ROPE_NOISE:
            raise InvalidArtifact(
                f"key 'rope_type' is missing beside {sorted(set(merged) - {'rope_theta'})}; state it ('linear', "
                "'yarn', ...)"
            )
        kind = "default"
    if kind == "mrope":
        kind = "default"
    if kind not in _ROPE_KEYS:
        raise InvalidArtifact(
            f"key 'rope_type' is {kind!r}; supported are {', '.join(_ROPE_KEYS)} (types whose frequencies change "
            "with the length or between layers cannot be applied to cached keys)"
        )
    partial = merged.pop("partial_rotary_factor", None)
    if partial not in (None, 1, 1.0):
        raise InvalidArtifact(f"key 'partial_rotary_factor' is {partial!r}: {FEATURES['partial_rotary_factor'][1]}")
    for name in _ROPE_NOISE:
        merged.pop(name, None)
    needed = _ROPE_KEYS[kind]
    missing = sorted(needed - set(merged))
    if missing:
        raise InvalidArtifact(
            f"key {missing[0]!r} is missing beside rope_type {kind!r}; add it from the draft's release"
        )
    extra = sorted(set(merged) - needed - _ROPE_OPTIONS.get(kind, set()) - {"rope_theta", "rope_type"})
    if extra:
        raise InvalidArtifact(
            f"key {extra[0]!r} is unknown to rope_type {kind!r}; remove it or state the type it belongs to"
        )
    for name in needed:
        positive(name, merged[name])
    return {**merged, "rope_type": kind}


def _dtype(reader: Reader) -> torch.dtype:
    stated = {key: reader.get(key, required=False) for key in ("dtype", "torch_dtype")}
    names = {str(value).removeprefix("torch.") for value in stated.values() if value is not None}
    if not names:
        reader.get("dtype")  # raises
    if len(names) > 1:
        raise InvalidArtifact(f"keys 'dtype' and 'torch_dtype' contradict one another: {stated}")
    name = names.pop()
    if name not in DTYPES:
        raise InvalidArtifact(f"key 'dtype' is {name!r}; supported are {', '.join(DTYPES)}")
    return DTYPES[name]
