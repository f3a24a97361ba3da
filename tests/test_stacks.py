"""Heads on every backbone, alone and stacked: lossless, silent while untrained, refused where they mean nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from conftest import dels, dflash, generator, noisy, prompts, toy
from test_cure import unsure
from test_domino import drafts_for as domino
from test_dspark import drafts_for as dspark

import repairzoo
from repairzoo.bench.replay import replay
from repairzoo.decode import branches_of
from repairzoo.errors import InvalidInput
from repairzoo.heads.cure import CURE
from repairzoo.heads.drelay import DRelay, DRelayConfig
from repairzoo.heads.lilicorr import LiLiCorr, LiLiCorrConfig
from repairzoo.walk import best_first

BACKBONES = ["dflash", "domino", "dspark"]
WIDE = {"threshold": 1e6, "scale": 1e6, "b_max": 3, "cost": "free"}  # random heads are sure of themselves


def backbone(kind: str, seed: int = 0) -> Any:
    return {
        "dflash": lambda: dflash(toy(), seed),
        "domino": lambda: domino(seed),
        "dspark": lambda: dspark(seed, "rnn"),
    }[kind]()


def shape(slots: int) -> dict[str, Any]:
    return {
        "block_size": slots + 1, "hidden_size": 16, "vocab_size": 32, "padded_vocab_size": 32, "target_id": "toy",
        "dtype": "float64", "width": 8,
    }  # fmt: skip


def new(kind: str, slots: int, seed: int = 0, pool: int = 6) -> Any:
    """A head as it is before training."""
    if kind == "dels":
        head = dels(toy(), seed)
        with torch.no_grad():
            head.up.zero_()
        head.config = dataclasses.replace(head.config, beta=0.0)
        return head
    if kind == "drelay":
        widths = {"heads": 2, "ffn": 8, "residual": 8, "rank": 4, "gate": 8, "pool_size": pool}
        return DRelay(DRelayConfig(**shape(slots), **widths), generator(seed))
    widths = {"candidates": pool, "pool_size": pool, "num_heads": 2, "factor_dim": 4, "decision": "identity_safe"}
    return LiLiCorr(LiLiCorrConfig(**shape(slots), **widths), generator(seed))


def trained(kind: str, slots: int, seed: int = 0) -> Any:
    """A head whose weights are all random, so that it changes choices."""
    if kind == "dels":
        head = dels(toy(), seed)
        head.config = dataclasses.replace(head.config, alpha=5.0)
        return head
    head = new(kind, slots, seed)
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn(p.shape, generator=generator(seed), dtype=p.dtype))
    return head.requires_grad_(False)


@pytest.mark.parametrize("head", ["dels", "drelay", "lilicorr", "cure", "dels+drelay+lilicorr+cure"])
@pytest.mark.parametrize("kind", BACKBONES)
def test_new_heads_change_nothing(kind, head):
    """Invariant 6 on every backbone: zero-initialised heads, and CURE without repairs, draft what the backbone drafts,
    down to the counters. A pool is of the backbone's own logits; one that leaves out what the causal part of Domino or
    DSpark chose could not keep it, so here it leaves out nothing on them."""
    rows = prompts(1, [4, 2])
    outs = []
    for part in (None, head):
        drafter = backbone(kind)
        names, size = part.split("+") if part else [], 6 if kind == "dflash" else 32
        heads = [CURE(repairs=0) if n == "cure" else new(n, drafter.slots, pool=size) for n in names]
        outs.append(repairzoo.build(drafter, heads, toy()).generate(rows, max_new_tokens=12).stats.as_dict())
    plain, ours = ({k: v for k, v in out.items() if k != "seconds"} for out in outs)
    assert ours == plain and ours["repaired"] == [0, 0]


@pytest.mark.parametrize("stack", ["dels+cure", "drelay+cure", "lilicorr+cure", "dels+drelay+cure", "drelay+lilicorr"])
@pytest.mark.parametrize("kind", BACKBONES)
def test_stacks_are_lossless(kind, stack):
    """Greedy output at temperature 0, the baseline's very draws above, on every backbone."""
    drafter = backbone(kind, 1)
    rows = prompts(2, [5, 3])
    parts = stack.split("+")
    heads = [CURE(repairs=2, **WIDE) if n == "cure" else trained(n, drafter.slots, i) for i, n in enumerate(parts)]
    zoo = repairzoo.build(drafter, heads, toy())
    for temperature in (0.0, 0.9):
        run = {"max_new_tokens": 9, "temperature": temperature, "seed": 5}
        out = zoo.generate(rows, **run)
        assert out.token_ids == repairzoo.autoregressive(toy(), rows, **run).token_ids
        assert sum(out.stats.repaired) > 0
        if parts[-1] == "cure":
            assert sum(out.stats.branches) > 0


