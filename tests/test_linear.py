"""Rounding a draft to 8 bits changes drafts a little and no answer (test_target.py compares the exact layouts)."""

import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import causal_lm
from hypothesis import given, settings
from hypothesis import strategies as st

import repairzoo
from repairzoo.backbones.dflash import DFlash
from repairzoo.backbones.dflash.config import new_config
from repairzoo.errors import InvalidInput
from repairzoo.linear import Int8Linear, int8_available

needs_int8 = pytest.mark.skipif(not int8_available(torch.device("cpu")), reason="torch has no 8-bit products here")
seeds = st.integers(0, 2**31)


def draw(seed: int, rows: int, bias: bool):
    g = torch.Generator().manual_seed(seed)
    weights = [torch.randn(n, 48, generator=g) for n in (32, 16, 64)]
    biases = [torch.randn(w.shape[0], generator=g) if bias and i != 1 else None for i, w in enumerate(weights)]
    return torch.randn(2, rows, 48, generator=g), weights, biases


@needs_int8
@settings(max_examples=20, deadline=None)
@given(seeds, st.integers(1, 9), st.booleans())
def test_rounded_products_are_near(seed, rows, bias):
    """Rounding to 127 steps of the largest entry leaves about a hundredth of the spread."""
    x, weights, biases = draw(seed, rows, bias)
    rounded = Int8Linear(weights, biases)(x)
    for mine, w, b in zip(rounded, weights, biases, strict=True):
        exact = F.linear(x, w, b)
        error = (mine - exact).std() / F.linear(x, w).std()
        assert 0 < error < 0.04


def drafted(target, **options):
    c = target.model.config
    config = new_config(
        block_size=5, mask_token_id=3, num_target_layers=c.num_hidden_layers, vocab_size=c.vocab_size,
        hidden_size=c.hidden_size, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, rope_theta=1e4, target_layer_ids=(0,),
    )  # fmt: skip
    return repairzoo.build(DFlash(config, seed=3).requires_grad_(False), target=target, **options)


@needs_int8
def test_a_rounded_draft_changes_no_answer():
    target = repairzoo.Target(causal_lm("llama", seed=5, dtype=torch.float32))
    prompt = torch.tensor([4, 9, 2, 11])
    plain = repairzoo.autoregressive(target, prompt, max_new_tokens=20, eos_token_id=[]).token_ids
    zoo = drafted(target, draft_int8=True)
    assert zoo.backbone.int8
    assert zoo.generate(prompt, max_new_tokens=20, eos_token_id=[]).token_ids == plain
    options = dict(max_new_tokens=20, eos_token_id=[], temperature=0.9, seed=7)
    assert zoo.generate(prompt, **options).token_ids == repairzoo.autoregressive(target, prompt, **options).token_ids


@needs_int8
@torch.no_grad()
def test_features_are_not_rounded():
    """One entry a thousand times the others, as residual streams have them, must not leave zeros of the rest."""
    target = repairzoo.Target(causal_lm("llama", seed=5, dtype=torch.float32))
    features = torch.randn(1, 6, target.hidden_size, generator=torch.Generator().manual_seed(0))
    features[0, 0, 3] = 3000.0
    kept = []
    for rounded in (False, True):
        backbone = drafted(target, draft_int8=rounded).backbone
        cache = backbone.new_cache(1, 16, torch.float32)
        backbone.extend(cache, features, torch.arange(6)[None])
        kept.append((cache.context[:, :6], cache.keys[0][:, :6]))
    torch.testing.assert_close(kept[1][0], kept[0][0])
    assert (kept[1][1] - kept[0][1]).std() < 0.04 * kept[0][1].std()


@needs_int8
def test_who_drafts_with_rounded_weights(monkeypatch):
    target = repairzoo.Target(causal_lm("llama", seed=5, dtype=torch.float32))
    assert not drafted(target).backbone.int8  # a module that the caller made is used as it is
    module = sys.modules["repairzoo.zoo"]
    monkeypatch.setattr(module, "int8_available", lambda device: False)
    with pytest.raises(InvalidInput, match="draft_int8"):
        drafted(target, draft_int8=True)
