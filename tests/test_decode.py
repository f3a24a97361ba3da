"""The loop's promise: whatever is drafted and repaired, the target's own tokens come out, or their exact law."""

from __future__ import annotations

import functools
import json
import operator
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, Bigram, causal_lm, dflash, greedy, heads_for, knowing, noisy, prompts, toy
from hypothesis import given, settings
from hypothesis import strategies as st
from test_verify import Table, cdf, deviation, pieces

import repairzoo
from repairzoo import decode
from repairzoo.backbones.dflash import DFlash
from repairzoo.sampling import Law, Stream
from repairzoo.target import Target

GOLDEN = Path(__file__).parent / "golden" / "dflash"
HEADS = ["none", "dels", "markov", "bigram", "pooled", "stack"]
F64 = torch.float64


def some_backbone(kind: str, target: Target, rows: list[list[int]], seed: int):
    if kind == "dflash":
        return dflash(target, seed)
    return noisy(seed, 3) if kind == "noisy" else knowing(rows, 4, wrong=0.3, seed=seed)


arrangements = {
    "seed": st.integers(0, 2**31),
    "kind": st.sampled_from(["dflash", "noisy", "knowing", "knowing"]),
    "head": st.sampled_from(HEADS),
    "tree": st.sampled_from([None, None, 1, 4, 20]),
}


# --- temperature 0 ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_baseline_equals_transformers(dtype):
    target, rows = toy(dtype=dtype), prompts(3, [1, 4, 9])
    out = repairzoo.autoregressive(target, rows, max_new_tokens=12)
    assert out.token_ids == [greedy(target.model, row, 12) for row in rows]
    assert len({*functools.reduce(operator.iadd, out.token_ids, [])}) > 5, (
        "a target that repeats one token proves nothing"
    )


@given(**arrangements, half=st.booleans(), new=st.integers(1, 12))
@settings(deadline=None, max_examples=12)
def test_greedy_equals_plain_greedy(seed, kind, head, tree, half, new):
    """transformers#27775 and #32189: ragged rows; the draft is random, or mostly right."""
    target = toy(dtype=torch.float32 if half else F64)
    rows = prompts(seed, [1, 6, 3])
    expected = repairzoo.autoregressive(target, rows, max_new_tokens=new).token_ids
    known = [p + e for p, e in zip(rows, expected, strict=True)]
    zoo = repairzoo.build(some_backbone(kind, target, known, seed), heads_for(target, head, seed), target, tree=tree)
    out = zoo.generate(rows, max_new_tokens=new)
    assert out.token_ids == expected
    assert [1 + sum(a) for a in out.stats.accepted] == [new] * 3


@pytest.mark.parametrize("tree", [None, *range(1, 21, 3)])
def test_perfect_draft_is_accepted_whole(tree):
    """litgpt#2307: the token from the prompt is there and belongs to no round; z-lab: S + 1 tokens a round."""
    target, prompt = toy(), prompts(1, [5])[0]
    expected = greedy(target.model, prompt, 12)
    zoo = repairzoo.build(knowing([prompt + expected], 3), None, target, tree=tree)
    out = zoo.generate(prompt, max_new_tokens=12)
    depth = 3 if tree is None else min(3, tree)
    whole, rest = divmod(11, depth + 1)
    assert out.token_ids == [expected]
    assert out.stats.accepted == [[depth + 1] * whole + [rest] * (rest > 0)]


@pytest.mark.parametrize(("place", "budget"), [(1, 20), (3, 20), (4, 20), (20, 3), (3, 4), (20, 1)])
def test_round_itself_ends_rows(place, budget):
    """The host would cut a row as well; on an accelerator the round must not go on with one that has ended."""
    target, rows = toy(), prompts(6, [5, 3])
    answers = [greedy(target.model, row, 21) for row in rows]
    zoo = repairzoo.build(knowing([p + a for p, a in zip(rows, answers, strict=True)], 3), None, target)
    place = next(i for i in range(place, 21) if answers[0][i] not in answers[0][:i]) if place < 20 else place
    eos = torch.tensor([answers[0][place]] if place < 20 else [], dtype=torch.int64)
    engine = decode.Engine(target, zoo.backbone, (), Law(0.0), eos)
    state = decode.start(engine, rows, [budget, 21], [0, 0])
    committed, stopped = 1, False
    for _ in range(7):
        out = decode.round(engine, state, state.ids.shape[1])
        committed, stopped = committed + int(out.count[0]), stopped or bool(out.stopped[0])
    assert committed == min(place + 1, budget) == int(state.length[0]) - 5
    assert state.done[0] and stopped == (place < budget)
    assert state.ids[0, 5 : 5 + committed].tolist() == answers[0][:committed]


