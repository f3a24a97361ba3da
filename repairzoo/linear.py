"""Matrix products of the decode path: one place that knows how weights are best laid out on this machine.

A block of eight rows against a row-major float32 matrix costs a CPU two to three times one row, since the library
repacks the matrix in every call. oneDNN's prepacked layout does it once, and eight rows then cost about 1.2 times one
row.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS_HINT = 8  # rows that the packed layout is chosen for: a block


def packable(weight: Tensor) -> bool:
    """Whether oneDNN can hold ``weight`` in its own layout and multiply with it natively."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.float32:
        return True
    return weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Linear:
    """``x @ W.T + b`` for one matrix, or for several that share their input.

    Args:
        weights: one or more ``[out_i, in]`` matrices; never modified.
        biases: as many ``[out_i]`` vectors or None.
        pack: keep a packed copy where that pays (more memory, less time); False uses the given tensors as they are.
        join: where they are not packed, keep one matrix of them all: one product instead of many small ones (a GPU).
    """

    __slots__ = ("weights", "biases", "sizes", "packed", "bias")

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] | None = None,
        *,
        pack: bool = True,
        join: bool = False,
    ):
        self.weights = weights
        self.biases = biases or [None] * len(weights)
        self.sizes = [w.shape[0] for w in weights]
        self.packed: Tensor | None = None
        self.bias: Tensor | None = None
        packs = pack and all(packable(w) for w in weights)
        if packs or (join and len(weights) > 1):
            with torch.no_grad():
                joined = torch.cat([w.detach() for w in weights]) if len(weights) > 1 else weights[0].detach()
                if any(b is not None for b in self.biases):
                    self.bias = torch.cat(
                        [w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, self.biases, strict=True)]
                    ).detach()
                if packs:
                    self.packed = torch.ops.mkldnn._reorder_linear_weight(joined.contiguous(), _ROWS_HINT)
                else:
                    self.weights, self.biases = [joined], [self.bias]

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """``x [..., in]`` -> one ``[..., out_i]`` for each matrix."""
        if self.packed is None:
            if len(self.weights) == len(self.sizes):
                return tuple(F.linear(x, w, b) for w, b in zip(self.weights, self.biases, strict=True))
            return F.linear(x, self.weights[0], self.biases[0]).split(self.sizes, dim=-1)
        y = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return (y,) if len(self.sizes) == 1 else y.split(self.sizes, dim=-1)


class Int8Linear:
    """``x @ W.T + b`` with weights rounded to 8 bits (one scale a row) and inputs rounded as they come; CPU only.

    For drafts alone: it moves a quarter of the bytes, and a rounded draft can only cost acceptance, since the target
    verifies it in full precision. Inputs share one scale over all rows of a call, so a row's draft depends (slightly)
    on the rows beside it; what must be reproducible row by row uses :class:`Linear`.

    Args:
        weights, biases: as for :class:`Linear`; read once, not kept.
    """

    __slots__ = ("sizes", "packed")

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None):
        self.sizes = [w.shape[0] for w in weights]
        with torch.no_grad():
            joined = torch.cat([w.detach().float() for w in weights])
            bias = None
            if biases is not None and any(b is not None for b in biases):
                bias = torch.cat(
                    [
                        torch.zeros(n) if b is None else b.detach().float()
                        for n, b in zip(self.sizes, biases, strict=True)
                    ]
                )
            scales = (joined.abs().amax(1) / 127).clamp_min(1e-12).double()
            zeros = torch.zeros(len(scales), dtype=torch.int64)
            with warnings.catch_warnings():  # torch announces the end of these tensors; nothing else is as fast yet
                warnings.simplefilter("ignore", UserWarning)
                rounded = torch.quantize_per_channel(joined, scales, zeros, 0, torch.qint8)
                self.packed = torch.ops.quantized.linear_prepack(rounded, bias)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """``x [..., in]`` -> one ``[..., out_i]`` for each matrix, in the dtype of ``x``."""
        y = torch.ops.quantized.linear_dynamic(x.float(), self.packed, True).to(x.dtype)
        return (y,) if len(self.sizes) == 1 else y.split(self.sizes, dim=-1)


def int8_available(device: torch.device) -> bool:
    """Whether 8-bit products run here: a CPU, and a torch that has its quantised engine (still)."""
    engine = getattr(torch.backends.quantized, "engine", "none")
    return device.type == "cpu" and engine in ("x86", "fbgemm", "onednn") and hasattr(torch, "quantize_per_channel")
