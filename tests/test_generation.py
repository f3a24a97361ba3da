"""What ends a run and what shapes it: end-of-text, budgets, stop strings, streams, processors, transformers."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB, Bigram, dflash, greedy, heads_for, knowing, letters, noisy, prompts, toy, utf8_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
    TopKLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

import repairzoo
from repairzoo.errors import InvalidInput
from repairzoo.generation import TextTrack
from repairzoo.target import Target

B = 4  # slots of the perfect drafts below
PROMPT = prompts(11, [5])[0]


def perfect(prompt=PROMPT, new=3 * B, tree=None, target=None, **options):
    """A zoo whose draft is the target's own greedy answer, and that answer."""
    target = target or toy()
    answer = repairzoo.autoregressive(target, prompt, max_new_tokens=new, eos_token_id=[], **options).token_ids[0]
    return repairzoo.build(knowing([prompt + answer], B, target.vocab_size), None, target, tree=tree), answer


# --- end-of-text and budgets -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("tree", [None, 7])
@pytest.mark.parametrize("place", range(B + 3))
def test_end_of_text_at_every_place_of_a_block(place, tree):
    """transformers#47912, litgpt#2307: place 0 is the token from the prompt, B + 1 the first round's bonus."""
    zoo, answer = perfect(tree=tree)
    eos = answer[place]
    first = answer.index(eos)
    out = zoo.generate(PROMPT, max_new_tokens=3 * B, eos_token_id=[eos, VOCAB - 1 if eos != VOCAB - 1 else 0])
    end = min(first, *(answer.index(e) for e in [VOCAB - 1 if eos != VOCAB - 1 else 0] if e in answer), 99)
    assert out.token_ids == [answer[: end + 1]] and out.finish_reason == ["stop"]
    assert sum(out.stats.accepted[0]) == end
    assert greedy(zoo.target.model, PROMPT, 3 * B, eos_token_id=eos) == answer[: first + 1]


def test_end_of_text_of_the_model_is_the_default():
    target, answer = toy(), perfect()[1]
    generation = target.model.generation_config
    try:
        generation.eos_token_id = [answer[3], VOCAB - 1]
        out = perfect()[0].generate(PROMPT, max_new_tokens=9)
        assert out.token_ids[0] == answer[: answer.index(answer[3]) + 1]
        assert len(perfect()[0].generate(PROMPT, max_new_tokens=9, eos_token_id=[]).token_ids[0]) == 9
    finally:
        generation.eos_token_id = None


@pytest.mark.parametrize("tree", [None, 7])
@pytest.mark.parametrize("new", [0, 1, 2, B, B + 1, B + 2, 2 * B + 1, 2 * B + 2])
def test_budget_is_exact(new, tree):
    """transformers#28555, lattice#242."""
    zoo, answer = perfect(tree=tree)
    out = zoo.generate(PROMPT, max_new_tokens=new)
    assert out.token_ids == [answer[:new]] and out.finish_reason == ["length"]
    assert sum(out.stats.accepted[0]) == max(0, new - 1)
    assert repairzoo.autoregressive(zoo.target, PROMPT, max_new_tokens=new).token_ids == out.token_ids


@pytest.mark.parametrize("new", [1, 2, B, B + 1, B + 2])
def test_stop_wins_at_the_last_allowed_token(new):
    """sglang#31599: the earliest event names the reason; at the same token it is stop."""
    zoo, answer = perfect()
    eos = answer[new - 1]
    if eos not in answer[: new - 1]:
        assert zoo.generate(PROMPT, max_new_tokens=new, eos_token_id=eos).finish_reason == ["stop"]
    late = next(i for i in range(new, len(answer)) if answer[i] not in answer[:new])
    assert zoo.generate(PROMPT, max_new_tokens=new, eos_token_id=answer[late]).finish_reason == ["length"]