def test_wrong_first_draft_is_never_committed():
    """lattice#243: a draft that is wrong at slot 0 gives rounds of one token, and that token is the target's."""
    target, prompt = toy(), prompts(2, [5])[0]
    expected = greedy(target.model, prompt, 8)
    zoo = repairzoo.build(knowing([prompt + [(t + 1) % VOCAB for t in expected]], 3), None, target)
    out = zoo.generate(prompt, max_new_tokens=8)
    assert out.token_ids == [expected]
    assert out.stats.accepted == [[1] * 7] and out.stats.agreed == [0]


def test_prompts_of_every_length_around_a_block():
    """vllm-ascend#5583: a prompt shorter than a block is still a prompt."""
    target = toy()
    backbone = dflash(target, 5, block_size=4)
    rows = prompts(4, [1, 2, 3, 4, 5, 6])
    alone = [repairzoo.build(backbone, None, target).generate(row, max_new_tokens=6).token_ids[0] for row in rows]
    assert alone == [greedy(target.model, row, 6) for row in rows]
    assert repairzoo.build(backbone, None, target, tree=6).generate(rows, max_new_tokens=6).token_ids == alone


def test_heads_repair_and_are_counted():
    """A head that undoes what is wrong raises the accepted lengths; the counts say how often it did."""
    target, prompt = toy(), prompts(5, [5])[0]
    expected = greedy(target.model, prompt, 13)
    text = torch.tensor(prompt + expected + [0] * 8)

    class Oracle(Bigram):
        def start(self, block):
            return block.anchor_positions[:, None]

        def step(self, prepared, carry, slot, previous, scores):
            right = torch.nn.functional.one_hot(text[carry + 1], VOCAB)
            return scores + 100 * right, carry + 1

    backbone = knowing([text.tolist()], 3, wrong=0.5, seed=1)
    plain = repairzoo.build(backbone, None, target).generate(prompt, max_new_tokens=13)
    fixed = repairzoo.build(backbone, Oracle(0), target).generate(prompt, max_new_tokens=13)
    assert plain.token_ids == fixed.token_ids == [expected]
    assert plain.stats.repaired == [0] and plain.stats.tau < fixed.stats.tau == 4.0
    assert 0 < fixed.stats.repairs_accepted[0] == fixed.stats.repaired[0] <= fixed.stats.drafted[0]


# --- golden generations ----------------------------------------------------------------------------------------------
GOLDEN_CASES = [
    (folder.name, case["name"])
    for folder in sorted(GOLDEN.iterdir())
    if folder.is_dir()
    for case in json.loads((folder / "cases.json").read_text())["cases"]
]


@pytest.mark.parametrize(("folder", "name"), GOLDEN_CASES)
def test_golden_generations(folder, name):
    """Ids and accepted lengths of every round, as the original implementation gave them.

    This loop always drafts whole blocks, as z-lab/dflash@44947fb did (``acceptance_lengths_older_loop``), and counts
    only what is committed: nothing behind a stop token or the budget. Where that list is stored it must be equal once
    cut to the committed tokens. dflash 0.1.0 shortens the block near the budget, and block rows see one another, so the
    rounds there may differ; its list is compared up to the first shortened block.
    """
    described = json.loads((GOLDEN / folder / "cases.json").read_text())
    case = next(c for c in described["cases"] if c["name"] == name)
    target = golden_target(folder, described["target"])
    zoo = repairzoo.build(DFlash.load(GOLDEN / folder / "draft"), None, target)
    out = zoo.generate(case["prompt"], max_new_tokens=case["max_new_tokens"], eos_token_id=case["stop_token_ids"] or [])
    assert case["prompt"] + out.token_ids[0] == case["output_ids"]
    assert out.finish_reason == ["stop" if out.token_ids[0][-1] in (case["stop_token_ids"] or []) else "length"]
    ours, committed = out.stats.accepted[0], len(out.token_ids[0]) - 1
    if "acceptance_lengths_older_loop" in case:
        cut, left = [], committed
        for length in case["acceptance_lengths_older_loop"]:
            cut += [min(length, left)] * (left > 0)
            left -= min(length, left)
        assert ours == cut
    full = [
        length
        for length, start in zip(case["acceptance_lengths"], case["round_starts"], strict=True)
        if start + described["dims"]["B"] <= case["n"] + case["max_new_tokens"]
    ]
    assert ours[: len(full)] == full and sum(ours) == committed


