"""DFlash against its reference's numbers, against a slow oracle of the equations, and against damaged artifacts."""

import copy
import json
import math
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from repairzoo.artifact import tensors_hash
from repairzoo.backbones.dflash import DFlash, DFlashConfig, default_target_layers, new_config
from repairzoo.draft_config import MEANING
from repairzoo.draft_layers import Rotary
from repairzoo.errors import IncompatibleArtifact, InvalidArtifact, InvalidInput

GOLDEN = Path(__file__).parent / "golden"
FOLDERS = ("random_b16", "sliding_b8", "trained_b8")
CLOSE = {"atol": 5e-5, "rtol": 1e-4}  # the golden README's


@cache
def described(folder: str) -> dict:
    return json.loads((GOLDEN / "dflash" / folder / "cases.json").read_text())


@cache
def stored(folder: str, name: str = "cases") -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "dflash" / folder / f"{name}.safetensors")


@cache
def target(folder: str) -> Qwen3ForCausalLM:
    path = GOLDEN / "dflash" / folder / described(folder)["target"]
    return Qwen3ForCausalLM.from_pretrained(path.resolve(), dtype=torch.float32).eval()


@cache
def draft(folder: str) -> DFlash:
    model = target(folder)
    loaded = DFlash.load(GOLDEN / "dflash" / folder / "draft")
    head = model.get_output_embeddings().weight
    return loaded.bind(model.get_input_embeddings().weight, head, num_layers=model.config.num_hidden_layers)


