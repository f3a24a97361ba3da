"""A round is one static graph: it looks at no value, and what was traced of one state serves others."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from conftest import Bigram, causal_lm, dflash, heads_for, knowing, prompts
from round_toys import BACKBONES, HEADS, backbone_for, head_for
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import repairzoo
from repairzoo import decode
from repairzoo.capacity import leaves
from repairzoo.capture import _Tape
from repairzoo.launched import pack
from repairzoo.row_law import RowLaw
from repairzoo.sampling import Law
from repairzoo.target import KVCache, Target

BOUND = 32


def tiny() -> Target:
    # packed weights are opaque to the tracer; the product itself is tested in test_target.py
    return Target(causal_lm(seed=4, num_hidden_layers=2), None, name="toy", pack=False)


def flatten(state: decode.State) -> list[torch.Tensor]:
    c = state.context
    drafted = [] if c is None else [*c.keys, *c.values, c.context]
    return [state.ids, state.length, state.limit, state.done, state.seed, *state.kv.keys, *state.kv.values, *drafted]


def restore(like: decode.State, tensors: list[torch.Tensor]) -> decode.State:
    n = len(like.kv.keys)
    kv = KVCache(list(tensors[5 : 5 + n]), list(tensors[5 + n : 5 + 2 * n]))
    rest = tensors[5 + 2 * n :]
    m = len(rest) // 2
    context = None if like.context is None else type(like.context)(list(rest[:m]), list(rest[m:-1]), rest[-1])
    return decode.State(*tensors[:5], kv, context)


def as_function(engine: decode.Engine, like: decode.State) -> Any:
    def function(*tensors):
        out = decode.round(engine, restore(like, list(tensors)), BOUND)
        return tuple(getattr(out, name) for name in decode.RoundOutput.__dataclass_fields__)

    return function


def engine_of(target: Target, backbone: Any, head: Any, law: Law, nodes: int | None, sampled: bool) -> decode.Engine:
    zoo = repairzoo.build(backbone, head, target)
    pool = getattr(head, "pool_size", None)
    return decode.Engine(target, zoo.backbone, zoo.heads, law, torch.tensor([7, 9]), nodes, sampled, pool)


def without_values(engine: decode.Engine, state: decode.State) -> None:
    """Run a round on tensors that have shapes and no values: any look at one raises.

    ``make_fx`` alone would not do: its fake tensors answer ``item()`` with an unknown number and carry on.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=None)
    tensors = [mode.from_tensor(t) for t in flatten(state)]
    with mode:
        as_function(engine, state)(*tensors)


def trace(engine: decode.Engine, state: decode.State) -> Any:
    tensors = [t.clone() for t in flatten(state)]
    return make_fx(as_function(engine, state), tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)


@pytest.mark.parametrize("head", ["none", "pooled", "stack"])
@pytest.mark.parametrize("mode", ["chain", "drawn chain", "sampled chain", "tree", "drawn tree"])
def test_round_looks_at_no_value(mode, head):
    target = tiny()
    backbone = dflash(target, 2, block_size=3)
    backbone.pack = False
    law = Law(0.0) if mode in ("chain", "tree") else Law(1.3, top_k=9, top_p=0.95, min_p=0.01)
    engine = engine_of(
        target, backbone, heads_for(target, head), law, 5 if "tree" in mode else None, mode == "sampled chain"
    )
    without_values(engine, decode.start(engine, prompts(1, [5, 2]), [20, 20], [1, 2], capacity=40))


@pytest.mark.parametrize(
    ("mode", "head"),
    [
        ("chain", "none"),
        ("sampled chain", "dels"),
        ("drawn tree", "pooled"),
    ],
)
def test_round_traces_and_the_graph_serves_other_states(mode, head):
    """TRT-LLM#17110, buun-llama#116: nothing of the traced state is frozen into the graph."""
    target = tiny()
    backbone = dflash(target, 2, block_size=4)
    backbone.pack = False
    law = Law(0.0) if mode in ("chain", "tree") else Law(1.3, top_k=9, top_p=0.95)
    engine = engine_of(
        target, backbone, heads_for(target, head), law, 5 if "tree" in mode else None, mode == "sampled chain"
    )
    state = decode.start(engine, prompts(1, [5, 2]), [20, 20], [1, 2], capacity=40)
    graph = trace(engine, state)
    other = decode.start(engine, prompts(2, [3, 8]), [3, 20], [5, 6], capacity=40)
    for _ in range(3):
        replayed = [t.clone() for t in flatten(other)]
        got = graph(*replayed)
        out = decode.round(engine, other, BOUND)
        for name, tensor in zip(decode.RoundOutput.__dataclass_fields__, got, strict=True):
            assert torch.equal(tensor, getattr(out, name)), name
        for ours, theirs in zip(flatten(other), replayed, strict=True):
            assert torch.equal(ours, theirs)