_targets: dict[str, Target] = {}


def golden_target(folder: str, where: str) -> Target:
    if where not in _targets:
        _targets[where] = repairzoo.build(
            noisy(0, 2, 128), None, str((GOLDEN / folder / where).resolve()), dtype=torch.float32
        ).target
    return _targets[where]


# --- above temperature 0: the same draws as the baseline's -----------------------------------------------------------
@given(
    **arrangements,
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    filters=st.sampled_from([{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.9}]),
)
@settings(deadline=None, max_examples=10)
def test_target_first_walk_gives_the_baselines_draws(seed, kind, head, tree, temperature, filters):
    """A token's random number belongs to its position, so the draft can change speed and nothing else."""
    target, rows = toy(), prompts(seed, [2, 5])
    options = {"max_new_tokens": 8, "temperature": temperature, "seed": seed, **filters}
    expected = repairzoo.autoregressive(target, rows, **options).token_ids
    known = [p + e for p, e in zip(rows, expected, strict=True)]
    zoo = repairzoo.build(some_backbone(kind, target, known, seed), heads_for(target, head, seed), target, tree=tree)
    assert zoo.generate(rows, **options).token_ids == expected


@given(seed=st.integers(0, 2**31), head=st.sampled_from(HEADS), sampled=st.booleans())
@settings(deadline=None, max_examples=5)
def test_rows_draw_alone_and_seeds_repeat(seed, head, sampled):
    """transformers#29769: what else is in the batch changes no row, for either rule."""
    target, rows = toy(), prompts(seed, [4, 1, 6])
    zoo = repairzoo.build(
        noisy(seed, 3), heads_for(target, head, seed), target, proposal="sampled" if sampled else "argmax"
    )
    options = {"max_new_tokens": 6, "temperature": 1.0}
    together = zoo.generate(rows, seed=seed, **options)
    assert zoo.generate(rows, seed=seed, **options).token_ids == together.token_ids
    for i, row in enumerate(rows):
        alone = zoo.generate(row, seed=seed + i, **options)
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.stats.accepted[0] == together.stats.accepted[i]
    assert zoo.generate(rows, seed=seed + 99, **options).token_ids != together.token_ids


def test_different_seeds_and_no_seed():
    target, prompt = toy(), prompts(0, [3])[0]
    zoo = repairzoo.build(noisy(1, 3), None, target)
    run = [tuple(zoo.generate(prompt, max_new_tokens=12, temperature=2.0).token_ids[0]) for _ in range(3)]
    assert len(set(run)) == 3
    torch.manual_seed(5)
    first = zoo.generate(prompt, max_new_tokens=12, temperature=2.0).token_ids
    torch.manual_seed(5)
    assert zoo.generate(prompt, max_new_tokens=12, temperature=2.0).token_ids == first


# --- above temperature 0: the exact law of a round -------------------------------------------------------------------
class Uniforms:
    """Stands in for ``uniform`` in the loop: every row gets the numbers that its share of the enumeration says."""

    def __init__(self, anchor: int) -> None:
        self.anchor, self.by_stream = anchor, {}

    def __call__(self, seed, position, stream):
        table = self.by_stream[stream]  # [N, slots]
        if stream == Stream.RESIDUAL:
            return table[:, 0]
        return table.gather(1, position - self.anchor - 1)