@pytest.mark.parametrize("kind", BACKBONES)
def test_a_tree_from_any_stack_is_lossless(kind):
    drafter = backbone(kind, 1)
    rows = prompts(2, [5, 3])
    heads = [trained("drelay", drafter.slots), trained("lilicorr", drafter.slots, 1)]
    run = {"max_new_tokens": 9}
    want = repairzoo.autoregressive(toy(), rows, **run).token_ids
    assert repairzoo.build(drafter, heads, toy(), tree=7).generate(rows, **run).token_ids == want


@pytest.mark.parametrize("tree", [None, 7])
@pytest.mark.parametrize("kind", ["domino", "dspark"])
def test_a_backbone_with_a_causal_part_walks_on_a_pool(kind, tree, monkeypatch):
    """By default where drafts are rounded. The choice is that of the whole vocabulary where the pool holds it all, and
    the answer is the target's with any pool."""
    drafter, rows = backbone(kind, 1), prompts(2, [5, 3])
    run = {"max_new_tokens": 9}
    want = repairzoo.autoregressive(toy(), rows, **run).token_ids
    monkeypatch.setattr(repairzoo.zoo, "POOL", 4)
    zoos = [repairzoo.build(drafter, None, toy(), tree=tree, pool=pool) for pool in ("auto", 4, 32)]
    assert [zoo.pool for zoo in zoos] == [None, 4, 32]
    runs = [zoo.generate(rows, **run) for zoo in zoos]
    assert all(out.token_ids == want for out in runs)
    assert runs[0].stats.accepted == runs[2].stats.accepted


def test_rounded_drafts_walk_on_a_pool(monkeypatch):
    """Only where something is scored again after every slot, and no head has a pool of its own."""
    monkeypatch.setattr(repairzoo.zoo, "POOL", 4)

    def pool(kind: str, head: Any = None, **options: Any) -> int | None:
        return repairzoo.build(backbone(kind), head, toy(), **{"draft_int8": True} | options).pool

    slots = backbone("dflash").slots
    assert pool("domino") == pool("dspark", CURE()) == pool("dflash", dels(toy())) == 4
    assert pool("domino", tree=7) == 7 and pool("dflash", new("drelay", slots)) == 6
    assert pool("dflash") is None and pool("dflash", CURE()) is None and pool("dflash", tree=7) is None
    assert pool("domino", draft_int8=False) is None and pool("domino", pool=None) is None
    assert pool("domino", pool=9) == 9
    monkeypatch.setattr(repairzoo.zoo, "POOL", 32)
    assert pool("domino") is None  # the vocabulary


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        (5, "a head chooses among 6 candidates"),
        (33, "1 to 32 candidates"),
        (0, "1 to 32 candidates"),
        (True, "1 to 32 candidates"),
        ("all", "give 'auto', None, or 1 to 32"),
    ],
)
def test_pools_that_cannot_be_are_refused(pool, words):
    drafter = backbone("dflash")
    with pytest.raises(InvalidInput, match=words):
        repairzoo.build(drafter, [new("drelay", drafter.slots)], toy(), pool=pool)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("cure+drelay", "an expander .* comes last"),
        ("cure+cure", "two expanders"),
        ("drelay+drelay", "drelay twice; each was trained to correct scores that it has not corrected yet"),
        ("dels+cure+dels", "comes last"),
        ("dels+lilicorr+dels", "dels twice"),
    ],
)
def test_stacks_without_a_meaning_are_refused_with_the_reason(names, words):
    drafter = backbone("dflash")
    heads = [CURE() if n == "cure" else new(n, drafter.slots) for n in names.split("+")]
    with pytest.raises(InvalidInput, match=words):
        repairzoo.build(drafter, heads, toy())


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ("none+dels", "'none' is the absence of a head and does not stack"),
        ("dels+", "must not be empty"),
        ("cure+dels", None),
    ],
)
def test_names_that_do_not_stack_are_refused(head, words):
    with pytest.raises((InvalidInput, repairzoo.RepairZooError), match=words):
        repairzoo.build(noisy(0, 3), head, toy())