def read(folder: str, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's features ``[T, F*D]`` and logits ``[T, V]``, recomputed from scratch."""
    return _read(folder, tuple(ids))


@cache
@torch.no_grad()
def _read(folder: str, ids: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    out = target(folder)(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return torch.cat([out.hidden_states[layer + 1] for layer in draft(folder).tapped_layers], -1)[0], out.logits[0]


CASES = [(folder, case["name"]) for folder in FOLDERS for case in described(folder)["cases"]]
WITH_TENSORS = [(folder, case["name"]) for folder in FOLDERS for case in described(folder)["cases"] if case["tensors"]]


def case_of(folder: str, name: str) -> dict:
    return next(case for case in described(folder)["cases"] if case["name"] == name)


# --- golden -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("folder", "name"), WITH_TENSORS)
@pytest.mark.parametrize("pack", [True, False])
def test_first_block_equals_the_reference(folder, name, pack):
    case, tensors, backbone = case_of(folder, name), stored(folder), copy.deepcopy(draft(folder))
    backbone.pack = pack
    n = case["n"]
    features, logits = read(folder, case["prompt"])
    torch.testing.assert_close(features, tensors[f"{name}.features"], **CLOSE)
    torch.testing.assert_close(logits[-1], tensors[f"{name}.prefill_logits"], **CLOSE)
    context = backbone.new_cache(1, n + backbone.block_size)
    backbone.extend(context, features[None], torch.arange(n)[None])
    block = backbone.draft(context, logits[-1:].argmax(-1), torch.tensor([n]))
    assert block.slots == backbone.slots == backbone.block_size - 1
    torch.testing.assert_close(block.hidden[0], tensors[f"{name}.block_hidden"][1:], **CLOSE)
    torch.testing.assert_close(block.logits[0], tensors[f"{name}.block_logits"], **CLOSE)
    assert block.native is None and block.logits.dtype == torch.float32


def generate(folder: str, case: dict, older: bool) -> tuple[list[int], list[int], list[list[int]], list[torch.Tensor]]:
    """A slow greedy loop: the target is recomputed from scratch every round, nothing is rolled back.

    ``older`` is z-lab/dflash@44947fb: whole blocks always, one round even if the prefill ended the text, and lengths
    that count what lies behind the end. Otherwise dflash 0.1.0: the last block is shortened to the tokens still wanted
    (which changes its drafts, since its rows see one another) and the last length is clipped at the budget or the stop
    token.
    """
    backbone = draft(folder)
    n, stops = case["n"], set(case["stop_token_ids"] or ())
    end = n + case["max_new_tokens"]
    context = backbone.new_cache(1, end + 2 * backbone.block_size)
    features, logits = read(folder, case["prompt"])
    out = [*case["prompt"], int(logits[-1].argmax())]
    backbone.extend(context, features[None], torch.arange(n)[None])
    lengths, proposals, hidden = [], [], []
    while (older and not lengths) or (len(out) < end + older and not stops & set(out[n:])):
        start = len(out) - 1
        rows = backbone.block_size if older else min(backbone.block_size, end - start)
        anchor, position = torch.tensor([out[start]]), torch.tensor([start])
        block = backbone.draft(context, anchor, position, start + rows, rows=rows)
        proposal = [out[start], *block.logits[0].argmax(-1).tolist()]
        features, logits = read(folder, out[:start] + proposal)
        answers = logits[start:].argmax(-1).tolist()
        accepted = 0
        while accepted < rows - 1 and proposal[accepted + 1] == answers[accepted]:
            accepted += 1
        committed = answers[: accepted + 1]
        if not older:
            committed = committed[: end - len(out)]
            stop = next((i for i, token in enumerate(committed) if token in stops), None)
            committed = committed if stop is None else committed[: stop + 1]
        # features of the anchor and the accepted drafts; the rest are rejected rows that only get overwritten later
        backbone.extend(context, features[None, start:], torch.arange(start, start + rows)[None])
        out += committed
        lengths.append(len(committed))
        proposals.append(proposal)
        if rows == backbone.block_size:
            hidden.append(block.hidden[0])
    out = out[:end]
    first = next((i for i in range(n, len(out)) if out[i] in stops), len(out) - 1)
    return out[: first + 1], lengths, proposals, hidden


@pytest.mark.parametrize(("folder", "name"), CASES)
def test_generation_equals_the_reference_round_by_round(folder, name):
    case = case_of(folder, name)
    out, lengths, proposals, hidden = generate(folder, case, older=False)
    assert out == case["output_ids"]
    assert proposals == case["verify_ids"]
    assert lengths == case["acceptance_lengths"]
    if "rounds_full" in case:
        rounds = stored(folder)[f"{name}.rounds_block_hidden"]
        torch.testing.assert_close(torch.stack(hidden), rounds[:, 1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("folder", "name"), [c for c in CASES if "acceptance_lengths_older_loop" in case_of(*c)])
def test_generation_equals_the_older_loop(folder, name):
    case = case_of(folder, name)
    out, lengths, _, _ = generate(folder, case, older=True)
    assert out == case["output_ids"]
    assert lengths == case["acceptance_lengths_older_loop"]


@pytest.mark.parametrize("folder", ["sliding_b8", "trained_b8"])
def test_training_batch_equals_the_reference_and_decoding(folder):
    backbone, t = draft(folder), stored(folder, "train")
    with torch.no_grad():
        hidden = backbone.train_forward(t["features"], t["input_ids"], t["anchor_positions"])
    kept = t["block_keep_mask"].bool()
    torch.testing.assert_close(hidden[kept], t["block_hidden"][kept], **CLOSE)
    length = t["input_ids"].shape[1]
    for row in range(2):
        context = backbone.new_cache(1, length + backbone.block_size)
        backbone.extend(context, t["features"][row : row + 1], torch.arange(length)[None])
        for block, anchor in enumerate(t["anchor_positions"][row]):
            # drafting overwrites context behind the anchor, which a decode loop would extend again
            got = backbone.draft(copy.deepcopy(context), t["input_ids"][row, anchor][None], anchor[None])
            torch.testing.assert_close(got.hidden[0], hidden[row, block, 1:], **CLOSE)


def test_slot_convention_shifted_by_one_loses_acceptance():
    """hipfire#483, Domino-Tree: the wrong first slot raises nothing; here it must show in the drafts."""
    folder, name = "trained_b8", "len23"
    case = case_of(folder, name)
    right = {}
    for shift in (0, 1, 2):
        backbone = copy.deepcopy(draft(folder))
        backbone.first_slot = shift
        right[shift] = 0
        ids = case["output_ids"]
        features, _ = read(folder, ids)
        for start in range(case["n"], len(ids) - 8, 4):
            context = backbone.new_cache(1, len(ids) + 8)
            backbone.extend(context, features[None, :start], torch.arange(start)[None])
            picks = backbone.draft(context, torch.tensor([ids[start]]), torch.tensor([start])).logits[0].argmax(-1)
            right[shift] += sum(a == b for a, b in zip(picks[:6].tolist(), ids[start + 1 :], strict=False))
    assert right[1] > 2 * max(right[0], right[2])


# --- a slow oracle of the equations -----------------------------------------------------------------------------------
def tiny(seed: int, kinds: tuple[str, ...] = ("full_attention", "sliding_attention"), **changes) -> DFlash:
    """A random draft in float64, bound to random tables."""
    published = new_config(
        block_size=5,
        mask_token_id=18,
        num_target_layers=6,
        vocab_size=19,
        hidden_size=12,
        intermediate_size=10,
        num_hidden_layers=len(kinds),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        rope_theta=10_000.0,
        target_layer_ids=[4, -1],
        sliding_window=3,
        layer_types=kinds,
        dtype="float64",
    ).to_dict()
    backbone = DFlash(DFlashConfig.from_dict(published | changes), seed=seed).double().requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in backbone.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4 + 0.3)
    tables = torch.randn(2, 19, 12, generator=generator, dtype=torch.float64)
    return backbone.bind(tables[0], tables[1])


def oracle(backbone: DFlash, features: torch.Tensor, anchor: int, rows: int) -> torch.Tensor:
    """Logits of all rows of a block after ``features [s, F*D]``, key by key from the equations of the README."""
    p, c = dict(backbone.named_parameters()), backbone.config
    s, d = features.shape[0], c.head_dim

    def norm(x, weight):
        return weight * x / (x.square().mean(-1, keepdim=True) + c.rms_norm_eps).sqrt()

    def linear(x, name):
        y = x @ p[f"{name}.weight"].T
        return y + p[f"{name}.bias"] if f"{name}.bias" in p else y

    def turn(x, position):
        out = x.clone()
        for j in range(d // 2):
            angle = position * c.rope["rope_theta"] ** (-2 * j / d)
            a, b = x[j], x[j + d // 2]
            out[j] = a * math.cos(angle) - b * math.sin(angle)
            out[j + d // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    context = norm(features @ p["fc.weight"].T, p["hidden_norm.weight"])
    ids = [anchor] + [c.mask_token_id] * (rows - 1)
    h = backbone._bound.embedding[ids] * c.input_embedding_scale
    for i in range(c.num_hidden_layers):
        layer = f"layers.{i}"
        u = norm(h, p[f"{layer}.input_layernorm.weight"])
        source = torch.cat([context, u])
        q = linear(u, f"{layer}.self_attn.q_proj").view(rows, -1, d)
        k = linear(source, f"{layer}.self_attn.k_proj").view(s + rows, -1, d)
        v = linear(source, f"{layer}.self_attn.v_proj").view(s + rows, -1, d)
        attended = torch.zeros_like(q)
        for row in range(rows):
            for head in range(c.num_attention_heads):
                group = head // (c.num_attention_heads // c.num_key_value_heads)
                query = turn(norm(q[row, head], p[f"{layer}.self_attn.q_norm.weight"]), s + row)
                scores, values = [], []
                for position in range(s + rows):
                    if c.causal[i] and position > s + row:
                        continue
                    if c.windows[i] is not None and s + row - position >= c.windows[i]:
                        continue
                    key = turn(norm(k[position, group], p[f"{layer}.self_attn.k_norm.weight"]), position)
                    scores.append(query @ key / math.sqrt(d))
                    values.append(v[position, group])
                attended[row, head] = torch.stack(scores).softmax(0) @ torch.stack(values)
        h = h + linear(attended.reshape(rows, -1), f"{layer}.self_attn.o_proj")
        u = norm(h, p[f"{layer}.post_attention_layernorm.weight"])
        gate, up = linear(u, f"{layer}.mlp.gate_proj"), linear(u, f"{layer}.mlp.up_proj")
        h = h + linear(gate * gate.sigmoid() * up, f"{layer}.mlp.down_proj")
    logits = norm(h, p["norm.weight"]) @ backbone._bound.output_weight.T * c.output_multiplier
    cap = c.final_logit_softcapping
    return logits if cap is None else cap * (logits / cap).tanh()


VARIANTS = st.fixed_dictionaries(
    {},
    optional={
        "is_causal": st.booleans(),
        "attention_bias": st.just(True),
        "input_embedding_scale": st.just(3.5),
        "output_multiplier": st.just(0.25),
        "final_logit_softcapping": st.just(2.0),
    },
)
KINDS = st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=1, max_size=3).map(tuple)
SEEDS = st.integers(0, 2**31)


def run(backbone: DFlash, features: torch.Tensor, anchor: int, rows: int | None = None, room: int = 0):
    s = features.shape[0]
    context = backbone.new_cache(1, s + backbone.block_size + room)
    backbone.extend(context, features[None], torch.arange(s)[None])
    return backbone.draft(context, torch.tensor([anchor]), torch.tensor([s]), rows=rows)


@settings(deadline=None, max_examples=15)
@given(SEEDS, KINDS, VARIANTS, st.integers(0, 7), st.integers(2, 5))
def test_draft_equals_the_equations(seed, kinds, changes, s, rows):
    """Window off-by-one (z-lab#126, ik_llama.cpp#2021), softcap, scales, biases (strix-llama.cpp#61), empty context."""
    backbone = tiny(seed, kinds, **changes)
    features = torch.randn(s, 24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = oracle(backbone, features, 3, rows)[1:]
    block = run(backbone, features, 3, rows)
    # the phases are float32 as in the reference, whatever the weights are
    torch.testing.assert_close(block.logits[0], expected, atol=2e-5, rtol=2e-5)
    assert block.logits.dtype == torch.float64


@settings(deadline=None, max_examples=12)
@given(SEEDS, KINDS, VARIANTS)
def test_train_forward_equals_draft(seed, kinds, changes):
    """The strongest alignment test: one forward of many blocks equals decoding at each anchor, anchor 0 included."""
    backbone = tiny(seed, kinds, **changes)
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(2, 11, 24, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 18, (2, 11), generator=generator)
    anchors = torch.randint(0, 11, (2, 4), generator=generator)
    hidden = backbone(features, ids, anchors)
    assert hidden.shape == (2, 4, 5, 12)
    for row in range(2):
        for block, anchor in enumerate(anchors[row].tolist()):
            got = run(backbone, features[row, :anchor], int(ids[row, anchor]))
            torch.testing.assert_close(got.hidden[0], hidden[row, block, 1:], atol=1e-9, rtol=1e-9)


@settings(deadline=None, max_examples=12)
@given(SEEDS, KINDS, st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_cached_equals_recomputed_for_any_accept_pattern(seed, kinds, accepts):
    """Draft K/V of rejected slots never survive (backbones.md C8; speculators#678: nothing is appended twice)."""
    backbone = tiny(seed, kinds)
    generator = torch.Generator().manual_seed(seed)
    start = int(torch.randint(1, 6, (1,), generator=generator))
    true = torch.randn(start + sum(accepts), 24, generator=generator, dtype=torch.float64)
    context = backbone.new_cache(1, start + sum(accepts) + 6)
    backbone.extend(context, true[None, :start], torch.arange(start)[None])
    for accepted in accepts:
        anchor = start % 18
        block = backbone.draft(context, torch.tensor([anchor]), torch.tensor([start]), start + 5)
        fresh = run(backbone, true[:start], anchor)
        for name in ("logits", "hidden", "context", "history"):
            torch.testing.assert_close(getattr(block, name), getattr(fresh, name), atol=1e-9, rtol=1e-9)
        # a verify pass hands over features of all its rows; those of rejected tokens are other than the true ones
        rows = torch.randn(5, 24, generator=generator, dtype=torch.float64)
        rows[:accepted] = true[start : start + accepted]
        backbone.extend(context, rows[None], torch.arange(start, start + 5)[None])
        start += accepted


@settings(deadline=None, max_examples=12)
@given(SEEDS, KINDS, st.lists(st.integers(0, 90), min_size=2, max_size=4))
def test_ragged_batch_equals_solo_rows(seed, kinds, lengths):
    """backbones.md C12, transformers#29769: rows with their own positions; features past a row's end are garbage."""
    backbone = tiny(seed, kinds)
    generator = torch.Generator().manual_seed(seed)
    width = max(*lengths, 1)
    features = torch.randn(len(lengths), width, 24, generator=generator, dtype=torch.float64)
    anchors = torch.randint(0, 18, (len(lengths),), generator=generator)
    context = backbone.new_cache(len(lengths), width + 5)
    backbone.extend(context, features, torch.arange(width).expand(len(lengths), -1))
    block = backbone.draft(context, anchors, torch.tensor(lengths))
    for row, length in enumerate(lengths):
        solo = run(backbone, features[row, :length], int(anchors[row]))
        for name in ("logits", "hidden", "context", "history"):
            torch.testing.assert_close(getattr(block, name)[row], getattr(solo, name)[0], atol=1e-9, rtol=1e-9)
        # history: the last 64 fused rows before the anchor, oldest first
        fused = backbone.hidden_norm(features[row, :length] @ backbone.fc.weight.T)[-64:]
        assert block.history_mask[row].tolist() == [False] * (64 - len(fused)) + [True] * len(fused)
        torch.testing.assert_close(block.history[row, 64 - len(fused) :], fused, atol=1e-9, rtol=1e-9)
        assert not block.history[row, : 64 - len(fused)].any()
        torch.testing.assert_close(block.context[row], fused[-1] if length else torch.zeros(12).double())


@settings(deadline=None, max_examples=10)
@given(SEEDS, KINDS)
def test_scratch_behind_the_anchor_has_no_effect(seed, kinds):
    """llama.cpp#22105: stale draft state. Large finite scratch changes no bit; neither does a tighter bound matter."""
    backbone = tiny(seed, kinds)
    features = torch.randn(7, 24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    clean, dirty = backbone.new_cache(1, 30), backbone.new_cache(1, 30)
    for buffer in (*dirty.keys, *dirty.values, dirty.context):
        buffer.fill_(1e6)
    blocks = []
    for context in (clean, dirty):
        backbone.extend(context, features[None], torch.arange(7)[None])
        blocks.append(backbone.draft(context, torch.tensor([2]), torch.tensor([7])))
    for name in ("logits", "hidden", "context", "history"):
        assert torch.equal(getattr(blocks[0], name), getattr(blocks[1], name))
    tight = backbone.draft(dirty, torch.tensor([2]), torch.tensor([7]), 12)
    torch.testing.assert_close(tight.logits, blocks[0].logits, atol=1e-9, rtol=1e-9)


def test_shorter_blocks_are_checked():
    backbone = tiny(0)
    context = backbone.new_cache(1, 9)
    anchor = torch.tensor([1])
    assert backbone.draft(context, anchor, torch.tensor([0]), rows=2).slots == 1
    for wrong in ({"rows": 1}, {"rows": 6}, {"bound": 4}, {"bound": 10}):
        with pytest.raises(InvalidInput, match=next(iter(wrong))):
            backbone.draft(context, anchor, torch.tensor([0]), **wrong)


def test_gradients_reach_every_parameter_and_no_borrowed_tensor():
    backbone = tiny(1).requires_grad_(True).train()
    tables = [torch.nn.Parameter(torch.randn(19, 12, dtype=torch.float64)) for _ in range(2)]
    backbone.bind(*tables)
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(2, 9, 24, generator=generator, dtype=torch.float64)
    hidden = backbone.train_forward(features, torch.randint(0, 18, (2, 9)), torch.tensor([[2, 5], [4, 8]]))
    backbone.logits(hidden[:, :, 1:]).log_softmax(-1)[..., 0].sum().backward()
    silent = [n for n, p in backbone.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert silent == [] and tables[0].grad is None and tables[1].grad is None
    assert not {"embedding", "output_weight"} & {n.split(".")[-1] for n in backbone.state_dict()}


def test_round_reads_no_tensor_on_the_host():
    """On the meta device every `.item()`, `nonzero` or branch on data raises; a graph capture would fail as well."""
    backbone = tiny(2)
    backbone.pack = False
    tables = backbone._bound
    backbone.to("meta").bind(tables.embedding.to("meta"), tables.output_weight.to("meta"))
    context = backbone.new_cache(2, 20)
    positions = torch.zeros(2, 4, dtype=torch.int64, device="meta")
    backbone.extend(context, torch.zeros(2, 4, 24, device="meta", dtype=torch.float64), positions)
    block = backbone.draft(context, positions[:, 0], positions[:, 0], 12)
    assert block.logits.shape == (2, 4, 19) and block.logits.device.type == "meta"


def test_packed_products_follow_the_weights():
    """A trainer evaluates between steps: drafts must come from the current weights, copies included."""
    backbone = copy.deepcopy(draft("trained_b8"))
    features, plain = stored("trained_b8")["len7.features"], copy.deepcopy(backbone)
    plain.pack = False
    before = run(backbone, features, 4).logits
    for model in (backbone, plain):
        model.requires_grad_(True)
        optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.05)
        optimiser.step()
    after = run(backbone, features, 4).logits
    assert (after - before).abs().max() > 1e-2
    torch.testing.assert_close(after, run(plain, features, 4).logits, **CLOSE)
    twin = copy.deepcopy(backbone)
    assert twin._bound.embedding.data_ptr() == backbone._bound.embedding.data_ptr()
    torch.testing.assert_close(run(twin, features, 4).logits, after)
    with torch.no_grad():
        backbone.load_state_dict(draft("trained_b8").state_dict(), assign=True)
    torch.testing.assert_close(run(backbone, features, 4).logits, before)


def test_the_targets_tensors_are_borrowed_and_unchanged():
    """speculators#184, SpecForge#139: loading and drafting never touch the target; nothing is copied."""
    model = target("trained_b8")
    before = tensors_hash(model.state_dict())
    backbone = draft("trained_b8")
    run(backbone, stored("trained_b8")["len7.features"], 4)
    assert tensors_hash(model.state_dict()) == before
    assert backbone._bound.embedding.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert backbone._bound.output_weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()


# --- rotary embedding -------------------------------------------------------------------------------------------------
ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_equals_transformers_far_behind_the_trained_length(kind):
    """TensorRT-LLM#16813: no table, so no clamp at max_position_embeddings; bfloat16 weights keep float32 phases."""
    rope = {"rope_type": kind, "rope_theta": 1e6, **ROPES[kind]}
    length = int(64 * rope.get("factor", 1))
    config = Qwen3Config(head_dim=16, max_position_embeddings=length, rope_parameters=dict(rope))
    positions = torch.tensor([[0, 1, 17, 63, 64, 511, 40_960, 131_072]])
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions)
    for module in (Rotary(rope, 16), Rotary(rope, 16).bfloat16()):
        ours = module(positions, torch.float32)
        torch.testing.assert_close(ours[0][:, :, 0], cos, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(ours[1][:, :, 0], sin, atol=1e-6, rtol=1e-6)


# --- config -----------------------------------------------------------------------------------------------------------
def published(folder: str = "sliding_b8") -> dict:
    return json.loads((GOLDEN / "dflash" / folder / "draft" / "config.json").read_text())


def refuses(config: dict, *words: str) -> None:
    with pytest.raises(InvalidArtifact) as caught:
        DFlashConfig.from_dict(config, "some/config.json")
    assert str(caught.value).startswith("some/config.json: ")
    for word in words:
        assert word in str(caught.value), str(caught.value)


REQUIRED = [key for key in published() if key in MEANING and key != "sliding_window"] + ["sliding_window"]


@pytest.mark.parametrize("key", [*REQUIRED, "mask_token_id", "target_layer_ids"])
def test_each_missing_key_is_named(key):
    """z-lab#156/#157, vllm#51269, Automodel#2461, atlas#394: a guessed id, layer list or block size drafts badly."""
    config = published()
    del (config["dflash_config"] if key in config["dflash_config"] else config)[key]
    refuses(config, repr(key), "missing", "add it")


@pytest.mark.parametrize("key", [*REQUIRED, "mask_token_id", "target_layer_ids"])
@pytest.mark.parametrize("value", ["many", -1.5, [], {}])
def test_each_key_of_a_wrong_type_is_named(key, value):
    config = published()
    (config["dflash_config"] if key in config["dflash_config"] else config)[key] = value
    refuses(config, key)


def test_nested_and_flat_keys_read_the_same():
    nested, flat = published(), published()
    nested["dflash_config"]["block_size"] = nested.pop("block_size")
    flat |= flat.pop("dflash_config")
    read = [DFlashConfig.from_dict(c) for c in (published(), nested, flat)]
    assert read[0].target_layer_ids == (1, 3, 5) and read[0].mask_token_id == 127 and read[0].block_size == 8
    assert read[0].windows == (10, 10, None) and read[0].causal == (True, True, False)
    for config in read:
        config.published = {}
    assert read[0] == read[1] == read[2]
    for key, value in (("block_size", 4), ("mask_token_id", 3), ("target_layer_ids", [2, 3, 5])):
        config = published()
        config["block_size"], config["dflash_config"]["block_size"] = 8, 8
        config[key] = value
        refuses(config, repr(key), str(value), "dflash_config")


def test_rope_theta_has_two_places_and_no_default():
    """lucebox#447, tokenspeed#510, Model-Optimizer#2221."""
    config = published()
    theta = config.pop("rope_theta")
    new = config | {"rope_parameters": {"rope_theta": theta, "rope_type": "default"}}
    assert DFlashConfig.from_dict(new).rope == {"rope_theta": 1e6, "rope_type": "default"}
    assert DFlashConfig.from_dict(new | {"rope_theta": theta}).rope["rope_theta"] == 1e6
    refuses(new | {"rope_theta": 10_000}, "rope_theta", "10000")
    refuses(config | {"rope_parameters": {"rope_type": "default"}}, "rope_theta", "missing")
    assert DFlashConfig.from_dict(published() | {"rope_scaling": {"type": "default"}}).rope["rope_type"] == "default"
    for kind, settings_ in ROPES.items():
        scaled = published() | {"rope_scaling": {"rope_type": kind, **settings_}}
        assert DFlashConfig.from_dict(scaled).rope == {"rope_theta": 1e6, "rope_type": kind, **settings_}
        for key in settings_.keys() - {"beta_fast"}:
            lacking = {k: v for k, v in settings_.items() if k != key}
            refuses(published() | {"rope_scaling": {"rope_type": kind, **lacking}}, key)
    for kind in ("dynamic", "longrope", "proportional", "nonsense"):
        refuses(published() | {"rope_scaling": {"rope_type": kind, "factor": 2.0}}, kind)
    refuses(published() | {"rope_scaling": {"factor": 2.0}}, "rope_type")
    refuses(published() | {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "strange": 1}}, "strange")
    refuses(published() | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("use_swa", True, "sliding"),
        ("swa_window_size", 128, "sliding"),
        ("attention_sink_bias", True, "sinks"),
        ("projector_type", "domino", "Domino"),
        ("projector_type", "dspark", "DSpark"),
        ("shift_label", True, "slot"),
        ("sample_from_anchor", True, "slot"),
        ("selector_rank", 64, "DFlash 2"),
        ("markov_rank", 0, "slot 0"),
        ("markov_rank", 256, "DSpark"),
        ("speculators_config", {}, "speculators"),
        ("aux_hidden_state_layer_ids", [2, 4], "speculators"),
        ("quantization_config", {"bits": 4}, "quantised"),
        ("partial_rotary_factor", 0.25, "rotary"),
        ("rope_is_neox_style", False, "rotary"),
        ("dspark_block", 5, "DSpark"),
        ("draft_vocab_size", 64, "vocabulary"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_features_of_others_are_refused_by_name(key, value, words, nested):
    config = published()
    (config["dflash_config"] if nested else config)[key] = value
    refuses(config, key, words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "architectures"),
        ({"architectures": ["Qwen3DSparkModel"]}, "architectures"),
        ({"model_type": "qwen3_5"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
        ({"use_sliding_window": False}, "use_sliding_window"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"num_attention_heads": 3}, "num_attention_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"block_size": 1}, "block_size"),
        ({"vocab_size": 127}, "mask_token_id"),
        ({"num_target_layers": 5}, "target_layer_ids"),
        ({"torch_dtype": "bfloat16"}, "dtype"),
        ({"dtype": "int8"}, "dtype"),
        ({"is_causal": "no"}, "is_causal"),
        ({"is_causal": True, "dflash_config": {**published()["dflash_config"], "causal": False}}, "causal"),
        ({"dflash_config": {**published()["dflash_config"], "novelty": 1}}, "dflash_config.novelty"),
        ({"dflash_config": 3}, "dflash_config"),
        ({"dflash_config": {"mask_token_id": 127, "target_layer_ids": [1, 1]}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 127, "target_layer_ids": [1, -2]}}, "target_layer_ids"),
        (
            {"output_multiplier": 2.0, "dflash_config": {**published()["dflash_config"], "output_multiplier": 1.0}},
            "2.0",
        ),
        ({"final_logit_softcapping": -30.0}, "final_logit_softcapping"),
    ],
)
def test_contradictions_are_refused(changes, words):
    refuses(published() | changes, words)


def test_neutral_and_unknown_keys_are_carried_along():
    config = published() | {"use_swa": False, "partial_rotary_factor": 1.0, "transformers_version": "5.0"}
    assert DFlashConfig.from_dict(config).to_dict() == config
    with pytest.warns(UserWarning, match="a_new_key"):
        assert DFlashConfig.from_dict(config | {"a_new_key": 1}).to_dict()["a_new_key"] == 1


def test_default_target_layers_are_the_published_ones():
    expected = {28: (1, 7, 13, 19, 25), 36: (1, 9, 17, 25, 33), 40: (1, 10, 19, 28, 37), 64: (1, 16, 31, 46, 61)}
    assert {layers: default_target_layers(layers, 5) for layers in expected} == expected
    assert default_target_layers(30, 1) == (15,)


def test_published_qwen3_8b_layout_has_58_tensors():
    """The published tensor list (58 names also in llama.cpp#22105)."""
    config = new_config(
        block_size=16,
        mask_token_id=151669,
        num_target_layers=36,
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rope_theta=1_000_000,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        shapes = {name: list(p.shape) for name, p in DFlash(config).state_dict().items()}
    layer = {
        "input_layernorm": [4096],
        "post_attention_layernorm": [4096],
        "self_attn.q_proj": [4096, 4096],
        "self_attn.k_proj": [1024, 4096],
        "self_attn.v_proj": [1024, 4096],
        "self_attn.o_proj": [4096, 4096],
        "self_attn.q_norm": [128],
        "self_attn.k_norm": [128],
        "mlp.gate_proj": [12288, 4096],
        "mlp.up_proj": [12288, 4096],
        "mlp.down_proj": [4096, 12288],
    }
    expected = {"fc.weight": [4096, 20480], "hidden_norm.weight": [4096], "norm.weight": [4096]}
    expected |= {f"layers.{i}.{name}.weight": shape for i in range(5) for name, shape in layer.items()}
    assert shapes == expected and len(shapes) == 58


# --- files ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of a published folder."""
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / "dflash" / "trained_b8" / "draft" / name, tmp_path / name)
    return tmp_path


def fails(folder: Path, *words: str) -> None:
    with pytest.raises(InvalidArtifact) as caught:
        DFlash.load(folder)
    assert str(folder) in str(caught.value)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_save_writes_back_what_was_loaded(folder, tmp_path):
    DFlash.load(folder).save(tmp_path / "copy")
    assert (tmp_path / "copy" / "config.json").read_text().split() == (folder / "config.json").read_text().split()
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "copy"))
    assert tensors_hash(before) == tensors_hash(after)
    assert sorted(p.name for p in (tmp_path / "copy").iterdir()) == ["config.json", "model.safetensors"]
    half = DFlash.load(folder, dtype=torch.bfloat16)
    half.save(tmp_path / "half")
    again = DFlash.load(tmp_path / "half")
    assert again.dtype == torch.bfloat16 and again.config.to_dict() == published("trained_b8") | {"dtype": "bfloat16"}
    assert torch.equal(again.fc.weight, half.fc.weight)
    assert again.rotary.frequencies.dtype == torch.float32
    assert not any(p.requires_grad for p in again.parameters())


def test_saved_files_find_a_flipped_bit(folder, tmp_path):
    """xet-core#604: right size, wrong bytes. A published file carries no hash; ours do."""
    DFlash.load(folder).save(tmp_path / "copy")
    path = tmp_path / "copy" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    fails(tmp_path / "copy", "model.safetensors", "not those that were written")


@pytest.mark.parametrize("cut", [0, 7, 8, 200, -1])
def test_truncated_weights_are_one_error_type(folder, cut):
    """huggingface_hub#4306, safetensors#668."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut] if cut else b"")
    fails(folder, "model.safetensors")


def test_damaged_weights_are_one_error_type(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0")
    fails(folder, "model.safetensors", "1 bytes follow")
    for place in (3, 9, 40, 300):  # the header's length and text
        data = bytearray(whole)
        data[place] ^= 0x10
        path.write_bytes(data)
        fails(folder, "model.safetensors")
    path.unlink()
    fails(folder, "model.safetensors", "no such file")
    path.mkdir()
    fails(folder, "model.safetensors")


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


NAME = "layers.1.self_attn.k_norm.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(NAME), "missing"),
        (lambda t: t.update({NAME: torch.ones(15)}), "expected (16,)"),
        (lambda t: t.update({NAME: torch.ones(16, dtype=torch.float16)}), "float16"),
        (lambda t: t.update({NAME: torch.full((16,), float("nan"))}), "non-finite"),
        (lambda t: t.update({f"{NAME}s": t[NAME].clone()}), "unknown"),
        (lambda t: t.update({NAME.replace("weight", "bias"): t[NAME].clone()}), "unknown"),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder, change, words):
    rewrite(folder, change)
    fails(folder, "model.safetensors", NAME.removesuffix("weight"), words)


def test_stored_embeddings_are_refused(folder):
    """DeepSpec's dflash_*_block7 stores them and reads slot 0 as a prediction; SpecForge#140 overwrote a tied head."""
    rewrite(folder, lambda t: t.update({"embed_tokens.weight": torch.zeros(128, 64)}))
    fails(folder, "model.safetensors", "embed_tokens.weight", "slot")


def test_swapped_files_are_refused(folder):
    other = GOLDEN / "dflash" / "random_b16" / "draft"
    shutil.copyfile(other / "model.safetensors", folder / "model.safetensors")
    fails(folder, "fc.weight", "layers.4.mlp.up_proj.weight")
    shutil.copyfile(GOLDEN / "targets" / "trained_tied" / "model.safetensors", folder / "model.safetensors")
    fails(folder, "model.embed_tokens.weight")
    shutil.copyfile(GOLDEN / "targets" / "trained_tied" / "config.json", folder / "config.json")
    fails(folder, "config.json", "architectures")
    (folder / "config.json").write_text("{]")
    fails(folder, "config.json", "JSON")
    (folder / "config.json").unlink()
    fails(folder, "config.json", "no such file")


def test_biases_follow_the_config(folder):
    """strix-llama.cpp#61: attention_bias needs its tensors, and without it they are unknown."""
    config = published("trained_b8") | {"attention_bias": True}
    (folder / "config.json").write_text(json.dumps(config))
    fails(folder, "layers.0.self_attn.q_proj.bias", "missing")


def test_pickles_are_never_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    fails(folder, "pytorch_model.bin", "repairzoo convert")


def test_shards_equal_one_file_and_a_missing_one_is_named(folder):
    """DeepSpec PR #11."""
    whole = DFlash.load(folder).state_dict()
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    places = {name: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, name in enumerate(names)}
    for shard in set(places.values()):
        save_file({n: whole[n].clone() for n in names if places[n] == shard}, folder / shard, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert tensors_hash(DFlash.load(folder).state_dict()) == tensors_hash(whole)
    with pytest.raises(InvalidInput, match="index"):
        DFlash.load(folder).save(folder)

    (folder / "model-00002-of-00003.safetensors").rename(folder / "away")
    fails(folder, "model-00002-of-00003.safetensors", "no such file")
    (folder / "away").rename(folder / "model-00002-of-00003.safetensors")
    lacking = {n: s for n, s in places.items() if n != names[4]}
    index.write_text(json.dumps({"weight_map": lacking}))
    fails(folder, names[4], "not listed")
    index.write_text(json.dumps({"weight_map": places | {"more": "model-00001-of-00003.safetensors"}}))
    fails(folder, "more", "not there")
    index.write_text(json.dumps({"weight_map": {**places, names[0]: "../model.safetensors"}}))
    fails(folder, "plain file name")
    index.write_text(json.dumps({"weight_map": places}))
    save_file(whole, folder / "model.safetensors")
    fails(folder, "both")


def test_bind_refuses_other_targets(folder):
    """vllm#48113 (hidden size), Model-Optimizer#1621 (trimmed embedding), vllm#5203 (vocabulary)."""
    backbone = DFlash.load(folder)
    with pytest.raises(InvalidInput, match="bind"):
        run(backbone, torch.zeros(3, 192), 1)
    table = torch.zeros(128, 64)
    for embedding, head, layers, word in (
        (torch.zeros(128, 32), table, 8, "hidden_size"),
        (table, torch.zeros(128, 32), 8, "hidden_size"),
        (torch.zeros(126, 64), torch.zeros(126, 64), 8, "mask_token_id"),
        (torch.zeros(256, 64), table, 8, "vocabulary"),
        (table, torch.zeros(256, 64), 8, "vocabulary"),
        (table, table, 5, "layers"),
        (table[0], table, 8, "matrices"),
    ):
        with pytest.raises(IncompatibleArtifact, match=word):
            backbone.bind(embedding, head, num_layers=layers)
    # a head over the real vocabulary, shorter than the padded embedding
    backbone.bind(table, torch.zeros(120, 64), num_layers=8)
    assert run(backbone, torch.zeros(3, 192), 1).logits.shape == (1, 7, 120)