class HuggingFaceTable(Table):
    """p(next | prompt and prefix), computed by transformers."""

    @torch.no_grad()
    def __init__(self, model, prompt: list[int], V: int, S: int, law: Law):
        self.V, self.S, self.rows = V, S, []
        strings = torch.zeros(1, 0, dtype=torch.int64)
        for _ in range(S + 1):
            ids = torch.cat([torch.tensor([prompt]).expand(len(strings), -1), strings], 1)
            self.rows.append(law.probs(model(input_ids=ids, use_cache=False).logits[:, -1]))
            strings = torch.cat([strings.repeat_interleave(V, 0), torch.arange(V).repeat(len(strings))[:, None]], 1)


def enumerate_round(monkeypatch, *, V, S, seed, law, head, nodes=None, sampled=False, propose=None):
    """Total variation between what whole rounds commit (the last tokens being decoded plainly) and the target."""
    target = Target(causal_lm(seed=seed, vocab=V, scale=0.35, num_hidden_layers=1), None, name="toy")
    backbone = noisy(seed, S, V)
    backbone.bind(target.embedding, target.output_weight)
    heads = (Bigram(seed + 1, V),) if head else ()
    none = torch.zeros(0, dtype=torch.int64)
    prompt = [0, 1 % V]

    def begin(rows: int):
        first = decode.Engine(target, backbone, (), Law(0.0), none)
        return decode.start(first, [prompt] * rows, [99] * rows, [0] * rows, capacity=16)

    engine = decode.Engine(target, backbone, heads, law, none, nodes=nodes, sampled=sampled)
    anchor = len(prompt)
    state = begin(1)
    table = HuggingFaceTable(target.model, state.ids[0, : anchor + 1].tolist(), V, S, law)
    numbers = Uniforms(anchor)
    monkeypatch.setattr(decode, "uniform", numbers)
    weight = torch.ones(1, dtype=F64)
    if not sampled:
        u = torch.zeros(1, 0, dtype=F64)
        for depth in range(S + 1):  # every node of a depth reads the same number: cut it where any of their laws breaks
            middle, length = pieces(cdf(table.rows[depth])[:, :-1].flatten())
            middle, length = middle[length > 0], length[length > 0]
            u = torch.cat([u.repeat_interleave(len(middle), 0), middle.repeat(len(u))[:, None]], 1)
            weight = (weight[:, None] * length).flatten()
        numbers.by_stream = {Stream.VERIFY: u}
    else:
        u = torch.full((1, S), 0.5, dtype=F64)
        for slot in range(S + 1):
            numbers.by_stream = {Stream.DRAFT: u}
            block = backbone.draft(None, state.ids[:1, anchor].expand(len(u)), torch.full((len(u),), anchor))
            tree, q, _ = decode.propose(engine, block, torch.zeros(len(u), dtype=torch.int64))
            if slot < S:
                middle, length = pieces(cdf(q[:, slot])[:, :-1])
                u = u.repeat_interleave(V, 0)
                u[:, slot] = middle.flatten()
                weight = (weight[:, None] * length).flatten()
                u, weight = u[weight > 0], weight[weight > 0]
        tokens = tree.tokens[:, 1:]
        p, index = table.along(tokens), torch.arange(len(u))
        ratio = p[:, :S].gather(2, tokens[..., None]) / q.gather(2, tokens[..., None])
        middle, length = pieces(ratio)  # [N, S, 2]
        accept = torch.zeros(len(u), 0, dtype=F64)
        for slot in range(S):
            accept = torch.cat([accept.repeat_interleave(2, 0), middle[index, slot].reshape(-1, 1)], 1)
            weight = (weight[:, None] * length[index, slot]).flatten()
            index = index.repeat_interleave(2)
            accept, index, weight = accept[weight > 0], index[weight > 0], weight[weight > 0]
        left = (p[:, :S] - q).clamp_min(0)
        breaks = torch.cat([cdf(p), cdf(left + (left.sum(-1, keepdim=True) == 0))], 1).flatten(1)
        middle, length = pieces(breaks)  # [N, R]
        R = middle.shape[1]
        weight = (weight[:, None] * length[index]).flatten()
        residual = middle[index].reshape(-1, 1)
        accept, index = accept.repeat_interleave(R, 0), index.repeat_interleave(R)
        alive = weight > 0
        weight = weight[alive]
        numbers.by_stream = {
            Stream.DRAFT: u[index[alive]],
            Stream.ACCEPT: accept[alive],
            Stream.RESIDUAL: residual[alive],
        }
    assert weight.sum().item() == pytest.approx(1, abs=1e-12)
    if propose is not None:
        monkeypatch.setattr(decode, "propose", propose(decode.propose))
    out = decode.round(engine, begin(len(weight)), 16)
    committed: dict[tuple[int, ...], float] = {}
    for string, count, w in zip(out.emitted.tolist(), out.count.tolist(), weight.tolist(), strict=True):
        key = tuple(string[:count])
        committed[key] = committed.get(key, 0.0) + w
    monkeypatch.undo()
    return deviation(table, committed), committed