def test_rows_end_each_for_their_own_reason():
    """transformers#32189: a row that has ended neither grows nor disturbs the others."""
    target, rows = toy(), prompts(12, [5, 3, 7])
    answers = repairzoo.autoregressive(target, rows, max_new_tokens=11).token_ids
    eos = answers[0][2]
    expected = [a[: a.index(eos) + 1] if eos in a else a for a in answers]
    known = [p + a for p, a in zip(rows, answers, strict=True)]
    for tree in (None, 5):
        out = repairzoo.build(knowing(known, 3), None, target, tree=tree).generate(
            rows, max_new_tokens=11, eos_token_id=eos
        )
        assert out.token_ids == expected
        assert out.finish_reason == ["stop" if a[-1] == eos else "length" for a in expected]
        assert [1 + sum(a) for a in out.stats.accepted] == [len(a) for a in expected]
    assert len({len(a) for a in expected}) > 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 1.5}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 2.0}, "min_p"),
        ({"eos_token_id": VOCAB}, "eos_token_id"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"eos_token_id": [None]}, "eos_token_id"),
        ({"eos_token_id": "12"}, "eos_token_id"),  # not the ids 1 and 2
        ({"eos_token_id": [1.5]}, "eos_token_id"),
        ({"eos_token_id": True}, "eos_token_id"),
        ({"logits_processor": lambda ids, scores: scores}, "logits_processor.*list"),
        ({"logits_processor": [3]}, "logits_processor"),
        ({"stopping_criteria": lambda ids, scores: True}, "stopping_criteria.*list"),
        ({"stopping_criteria": 3}, "stopping_criteria"),
        ({"stop": "x"}, "tokenizer"),
        ({"stop": ""}, "stop"),
        ({"stop": 3}, "stop"),
        ({"seed": [1, 2]}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**63}, "64 bits"),
        ({"max_new_token": 5}, "unknown option of generate 'max_new_token': did you mean 'max_new_tokens'"),
        ({"logits_processor": [UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, None)]}, "Guidance.*state"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(InvalidInput, match=words):
        repairzoo.build(noisy(0, 3), None, toy()).generate(PROMPT, **options)
    with pytest.raises(InvalidInput, match=words):
        repairzoo.autoregressive(toy(), PROMPT, **options)


def test_sizes_that_no_run_has_are_refused():
    zoo = repairzoo.build(noisy(0, 3), None, toy())
    for sizes, words in (((0, 8), "rows=0"), ((1, 0), "positions=0"), ((1.5, 8), "rows=1.5"), ((True, 8), "rows=True")):
        for ask in (zoo.memory, zoo.warm_up):
            with pytest.raises(InvalidInput, match=words):
                ask(*sizes)


def test_a_backbone_may_tap_nothing():
    from conftest import Scripted

    backbone = noisy(0, 3)
    target = toy()
    zoo = repairzoo.build(Scripted(3, backbone.logits, ()), None, target, tree=4)
    assert zoo.generate(PROMPT, max_new_tokens=6).token_ids[0] == greedy(target.model, PROMPT, 6)


# --- text ------------------------------------------------------------------------------------------------------------
def with_text(tokenizer=None, vocab: int = VOCAB) -> Target:
    return Target(toy(vocab=vocab).model, tokenizer or letters(), name="toy")


@given(seed=st.integers(0, 2**31), at=st.integers(0, 10), length=st.integers(1, 4), wrong=st.sampled_from([0.0, 0.4]))
@settings(deadline=None, max_examples=15)
def test_stop_strings_wherever_they_fall(seed, at, length, wrong):
    """transformers#48039, sglang#23802, vllm#47616: across slots and rounds; ids end with the match, text before it."""
    target, new = with_text(), 12
    ids = prompts(seed, [4])[0]
    options = {"temperature": 1.0, "seed": seed, "max_new_tokens": new}
    plain = repairzoo.autoregressive(target, ids, **options)
    text, answer = plain.text[0], plain.token_ids[0]
    stop = text[at : at + length]
    zoo = repairzoo.build(knowing([ids + answer], B, wrong=wrong, seed=seed), None, target)
    out = zoo.generate(ids, stop=["never at all", stop], **options)
    begin = text.find(stop)
    assert out.text == [text[:begin]] and out.token_ids == [answer[: begin + len(stop)]]
    assert out.finish_reason == ["stop"]
    assert sum(out.stats.accepted[0]) == len(out.token_ids[0]) - 1
    given_pieces = list(zoo.stream(ids, stop=stop, **options))
    assert "".join(given_pieces) == out.text[0] and all(given_pieces)
    assert zoo.last.token_ids == out.token_ids
    assert repairzoo.autoregressive(target, ids, stop=stop, **options).text == out.text


