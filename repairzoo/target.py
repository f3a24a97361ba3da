"""The target: any causal LM with full attention, run on its own weights with our own KV.

``transformers`` loads the model; the forward pass here reads the same tensors (nothing is copied but an optional packed
layout on CPU), writes keys and values at per-row positions of preallocated buffers, and taps the residual stream where
a backbone wants it. Whether a model has the layout that this forward computes is first recognised from its modules and
then *proved* on a few tokens against the model's own forward; a model that is not reproduced is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from repairzoo.errors import InvalidArtifact, UnsupportedTarget
from repairzoo.linear import Linear
from repairzoo.sampling import at_least_float32

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
_PREFILL_CHUNK = 512


@dataclass(slots=True)
class KVCache:
    """Keys and values of every layer at every position.

    Attributes:
        keys, values: one ``[B, C, Hkv, d]`` tensor a layer. Entry ``c`` of row ``b`` belongs to position ``c`` once
            it is committed; entries at or past a row's length are scratch and hidden by the mask.
    """

    keys: list[Tensor]
    values: list[Tensor]

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[1]

    def compact(self, source: Tensor, destination: Tensor) -> None:
        """Copy entries ``source [B, T]`` to ``destination [B, T]`` in every layer: an accepted tree path, in order."""
        rows, places = flat_index(source, self.capacity), flat_index(destination, self.capacity)
        for buffer in (*self.keys, *self.values):
            flat = buffer.flatten(0, 1)
            flat.index_copy_(0, places, flat.index_select(0, rows))

    def keep(self, rows: Tensor) -> None:
        """Keep some rows of the batch, ``rows [B'] int64`` (a row may be named twice); a layer at a time, since two
        whole caches may not fit in memory."""
        for buffers in (self.keys, self.values):
            for index, buffer in enumerate(buffers):
                buffers[index] = buffer[rows]


def flat_index(columns: Tensor, width: int) -> Tensor:
    """``[B, T]`` column numbers -> ``[B*T]`` row numbers of a ``[B, width, ...]`` buffer flattened over its first
    axes."""
    rows = torch.arange(columns.shape[0], device=columns.device)[:, None] * width
    return (rows + columns).flatten()


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Boolean ``mask`` (True: may be seen) -> additive mask of the same shape."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Grouped-query attention without repeating keys: the queries of a group become further query rows.

    Args:
        q: ``[B, T, Hq, d]``. k, v: ``[B, C, Hkv, d]``. mask: additive ``[B, 1, (Hq/Hkv)*T, C]``.

    Returns:
        ``[B, T, Hq*d]``.
    """
    b, t, hq, d = q.shape
    hkv = k.shape[2]
    group = hq // hkv
    q = q.view(b, t, hkv, group, d).permute(0, 2, 3, 1, 4).reshape(b, hkv, group * t, d)
    out = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale)
    return out.view(b, hkv, group, t, d).permute(0, 3, 1, 2, 4).reshape(b, t, hq * d)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding of ``x [B, T, H, d]`` by ``cos, sin [B, T, 1, d]``."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


@dataclass(slots=True)
class _Layer:
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    input_norm: Callable[[Tensor], Tensor]
    post_norm: Callable[[Tensor], Tensor]
    q_norm: Callable[[Tensor], Tensor] | None
    k_norm: Callable[[Tensor], Tensor] | None
    activation: nn.Module
    scale: float


