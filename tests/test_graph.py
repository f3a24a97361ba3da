"""Captured rounds give the tokens of the eager loop: recorded on values-less tensors, replayed on static buffers."""

from __future__ import annotations

import gc
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB, Bigram, causal_lm, dels, dflash, greedy, letters, noisy, prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from round_toys import Knowing, backbone_for, head_for

import repairzoo
from repairzoo import capacity, decode
from repairzoo.capacity import position_bucket, position_buckets, row_bucket
from repairzoo.capture import Recorder
from repairzoo.errors import CaptureFailed, DoesNotFit, InvalidInput
from repairzoo.generation import finish, speculate
from repairzoo.graph import Arena, Graph, Graphs
from repairzoo.row_law import RowLaw, filters_of
from repairzoo.runner import Eager
from repairzoo.sampling import Law
from repairzoo.target import Target

S = 3


@cache
def target_of(layers: int = 2) -> Target:
    """Packed weights are opaque to the tracer; the products themselves are tested in test_target.py."""
    return Target(causal_lm(seed=4, num_hidden_layers=layers), letters(), name="toy", pack=False)


def recorded(
    backbone: Any, head: Any = None, *, smallest: int = 64, ahead: int = 1024, blank: bool = False, **options: Any
) -> Any:
    zoo = repairzoo.build(backbone, head, target_of(), **options)
    zoo.graphs = Graphs(Recorder(blank), smallest, ahead)
    zoo.graphs.sampled = zoo.proposal == "sampled"
    return zoo


def eager(zoo: Any) -> Any:
    return repairzoo.Zoo(zoo.target, zoo.backbone, zoo.heads, zoo.nodes, zoo.proposal)


def same(zoo: Any, inputs: Any, **options: Any) -> Any:
    """Run captured and eagerly; everything that a user sees is the same."""
    ours, theirs = zoo.generate(inputs, **options), eager(zoo).generate(inputs, **options)
    assert ours.token_ids == theirs.token_ids
    assert ours.text == theirs.text and ours.finish_reason == theirs.finish_reason
    for name in ("accepted", "drafted", "agreed", "repaired", "repairs_accepted", "branches", "branches_accepted"):
        assert getattr(ours.stats, name) == getattr(theirs.stats, name), name
    for arena in zoo.graphs.free:  # what is hidden must still be finite: nothing times NaN is NaN
        assert all(bool(x.isfinite().all()) for x in capacity.leaves(arena.state))
    return ours


# --- equal tokens ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tree", [None, 5])
def test_forced_rejections_at_every_slot(tree):
    """TRT-LLM#17110, buun-llama#116: graphs diverge after a rejection if a host value was frozen into them."""
    target, prompt = target_of(), prompts(1, [5])[0]
    answer = greedy(target.model, prompt, 40)
    wrong, at, pattern = set(), len(prompt), []
    while at < len(prompt) + 30:
        accept = len(pattern) % (S + 1)  # 0, 1, .., S drafted tokens, again and again
        pattern.append(accept + 1)
        if accept < S:
            wrong.add(at + 1 + accept)
        at += accept + 1
    zoo = recorded(Knowing([prompt + answer], S, VOCAB, wrong), tree=tree)
    out = same(zoo, prompt, max_new_tokens=30)
    assert out.token_ids == [answer[:30]]
    if tree is None:
        assert out.stats.accepted[0][:-1] == pattern[: len(out.stats.accepted[0]) - 1]


