"""Prompts in all their forms, and what is refused."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB, letters, noisy, prompts, toy

import repairzoo
from repairzoo.errors import InvalidInput
from repairzoo.inputs import prompt_ids
from repairzoo.target import Target


def reader(chat: bool = False) -> Target:
    base = toy()
    tokenizer = letters()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}.{{ m.content }}!{% endfor %}a." if chat else None
    return Target(base.model, tokenizer, name="toy")


ROW, OTHER = prompts(0, [4, 4])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (ROW, [ROW]),
        (tuple(ROW), [ROW]),
        ([ROW], [ROW]),
        ([ROW, OTHER[:2]], [ROW, OTHER[:2]]),
        (torch.tensor(ROW), [ROW]),
        (torch.tensor([ROW, OTHER]), [ROW, OTHER]),
        (torch.tensor([ROW], dtype=torch.int32), [ROW]),
        ({"input_ids": torch.tensor([ROW])}, [ROW]),
        ({"input_ids": [ROW, OTHER[:2]], "attention_mask": [[1] * 4, [1] * 2]}, [ROW, OTHER[:2]]),
        ({"input_ids": ROW, "attention_mask": [1] * 4}, [ROW]),
    ],
)
def test_forms_of_token_ids(given, expected):
    assert prompt_ids(toy(), given) == expected


def test_forms_of_text():
    plain, chatting = reader(), reader(True)
    ids = [7, 8]
    assert letters()("hi")["input_ids"] == ids
    assert prompt_ids(chatting, "hi", chat=False) == [ids] == prompt_ids(chatting, ["hi"], chat=False)
    wrapped = letters()("u.hi!a.")["input_ids"]
    turn = [{"role": "user", "content": "hi"}]
    assert prompt_ids(chatting, "hi") == [wrapped] == prompt_ids(chatting, turn) == prompt_ids(chatting, [turn])
    assert prompt_ids(chatting, [turn, "hi", ids]) == [wrapped, wrapped, ids]
    encoded = letters()(["hi", "hello"], padding=False)
    assert prompt_ids(plain, encoded) == [ids, letters()("hello")["input_ids"]]
    plain.tokenizer.chat_template = None
    assert prompt_ids(plain, "hi") == [ids]
    with pytest.raises(InvalidInput, match="no chat template"):
        prompt_ids(plain, "hi", chat=True)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side):
    """transformers#46773, TransformerLens#1005: a padded prompt, alone or in a batch, reads as the bare one."""
    zoo = repairzoo.build(noisy(0, 3), None, toy())
    bare = zoo.generate([ROW, OTHER], max_new_tokens=6).token_ids
    pad, keep = [9] * 3, [0] * 3
    ids = torch.tensor([pad + ROW if side == "left" else ROW + pad, OTHER[:2] + OTHER[2:] + pad])
    mask = torch.tensor([keep + [1] * 4 if side == "left" else [1] * 4 + keep, [1] * 4 + keep])
    assert zoo.generate(ids, attention_mask=mask, max_new_tokens=6).token_ids == bare
    assert zoo.generate(ids[:1], attention_mask=mask[:1], max_new_tokens=6).token_ids == bare[:1]
    both = {"input_ids": ids[0], "attention_mask": mask[0]}
    assert zoo.generate(both, max_new_tokens=6).token_ids == bare[:1]
    assert repairzoo.autoregressive(toy(), both, max_new_tokens=6).token_ids == bare[:1]


@pytest.mark.parametrize("mask", [[1, 0, 1, 1], [1, 0, 0, 1], [0, 1, 0, 1], [1, 1, 0, 1]])
def test_holes_of_any_width_are_refused(mask):
    with pytest.raises(InvalidInput, match="hole"):
        prompt_ids(toy(), torch.tensor([ROW]), torch.tensor([mask]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "prompt"),
        ([[]], "empty"),
        (torch.zeros(0, dtype=torch.int64), "empty"),
        (torch.zeros(0, 3, dtype=torch.int64), "no prompt"),
        (torch.zeros(1, 0, dtype=torch.int64), "empty"),
        ([ROW, []], "prompt 1 is empty"),
        ([VOCAB], f"{VOCAB}.*0 to {VOCAB - 1}"),
        ([3, -1], "-1"),
        (torch.tensor([ROW, [0, 1, 2, VOCAB]]), "prompt 1"),
        (torch.tensor([1.0]), "float32"),
        (torch.zeros(1, 1, 1, dtype=torch.int64), "shape"),
        ([True, False], "bool"),
        ([1.5], "float"),
        (None, "NoneType"),
        (3, "int"),
        ("text", "no tokenizer"),
        ([{"role": "user", "content": "x"}], "no tokenizer"),
        ({"role": "user", "content": "x"}, "input_ids"),
        ([0] * 128, "128"),
    ],
)
def test_bad_prompts_are_named(given, words):
    for run in (repairzoo.build(noisy(0, 3), None, toy()).generate, lambda x: repairzoo.autoregressive(toy(), x)):
        with pytest.raises(InvalidInput, match=words):
            run(given)


def test_mask_must_fit():
    with pytest.raises(InvalidInput, match="shape"):
        prompt_ids(toy(), torch.tensor([ROW]), torch.ones(1, 3))
    with pytest.raises(InvalidInput, match="empty"):
        prompt_ids(toy(), torch.tensor([ROW]), torch.zeros(1, 4))
    with pytest.raises(InvalidInput, match="attention_mask"):
        prompt_ids(toy(), "text", torch.ones(1, 4))
    with pytest.raises(InvalidInput, match="tensor"):
        prompt_ids(toy(), torch.tensor([ROW]), [[1] * 4])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chat", "given", "words"),
    [
        (True, [{"role": "user"}], r"\['role'\].*content"),
        (True, [{"role": "user", "content": "x"}, {"foo": 1}], "foo"),
        (True, [{"role": "bot", "content": "x"}], "refuses.*no bots"),
        (False, [{"role": "user", "content": "x"}], "no chat template"),
        (False, "\ud800", "Unicode"),
        (True, "\ud800", "Unicode"),
    ],
)
def test_bad_text_is_named(chat, given, words):
    target = reader(chat)
    if chat:
        target.tokenizer.chat_template = (
            "{% for m in messages %}{% if m.role == 'bot' %}{{ raise_exception('no bots') }}{% endif %}"
            "{{ m.content }}{% endfor %}"
        )
    with pytest.raises(InvalidInput, match=words):
        prompt_ids(target, given)


@pytest.mark.parametrize("length", [127, 126, 124])
def test_context_ends_the_run(length):
    """vllm#16087, #5342: the last block may hang over the end of the context; tokens may not."""
    prompt = prompts(1, [length])[0]
    zoo = repairzoo.build(noisy(0, 6), None, toy(), tree=9)
    out = zoo.generate([prompt, prompt[:3]], max_new_tokens=8)
    assert [len(t) for t in out.token_ids] == [128 - length, 8] and out.finish_reason == ["length"] * 2
    assert out.token_ids == repairzoo.autoregressive(toy(), [prompt, prompt[:3]], max_new_tokens=8).token_ids
