"""The target's own forward against transformers', its cache, and what it refuses."""

from __future__ import annotations

import hashlib

import pytest
import torch
from conftest import Bigram, causal_lm, dflash, greedy, prompts, toy
from hypothesis import given, settings
from hypothesis import strategies as st

import repairzoo
from repairzoo.decode import verify_mask
from repairzoo.errors import InvalidArtifact, UnsupportedTarget
from repairzoo.linear import Linear
from repairzoo.target import Target
from repairzoo.tree import TokenTree, ancestor_mask

KINDS = ["llama", "qwen2", "qwen3", "mistral"]
CHANGES = {"mistral": {"sliding_window": None}}
EXACT = {torch.float64: {"atol": 1e-10, "rtol": 1e-10}, torch.float32: {"atol": 1e-4, "rtol": 1e-4}}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_features_equal_transformers(kind, dtype):
    """Layer l's feature is ``hidden_states[l + 1]``, -1 the embedding (atlas#394: off by one is silent)."""
    model = causal_lm(kind, 2, dtype=dtype, **CHANGES.get(kind, {}))
    target = Target(model)
    rows = prompts(0, [9, 4])
    ids = torch.tensor([rows[0], rows[1] + [0] * 5])
    taps = (-1, 0, 2, 1)
    cache = target.new_cache(2, 12)
    last, features = target.prefill(ids, torch.tensor([9, 4]), cache, taps)
    for i, row in enumerate(rows):
        out = model(input_ids=torch.tensor([row]), output_hidden_states=True, use_cache=False)
        torch.testing.assert_close(last[i].to(dtype), out.logits[0, -1], **EXACT[dtype])
        # the top layer's entry in hidden_states is after the final norm; a hook sees the residual stream
        stream = {}
        handle = model.model.layers[2].register_forward_hook(lambda m, a, o, s=stream: s.update(x=o))
        model(input_ids=torch.tensor([row]), use_cache=False)
        handle.remove()
        top = stream["x"][0] if isinstance(stream["x"], tuple) else stream["x"]
        expected = torch.cat(
            [out.hidden_states[0], out.hidden_states[1], top.reshape(1, len(row), -1), out.hidden_states[2]], -1
        )
        torch.testing.assert_close(features[i, : len(row)], expected[0], **EXACT[dtype])


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 10000.0,
            }
        },
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 32,
            }
        },
    ],
)
def test_variants_of_llama(changes):
    model = causal_lm("llama", 3, **changes)
    row = prompts(1, [7])[0]
    assert repairzoo.autoregressive(Target(model), row, max_new_tokens=6).token_ids[0] == greedy(model, row, 6)


@given(seed=st.integers(0, 2**31), nodes=st.integers(1, 12))
@settings(deadline=None, max_examples=12)
def test_tree_equals_path_by_path(seed, nodes):
    """mlxcel#1214: a node's position is its depth, and it sees its ancestors only; rows of different lengths."""
    g = torch.Generator().manual_seed(seed)
    target, rows = toy("qwen3", 1), prompts(seed, [5, 2])
    lengths = torch.tensor([5, 2])
    cache = target.new_cache(2, 5 + nodes + 3)
    for buffer in (*cache.keys, *cache.values):
        buffer.fill_(7)  # scratch must not be seen
    target.prefill(torch.tensor([rows[0], rows[1] + [0] * 3]), lengths, cache)
    parents = torch.tensor([[-1] + [int(torch.randint(m, (), generator=g)) for m in range(1, nodes + 1)] for _ in rows])
    depths = torch.zeros_like(parents)
    for m in range(1, nodes + 1):
        depths[:, m] = depths.gather(1, parents[:, m : m + 1])[:, 0] + 1
    tokens = torch.randint(target.vocab_size, parents.shape, generator=g)
    tree = TokenTree(tokens, parents, depths, torch.ones_like(tokens, dtype=torch.bool))
    entries = lengths[:, None] + torch.arange(nodes + 1)
    mask = verify_mask(tree, lengths, 5 + nodes + 2)
    hidden, features = target.forward(tokens, lengths[:, None] + depths, entries, mask, cache, (0, 2))
    logits = target.logits(hidden)
    reach = ancestor_mask(tree)
    paths = []
    for b, row in enumerate(rows):
        for m in range(nodes + 1):
            path = [v for v in range(nodes + 1) if reach[b, m, v]]
            out = target.model(
                input_ids=torch.tensor([row + tokens[b, path].tolist()]), use_cache=False, output_hidden_states=True
            )
            torch.testing.assert_close(logits[b, m], out.logits[0, -1], atol=1e-10, rtol=1e-10)
            torch.testing.assert_close(features[b, m, :16], out.hidden_states[1][0, -1], atol=1e-10, rtol=1e-10)
        paths.append(max(([v for v in range(nodes + 1) if reach[b, m, v]] for m in range(nodes + 1)), key=len))
    # the deepest path, moved to where a plain run would have it, equals a fresh prefill of it
    width = min(map(len, paths))
    source = torch.stack([lengths[b] + torch.tensor(p[:width]) for b, p in enumerate(paths)])
    cache.compact(source, lengths[:, None] + torch.arange(width))
    for b, row in enumerate(rows):
        ids = row + tokens[b, paths[b][:width]].tolist()
        fresh = target.new_cache(1, len(ids))
        target.prefill(torch.tensor([ids]), torch.tensor([len(ids)]), fresh)
        for ours, theirs in zip((*cache.keys, *cache.values), (*fresh.keys, *fresh.values), strict=True):
            torch.testing.assert_close(ours[b, : len(ids)], theirs[0], atol=1e-10, rtol=1e-10)