@pytest.mark.parametrize(
    ("kind", "head", "options"),
    [
        ("dflash", "dels", {}),
        ("dflash", "lilicorr+drelay", {"tree": 5}),
        ("domino", "none", {"proposal": "sampled"}),
        ("dspark", "dels+cure", {}),
    ],
)
def test_pairs_replay_what_they_run(kind, head, options):
    """One graph serves greedy and sampled rows: the law's options are tensors."""
    target = target_of()
    zoo = recorded(backbone_for(kind, target, 2), head_for(head, target), blank=kind == "domino", **options)
    rows = prompts(3, [5, 2])
    for temperature in (0.0, 0.9):
        same(zoo, rows, max_new_tokens=8, temperature=temperature, seed=7)
    (arena,) = zoo.graphs.free
    assert {key.filters for key in arena.graphs} == {(False, False, False)}
    same(zoo, rows[0], max_new_tokens=6, temperature=0.7, top_p=0.8, top_k=6, min_p=0.02, seed=1)
    assert {key.filters for key in arena.graphs} > {(True, True, True)}  # they cost work: graphs of their own


@cache
def shared() -> Any:
    return recorded(noisy(3, S), Bigram(1))


@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    new=st.integers(1, 40),
    temperature=st.sampled_from([0.0, 1.0]),
)
@settings(deadline=None, max_examples=8)
def test_reused_buffers_hide_what_was_there(seed, lengths, new, temperature):
    """Short after long after short, one row after four: one arena serves them all and nothing shines through."""
    same(shared(), prompts(seed, lengths), max_new_tokens=new, temperature=temperature, seed=seed)
    assert len(shared().graphs.free) == 1


def test_short_long_short():
    zoo = recorded(noisy(5, S))
    for length, new in ((3, 5), (70, 20), (3, 5), (2, 30)):
        same(zoo, prompts(length, [length]), max_new_tokens=new)
    (arena,) = zoo.graphs.free
    assert arena.positions == 96 and {key.bound for key in arena.graphs} == {64, 96}


def test_buffers_grow_by_bucket_in_the_middle_of_an_answer():
    zoo = recorded(noisy(2, S), smallest=16, ahead=4)
    seen = []
    for session in zoo._run(zoo._request(prompts(1, [4]), None, None, {"max_new_tokens": 60})):
        seen.append(session)
    assert seen[-1].result().token_ids == eager(zoo).generate(prompts(1, [4]), max_new_tokens=60).token_ids
    (arena,) = zoo.graphs.free
    assert arena.positions == 96
    assert all(x.shape[1] == 96 for x in capacity.leaves(arena.state.kv))


def test_runs_at_the_same_time_have_buffers_of_their_own():
    """am17an/llama.cpp#45: two graphs that share an identity reset each other."""
    first, second = recorded(noisy(1, S)), recorded(noisy(1, S))
    a, b = prompts(1, [4])[0], prompts(2, [7])[0]
    expected = [eager(first).generate(p, max_new_tokens=15).text[0] for p in (a, b)]
    runs = [zoo.stream(p, max_new_tokens=15) for zoo, p in ((first, a), (first, b), (second, a), (second, b))]
    texts = [""] * 4
    for _ in range(20):
        for at, run in enumerate(runs):
            texts[at] += next(run, "")
    assert texts == expected * 2
    assert len(first.graphs.free) == len(second.graphs.free) == 2


def test_abandoned_run_gives_its_buffers_back():
    zoo = recorded(noisy(1, S))
    run = zoo.stream(prompts(1, [4])[0], max_new_tokens=15)
    next(run)
    assert not zoo.graphs.free
    run.close()
    gc.collect()
    assert len(zoo.graphs.free) == 1
    same(zoo, prompts(1, [4]), max_new_tokens=9)


def test_an_abandoned_run_is_over_before_its_buffers_are_free(monkeypatch):
    """Its last round may still be on its way, and the next run on another stream."""
    zoo = recorded(noisy(1, S))
    events = []
    read, release = Graph.read, Graphs.release
    monkeypatch.setattr(Graph, "read", lambda self: (wait := read(self)) and (lambda: events.append("waits") or wait()))
    monkeypatch.setattr(Graphs, "release", lambda self, arena: events.append("free") or release(self, arena))
    run = zoo._run(zoo._request(prompts(1, [4]), None, None, {"max_new_tokens": 15}))
    next(run), next(run)  # the prompt; one round of two that were launched
    events.clear()
    run.close()
    assert events == ["waits", "free"]


