"""The block-parallel trunk that DFlash, Domino and DSpark share: Qwen3-style layers with injected target features.

Notation (DFlash, arXiv 2602.06036, section 4): a row has committed tokens at positions ``0 .. s``; ``s`` is the
anchor, whose target feature does not exist yet. ``c_t = RMSNorm(W_fc f_t)`` for ``t < s`` is the context. Every layer
turns the same ``c`` into further keys and values; the block's own rows are queries, keys and values as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from repairzoo.linear import Int8Linear, Linear
from repairzoo.target import additive, flat_index, grouped_attention, rotate


class TrunkConfig(Protocol):
    """What the trunk reads from a backbone's config."""

    block_size: int
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    rope: dict[str, Any]  # rope_type, rope_theta and the parameters of the type
    windows: tuple[int | None, ...]  # per layer
    causal: tuple[bool, ...]  # per layer, inside the block


def wide(x: Tensor) -> Tensor:
    """``x`` in float32, or as it is when it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def rope_frequencies(rope: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies ``[head_dim/2]`` float32 and the factor on cosine and sine, on the CPU.

    Frequencies that depend on the length of the text are not offered: keys already in the cache could not follow them.
    """
    theta, kind = float(rope["rope_theta"]), rope["rope_type"]
    with torch.device("cpu"):
        if kind == "default":
            # reciprocal last, as transformers rounds it: a far position multiplies the last bit
            return 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim), 1.0
        from transformers import Qwen3Config
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        # the length only keeps transformers from warning; no supported type reads it
        length = int(rope.get("original_max_position_embeddings", 1) * rope["factor"])
        config = Qwen3Config(head_dim=head_dim, rope_parameters=dict(rope), max_position_embeddings=length)
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return frequencies.float(), float(factor)


