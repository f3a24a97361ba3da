"""``model.generate(..., custom_generate=zoo.custom_generate)``: the options that transformers prepared, in our
terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from repairzoo.errors import InvalidInput

if TYPE_CHECKING:
    from repairzoo.build import Zoo

# what Law does itself, by transformers' class names
_WARPERS = {"TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper"}
_OWN_CRITERIA = {"MaxLengthCriteria", "EosTokenCriteria"}


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
    ):
        if getattr(config, name, None) not in neutral:
            raise InvalidInput(f"{name}={getattr(config, name)!r} is not supported with custom_generate")
    sample = bool(config.do_sample)
    eos = config.eos_token_id
    eos = [] if eos is None else ([eos] if isinstance(eos, int) else [int(e) for e in eos])
    out = zoo.generate(
        input_ids,
        attention_mask=attention_mask,
        streamer=streamer,
        max_new_tokens=max(0, int(config.max_length) - input_ids.shape[1]),
        temperature=float(config.temperature if config.temperature is not None else 1.0) if sample else 0.0,
        top_k=(config.top_k or None) if sample else None,
        top_p=config.top_p if sample else None,
        min_p=config.min_p if sample else None,
        seed=int(torch.randint(0, 2**62, ())),  # follows torch.manual_seed, as transformers' sampling does
        eos_token_id=eos,
        logits_processor=[p for p in logits_processor or () if type(p).__name__ not in _WARPERS],
        stopping_criteria=[c for c in stopping_criteria or () if type(c).__name__ not in _OWN_CRITERIA],
    )
    pad = config.pad_token_id if config.pad_token_id is not None else (eos[0] if eos else 0)
    width = max(len(row) for row in out.token_ids)
    answers = torch.full((len(out.token_ids), width), int(pad), dtype=input_ids.dtype, device=input_ids.device)
    for index, row in enumerate(out.token_ids):
        answers[index, : len(row)] = torch.tensor(row, device=input_ids.device)
    return torch.cat([input_ids, answers], 1)