@dataclass(slots=True)
class Target:
    """A loaded target.

    Attributes:
        model: the ``transformers`` causal LM; its tensors are never changed.
        tokenizer: its tokenizer, or None (token ids only).
        name: Hub id or folder; ``revision``: commit, when known; ``source``: where the weights came from, in words.
        pack: keep packed copies of the weights where that is faster (CPU).
    """

    model: Any
    tokenizer: Any = None
    name: str = "custom"
    revision: str | None = None
    source: str = "given in memory"
    pack: bool = True
    max_context: int = field(init=False)
    _layers: list[_Layer] = field(init=False, repr=False)
    _output: Linear = field(init=False, repr=False)
    final_norm: Callable[[Tensor], Tensor] = field(init=False, repr=False)
    _head_dim: int = field(init=False, repr=False)
    _kv_heads: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.model.eval()
        _recognise(self.model)
        config = self.model.config
        self.max_context = _max_context(config)
        body = self.model.model
        attention = body.layers[0].self_attn
        self._head_dim = attention.head_dim
        self._kv_heads = attention.k_proj.out_features // self._head_dim
        self.final_norm = _norm(body.norm)
        self._layers = [_layer(layer, self.pack) for layer in body.layers]
        self._output = Linear([self.output_weight], [self.model.get_output_embeddings().bias], pack=self.pack)
        _prove(self)

    # --- what others read -------------------------------------------------------------------------------------
    @property
    def embedding(self) -> Tensor:
        """``[V_padded, D]`` input embedding."""
        return self.model.get_input_embeddings().weight.detach()

    @property
    def output_weight(self) -> Tensor:
        """``[V_padded, D]`` output head."""
        return self.model.get_output_embeddings().weight.detach()

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table."""
        return self.embedding.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-text ids that the model states in its generation config, or else in its config."""
        for config in (getattr(self.model, "generation_config", None), self.model.config):
            ids = getattr(config, "eos_token_id", None)
            if ids is not None:
                return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
        return ()

    # --- forward ------------------------------------------------------------------------------------------------
    def new_cache(self, batch: int, capacity: int, device: torch.device | None = None) -> KVCache:
        """Zeroed buffers for ``batch`` rows of ``capacity`` positions (zeros: masked garbage must stay finite), on the
        target's device unless another is given."""
        shape, device = (batch, capacity, self._kv_heads, self._head_dim), device or self.device

        def buffers() -> list[Tensor]:
            return [torch.zeros(shape, dtype=self.dtype, device=device) for _ in self._layers]

        return KVCache(buffers(), buffers())

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        columns: Tensor,
        mask: Tensor,
        cache: KVCache,
        taps: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """One pass over new tokens.

        Args:
            ids: ``[B, T]`` int64 tokens. positions: ``[B, T]`` int64 absolute positions (rotary phase).
            columns: ``[B, T]`` int64 cache entries that the new keys and values are written to (for a chain, the
                positions; for a tree, one entry a node).
            mask: ``[B, T, C']`` bool over the first ``C'`` cache entries, True where token ``t`` may look.
            cache: written in place.
            taps: decoder layers whose output (residual stream, before the final norm) is returned; -1 is the embedding.

        Returns:
            final hidden states ``[B, T, D]`` after the last norm, and tapped features ``[B, T, len(taps)*D]`` or None.
        """
        bound = mask.shape[-1]
        x = F.embedding(ids, self.embedding)  # [B, T, D]
        cos, sin = self._rotary(positions, x.dtype)
        group = (self._layers[0].qkv.sizes[0] // self._head_dim) // self._kv_heads
        bias = additive(mask, x.dtype)[:, None].repeat(1, 1, group, 1)  # [B, 1, G*T, C']
        rows = flat_index(columns, cache.capacity)
        tapped: dict[int, Tensor] = {-1: x} if -1 in taps else {}
        for index, layer in enumerate(self._layers):
            x = self._layer_forward(layer, x, cos, sin, bias, rows, bound, cache.keys[index], cache.values[index])
            if index in taps:
                tapped[index] = x
        features = torch.cat([tapped[t] for t in taps], -1) if taps else None
        return self.final_norm(x), features

    def _layer_forward(
        self,
        layer: _Layer,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        bias: Tensor,
        rows: Tensor,
        bound: int,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        b, t, _ = x.shape
        q, k, v = layer.qkv(layer.input_norm(x))
        q = q.reshape(b, t, -1, self._head_dim)
        k = k.reshape(b, t, -1, self._head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = layer.q_norm(q), layer.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        keys.flatten(0, 1).index_copy_(0, rows, k.flatten(0, 1))
        values.flatten(0, 1).index_copy_(0, rows, v.reshape(b * t, -1, self._head_dim))
        attended = grouped_attention(q, keys[:, :bound], values[:, :bound], bias, layer.scale)
        x = x + layer.out(attended)[0]
        gate, up = layer.gate_up(layer.post_norm(x))
        return x + layer.down(layer.activation(gate) * up)[0]

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rotary = self.model.model.rotary_emb
        angles = positions[..., None].float() * rotary.inv_freq.float()  # [B, T, d/2]
        angles = torch.cat((angles, angles), -1)[:, :, None]  # [B, T, 1, d]
        return (angles.cos() * rotary.attention_scaling).to(dtype), (angles.sin() * rotary.attention_scaling).to(dtype)

    @property
    def output(self) -> Linear:
        """The product with the output head; backbones share it."""
        return self._output

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[..., V_padded]`` of final hidden states ``[..., D]``: float32, or float64 of a float64 target."""
        return at_least_float32(self._output(hidden)[0])

    def prefill(
        self, ids: Tensor, lengths: Tensor, cache: KVCache, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Read prompts of different lengths, padded on the right.

        Args:
            ids: ``[B, T]`` int64. lengths: ``[B]`` int64, at least 1. cache, taps: as in ``forward``.

        Returns:
            logits ``[B, V]`` after each row's last token, and features ``[B, T, F*D]`` (rows past a length are
            garbage).
        """
        b, t = ids.shape
        last = ids.new_zeros(b, self.hidden_size, dtype=self.dtype)
        features = []
        for start in range(0, t, _PREFILL_CHUNK):
            stop = min(start + _PREFILL_CHUNK, t)
            positions = torch.arange(start, stop, device=ids.device).expand(b, -1)
            mask = torch.arange(stop, device=ids.device)[None, None] <= positions[..., None]  # [B, T', stop]
            hidden, tapped = self.forward(ids[:, start:stop], positions, positions, mask, cache, taps)
            here = (lengths - 1 - start).clamp(0, stop - start - 1)
            row = hidden.gather(1, here[:, None, None].expand(-1, 1, hidden.shape[-1]))[:, 0]
            last = torch.where(((lengths > start) & (lengths <= stop))[:, None], row, last)
            features.append(tapped)
        return self.logits(last), torch.cat(features, 1) if taps else None


# --- recognition ------------------------------------------------------------------------------------------------------
def _refuse(model: Any, why: str) -> UnsupportedTarget:
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    return UnsupportedTarget(
        f"target of type {kind!r} ({type(model).__name__}) is not supported: {why}. Supported are decoder-only models "
        "with the Llama layout (Llama, Qwen2, Qwen3, Mistral and models built like them) and full attention"
    )


def _children(module: nn.Module) -> set[str]:
    return {name for name, child in module.named_children() if any(True for _ in child.parameters())}


def _recognise(model: Any) -> None:
    """Refuse what ``Target.forward`` doesn't compute, naming the part that differs."""
    body = getattr(model, "model", None)
    if body is None or not hasattr(body, "layers") or not hasattr(body, "embed_tokens"):
        raise _refuse(model, "it has no `model.embed_tokens` and `model.layers`")
    if model.get_output_embeddings() is None:
        raise _refuse(model, "it has no output head")
    extra = _children(body) - {"embed_tokens", "layers", "norm"}
    if extra or not hasattr(body, "norm"):
        raise _refuse(model, f"its body has further modules {sorted(extra)}" if extra else "its body has no final norm")
    if not hasattr(body, "rotary_emb"):
        raise _refuse(model, "it has no shared rotary embedding `model.rotary_emb`")
    rope = getattr(body.rotary_emb, "rope_type", "default")
    if rope not in ("default", "linear", "llama3", "yarn"):
        raise _refuse(model, f"its rotary frequencies change with the length (rope type {rope!r})")
    for index, layer in enumerate(body.layers):
        attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        if attention is None or mlp is None:
            raise _refuse(model, f"layer {index} has no `self_attn` and `mlp` (recurrent state cannot be rolled back)")
        for name, found, known in (
            ("layer", _children(layer), _LAYER),
            ("attention", _children(attention) - {"q_norm", "k_norm"}, _ATTENTION),
            ("mlp", _children(mlp), _MLP),
        ):
            if found != known:
                raise _refuse(model, f"{name} {index} has the modules {sorted(found)} instead of {sorted(known)}")
    turned = 2 * body.rotary_emb.inv_freq.numel()
    if turned != getattr(body.layers[0].self_attn, "head_dim", None):
        raise _refuse(model, f"its rotary embedding turns {turned} dimensions of a head, not all")


def _max_context(config: Any) -> int:
    """Positions that full attention covers: a sliding window is exact as long as nothing slides out of it."""
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    uses = sliding or (window is not None and getattr(config, "use_sliding_window", True))
    limit = int(config.max_position_embeddings)
    return min(limit, int(window)) if uses and window else limit


def _norm(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """A norm as torch's fused one where that rounds alike: half the time of the module's six operations.

    In half precision the module rounds before it multiplies by its weight, and in float64 it computes in float32; there
    it is called itself.
    """
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or weight.dtype != torch.float32 or not isinstance(eps, float):
        return module
    return partial(F.rms_norm, normalized_shape=weight.shape, weight=weight.detach(), eps=eps)


def _layer(layer: Any, pack: bool) -> _Layer:
    a, m = layer.self_attn, layer.mlp

    def linear(*modules: nn.Linear) -> Linear:
        return Linear([x.weight.detach() for x in modules], [x.bias for x in modules], pack=pack)

    return _Layer(
        qkv=linear(a.q_proj, a.k_proj, a.v_proj),
        out=linear(a.o_proj),
        gate_up=linear(m.gate_proj, m.up_proj),
        down=linear(m.down_proj),
        input_norm=_norm(layer.input_layernorm),
        post_norm=_norm(layer.post_attention_layernorm),
        q_norm=_norm(a.q_norm) if getattr(a, "q_norm", None) is not None else None,
        k_norm=_norm(a.k_norm) if getattr(a, "k_norm", None) is not None else None,
        activation=m.act_fn,
        scale=float(getattr(a, "scaling", a.head_dim**-0.5)),
    )


@torch.no_grad()
def _prove(target: Target) -> None:
    """Compare our forward with the model's own on a few tokens.

    The module names don't show scalar multipliers, soft caps or a different order of operations (Granite has Llama's
    modules and four multipliers); the numbers do.
    """
    model = target.model
    generator = torch.Generator().manual_seed(0)
    length = min(9, target.max_context)  # beyond it, a window would slide
    ids = torch.randint(0, target.vocab_size, (1, length), generator=generator).to(target.device)
    expected = model(input_ids=ids, use_cache=False).logits.float()
    if not bool(expected.isfinite().all()):
        raise InvalidArtifact(
            f"target {target.name!r} gives logits that are not finite: its weights hold NaN or infinities, or overflow "
            f"in {target.dtype}; fetch them again, or choose another dtype"
        )
    cache = target.new_cache(1, ids.shape[1])
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    mask = torch.ones(1, ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
    ours = target.logits(target.forward(ids, positions, positions, mask, cache)[0])
    tolerance = {torch.float64: 1e-6, torch.float32: 2e-3}.get(target.dtype, 0.06)
    spread = expected.std().clamp_min(1e-6)
    error = float((ours - expected).abs().max() / spread)
    if not error < tolerance:
        raise _refuse(
            model,
            f"repairzoo's forward differs from the model's own by {error:.2g} standard deviations of its logits "
            f"(limit {tolerance}): the model scales, caps or orders something that its module names don't show",
        )