@pytest.mark.parametrize("nodes", [1, 5, 12])
def test_branches_of_any_tree_are_counted(nodes):
    """A node with an elder sibling begins a branch; what is not on the first path is beside it."""
    g = generator(nodes)
    for _ in range(5):
        block = noisy(int(torch.randint(99, (1,), generator=g)), 3)
        block.bind(torch.zeros(32, 4), torch.zeros(32, 4))
        drafted = block.draft(None, torch.tensor([3, 8]), torch.tensor([0, 0]))
        tree = best_first(drafted, [], None, nodes)
        branches, beside = branches_of(tree)
        for row in range(2):
            parents = [p for p, v in zip(tree.parents[row].tolist(), tree.valid[row].tolist(), strict=True) if v]
            begins = [p in parents[1:i] for i, p in enumerate(parents)][1:]
            path, at = set(), 0
            for i, p in enumerate(parents[1:], 1):
                if p == at:
                    path.add(i)
                    at = i
            assert branches[row, : len(begins)].tolist() == begins
            assert int(beside[row]) == len(parents) - 1 - len(path)


def test_a_tree_tells_what_its_branches_brought():
    """Accepted branches are tokens that a chain would not have had: scripted runner-up tokens that are right."""
    target, prompt = toy(), prompts(5, [5])[0]
    expected = repairzoo.autoregressive(target, prompt, max_new_tokens=17).token_ids[0]
    out = repairzoo.build(unsure(prompt + expected, 4, every=3), None, target, tree=8).generate(
        prompt, max_new_tokens=17
    )
    assert out.token_ids == [expected]
    s = out.stats
    assert 0 < s.branches_accepted[0] <= s.branches[0] <= s.branch_nodes[0] < s.drafted[0]


def test_replay_tells_what_heads_say():
    """Diagnostics of a run: prefixes, the null's mass and lambda (DRelay), the spread of factors (LiLiCorr)."""
    drafter = backbone("dflash", 1)
    heads = [trained("drelay", drafter.slots), trained("lilicorr", drafter.slots, 1), CURE(cost="rows")]
    zoo = repairzoo.build(drafter, heads, toy())
    prompt = prompts(2, [5])[0]
    out = zoo.generate(prompt, max_new_tokens=9)
    seen = replay(zoo, prompt, out.token_ids[0], oracle=6).prefix
    assert seen is not None
    told = seen.as_dict()
    assert set(told["heads"]) == {"drelay", "lilicorr"} and 0 <= told["heads"]["drelay"]["null_mass"] <= 1
    histogram = told["heads"]["drelay"]["fusion_histogram"]
    assert (
        len(histogram) == 10 and sum(histogram) == drafter.slots * len(seen.native) == drafter.slots * out.stats.rounds
    )
    assert told["heads"]["lilicorr"]["factor_spread"] > 0
    assert all(n <= o and s <= o for n, s, o in zip(seen.native, seen.selected, seen.oracle, strict=True))
    plain = replay(repairzoo.build(drafter, None, toy()), prompt, out.token_ids[0], oracle=6).prefix
    assert plain is not None and "heads" not in plain.as_dict() and plain.native == plain.selected