def test_stop_string_ends_one_row_of_a_batch():
    """Its device length is then ahead of what counts, and must not disturb the rest."""
    target, rows = with_text(), prompts(3, [4, 6])
    plain = repairzoo.autoregressive(target, rows, max_new_tokens=14)
    known = [p + a for p, a in zip(rows, plain.token_ids, strict=True)]
    stop = plain.text[0][1:3]
    assert stop not in plain.text[1]
    out = repairzoo.build(knowing(known, B), None, target).generate(rows, max_new_tokens=14, stop=stop)
    assert out.token_ids == [plain.token_ids[0][:3], plain.token_ids[1]]
    assert out.text == [plain.text[0][:1], plain.text[1]] and out.finish_reason == ["stop", "length"]


@given(
    ids=st.lists(st.integers(0, 4), min_size=1, max_size=12), stop=st.sampled_from(["aé", "é", "bü", "ab", "üéa", None])
)
@settings(deadline=None, max_examples=200)
def test_pieces_join_to_the_text_and_nothing_is_retracted(ids, stop):
    """Aryagm/dflash-mlx#1: a character of two tokens, and one that completes a stop string, are held back."""
    track = TextTrack(utf8_bytes(), [stop] if stop else [])
    given_pieces, ended = [], False
    for i, token in enumerate(ids):
        ended = track.push(token)
        given_pieces.append(track.piece(final=ended or i == len(ids) - 1))
        if ended:
            break
    assert "".join(given_pieces) == track.final_text()
    assert not stop or stop not in track.final_text()
    assert ended == bool(stop and stop in utf8_bytes().decode(ids))


@given(ids=st.lists(st.integers(0, 4), min_size=1, max_size=200))
@settings(deadline=None, max_examples=50)
def test_text_is_the_decoding_of_all_tokens_at_the_cost_of_a_short_window(ids):
    """Decoding the whole answer at every token would make long answers quadratic."""
    asked = []

    class Counting:
        def decode(self, ids, **options):
            asked.append(len(ids))
            return utf8_bytes().decode(ids, **options)

    track = TextTrack(Counting(), ["never at all"])
    for token in ids:
        assert not track.push(token)
    assert track.final_text() == utf8_bytes().decode(ids)
    assert max(asked) <= 2 * TextTrack._WINDOW


def test_stream_starts_before_the_end_and_refuses_batches():
    target = with_text()
    zoo = perfect(target=target)[0]
    session = zoo.stream(PROMPT, max_new_tokens=3 * B)
    assert next(session) == zoo.target.tokenizer.decode(greedy(target.model, PROMPT, 1))
    with pytest.raises(InvalidInput, match="one prompt"):
        next(zoo.stream([PROMPT, PROMPT]))
    with pytest.raises(InvalidInput, match="no tokenizer"):
        next(perfect()[0].stream(PROMPT))


