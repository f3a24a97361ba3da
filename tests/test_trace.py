"""A round is one static graph: it looks at no value, and what was traced of one state serves others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Bigram, causal_lm, dflash, heads_for, knowing, prompts
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import repairzoo
from repairzoo import decode
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