def test_runs_in_inference_mode_share_buffers_with_runs_outside():
    zoo = recorded(backbone_for("dflash", target_of(), 1), dels(target_of(), 1), smallest=16, ahead=4)
    rows = prompts(1, [4, 3])
    for inside in (True, False, True):
        with torch.inference_mode(inside):
            same(zoo, rows, max_new_tokens=14)
    stream = zoo.stream(rows[0], max_new_tokens=6)
    with torch.inference_mode():
        first = next(stream)
    assert first + "".join(stream) == eager(zoo).generate(rows[0], max_new_tokens=6).text[0]
    alone = eager(zoo).stream(rows[0], max_new_tokens=6)
    with torch.inference_mode():
        first = next(alone)
    assert first + "".join(alone) == zoo.generate(rows[0], max_new_tokens=6).text[0]


def test_numbers_that_overflowed_end_with_their_run():
    """What is hidden must be finite: nothing times NaN is NaN, and half precision overflows."""
    zoo = recorded(backbone_for("dflash", target_of(), 1))
    same(zoo, prompts(1, [20]), max_new_tokens=4)
    (arena,) = zoo.graphs.free
    for buffer in capacity.leaves((arena.state.kv, arena.state.context)):
        buffer.fill_(torch.nan)
    same(zoo, prompts(2, [5]), max_new_tokens=6)


@pytest.mark.parametrize("when", ["between runs", "in the middle of an answer"])
@pytest.mark.parametrize("why", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_buffers_that_stopped_growing_half_way_are_dropped(monkeypatch, when, why):
    zoo = recorded(noisy(2, S), smallest=16, ahead=4)
    if when == "between runs":
        same(zoo, prompts(1, [4]), max_new_tokens=3)
    zeros, calls = torch.zeros, []

    def failing(*args, **options):
        if str(options.get("device")) != "meta":
            calls.append(args)
        if len(calls) == 4:  # some buffers are of the new size by then
            raise why
        return zeros(*args, **options)

    grow = Arena.grow

    def growing(self, *args):
        monkeypatch.setattr(torch, "zeros", failing)
        return grow(self, *args)

    monkeypatch.setattr(Arena, "grow", growing)
    with pytest.raises(DoesNotFit if why is torch.OutOfMemoryError else why):
        zoo.generate(prompts(1, [4]), max_new_tokens=30)
    monkeypatch.undo()
    assert len(calls) == 4 and not zoo.graphs.free
    same(zoo, prompts(1, [4]), max_new_tokens=20)


# --- rows that end ---------------------------------------------------------------------------------------------------
def rounds_of(zoo: Any, rows: list[list[int]], **options: Any) -> tuple[Any, list[int]]:
    """The result, and how many rows every launched round worked on."""
    widths = []
    original = decode.Target.forward

    def counting(self, ids, *rest, **more):
        widths.append(ids.shape[0])
        return original(self, ids, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode.Target, "forward", counting)
        out = zoo.generate(rows, **options)
    return out, widths


def test_finished_rows_leave_the_batch():
    """They cost no work from the next bucket on, and their statistics end where they ended."""
    target, rows = target_of(), prompts(1, [30, 4, 5, 6])
    answers = [greedy(target.model, row, 41) for row in rows]
    known = Knowing([r + a for r, a in zip(rows, answers, strict=True)], 1, VOCAB)
    eos = answers[1][5]
    expected = [a[: a.index(eos) + 1] if eos in a else a[:41] for a in answers]
    ended = sorted(map(len, expected))
    assert ended[0] < 10 < ended[-1]
    zoo = recorded(known)
    out = same(zoo, rows, max_new_tokens=41, eos_token_id=eos)
    assert out.token_ids == expected
    assert [1 + sum(a) for a in out.stats.accepted] == [len(e) for e in expected]
    assert {key.rows for arena in zoo.graphs.free for key in arena.graphs} > {4}
    widths = rounds_of(eager(zoo), rows, max_new_tokens=41, eos_token_id=eos)[1]
    assert widths[0] == widths[1] == 4 > widths[-1]


@pytest.fixture
def harsh(monkeypatch):
    """A query that may look at nothing gets NaN, as of softmax and a GPU's kernels; torch gives 0 on a CPU."""
    kind = torch.nn.functional.scaled_dot_product_attention

    def attention(q, k, v, attn_mask=None, **options):
        out = kind(q, k, v, attn_mask=attn_mask, **options)
        if attn_mask is None or attn_mask.dtype == torch.bool:  # transformers' own
            return out
        return out.masked_fill((attn_mask == -torch.inf).all(-1, keepdim=True), torch.nan)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)


