"""What a round costs: parameters, bytes, operations and bytes moved of draft, head and verification, and their times.

Nothing is taken from formulas of one architecture: one round of the given shapes is run, and every operation that it
dispatches is counted. A product of ``[m, k]`` and ``[k, n]`` is ``2 m k n`` operations. Moved are operands and results
of every operation, as if no cache held them: what a kernel that fuses some of them saves is not known here. The least
that any kernels must move is what lay there before the round, weights, keys and values, once: floors are made of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from repairzoo.decode import propose, verify_mask
from repairzoo.errors import InvalidInput
from repairzoo.generation import make_request
from repairzoo.linear import Int8Linear, Linear
from repairzoo.zoo import autoregressive

# of their first operand only the rows that are asked for are read (or written)
_BY_ROWS = (
    "embedding",
    "index_select",
    "gather",
    "index",
    "index_copy",
    "index_copy_",
    "scatter",
    "scatter_",
    "index_put_",
)
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


@dataclass(frozen=True, slots=True)
class Cost:
    """One stage of a round.

    Attributes:
        part: ``draft``, ``head`` or ``verify``. parameters, bytes: of its weights (borrowed ones are the target's).
        operations: multiplications and additions of its products. moved: bytes of operands and results.
        least: bytes of what no stage of the round has made and this one reads, each once.
        seconds: measured, a round; None where nothing was measured.
    """

    part: str
    parameters: int
    bytes: int
    operations: int
    moved: int
    least: int
    seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Counter(TorchDispatchMode):
    """Counts what is dispatched inside it.

    Args:
        after: the counter of the stage before: what was made in it does not count as lying there.
        weight_bytes: bytes of a number in the second operand of a product, where the real run rounds weights; None
            takes the tensor's own.
        exact: weights that are not rounded there either.
    """

    def __init__(
        self, after: Counter | None = None, *, weight_bytes: int | None = None, exact: Iterable[Tensor] = ()
    ) -> None:
        super().__init__()
        self.operations = self.moved = self._rows = 0
        self.weight_bytes, self._exact = weight_bytes, {_storage(t) for t in exact}
        self._made: set[int] = after._made if after else set()  # storages, by address
        self._read: dict[int, int] = {}  # address of what lay there -> bytes of its widest view

    @property
    def least(self) -> int:
        return self._rows + sum(self._read.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        name = packet.__name__
        if "scaled_dot_product" in name:
            q, k, v = args[:3]
            self.operations += 2 * q[..., 0].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        elif packet in flop_registry:
            self.operations += int(flop_registry[packet](*args, **(kwargs or {}), out_val=out))
        returns = func._schema.returns
        view = returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if view:
            return out
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        self._made.update(_storage(t) for t in outputs if not any(t is x for x in inputs))
        if name in _BY_ROWS:
            writes = name.endswith("_") or name in ("index_copy", "scatter")
            rows = inputs[-1] if writes else outputs[0]
            if not writes and _storage(inputs[0]) not in self._made:
                self._rows += held(rows)
            self.moved += 2 * held(rows) + sum(held(t) for t in inputs[1:] if t is not rows)
            self._see(inputs[1:])
            return out
        self.moved += sum(held(t) for t in (*inputs, *outputs))
        rounded = inputs[-1] if self.weight_bytes is not None and name in _PRODUCTS[:2] else None
        if rounded is not None and _storage(rounded) in self._exact:
            rounded = None
        if rounded is not None:
            self.moved -= held(rounded) - self._bytes(rounded, rounded)
        self._see(inputs, rounded)
        return out

    def _see(self, tensors: Iterable[Tensor], rounded: Tensor | None = None) -> None:
        for t in tensors:
            if _storage(t) not in self._made:
                self._read[t.data_ptr()] = max(self._read.get(t.data_ptr(), 0), self._bytes(t, rounded))

    def _bytes(self, tensor: Tensor, rounded: Tensor | None) -> int:
        return tensor.numel() * (self.weight_bytes or 0) if tensor is rounded else held(tensor)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def held(tensor: Tensor) -> int:
    """Bytes that a tensor's elements occupy; broadcast axes occupy nothing."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= 1 if stride == 0 else length
    return size


@torch.no_grad()
def costs(zoo: Any, *, context: int = 256, batch: int = 1) -> list[Cost]:
    """Draft, head and verification of one round, and plain decoding's step for comparison (``step``).

    Args:
        zoo: a backbone and heads on their target. context: committed positions. batch: rows.

    Raises:
        InvalidInput: no room for a block after so much context.
    """
    target, backbone = zoo.target, zoo.backbone
    request = make_request(target, [[0]] * batch, max_new_tokens=2, eos_token_id=[])
    engine = replace(zoo.engine(request), kernels="torch")  # a fused kernel shows no operations
    _check(target, context, batch, engine.slack)
    device, bound = target.device, context + engine.slack
    kv, cache = target.new_cache(batch, bound), backbone.new_cache(batch, bound, target.dtype, device)
    anchor = torch.zeros(batch, dtype=torch.int64, device=device)
    position = anchor + context
    committed = engine.budget + 1 if zoo.nodes is None and zoo.expander is None else backbone.slots + 1
    taps = backbone.tapped_layers
    features = torch.zeros(batch, committed, len(taps) * target.hidden_size, dtype=target.dtype, device=device)
    places = position[:, None] - committed + torch.arange(committed, device=device)
    int8, exact = getattr(backbone, "int8", False), getattr(backbone, "unrounded", ())

    def counted() -> tuple[Counter, Counter, Counter]:
        with Counter(weight_bytes=1 if int8 else None, exact=exact) as draft:
            if taps:
                backbone.extend(cache, features, places.clamp_min(0))
            block = backbone.draft(cache, anchor, position, bound)
        with Counter(draft) as head:
            tree, _, _ = propose(engine, block, torch.zeros_like(anchor))
        with Counter(head) as between:
            entries = position[:, None] + torch.arange(tree.size, device=device)
            mask = verify_mask(tree, position, bound)
        with Counter(between) as verify:
            hidden, _ = target.forward(tree.tokens, position[:, None] + tree.depths, entries, mask, kv, taps)
            target.logits(hidden)
        return draft, head, verify

    with _unpacked(target, backbone, *zoo.heads):
        counted()  # heads make their tables once
        draft, head, verify = counted()
    own = _parameters([backbone])
    weights = sum(
        p.numel() * (1 if int8 and p.dim() > 1 and all(p is not e for e in exact) else p.element_size()) for p in own
    )
    return [
        Cost("draft", sum(p.numel() for p in own), weights, draft.operations, draft.moved, draft.least),
        _cost("head", zoo.heads, head),
        _cost("verify", [target.model], verify),
        plain_cost(target, context=context, batch=batch, bound=bound),
    ]


@torch.no_grad()
def plain_cost(target: Any, *, context: int = 256, batch: int = 1, bound: int | None = None) -> Cost:
    """One step of plain decoding, part ``step``.

    Args:
        context: committed positions. batch: rows. bound: cache columns that attention reads; just those needed.

    Raises:
        InvalidInput: no room for a token after so much context.
    """
    _check(target, context, batch, 1)
    bound = bound or context + 1
    kv = target.new_cache(batch, bound)
    anchor = torch.zeros(batch, dtype=torch.int64, device=target.device)
    position = anchor + context
    with _unpacked(target), Counter() as step:
        seen = torch.arange(bound, device=target.device)[None, None] <= position[:, None, None]
        hidden, _ = target.forward(anchor[:, None], position[:, None], position[:, None], seen, kv)
        target.logits(hidden)
    return _cost("step", [target.model], step)


def _check(target: Any, context: int, batch: int, slack: int) -> None:
    if batch < 1 or not 1 <= context <= target.max_context - slack:
        raise InvalidInput(f"context={context}, batch={batch}: give 1 to {target.max_context - slack}, and 1 up")


def measured(zoo: Any, table: list[Cost], prompt: Any, *, new_tokens: int = 48) -> list[Cost]:
    """The table with seconds a round (and a step of plain decoding), from two short runs each, the first to warm up."""

    def run() -> tuple[Any, Any]:
        options: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": []}
        return zoo.generate(prompt, **options), autoregressive(zoo.target, prompt, **options)

    run()
    out, plain = run()
    rounds, seconds = max(map(len, out.stats.accepted)), out.stats.seconds
    if not rounds:
        raise InvalidInput(f"new_tokens={new_tokens}: no round was run; give more")
    steps = max(len(plain.token_ids[0]) - 1, 1)
    known = {part: seconds[part] / rounds for part in ("draft", "head", "verify") if part in seconds}
    known["step"] = plain.stats.decode_seconds / steps
    return [replace(cost, seconds=known.get(cost.part)) for cost in table]


def _parameters(modules: Iterable[Any]) -> list[Tensor]:
    """Parameters and buffers of modules, each tensor once."""
    found: dict[int, Tensor] = {}
    for module in modules:
        if isinstance(module, nn.Module):
            found |= {t.data_ptr(): t for t in module.parameters()}
    return list(found.values())


def _cost(part: str, modules: Iterable[Any], counted: Counter) -> Cost:
    own = _parameters(modules)
    numbers, held_ = sum(p.numel() for p in own), sum(p.numel() * p.element_size() for p in own)
    return Cost(part, numbers, held_, counted.operations, counted.moved, counted.least)


@contextmanager
def _unpacked(target: Any, backbone: Any = None, *heads: Any) -> Iterator[None]:
    """Products as plain ones for a while: packed weights hide their sizes. The numbers are the same."""
    layers = [p for layer in target._layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    linears = [p for p in (*layers, target.output) if isinstance(p, Linear)]
    packed = [p.packed for p in linears]
    before = {name: getattr(backbone, name) for name in ("pack", "int8", "_target") if hasattr(backbone, name)}
    borrowed: Any = before.get("_target")
    packing = [head for head in heads if getattr(head, "pack", False)]
    try:
        for head in packing:
            head.pack = False
        for linear in linears:
            linear.packed = None
        if "pack" in before:
            backbone.pack, backbone.int8 = False, False
        if isinstance(getattr(borrowed, "output", None), Int8Linear):
            weight = borrowed.output_weight
            backbone._target = type(borrowed)(borrowed.embedding, weight, Linear([weight], pack=False))
        yield
    finally:
        for head in packing:
            head.pack = True
        for linear, was in zip(linears, packed, strict=True):
            linear.packed = was
        for name, value in before.items():
            setattr(backbone, name, value)
