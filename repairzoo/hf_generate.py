"""``model.generate(..., custom_generate=zoo.custom_generate)``: the options that transformers prepared, in our
terms."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from repairzoo.errors import InvalidInput
from repairzoo.generation import PerRow, finish, make_request, speculate, streamed
from repairzoo.inputs import prompt_ids

if TYPE_CHECKING:
    from repairzoo.zoo import Zoo

# what transformers prepares for its own forward passes and ours do without
_PREPARED = {"use_cache", "logits_to_keep", "cache_position", "tokenizer", "past_key_values", "cache", "position_ids"}


def custom_generate(
    zoo: Zoo,
    model: Any,
    input_ids: Tensor,
    *,
    generation_config: Any,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    streamer: Any = None,
    attention_mask: Tensor | None = None,
    synced_gpus: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Prompt and answer of every row, ``LongTensor [B, T]``, padded on the right like transformers' own result.

    Raises:
        InvalidInput: another model than the zoo's target, or an option that speculative decoding cannot honour.
    """
    if model is not zoo.target.model:
        raise InvalidInput(
            "custom_generate runs the model that the zoo was built with: call generate on zoo.target.model"
        )
    config = generation_config
    for name, neutral in (
        ("num_beams", (None, 1)),
        ("num_return_sequences", (None, 1)),
        ("return_dict_in_generate", (None, False)),
        ("typical_p", (None, 1.0)),
        ("epsilon_cutoff", (None, 0.0)),
        ("eta_cutoff", (None, 0.0)),
        ("top_h", (None,)),
        ("watermarking_config", (None,)),
    ):
        if getattr(config, name, None) not in neutral:
            raise InvalidInput(f"{name}={getattr(config, name)!r} is not supported with custom_generate")
    prompts = prompt_ids(zoo.target, input_ids, attention_mask)
    _refuse_unread(input_ids, attention_mask, kwargs)
    sample = bool(config.do_sample)
    width, criteria = input_ids.shape[1], list(stopping_criteria or ())
    # these two say what the loop does anyway; a caller may have given further ones
    own = {"MaxLengthCriteria": [int(config.max_length)], "EosTokenCriteria": _ids(config.eos_token_id)}
    for criterion in criteria:
        if type(criterion).__name__ == "MaxLengthCriteria":
            own["MaxLengthCriteria"].append(int(criterion.max_length))
        elif type(criterion).__name__ == "EosTokenCriteria":
            own["EosTokenCriteria"] += _ids(criterion.eos_token_id)
    eos = sorted(set(own["EosTokenCriteria"]))
    request = make_request(
        zoo.target,
        prompts,
        max_new_tokens=max(0, min(own["MaxLengthCriteria"]) - width),
        temperature=float(config.temperature if config.temperature is not None else 1.0) if sample else 0.0,
        top_k=(config.top_k or None) if sample else None,
        top_p=config.top_p if sample else None,
        min_p=config.min_p if sample else None,
        seed=int(torch.randint(0, 2**62, ())),  # follows torch.manual_seed, as transformers' sampling does
        eos_token_id=eos,
        logits_processor=_processors(list(logits_processor or ()), config, sample),
        stopping_criteria=[c for c in criteria if type(c).__name__ not in own],
    )
    # transformers' processors count and see the padding on the left, and were made for that width
    kept = attention_mask if attention_mask is not None else torch.ones_like(input_ids)
    first = kept.bool().to(torch.uint8).argmax(1).tolist()
    request = replace(request, before=tuple(row[:n] for row, n in zip(input_ids.tolist(), first, strict=True)))
    runs = speculate(zoo.engine(request), request, zoo.graphs)
    # transformers has put the prompt already (5.x hands no streamer over at all)
    out = finish(runs) if streamer is None else streamed(runs, request, streamer, prompt=False)
    zoo.last = out
    pad = config.pad_token_id if config.pad_token_id is not None else (eos[0] if eos else 0)
    longest = max(len(row) for row in out.token_ids)
    answers = torch.full((len(out.token_ids), longest), int(pad), dtype=input_ids.dtype, device=input_ids.device)
    for index, row in enumerate(out.token_ids):
        answers[index, : len(row)] = torch.tensor(row, device=input_ids.device)
    return torch.cat([input_ids, answers], 1)


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(value)] if isinstance(value, int) else [int(e) for e in value]


def _processors(processors: list[Any], config: Any, sample: bool) -> list[Any]:
    """All but the warpers that transformers appended for its settings, which ``Law`` does; a caller's own stay."""
    appended = [
        name
        for name, on in (
            ("TemperatureLogitsWarper", config.temperature not in (None, 1.0)),
            ("TopKLogitsWarper", config.top_k not in (None, 0)),
            ("TopPLogitsWarper", config.top_p is not None and config.top_p < 1.0),
            ("MinPLogitsWarper", config.min_p is not None),
        )
        if on and sample
    ]
    processors = [_by_row(p) for p in processors]
    while processors:
        name = type(processors[-1]).__name__
        if appended and name == appended[-1]:
            appended.pop()
        elif name != "LogitNormalization":  # which changes no law
            break
        processors = processors[:-1]
    return processors


def _by_row(processor: Any) -> Any:
    """transformers tells a repetition penalty how much padding each row has."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, Tensor):
        return processor
    rows = []
    for length in ignored.tolist():
        rows.append(copy(processor))
        rows[-1].prompt_ignore_length = int(length)
    return PerRow(tuple(rows))


def _refuse_unread(input_ids: Tensor, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Refuse model inputs that this loop would not read."""
    for cache in (kwargs.get("past_key_values"), kwargs.get("cache")):  # its name differs between versions
        if cache is None or cache.get_seq_length() == 0:
            continue
        raise InvalidInput("past_key_values: a cache with content cannot be continued; give the whole text")
    positions = kwargs.get("position_ids")
    if positions is not None:
        kept = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        if not torch.equal(positions * kept, (kept.cumsum(-1) - 1) * kept):
            raise InvalidInput("position_ids: only positions that count the tokens of a prompt from 0 are supported")
    unread = [
        name for name, value in kwargs.items() if name not in _PREPARED and value is not None and value is not False
    ]
    if unread:
        raise InvalidInput(f"{unread[0]} is not supported with custom_generate: the zoo's loop would not read it")