def test_long_prompts_are_read_in_chunks(monkeypatch):
    from repairzoo import target as module

    target, rows = toy(), prompts(0, [11, 3, 8])
    lengths, ids = torch.tensor([11, 3, 8]), torch.tensor([r + [0] * (11 - len(r)) for r in rows])
    whole = target.prefill(ids, lengths, target.new_cache(3, 11), (0,))
    for chunk in (1, 4, 8):
        monkeypatch.setattr(module, "_PREFILL_CHUNK", chunk)
        cache = target.new_cache(3, 11)
        for got, expected in zip(target.prefill(ids, lengths, cache, (0,)), whole, strict=True):
            for b, n in enumerate(lengths):
                pick = (lambda x, b=b, n=n: x[b, :n]) if got.dim() == 3 else (lambda x, b=b: x[b])
                torch.testing.assert_close(pick(got), pick(expected), atol=1e-10, rtol=1e-10)


def changed(kind: str, **changes):
    return lambda: causal_lm(kind, 1, **changes)


def soft_multiplied():
    from transformers import GraniteConfig, GraniteForCausalLM

    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
        "embedding_multiplier": 12.0,
    }
    return GraniteForCausalLM(GraniteConfig(**sizes))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=32))


def partly_rotated():
    from transformers import StableLmConfig, StableLmForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1}
    return StableLmForCausalLM(StableLmConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))


def mamba():
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (changed("gemma2"), "gemma2.*feedforward"),
        (changed("gemma"), "gemma.*standard deviations"),
        (soft_multiplied, "granite.*standard deviations"),
        (gpt2, "gpt2.*embed_tokens"),
        (mamba, "mamba"),
        (changed("mixtral", num_local_experts=2, num_experts_per_tok=1), "mixtral"),
        (changed("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "dynamic"),
        (changed("cohere"), "cohere"),
        (changed("olmo2"), "olmo2"),
        (partly_rotated, "stablelm.*4 dimensions of a head"),
        (lambda: torch.nn.Linear(2, 2), "Linear.*embed_tokens"),
    ],
)
def test_what_is_not_computed_here_is_refused_by_name(make, words):
    with pytest.raises(UnsupportedTarget, match=words):
        Target(make().eval())


def test_weights_with_nan_are_not_called_unsupported():
    model = causal_lm("llama", 1)
    model.model.norm.weight[3] = float("nan")
    with pytest.raises(InvalidArtifact, match="not finite"):
        Target(model)


@pytest.mark.parametrize("window", [4, 12])
def test_sliding_window_is_the_end_of_the_context(window):
    """transformers#46629: no rollback in a rolling cache; as long as nothing slides out, attention is full."""
    model = causal_lm("mistral", 2, sliding_window=window)
    target = Target(model)
    assert target.max_context == window
    row = prompts(0, [3])[0]
    out = repairzoo.build(dflash(target), None, target).generate(row, max_new_tokens=50)
    assert out.token_ids[0] == greedy(model, row, window - 3) and out.finish_reason == ["length"]


def test_target_tensors_never_change():
    """speculators#184, SpecForge#139: tied heads overwritten on load."""

    def digest(model):
        h = hashlib.sha256()
        for name, tensor in sorted(model.state_dict().items()):
            h.update(name.encode() + tensor.numpy().tobytes())
        return h.hexdigest()

    for tied in (True, False):
        model = causal_lm("llama", 5, tie_word_embeddings=tied, dtype=torch.float32)
        before = digest(model)
        zoo = repairzoo.build(dflash(Target(model)), Bigram(1), (model, None), tree=5)
        zoo.generate(prompts(0, [3, 5]), max_new_tokens=6, temperature=1.0)
        assert digest(model) == before
        embedding = model.get_input_embeddings().weight
        assert zoo.target.embedding.data_ptr() == embedding.data_ptr()
        assert (zoo.target.output_weight.data_ptr() == embedding.data_ptr()) == tied


@given(seed=st.integers(0, 2**31), parts=st.integers(1, 3), rows=st.integers(1, 40), half=st.booleans())
@settings(deadline=None, max_examples=15)
def test_packed_product_equals_the_plain_one(seed, parts, rows, half):
    g = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if half else torch.float32
    weights = [torch.randn(5 + 3 * i, 16, generator=g).to(dtype) for i in range(parts)]
    biases = [torch.randn(len(w), generator=g).to(dtype) if i % 2 else None for i, w in enumerate(weights)]
    x = torch.randn(2, rows, 16, generator=g).to(dtype)
    close = {"atol": 0.1, "rtol": 0.02} if half else {"atol": 1e-5, "rtol": 1e-5}
    for pack in (True, False):
        for got, w, b in zip(Linear(weights, biases, pack=pack)(x), weights, biases, strict=True):
            torch.testing.assert_close(got, torch.nn.functional.linear(x, w, b), **close)