def test_transformers_streamer(capsys):
    target = with_text()
    zoo = perfect(target=target)[0]
    out = zoo.generate(PROMPT, max_new_tokens=9, streamer=TextStreamer(target.tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.rstrip("\n") == out.text[0].rstrip("\n")
    with pytest.raises(InvalidInput, match="one prompt"):
        zoo.generate([PROMPT] * 2, streamer=TextStreamer(target.tokenizer))


# --- processors and criteria -----------------------------------------------------------------------------------------
class Presence(LogitsProcessor):
    """Counts tokens; a token counted twice, or once a round, shows (sglang#33643, vllm#33251)."""

    def __call__(self, input_ids, scores):
        return scores - 1.5 * torch.nn.functional.one_hot(input_ids, scores.shape[-1]).sum(1).to(scores)


class EvenAfterOdd(LogitsProcessor):
    """A small grammar."""

    def __call__(self, input_ids, scores):
        wrong = (torch.arange(scores.shape[-1]) + input_ids[:, -1:]) % 2 == 0
        return scores.masked_fill(wrong, float("-inf"))


PROCESSORS = {
    "repetition": lambda: [RepetitionPenaltyLogitsProcessor(1.5)],
    "ngram": lambda: [NoRepeatNGramLogitsProcessor(2)],
    "presence": lambda: [Presence()],
    "grammar": lambda: [EvenAfterOdd(), Presence()],
    "min length": lambda: [MinLengthLogitsProcessor(11, list(range(0, VOCAB, 3)))],
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("tree", [None, 6])
def test_processors_equal_plain_generate(name, tree):
    """sglang#28180, TRT-LLM#17701, transformers#48390: every slot with its own history."""
    target, processors = toy(), PROCESSORS[name]()
    eos = list(range(0, VOCAB, 3)) if name == "min length" else []
    expected = [
        greedy(target.model, row, 9, logits_processor=processors, eos_token_id=eos or None)
        for row in (PROMPT, PROMPT[:2])
    ]
    if name != "min length":
        assert expected[0] != greedy(target.model, PROMPT, 9)
    known = [p + e for p, e in zip((PROMPT, PROMPT[:2]), expected, strict=True)]
    options = {"max_new_tokens": 9, "logits_processor": processors, "eos_token_id": eos}
    assert repairzoo.autoregressive(target, [PROMPT, PROMPT[:2]], **options).token_ids == expected
    for wrong in (0.0, 0.5):
        zoo = repairzoo.build(knowing(known, B, wrong=wrong, seed=3), None, target, tree=tree)
        out = zoo.generate([PROMPT, PROMPT[:2]], **options)
        assert out.token_ids == expected
        if wrong == 0.0 and name != "min length":
            assert out.stats.accepted[0][0] > 1  # atlas#132: the verified law is the one that was drafted for


def test_processors_above_temperature_zero():
    options = {"logits_processor": [Presence()], "temperature": 1.0, "seed": 4, "max_new_tokens": 10}
    expected = repairzoo.autoregressive(toy(), PROMPT, **options).token_ids
    zoo = repairzoo.build(knowing([PROMPT + expected[0]], B), Bigram(0), toy(), tree=5)
    assert zoo.generate(PROMPT, **options).token_ids == expected
    del options["logits_processor"]
    assert repairzoo.autoregressive(toy(), PROMPT, **options).token_ids != expected


class Script(LogitsProcessor):
    """Allows exactly one continuation, and knows nothing after any other text."""

    def __init__(self, prompt, answer):
        self.text = prompt + answer

    def __call__(self, input_ids, scores):
        ids = input_ids[0].tolist()
        out = torch.full_like(scores, float("-inf"))
        if self.text[: len(ids)] == ids and len(ids) < len(self.text):
            out[:, self.text[len(ids)]] = 0.0
        return out


@pytest.mark.parametrize("tree", [None, 6])
def test_a_processor_is_not_asked_behind_tokens_that_it_forbids(tree):
    """Draft tokens that a grammar excludes have no continuation in it: that is no error."""
    answer = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    options = {"logits_processor": [Script(PROMPT, answer)], "eos_token_id": [], "max_new_tokens": len(answer)}
    for known in (PROMPT + answer, PROMPT + [7] * 20, PROMPT + answer[:4] + [8] * 20):
        zoo = repairzoo.build(knowing([known], B), Bigram(0) if tree else None, toy(), tree=tree)
        assert zoo.generate(PROMPT, **options).token_ids == [answer]
    with pytest.raises(InvalidInput, match="Script left no token that is allowed after"):
        zoo.generate(PROMPT, **(options | {"max_new_tokens": len(answer) + 2}))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda ids, scores: scores[:, :-1], "returned"),
        (lambda ids, scores: None, "NoneType"),
        (lambda ids, scores: scores * float("nan"), "NaN"),
        (lambda ids, scores: scores - float("inf"), "no token"),
    ],
)
def test_processors_that_return_no_scores_are_named(broken, message):
    zoo, _ = perfect()
    for run in (zoo.generate, lambda *a, **k: repairzoo.autoregressive(zoo.target, *a, **k)):
        with pytest.raises(InvalidInput, match=f"logits processor function.*{message}"):
            run(PROMPT, max_new_tokens=4, logits_processor=[broken])


@pytest.mark.parametrize("at", range(6, 6 + B + 3))
def test_stopping_criteria_inside_a_block(at):
    zoo, answer = perfect()

    class Long(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= at)

    out = zoo.generate(PROMPT, max_new_tokens=3 * B, stopping_criteria=StoppingCriteriaList([Long()]))
    assert out.token_ids == [answer[: at - len(PROMPT)]] and out.finish_reason == ["stop"]
    assert greedy(zoo.target.model, PROMPT, 3 * B, stopping_criteria=StoppingCriteriaList([Long()])) == out.token_ids[0]