def windowed() -> Any:
    """A draft whose layers see three tokens: a row far behind the bound would see none. A tree of two nodes leaves
    its last slot in the cache, where what is committed does not overwrite it."""
    changes = {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2, "sliding_window": 3}
    return dflash(target_of(), 3, S + 1, **changes)


def test_rows_that_end_behind_the_bound_leave_nothing_to_a_windowed_draft(harsh):
    """Long rows end, the others go on in fewer columns: one stays as padding, and its place is used again later."""
    target = target_of()
    for seed in range(40):
        rows = prompts(seed, [3, 4, 5, 80])
        *short, long = [greedy(target.model, row, 24) for row in rows]
        ends = [t for t in long[2:6] if not any(t in answer for answer in short) and t not in long[:2]]
        if ends:
            break
    zoo = recorded(windowed(), tree=2)
    same(zoo, [*rows, rows[-1]], max_new_tokens=24, eos_token_id=ends[0])
    assert {(key.rows, key.bound) for arena in zoo.graphs.free for key in arena.graphs} >= {(8, 96), (4, 64)}
    same(zoo, prompts(1, [30, 31, 32, 60]), max_new_tokens=24)


def test_captures_in_used_buffers_leave_nothing_to_a_windowed_draft(harsh):
    """Warm-ups of a small bound run on the buffers of a long answer."""
    zoo = recorded(windowed(), tree=2)
    same(zoo, prompts(1, [80]), max_new_tokens=6)
    zoo.warm_up(rows=1, positions=80)
    (arena,) = zoo.graphs.free
    assert {key.bound for key in arena.graphs} == {96, 64}
    same(zoo, prompts(2, [50]), max_new_tokens=40)