LAWS = [Law(1.0), Law(0.6, top_k=2), Law(1.5, top_p=0.7)]
SIZES = [(2, 3), (3, 2), (5, 1)]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("V", "S"), SIZES)
@pytest.mark.parametrize("mode", ["argmax chain", "tree", "sampled chain"])
def test_law_of_a_whole_round_is_exact(monkeypatch, mode, V, S, law):
    """Pitfalls section 2 (transformers#47932, vllm#10198): all uniform numbers enumerated through the real round."""
    error, committed = enumerate_round(
        monkeypatch,
        V=V,
        S=S,
        seed=V,
        law=law,
        head=True,
        nodes=2 * S + 1 if mode == "tree" else None,
        sampled=mode == "sampled chain",
    )
    assert error < 1e-12
    if law == Law(1.0):
        assert len({len(s) for s in committed}) > 1, "accepted lengths must vary"


def test_control_native_marginal_in_place_of_the_walks_q_is_biased(monkeypatch):
    """The head's walk drew the tokens; judging them by the backbone's own marginals is another law."""

    def wrong(propose):
        def swapped(engine, block, seed):
            tree, _, repaired = propose(engine, block, seed)
            return tree, engine.law.probs(block.logits), repaired

        return swapped

    options = {"V": 3, "S": 2, "seed": 3, "law": Law(1.0), "sampled": True}
    assert enumerate_round(monkeypatch, head=True, **options)[0] < 1e-12
    assert enumerate_round(monkeypatch, head=True, propose=wrong, **options)[0] > 0.02
    assert enumerate_round(monkeypatch, head=False, propose=wrong, **options)[0] < 1e-12


def chi_square(zoo: repairzoo.build, table: Table, prompt: list[int], rows: int) -> float:
    out = zoo.generate([prompt] * rows, max_new_tokens=table.S + 1, temperature=1.0, seed=0)
    codes = table.code(torch.tensor(out.token_ids))
    seen = torch.bincount(codes, minlength=table.V ** (table.S + 1)).double()
    expected = table.strings() * rows
    return float(((seen - expected).square() / expected).sum())


def test_law_over_several_rounds_and_control_with_one_stream(monkeypatch):
    """vllm#54282: the loop's own counters over several rounds. A position that is drafted again in a later round reads
    the same number again, which is harmless (only what was dropped had used it); one stream for draft and judgement is
    not.
    """
    V, S, rows = 3, 3, 3000
    target = Target(causal_lm(seed=8, vocab=V, scale=0.4, num_hidden_layers=1), None, name="toy")
    prompt = [0, 2]
    table = HuggingFaceTable(target.model, prompt, V, S, Law(1.0))
    zoo = repairzoo.build(noisy(4, 2, V), Bigram(1, V), target, proposal="sampled")
    limit = 154  # 80 degrees of freedom, p = 1e-6
    assert chi_square(zoo, table, prompt, rows) < limit
    real = decode.uniform
    monkeypatch.setattr(
        decode, "uniform", lambda s, p, stream: real(s, p, Stream.DRAFT if stream == Stream.ACCEPT else stream)
    )
    assert chi_square(zoo, table, prompt, rows) > 3 * limit