# --- model.generate --------------------------------------------------------------------------------------------------
def batch(seed: int, lengths: list[int]) -> dict[str, torch.Tensor]:
    """Left-padded."""
    width, rows = max(lengths), prompts(seed, lengths)
    return {
        "input_ids": torch.tensor([[0] * (width - len(r)) + r for r in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows]),
    }


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 9},
        {"max_new_tokens": 1},
        {"max_length": 12},
        {"max_new_tokens": 9, "eos_token_id": [3, 8, 20]},
        {"max_new_tokens": 9, "eos_token_id": list(range(0, VOCAB, 2)), "min_new_tokens": 4},
        {"max_new_tokens": 9, "eos_token_id": list(range(0, VOCAB, 2)), "min_length": 9},
        {"max_new_tokens": 9, "repetition_penalty": 1.6},
        {"max_new_tokens": 9, "no_repeat_ngram_size": 2},
        {"max_new_tokens": 9, "suppress_tokens": list(range(0, 20))},
        {"max_new_tokens": 9, "logits_processor": [Presence()], "renormalize_logits": True},
        {"max_new_tokens": 9, "stopping_criteria": [MaxLengthCriteria(10)]},
        {"max_new_tokens": 9, "logits_processor": [TopKLogitsWarper(3)]},
        {"max_new_tokens": 9, "use_cache": False},
    ],
    ids=lambda o: "-".join(o),
)
def test_custom_generate_equals_generate(options):
    target = toy()
    zoo = repairzoo.build(dflash(target, 1), heads_for(target, "dels"), target, tree=5)
    inputs = batch(7, [6, 3, 1])
    settings_ = {"pad_token_id": 0, "do_sample": False} | options
    expected = target.model.generate(**inputs, **settings_)
    assert torch.equal(target.model.generate(**inputs, **settings_, custom_generate=zoo.custom_generate), expected)
    single = {"input_ids": inputs["input_ids"][:1]}
    expected = target.model.generate(**single, **settings_)
    assert torch.equal(target.model.generate(**single, **settings_, custom_generate=zoo.custom_generate), expected)


def test_custom_generate_samples_the_callers_law():
    """A caller's own warper stays (sglang#28180), those that transformers appends are the law's."""
    target = toy()
    zoo = repairzoo.build(noisy(1, 3), None, target)
    inputs = batch(7, [4, 2])
    options = {"do_sample": True, "max_new_tokens": 6, "pad_token_id": 0, "custom_generate": zoo.custom_generate}
    certain = target.model.generate(**inputs, do_sample=False, max_new_tokens=6, pad_token_id=0)
    for top in ({"logits_processor": [TopKLogitsWarper(1)], "top_k": 0, "top_p": 0.9}, {"top_k": 1}):
        assert torch.equal(target.model.generate(**inputs, **options, **top), certain)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(target.model.generate(**inputs, **options, top_k=0, temperature=2.0).tolist())
    assert runs[0] == runs[1] != runs[2]


def test_custom_generate_puts_the_answer_and_not_the_prompt(capsys):
    """transformers puts the prompt itself before it hands over; 5.24 then forgets to hand the streamer over."""
    target = with_text()
    zoo = repairzoo.build(noisy(1, 3), None, target)
    config = GenerationConfig(max_length=len(PROMPT) + 6, do_sample=False)
    streamer = TextStreamer(target.tokenizer)
    out = zoo.custom_generate(target.model, torch.tensor([PROMPT]), generation_config=config, streamer=streamer)
    assert capsys.readouterr().out.rstrip("\n") == target.tokenizer.decode(out[0, len(PROMPT) :])
    assert zoo.last.token_ids[0] == out[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences"),
        ({"return_dict_in_generate": True}, "return_dict"),
        ({"typical_p": 0.5, "do_sample": True}, "typical_p"),
        ({"position_ids": torch.tensor([[3, 4, 5, 6, 7]])}, "position_ids"),
        ({"attention_mask": torch.tensor([[1, 0, 0, 1, 1]])}, "hole"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [row]}, "Prefix.*one by one"),
    ],
)
def test_custom_generate_refuses_what_it_would_not_honour(options, words):
    target = toy()
    zoo = repairzoo.build(noisy(1, 3), None, target)
    ids = torch.tensor([PROMPT, PROMPT] if "prefix_allowed_tokens_fn" in options else [PROMPT])
    with pytest.raises(InvalidInput, match=words):
        target.model.generate(ids, max_new_tokens=4, pad_token_id=0, custom_generate=zoo.custom_generate, **options)


def test_custom_generate_refuses_another_model():
    zoo = repairzoo.build(noisy(1, 3), None, toy())
    with pytest.raises(InvalidInput, match="built with"):
        toy(seed=1).model.generate(torch.tensor([PROMPT]), max_new_tokens=4, custom_generate=zoo.custom_generate)