def test_graph_of_a_state_that_accepts_nothing_serves_one_that_accepts_all():
    target = tiny()
    rows = prompts(1, [4, 6])
    answers = repairzoo.autoregressive(target, rows, max_new_tokens=12).token_ids
    known = [p + a for p, a in zip(rows, answers, strict=True)]
    right = knowing(known, 3)
    engine = engine_of(target, right, None, Law(0.0), None, False)
    engine = decode.Engine(target, engine.backbone, (), Law(0.0), torch.zeros(0, dtype=torch.int64))
    state = decode.start(engine, rows, [12, 12], [0, 0], capacity=40)
    wrong = decode.start(engine, [[(t + 3) % 32 for t in row] for row in rows], [12, 12], [0, 0], capacity=40)
    assert decode.round(engine, restore(wrong, [t.clone() for t in flatten(wrong)]), BOUND).accepted.tolist() != [3, 3]
    graph = trace(engine, wrong)
    assert graph(*flatten(state))[2].tolist() == [3, 3]


def host_item(scores):
    return scores * scores.max().item()


def host_branch(scores):
    return scores if scores.sum() > 0 else -scores


def host_mask(scores):
    return scores + scores[scores > 0].sum()


def host_list(scores):
    return scores + scores.argmax(-1).tolist()[0][0]


@pytest.mark.parametrize("peek", [host_item, host_branch, host_list, host_mask])
def test_control_a_look_at_values_fails_the_trace(peek):
    class Peeking(Bigram):
        def step(self, prepared, carry, slot, previous, scores):
            return peek(scores), carry

    target = tiny()
    backbone = dflash(target, 2, block_size=4)
    backbone.pack = False
    engine = engine_of(target, backbone, Peeking(0), Law(0.0), None, False)
    state = decode.start(engine, prompts(1, [5, 2]), [20, 20], [1, 2], capacity=40)
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        without_values(engine, state)


# --- every backbone with every head -----------------------------------------------------------------------------------
FILTERED = (True, True, True)


@cache
def small(dtype: torch.dtype = torch.float32) -> Target:
    return Target(causal_lm(seed=4, num_hidden_layers=1, dtype=dtype), None, name="toy", pack=False)


def static_engine(zoo: Any, rows: int, sampled: bool) -> decode.Engine:
    """The engine of a captured round: its law and its end-of-text ids are tensors."""
    target = zoo.target
    law = RowLaw.empty(rows, target.vocab_size, torch.float32, target.device).only(FILTERED)
    eos = torch.full((8,), -1, dtype=torch.int64, device=target.device)
    sizes = [size for size in (getattr(head, "pool_size", None) for head in zoo.heads) if size is not None]
    pool = max(sizes, default=None)
    return decode.Engine(target, zoo.backbone, zoo.heads, law, eos, zoo.nodes, sampled, pool)


def options_for(head: str) -> list[dict[str, Any]]:
    """A chain; drawn and verified by ratio; a tree. An expander makes its own."""
    return [{}] if "cure" in head else [{"proposal": "sampled"}, {"tree": 4}]


class OnlyDevice(TorchDispatchMode):
    """Notes operations that touch the host's memory; numbers that ride along with a launch may come from there."""

    def __init__(self) -> None:
        super().__init__()
        self.host: list[str] = []
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        copies = "copy" in str(func)
        here = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor) and x.device.type != "cuda"]
        self.host += [str(func) for x in here if copies or x.dim() > 0]
        self.count += 1
        return out


class WithoutGuard(TorchFunctionMode):
    """Some of Python's bindings ask for the GPU itself, which a build without CUDA hasn't got; the operations that they
    stand for don't."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            return view_of(*args)
        if func is torch.Tensor.__setitem__:
            view, value = view_of(*args[:2]), args[2]
            fill = not isinstance(value, torch.Tensor)
            return torch.ops.aten.fill_(view, value) if fill else torch.ops.aten.copy_(view, value)
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if "not linked with support for cuda" not in str(error):
                raise
            name = {"__invert__": "bitwise_not"}.get(func.__name__, func.__name__)
            return getattr(torch.ops.aten, name)(*args, **(kwargs or {}))


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """``Tensor.contiguous`` for decompositions, which no function mode sees."""
    return x if x.is_contiguous() else torch.ops.aten.clone(x, memory_format=torch.contiguous_format)


def view_of(x: torch.Tensor, key: Any) -> torch.Tensor:
    """``x[key]`` by the operations that it stands for."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(k is Ellipsis for k in keys):
        at = next(i for i, k in enumerate(keys) if k is Ellipsis)
        missing = x.dim() - sum(k is not None and k is not Ellipsis for k in keys)
        keys[at : at + 1] = [slice(None)] * missing
    dim, tensors = 0, []
    for k in keys:
        if k is None:
            x = x.unsqueeze(dim)
        elif isinstance(k, int):
            x = x.select(dim, k)
            continue
        elif isinstance(k, slice):
            if k != slice(None):
                x = torch.ops.aten.slice.Tensor(x, dim, k.start, k.stop, k.step or 1)
        else:
            tensors += [None] * (dim - len(tensors)) + [k]
        dim += 1
    return torch.ops.aten.index.Tensor(x, tensors) if tensors else x


