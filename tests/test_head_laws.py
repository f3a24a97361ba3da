"""The exact law of what is committed with real heads of random weights, by enumeration (invariant 2)."""

from __future__ import annotations

import pytest
import test_verify as exact
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repairzoo.block import make_pool
from repairzoo.heads.cure import CURE
from repairzoo.heads.dels import DeLS, DeLSConfig
from repairzoo.heads.drelay import DRelay, DRelayConfig
from repairzoo.heads.lilicorr import LiLiCorr, LiLiCorrConfig
from repairzoo.sampling import Law
from repairzoo.tree import check
from repairzoo.walk import Stack, best_first, walk

F64 = torch.float64
sizes = {"seed": st.integers(0, 2**31), "V": st.integers(3, 5), "S": st.integers(1, 3)}
few = settings(max_examples=3, deadline=None)
KINDS = ["dels", "drelay", "published", "identity_safe"]
STACKS = [*KINDS, "dels+drelay", "drelay+published", "identity_safe+dels", "published+drelay"]


class Together:
    """Several correctors as one, for helpers that take one; the walk's own way to stack them is ``Stack``."""

    def __init__(self, parts: list):
        self.parts = parts

    def prepare(self, block, pool):
        return tuple(p.prepare(block, pool) for p in self.parts)

    def start(self, block):
        return tuple(p.start(block) for p in self.parts)

    def step(self, prepared, carry, slot, previous, scores):
        carries = []
        for part, known, own in zip(self.parts, prepared, carry, strict=True):
            scores, own = part.step(known, own, slot, previous, scores)
            carries.append(own)
        return scores, tuple(carries)


def random_stack(kinds: str, seed: int, S: int, V: int) -> list:
    return [random_head(kind, seed + i, S, V) for i, kind in enumerate(kinds.split("+"))]


def random_head(kind: str, seed: int, S: int, V: int):
    if kind == "dels":
        config = DeLSConfig(
            variant="gru", rank=2, hidden=3, input_rank=2, block_size=S + 1, vocab_size=V, padded_vocab_size=V,
            hidden_size=1, target_id="table", dtype="float64",
        )  # fmt: skip
        head, g = DeLS(config), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in head.parameters():
                p.copy_(torch.randn(p.shape, generator=g, dtype=F64))
            head.log_prior.copy_(torch.randn(V, generator=g).log_softmax(-1))
        return head.requires_grad_(False)
    shape = {
        "block_size": S + 1, "hidden_size": 1, "vocab_size": V, "padded_vocab_size": V, "target_id": "table",
        "dtype": "float64", "width": 4,
    }  # fmt: skip
    if kind == "drelay":
        widths = {"heads": 2, "ffn": 4, "residual": 4, "rank": 2, "gate": 4, "history": 4}
        head = DRelay(DRelayConfig(**shape, **widths, pool_size=2))
    else:
        widths = {"candidates": 3, "pool_size": 3, "num_heads": 2, "factor_dim": 3, "decision": kind}
        head = LiLiCorr(LiLiCorrConfig(**shape, **widths))
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=F64))
    return head.requires_grad_(False)


def telling_blocks(seed: int, B: int, S: int, V: int):
    """Blocks whose hidden states and embeddings are not all zero, so that heads can tell tokens apart."""
    block, g = plain_block(seed, B, S, V), torch.Generator().manual_seed(seed)
    block.embedding = torch.randn(V, 1, generator=g, dtype=F64)
    block.output_weight = torch.randn(V, 1, generator=torch.Generator().manual_seed(seed + 1), dtype=F64)
    block.hidden = torch.randn(1, S, 1, generator=g, dtype=F64).expand(B, S, 1)
    return block


plain_block = exact.make_block


@pytest.mark.parametrize("kind", STACKS)
@given(**sizes, size=st.integers(2, 3), law=st.sampled_from([None, Law(0.7, top_p=0.9)]))
@few
def test_sampled_chain_is_exact(kind, seed, V, S, size, law):
    """Lemma B: q is the law that was drawn from, pools that miss the target's best token included."""
    table = exact.Table(seed, V, S, law)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "make_block", telling_blocks)
        patch.setattr(exact, "Markov", lambda seed, V: Together(random_stack(kind, seed, S, V)))
        tokens, q, weight = exact.sampled_walks(seed, S, V, size, Law(0.8))
    assert exact.deviation(table, exact.ratio_law(table.along(tokens), q, tokens, weight)) < exact.EXACT


@pytest.mark.parametrize("kind", STACKS)
@given(**sizes, nodes=st.integers(1, 5))
@few
def test_tree_is_exact(kind, seed, V, S, nodes):
    """Lemma C: trees from any head, and chains as trees of one path."""
    table, block = exact.Table(seed, V, S, None), telling_blocks(seed, 1, S, V)
    tree = best_first(block, random_stack(kind, seed, S, V), make_pool(block.logits, 3), nodes)
    assert exact.deviation(table, exact.walk_tree(tree, 0, exact.tree_laws(table, tree, 0))) < exact.EXACT


@pytest.mark.parametrize("suffix", ["head", "reuse", "redraft"])
@pytest.mark.parametrize("kind", ["dels", "drelay", "published", "dels+drelay"])
@given(**sizes, law=st.sampled_from([None, Law(0.7, top_p=0.9), Law(0.0)]))
@few
def test_branches_are_exact(kind, suffix, seed, V, S, law):
    """Lemma C: CURE behind every head and stack, in each of its modes; and the chain it extends, point mass by point
    mass (Lemma A)."""
    table, block = exact.Table(seed, V, S, law), telling_blocks(seed, 1, S, V)
    block.redraft = lambda known: telling_blocks(seed + 1 + int((known + 2).sum()), 1, S, V)
    pool = make_pool(block.logits, 3)
    stack = Stack(block, random_stack(kind, seed, S, V), pool)
    tokens, _, seen = walk(block, stack, pool)
    cure = CURE(threshold=1e6, scale=1e6, b_max=3, repairs=2, nodes=S + 4, suffix=suffix, cost="free")
    tree = cure.expand(block, stack, pool, tokens, seen["scores"])
    check(tree)
    assert int(tree.valid.sum()) > 1 + S
    for proposed in (tree, exact.chain(block.anchor_ids, tokens)):
        committed = exact.walk_tree(proposed, 0, exact.tree_laws(table, proposed, 0))
        assert exact.deviation(table, committed) < exact.EXACT
