"""The exact law of what is committed with real heads of random weights, by enumeration (invariant 2)."""

from __future__ import annotations

import pytest
import test_verify as exact
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repairzoo.block import make_pool
from repairzoo.heads.drelay import DRelay, DRelayConfig
from repairzoo.heads.lilicorr import LiLiCorr, LiLiCorrConfig
from repairzoo.sampling import Law
from repairzoo.walk import best_first

F64 = torch.float64
sizes = {"seed": st.integers(0, 2**31), "V": st.integers(3, 5), "S": st.integers(1, 3)}
few = settings(max_examples=4, deadline=None)


def random_head(kind: str, seed: int, S: int, V: int):
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
    block.hidden = torch.randn(1, S, 1, generator=g, dtype=F64).expand(B, S, 1)
    return block


plain_block = exact.make_block


@pytest.mark.parametrize("kind", ["drelay", "published", "identity_safe"])
@given(**sizes, size=st.integers(2, 3), law=st.sampled_from([None, Law(0.7, top_p=0.9)]))
@few
def test_sampled_chain_is_exact(kind, seed, V, S, size, law):
    """Lemma B: q is the law that was drawn from, pools that miss the target's best token included."""
    table = exact.Table(seed, V, S, law)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "make_block", telling_blocks)
        patch.setattr(exact, "Markov", lambda seed, V: random_head(kind, seed, S, V))
        tokens, q, weight = exact.sampled_walks(seed, S, V, size, Law(0.8))
    assert exact.deviation(table, exact.ratio_law(table.along(tokens), q, tokens, weight)) < exact.EXACT


@pytest.mark.parametrize("kind", ["drelay", "published", "identity_safe"])
@given(**sizes, nodes=st.integers(1, 5))
@few
def test_tree_is_exact(kind, seed, V, S, nodes):
    """Lemma C: trees from any head, and chains as trees of one path."""
    table, block = exact.Table(seed, V, S, None), telling_blocks(seed, 1, S, V)
    tree = best_first(block, [random_head(kind, seed, S, V)], make_pool(block.logits, 3), nodes)
    assert exact.deviation(table, exact.walk_tree(tree, 0, exact.tree_laws(table, tree, 0))) < exact.EXACT