@pytest.mark.parametrize("at", range(4, 4 + S + 2))
def test_ends_are_noticed_a_round_late_and_the_surplus_is_trimmed(at):
    """A stop string is found by the host, while the next round runs; nothing behind it is given out."""
    target, prompt = target_of(), prompts(4, [5])[0]
    answer = greedy(target.model, prompt, 40)
    zoo = recorded(Knowing([prompt + answer], S, VOCAB))
    text = target.tokenizer.decode(answer)
    stop = text[at : at + 3]
    end = text.find(stop) + 3
    out = same(zoo, prompt, max_new_tokens=30, stop=stop)
    assert out.token_ids == [answer[:end]] and out.finish_reason == ["stop"]
    assert sum(out.stats.accepted[0]) == end - 1
    committed = -(-(end - 1) // (S + 1)) * (S + 1)
    assert out.stats.surplus == [committed - (end - 1) + S + 1]  # the rest of that round, and the one in flight
    assert out.stats.idle_rounds == 1
    eos = answer[end - 1]
    late = same(zoo, prompt, max_new_tokens=30, eos_token_id=eos)
    assert late.token_ids == [answer[: answer.index(eos) + 1]]
    assert late.stats.surplus == [0]  # the device knows end-of-text itself


def test_static_buffers_do_not_move_and_one_read_is_taken_a_round(monkeypatch):
    zoo = recorded(noisy(1, S))
    zoo.generate(prompts(1, [4]), max_new_tokens=4)
    (arena,) = zoo.graphs.free
    graph = next(iter(arena.graphs.values()))
    addresses = [x.data_ptr() for x in (*capacity.leaves(arena.state), graph.packed)]
    reads = []
    original = type(graph).read

    def read(self):
        reads.append(self)
        return original(self)

    monkeypatch.setattr(type(graph), "read", read)
    out = zoo.generate(prompts(2, [6]), max_new_tokens=20)
    assert [x.data_ptr() for x in (*capacity.leaves(arena.state), graph.packed)] == addresses
    assert len(reads) == len(out.stats.accepted[0]) + out.stats.idle_rounds
    assert len(arena.graphs) == 1


def test_warm_up_captures_every_bucket_largest_first():
    zoo = recorded(noisy(1, S), smallest=32)
    order = []
    original = zoo.graphs.backend.capture

    def capture(make, static, pool, what):
        order.append(tuple(static[0].shape))
        return original(make, static, pool, what)

    zoo.graphs.backend.capture = capture
    zoo.warm_up(rows=2, positions=40)
    (arena,) = zoo.graphs.free
    assert [(k.rows, k.bound) for k in arena.graphs] == [(2, 48), (2, 32), (1, 48), (1, 32)]
    count = len(order)
    same(zoo, prompts(1, [8, 3]), max_new_tokens=30, temperature=1.0, seed=3)
    assert len(order) == count


def test_trained_weights_are_captured_anew():
    """What a head derives of its weights is a constant of the graph."""
    target = target_of()
    zoo = recorded(noisy(1, S), dels(target, 1))
    first = same(zoo, prompts(1, [4]), max_new_tokens=20)
    with torch.no_grad():
        zoo.heads[0].up.mul_(-1)
    assert same(zoo, prompts(1, [4]), max_new_tokens=20).stats.repaired != first.stats.repaired


def test_rounds_of_another_form_are_captured_anew():
    """A tree that was asked for later, or another budget of one, is no graph of a chain."""
    zoo = recorded(noisy(1, S))
    for zoo.nodes in (None, 6, 2):
        out = same(zoo, prompts(1, [4]), max_new_tokens=9)
        assert out.stats.drafted[0] == len(out.stats.accepted[0]) * (zoo.nodes or S)


def test_a_calibration_after_the_capture_is_followed():
    """The temperatures of confidences are no parameter, and a captured round divides by the old ones."""
    zoo = recorded(backbone_for("dspark", target_of(), 1))
    zoo.backbone.confidence_threshold = 0.99
    before = same(zoo, prompts(1, [4]), max_new_tokens=9)
    zoo.backbone.calibrate([1e-3] * zoo.backbone.slots)  # all or nothing
    hot = same(zoo, prompts(1, [4]), max_new_tokens=9)
    zoo.backbone.calibrate(None)
    assert same(zoo, prompts(1, [4]), max_new_tokens=9).stats.drafted == before.stats.drafted != hot.stats.drafted


def test_eager_rounds_take_the_bounds_of_captured_ones_where_asked(monkeypatch):
    """What compares both to the last bit must multiply the same shapes."""
    zoo, bounds = recorded(noisy(1, S)), []
    original = decode.round

    def seeing(engine, state, bound, *rest):
        bounds.append((bound, state.ids.shape[1]))
        return original(engine, state, bound, *rest)

    monkeypatch.setattr("repairzoo.runner.round", seeing)
    request = zoo._request(prompts(1, [50]), None, None, {"max_new_tokens": 30})
    engine = zoo.engine(request)
    out = finish(speculate(engine, request, loop=Eager(engine, 64)))
    assert out.token_ids == zoo.generate(prompts(1, [50]), max_new_tokens=30).token_ids
    assert set(bounds) == {(64, 96), (96, 96)}
    (arena,) = zoo.graphs.free
    assert {key.bound for key in arena.graphs} == {64, 96}


# --- refusals --------------------------------------------------------------------------------------------------------
def item(scores):
    return scores * scores.max().item()


def branch(scores):
    return scores if scores.sum() > 0 else -scores


def mask(scores):
    return scores + scores[scores > 0].sum()


@pytest.mark.parametrize("blank", [True, False])
@pytest.mark.parametrize(
    ("peek", "name"), [(item, "_local_scalar"), (branch, "_local_scalar|is_nonzero"), (mask, "nonzero|index")]
)
def test_capture_failure_raises_and_names_the_operation(peek, name, blank):
    """sglang#37462: never a silent fall back to the eager loop."""

    class Peeking(Bigram):
        def step(self, prepared, carry, slot, previous, scores):
            return peek(scores), carry

    zoo = recorded(noisy(1, S), Peeking(0), blank=blank)
    with pytest.raises(CaptureFailed, match=name) as error:
        zoo.generate(prompts(1, [4]), max_new_tokens=9)
    assert "cuda_graphs=False" in str(error.value) and "bound=64" in str(error.value)
    assert len(zoo.graphs.free) == 1


def test_processors_run_eagerly_unless_graphs_are_required():
    from transformers import RepetitionPenaltyLogitsProcessor

    zoo = recorded(noisy(1, S))
    options = {"max_new_tokens": 9, "logits_processor": [RepetitionPenaltyLogitsProcessor(1.5)]}
    same(zoo, prompts(1, [4]), **options)
    assert not zoo.graphs.free
    zoo.graphs.required = True
    with pytest.raises(InvalidInput, match="logits_processor"):
        zoo.generate(prompts(1, [4]), **options)


@pytest.mark.parametrize(("asked", "words"), [(True, "is on cpu"), ("sometimes", "cuda_graphs='sometimes'"), (1, "=1")])
def test_build_refuses_graphs_that_cannot_be(asked, words):
    with pytest.raises(InvalidInput, match=words):
        repairzoo.build(noisy(1, S), None, target_of(), cuda_graphs=asked)
    assert repairzoo.build(noisy(1, S), None, target_of(), cuda_graphs=False).graphs is None
    assert repairzoo.build(noisy(1, S), None, target_of()).graphs is None  # "auto" on a CPU


def test_a_cache_of_unknown_tensors_is_refused_by_name():
    class Opaque(Knowing):
        def new_cache(self, batch, capacity, dtype, device):
            return object()

    zoo = recorded(Opaque([[1, 2]], S, VOCAB))
    with pytest.raises(InvalidInput, match="holds a object"):
        zoo.generate(prompts(1, [4]), max_new_tokens=9)


# --- memory ----------------------------------------------------------------------------------------------------------
def test_plan_is_what_is_allocated():
    target = target_of()
    zoo = recorded(backbone_for("dflash", target))
    engine = zoo.engine(zoo._request([[1]] * 4, None, None, {}))
    plan = capacity.plan(engine, 4, 96)
    arena = Arena(zoo.graphs, engine, 4, 96)
    assert plan.target_cache == sum(x.nbytes for x in capacity.leaves(arena.state.kv))
    assert plan.draft_cache == sum(x.nbytes for x in capacity.leaves(arena.state.context))
    assert plan.total == plan.target_cache + plan.draft_cache + plan.tokens + plan.scratch
    assert zoo.memory(rows=4, positions=96 - engine.slack).as_dict() == plan.as_dict()
    assert zoo.memory(4, 90, temperature=1.0).scratch > zoo.memory(4, 90).scratch
    assert "4 rows x 96 positions" in str(plan)


def test_what_does_not_fit_is_refused_before_anything_is_allocated(monkeypatch):
    zoo = recorded(noisy(1, S))
    monkeypatch.setattr(capacity, "available", lambda device: 10_000)
    monkeypatch.setattr("repairzoo.graph.new_state", lambda *_: pytest.fail("allocated"))
    monkeypatch.setattr("repairzoo.runner.start", lambda *_: pytest.fail("allocated"))
    for loop in (zoo, eager(zoo)):
        with pytest.raises(DoesNotFit, match=r"max_new_tokens") as error:
            loop.generate(prompts(1, [40]), max_new_tokens=60)
        assert isinstance(error.value, MemoryError) and "10.0 KB" not in str(error.value)


def test_growth_that_does_not_fit_gives_the_buffers_back(monkeypatch):
    zoo = recorded(noisy(1, S), smallest=16, ahead=4)
    zoo.generate(prompts(1, [4]), max_new_tokens=5)
    (arena,) = zoo.graphs.free
    monkeypatch.setattr(capacity, "available", lambda device: 100)
    with pytest.raises(DoesNotFit):
        zoo.generate(prompts(1, [4]), max_new_tokens=60)
    assert zoo.graphs.free == [arena]
    monkeypatch.undo()
    same(zoo, prompts(1, [4]), max_new_tokens=20)


@given(st.integers(1, 10_000), st.sampled_from([2, 16, 256]))
def test_buckets(positions, smallest):
    size = position_bucket(positions, smallest)
    assert size >= positions and (size == smallest or size < 1.5 * positions + 1)
    assert position_bucket(size, smallest) == size
    sizes = position_buckets(1, positions, smallest)
    assert sizes[0] == size and sizes[-1] == smallest and sizes == sorted(sizes, reverse=True)
    assert row_bucket(positions) >= positions > row_bucket(positions) // 2


# --- the law as tensors ----------------------------------------------------------------------------------------------
laws = st.builds(
    Law,
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.sampled_from([None, 1, 3, 40]),
    st.sampled_from([None, 0.5, 0.9, 1.0]),
    st.sampled_from([None, 0.0, 0.1]),
)


@given(st.integers(0, 2**31), st.lists(laws, min_size=1, max_size=3), st.sampled_from([torch.float32, torch.float64]))
@settings(deadline=None, max_examples=60)
def test_row_law_equals_law_bit_for_bit(seed, rows, dtype):
    """The same tensors for all rows, whatever each asks for: filters that others need are off for the rest."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), 2, 11, generator=g, dtype=torch.float64).mul(3).round(decimals=1).to(dtype)
    law = RowLaw.empty(len(rows), 50, dtype, logits.device)
    for at, row in enumerate(rows):
        one = RowLaw.empty(1, 50, dtype, logits.device)  # the scores are those of a pool
        one.set(row, 50)
        for whole, single in zip(law.tensors, one.tensors, strict=True):
            whole[at : at + 1].copy_(single)
        only = one.only(filters_of(row))
        assert torch.equal(only.probs(logits[at : at + 1]), row.probs(logits[at : at + 1]))
    assert torch.equal(law.probs(logits), torch.stack([row.probs(x) for row, x in zip(rows, logits, strict=True)]))


# --- for ever ---------------------------------------------------------------------------------------------------------
def soak_module() -> Any:
    path = Path(__file__).parent.parent / "benchmarks" / "soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_soak_for_a_moment():
    """The script that runs for minutes; its comparison and its look at memory can fail."""
    module = soak_module()
    facts = module.soak(minutes=0.0, seed=1, zoos=3)
    assert facts["runs"] == 6 and facts["tokens"] > 20 and facts["ties"] == 0 and facts["memory"][-1]["tensors"] > 0
    grown = [(0.0, 10, 5, 10), *[(float(t), 2**30, 5, 10) for t in range(1, 4)], (9.0, 2**31, 5, 2**30)]
    with pytest.raises(AssertionError, match="grew"):
        module.check_memory(grown)
    target = target_of()
    zoo, row = eager(recorded(noisy(1, S))), prompts(1, [4])[0]
    options = {"max_new_tokens": 3, "temperature": 0.0}
    right = zoo.generate(row, **options).token_ids[0]
    module.compare(zoo, target, [row], options | {"seed": 0}, [right], {"ties": 0})
    with pytest.raises(AssertionError, match="parts at token 1"):
        module.compare(zoo, target, [row], options | {"seed": 0}, [[right[0], (right[1] + 1) % VOCAB, 1]], {"ties": 0})