class Rotary(nn.Module):
    """Half-split rotary embedding of absolute positions; no stored tensors.

    Cosines are computed at every position asked for: a table that ends at ``max_position_embeddings`` gives all later
    positions one phase (TensorRT-LLM#16813).
    """

    def __init__(self, rope: dict[str, Any], head_dim: int):
        super().__init__()
        self._exact, self.factor = rope_frequencies(rope, head_dim)
        self.frequencies: Tensor
        self.register_buffer("frequencies", self._exact, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        super()._apply(fn, recurse)
        # a module cast to bfloat16 must keep its phases
        self.frequencies = self._exact.to(self.frequencies.device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``positions [B, T]`` int64 -> cosine and sine ``[B, T, 1, d]`` in ``dtype``."""
        angles = positions[..., None].float() * self.frequencies  # [B, T, d/2]
        angles = torch.cat((angles, angles), -1)[:, :, None]
        return (angles.cos() * self.factor).to(dtype), (angles.sin() * self.factor).to(dtype)


class RMSNorm(nn.Module):
    """``w * x / rms(x)`` over the last axis; the statistics in float32, or float64 when given that."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = wide(x)
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    """The parameters of one attention; :class:`Trunk` does the arithmetic."""

    def __init__(self, config: TrunkConfig):
        super().__init__()
        d, bias = config.head_dim, config.attention_bias
        queries, keys = config.num_attention_heads * d, config.num_key_value_heads * d
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(d, config.rms_norm_eps)
        self.k_norm = RMSNorm(d, config.rms_norm_eps)


class MLP(nn.Module):
    """The parameters of one SiLU-gated MLP."""

    def __init__(self, config: TrunkConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class DraftLayer(nn.Module):
    """The parameters of one pre-norm decoder layer, under the published names."""

    def __init__(self, config: TrunkConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


@dataclass(slots=True)
class DraftCache:
    """What a trunk remembers of a text; entry ``c`` of row ``b`` belongs to position ``c``.

    Entries at or past a row's anchor are scratch: they are masked now and overwritten later, so they only have to be
    finite.

    Attributes:
        keys, values: one ``[B, C, Hkv, d]`` tensor a layer; keys are normalised and rotated.
        context: ``[B, C, D]`` fused features ``c_t``.
    """

    keys: list[Tensor]
    values: list[Tensor]
    context: Tensor

    @property
    def capacity(self) -> int:
        return self.context.shape[1]

    def select(self, rows: Tensor) -> DraftCache:
        """A copy of some rows of the batch, ``rows [B'] int64``."""
        return DraftCache([k[rows] for k in self.keys], [v[rows] for v in self.values], self.context[rows])


@dataclass(slots=True)
class _LayerProducts:
    qkv: Linear | Int8Linear
    out: Linear | Int8Linear
    gate_up: Linear | Int8Linear
    down: Linear | Int8Linear


@dataclass(slots=True)
class _Products:
    """Every matrix product of the trunk; packed ones are copies and remember the state of their weights."""

    fuse: Linear | Int8Linear
    context: Linear | Int8Linear  # keys and values of all layers: they share their input
    layers: list[_LayerProducts]
    state: tuple[tuple[int, int], ...] = ()


def _join(modules: Sequence[nn.Module], pack: bool, int8: bool, one: bool = False) -> Linear | Int8Linear:
    linears = [m for m in modules if isinstance(m, nn.Linear)]
    weights, biases = [m.weight for m in linears], [m.bias for m in linears]
    return Int8Linear(weights, biases) if int8 else Linear(weights, biases, pack=pack, join=one)


class Trunk(nn.Module):
    """``fc``, ``hidden_norm``, ``layers.*`` and ``norm`` under their published names, for decoding and for training.

    Args:
        config: see :class:`TrunkConfig`.

    Attributes:
        pack: keep packed copies of the weights for decoding where that is faster (CPU); they follow the weights.
        int8: decode with 8-bit products; see :meth:`use_int8`.
    """

    def __init__(self, config: TrunkConfig):
        super().__init__()
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config.rope, config.head_dim)
        self.pack = True
        self.int8 = False
        self._kv_heads, self._head_dim = config.num_key_value_heads, config.head_dim
        self._group = config.num_attention_heads // config.num_key_value_heads
        self._windows, self._causal = config.windows, config.causal
        self._packed: _Products | None = None

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    # --- decoding -----------------------------------------------------------------------------------------------
    def use_int8(self) -> None:
        """Decode with matrices rounded to 8 bits from now on (CPU): a quarter of the bytes, drafts that differ a
        little.

        The target verifies whatever is drafted, so the output keeps its law. Training is not affected.
        """
        self.int8, self._packed = True, None

    @property
    def unrounded(self) -> tuple[Tensor, ...]:
        """Matrices that ``use_int8`` leaves as they are. A few entries of the target's residual stream are a thousand
        times as large as the others, at the first positions above all: rounded by one scale, features are zeros.
        Everything else reads what a norm has evened out."""
        return (self.fc.weight,)

    def new_cache(
        self, batch: int, capacity: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> DraftCache:
        """Zeroed buffers for ``batch`` rows of ``capacity`` positions (zeros: masked scratch must be finite).

        ``capacity`` has to cover the last anchor plus a whole block: writes past it are not caught on an accelerator.
        """
        dtype, device = dtype or self.dtype, device or self.device

        def buffers() -> list[Tensor]:
            shape = (batch, capacity, self._kv_heads, self._head_dim)
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in self.layers]

        context = torch.zeros((batch, capacity, self.norm.weight.shape[0]), dtype=dtype, device=device)
        return DraftCache(buffers(), buffers(), context)

    @torch.no_grad()
    def extend(self, cache: DraftCache, features: Tensor, positions: Tensor) -> None:
        """Inject target features: write ``c_t`` and every layer's keys and values of it.

        Only *new* features go in; a prefix that is fed twice would be written twice to the same place, not appended
        (speculators#678). Rows past a row's valid count may be passed along: written at or after the next anchor they
        are hidden by the mask and overwritten when the true features arrive.

        Args:
            cache: written in place.
            features: ``[B, T, F*D]`` residual-stream outputs of the tapped layers, concatenated in the config's order.
            positions: ``[B, T]`` int64 absolute positions, each below the capacity.
        """
        products = self._products(self.pack)
        rows = flat_index(positions, cache.capacity)
        context = self._fuse(features, products)
        cache.context.flatten(0, 1).index_copy_(0, rows, context.flatten(0, 1).to(cache.context.dtype))
        rotation = self.rotary(positions, context.dtype)
        pairs = self._context_keys(context, products, rotation)
        for layer, (key, value) in enumerate(pairs):
            _write(cache.keys[layer], rows, key)
            _write(cache.values[layer], rows, value)

    def _block_hidden(self, cache: DraftCache, x: Tensor, positions: Tensor, bound: int) -> Tensor:
        """Hidden rows ``[B, T, D]`` of one block ``x [B, T, D]`` at consecutive ``positions [B, T]``, anchor first.

        Reads the first ``bound`` entries of the cache; the block's own keys and values go to its positions there and
        are overwritten by the next ``extend``.
        """
        rows = flat_index(positions, cache.capacity)
        columns = torch.arange(bound, device=x.device)[None, None]  # [1, 1, C]
        query, last = positions[:, :, None], positions[:, -1:, None]
        bias: dict[tuple[int | None, bool], Tensor] = {}
        for window, causal in set(zip(self._windows, self._causal, strict=True)):
            # every entry up to the block's end is context or the block itself; what lies beyond is scratch
            seen = columns <= (query if causal else last)
            if window is not None:
                seen = seen & (query - columns < window)
            seen = seen.expand(-1, x.shape[1], -1)
            bias[window, causal] = additive(seen, x.dtype)[:, None].repeat(1, 1, self._group, 1)  # [B, 1, G*T, C]

        def store(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            _write(cache.keys[layer], rows, key)
            _write(cache.values[layer], rows, value)
            return cache.keys[layer][:, :bound].to(x.dtype), cache.values[layer][:, :bound].to(x.dtype)

        return self._run(x, positions, bias, store, self._products(self.pack))

    # --- training -----------------------------------------------------------------------------------------------
    def _train_hidden(self, features: Tensor, x: Tensor, anchors: Tensor) -> Tensor:
        """Hidden rows ``[B, N, R, D]`` of ``N`` blocks ``x [B, N, R, D]`` at ``anchors [B, N]``, in one pass.

        Rows of block ``n`` see context strictly before ``anchors[n]`` and their own block, exactly as when decoding.
        """
        products = self._products(False)
        b, n, r, d = x.shape
        length = features.shape[1]
        context = self._fuse(features, products)
        steps = torch.arange(length, device=x.device)
        pairs = self._context_keys(context, products, self.rotary(steps[None], context.dtype))
        offsets = torch.arange(r, device=x.device)
        positions = (anchors[:, :, None] + offsets).reshape(b, n * r)  # [B, N*R]
        before = (steps < anchors[:, :, None]).repeat_interleave(r, 1)  # [B, N*R, L]
        block = torch.arange(n, device=x.device).repeat_interleave(r)
        same = block[:, None] == block  # [N*R, N*R]
        offset = offsets.repeat(n)
        bias: dict[tuple[int | None, bool], Tensor] = {}
        for window, causal in set(zip(self._windows, self._causal, strict=True)):
            outer, inner = before, same
            if causal:
                inner = inner & (offset <= offset[:, None])
            if window is not None:
                outer = outer & (positions[:, :, None] - steps < window)
                inner = inner & (offset[:, None] - offset < window)
            seen = torch.cat((outer, inner.expand(b, -1, -1)), -1)  # [B, N*R, L + N*R]
            bias[window, causal] = additive(seen, x.dtype)[:, None].repeat(1, 1, self._group, 1)

        def join(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            return torch.cat((pairs[layer][0], key), 1), torch.cat((pairs[layer][1], value), 1)

        return self._run(x.reshape(b, n * r, d), positions, bias, join, products).reshape(b, n, r, d)

    # --- both ---------------------------------------------------------------------------------------------------
    def _fuse(self, features: Tensor, products: _Products) -> Tensor:
        """``c = RMSNorm(W_fc f)``: ``[B, T, F*D] -> [B, T, D]``, in the trunk's dtype."""
        return self.hidden_norm(products.fuse(features.to(self.dtype))[0])

    def _context_keys(
        self, context: Tensor, products: _Products, rotation: tuple[Tensor, Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Keys (normalised, rotated) and values ``[B, T, Hkv, d]`` of the context, for every layer."""
        flat = products.context(context)
        shape = (*context.shape[:2], self._kv_heads, self._head_dim)
        return [
            (rotate(layer.self_attn.k_norm(flat[2 * i].reshape(shape)), *rotation), flat[2 * i + 1].reshape(shape))
            for i, layer in enumerate(self._layers())
        ]

    def _run(
        self,
        x: Tensor,
        positions: Tensor,
        bias: dict[tuple[int | None, bool], Tensor],
        exchange: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]],
        products: _Products,
    ) -> Tensor:
        """The layers and the final norm. ``exchange`` maps a layer's own keys and values to all that it attends to."""
        b, t, _ = x.shape
        cos, sin = self.rotary(positions, x.dtype)
        for i, (layer, product) in enumerate(zip(self._layers(), products.layers, strict=True)):
            attention = layer.self_attn
            q, k, v = (y.reshape(b, t, -1, self._head_dim) for y in product.qkv(layer.input_layernorm(x)))
            q, k = rotate(attention.q_norm(q), cos, sin), rotate(attention.k_norm(k), cos, sin)
            keys, values = exchange(i, k, v)
            mask = bias[self._windows[i], self._causal[i]]
            x = x + product.out(grouped_attention(q, keys, values, mask, self._head_dim**-0.5))[0]
            gate, up = product.gate_up(layer.post_attention_layernorm(x))
            x = x + product.down(F.silu(gate) * up)[0]
        return self.norm(x)

    def _layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    def _products(self, pack: bool) -> _Products:
        if not pack:
            return self._build_products(False)
        # versions change with every optimiser step, addresses with every replaced parameter
        state = tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in self.parameters())
        if self._packed is None or self._packed.state != state:
            self._packed = self._build_products(True)
            self._packed.state = state
        return self._packed

    def _build_products(self, pack: bool) -> _Products:
        int8 = pack and self.int8
        layers = [
            _LayerProducts(
                qkv=_join([layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj], pack, int8),
                out=_join([layer.self_attn.o_proj], pack, int8),
                gate_up=_join([layer.mlp.gate_proj, layer.mlp.up_proj], pack, int8),
                down=_join([layer.mlp.down_proj], pack, int8),
            )
            for layer in self._layers()
        ]
        pairs = [m for layer in self._layers() for m in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
        # one product for the context's keys and values of all layers, also where nothing is packed: kept, not remade
        return _Products(_join([self.fc], pack, False), _join(pairs, pack, int8, one=pack), layers)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_packed": None}  # packed copies can be neither copied nor pickled


def _write(buffer: Tensor, rows: Tensor, new: Tensor) -> None:
    """Write ``new [B, T, H, d]`` to ``rows [B*T]`` of ``buffer [B, C, H, d]`` flattened over its first axes."""
    buffer.flatten(0, 1).index_copy_(0, rows, new.flatten(0, 1).to(buffer.dtype))
