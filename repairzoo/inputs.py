"""Prompts in every form that users bring -> lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from repairzoo.errors import InvalidInput
from repairzoo.target import Target


def _is_chat(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(m, dict) for m in value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(x, int) and not isinstance(x, bool) for x in value)


def _ones(mask: Any) -> bool:
    """Whether a tokenizer's mask in lists says that nothing is padding."""
    return mask is None or all(_ones(m) if isinstance(m, (list, tuple)) else m == 1 for m in mask)


def prompt_ids(
    target: Target, inputs: Any, attention_mask: Tensor | None = None, chat: bool | None = None
) -> list[list[int]]:
    """Token ids of every row.

    Args:
        inputs: a string, strings, chat messages, several chats, ids ``LongTensor [T]`` or ``[B, T]``, or lists of ids.
        attention_mask: ``[B, T]``, padding on either side; only with a tensor of ids.
        chat: wrap strings as a user turn; None wraps when the tokenizer has a chat template.

    Raises:
        InvalidInput: nothing to read, ids outside the vocabulary, a prompt longer than the context, or text without a
            tokenizer.
    """
    if isinstance(inputs, dict) or hasattr(inputs, "input_ids"):  # what a tokenizer returns
        if "input_ids" not in inputs:
            raise InvalidInput(f"cannot read a prompt from a dict with the keys {sorted(inputs)}: it needs input_ids")
        mask = dict(inputs).get("attention_mask")
        inputs = inputs["input_ids"]
        if attention_mask is None and (isinstance(mask, Tensor) or not _ones(mask)):
            attention_mask = mask
    if attention_mask is not None and not isinstance(inputs, Tensor):
        raise InvalidInput("attention_mask goes with a tensor of token ids; lists of ids and text need none")
    if isinstance(inputs, Tensor):
        rows = _tensor_rows(inputs, attention_mask)
    elif isinstance(inputs, str) or _is_chat(inputs):
        rows = [_encode(target, inputs, chat)]
    elif isinstance(inputs, (list, tuple)) and inputs and _is_ids(inputs):
        rows = [list(inputs)]
    elif isinstance(inputs, (list, tuple)) and inputs:
        rows = [list(x) if _is_ids(x) else _encode(target, x, chat) for x in inputs]
    else:
        raise InvalidInput(
            f"cannot read a prompt from {type(inputs).__name__}: give a string, chat messages, token ids "
            "(LongTensor [T] or [B, T], or lists of int), or a list of those"
        )
    if not rows:
        raise InvalidInput("there is no prompt: the tensor of token ids has no row")
    for number, row in enumerate(rows):
        where = f"prompt {number}" if len(rows) > 1 else "the prompt"
        if not row:
            raise InvalidInput(f"{where} is empty: at least one token is needed")
        bad = next((t for t in row if not 0 <= t < target.vocab_size), None)
        if bad is not None:
            raise InvalidInput(
                f"{where} holds the token id {bad}, outside the vocabulary (0 to {target.vocab_size - 1})"
            )
        if len(row) >= target.max_context:
            raise InvalidInput(
                f"{where} has {len(row)} tokens, and the target's context of {target.max_context} leaves no room for "
                f"an answer"
            )
    return rows


def _tensor_rows(ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    if ids.dtype not in (torch.int64, torch.int32) or ids.dim() not in (1, 2):
        raise InvalidInput(f"token ids must be integers of shape [T] or [B, T], not {ids.dtype} {tuple(ids.shape)}")
    ids = ids[None] if ids.dim() == 1 else ids
    if mask is None:
        return ids.tolist()
    if not isinstance(mask, Tensor):
        raise InvalidInput(f"attention_mask is a {type(mask).__name__}: beside a tensor of ids give a tensor, too")
    mask = mask[None] if mask.dim() == 1 else mask
    if mask.shape != ids.shape:
        raise InvalidInput(f"attention_mask has shape {tuple(mask.shape)}, the ids {tuple(ids.shape)}")
    rows = []
    for number, (row, keep) in enumerate(zip(ids.tolist(), mask.bool().tolist(), strict=True)):
        kept = [at for at, flag in enumerate(keep) if flag]
        if kept and len(kept) != kept[-1] - kept[0] + 1:
            raise InvalidInput(f"attention_mask of row {number} has a hole: padding is allowed at either end only")
        rows.append([row[at] for at in kept])
    return rows


def _encode(target: Target, value: str | Sequence[dict[str, Any]], chat: bool | None) -> list[int]:
    tokenizer = target.tokenizer
    if not isinstance(value, str) and not _is_chat(value):
        raise InvalidInput(f"cannot read a prompt from {type(value).__name__} inside a list")
    if tokenizer is None:
        raise InvalidInput(f"target {target.name!r} has no tokenizer: give token ids instead of text")
    template = getattr(tokenizer, "chat_template", None)
    if not template and (chat or not isinstance(value, str)):
        raise InvalidInput(
            f"the tokenizer of target {target.name!r} has no chat template: give plain text, and not chat=True"
        )
    text, special = value, True
    if not isinstance(value, str) or (template and chat is not False):
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else list(value)
        bad = next((m for m in messages if not {"role", "content"} <= set(m)), None)
        if bad is not None:
            raise InvalidInput(f"a chat message has the keys {sorted(map(str, bad))}: it needs role and content")
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates refuse roles and their order in words of their own
            raise InvalidInput(f"the chat template of target {target.name!r} refuses the messages: {error}") from error
        special = False  # the template writes them
    try:
        str(text).encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"the prompt is no valid Unicode text ({error.reason} at {error.start})") from error
    return tokenizer(text, add_special_tokens=special)["input_ids"]