def move_to_blank_gpu(module: torch.nn.Module, mode: FakeTensorMode) -> None:
    """Replace every weight by one on a GPU that has a shape and no values; there need be no GPU."""
    for part in module.modules():
        for store in (part._parameters, part._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    with mode:
                        blank = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                    store[name] = torch.nn.Parameter(blank, False) if store is part._parameters else blank


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", BACKBONES)
def test_every_pair_stays_on_the_gpu(kind, head, monkeypatch):
    """In bfloat16 on a GPU without values: no host read, no shape that depends on data, nothing copied from the host,
    and no branch on an address, since there is none."""
    mode, target = FakeTensorMode(shape_env=None), small(torch.bfloat16)
    backbone, heads = backbone_for(kind, target, 2), head_for(head, target)
    backbone.pack = True
    model = causal_lm(seed=4, num_hidden_layers=1, dtype=torch.bfloat16)
    for part in (model, backbone, *(heads if isinstance(heads, list) else [heads])):
        if isinstance(part, torch.nn.Module):
            move_to_blank_gpu(part, mode)
    monkeypatch.setattr("repairzoo.target._prove", lambda target: None)
    monkeypatch.setattr(torch.Tensor, "contiguous", contiguous)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_, **__: module)  # all is where it belongs
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda self: id(self))  # tables made of weights are kept by address
    with mode, WithoutGuard():
        target = Target(model, None, name="toy")
        backbone.bind(target.embedding, target.output_weight, output=target.output)
        parts = tuple(heads) if isinstance(heads, list) else (heads,) if heads is not None else ()
        ways = options_for(head)
        options = ways[(BACKBONES.index(kind) + HEADS.index(head)) % len(ways)]  # in turn: a round takes long here
        zoo = repairzoo.Zoo(target, backbone, parts, options.get("tree"), options.get("proposal", "argmax"))
        engine = static_engine(zoo, 2, zoo.proposal == "sampled")
        state = decode.new_state(engine, 2, 40)
        with OnlyDevice() as watch:
            result = pack(decode.round(engine, state, BOUND))
        assert not watch.host
        assert watch.count > 100 and result.device.type == "cuda" and result.shape[0] == 2


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", BACKBONES)
def test_every_pair_does_the_same_whatever_it_finds(kind, head):
    """Rows that end, rows that go on, laws that are greedy or not, buffers elsewhere: one list of operations."""
    target = small()
    backbone, heads = backbone_for(kind, target, 2), head_for(head, target)
    for options in options_for(head):
        zoo = repairzoo.build(backbone, heads, target, **options)
        zoo.generate([[1, 2, 3]], max_new_tokens=3)  # the first round makes what a head keeps between blocks
        lists = []
        for seed, lengths, budgets in ((1, [5, 2], [9, 9]), (2, [3, 11], [1, 20])):
            engine = static_engine(zoo, 2, zoo.proposal == "sampled")
            engine.law.set(Law(0.0) if seed == 1 else Law(0.8, 5, 0.9, 0.05), target.vocab_size)
            engine.eos[:1] = 7
            state = decode.start(engine, prompts(seed, lengths), budgets, [1, 2], capacity=40)
            tape = _Tape(list(leaves(state)))
            with tape:
                pack(decode.round(engine, state, BOUND))
            lists.append([(str(func), at) for func, _, _, at in tape.steps])
        assert lists[0] == lists[1] and len(lists[0]) > 100


def test_scores_laws_and_ratios_are_float32_in_half_precision(monkeypatch):
    """What is proposed from, accepted by and normalised never has the precision of the weights (DeepSpec#31)."""
    target = small(torch.bfloat16)
    zoo = repairzoo.build(backbone_for("domino", target, 2), head_for("dels", target), target, proposal="sampled")
    seen = {}

    def ratio(p, q, *rest):
        seen.update(p=p, q=q)
        return original(p, q, *rest)

    def walk(block, stack, pool, **options):
        tokens, q, more = walked(block, stack, pool, **options)
        seen.update(logits=block.logits, drawn_from=q, scores=more["scores"][0])
        return tokens, q, more

    original, walked = decode.ratio, decode.walk
    monkeypatch.setattr(decode, "ratio", ratio)
    monkeypatch.setattr(decode, "walk", walk)
    zoo.generate(prompts(1, [4]), max_new_tokens=3, temperature=1.0, seed=1)
    assert target.dtype == torch.bfloat16
    assert {name: x.dtype for name, x in seen.items()} == dict.fromkeys(seen, torch.float32)
    assert seen["q"] is seen["drawn_from"]  # the very tensor
