"""What held-out answers say about a draft: tokens a round from random places, and along the walk of decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from repairzoo.train.data import Batch, prefix

Judge = Callable[[Batch], tuple[Tensor, Tensor]]


def estimated_tau(right: Tensor, valid: Tensor) -> tuple[float, list[float]]:
    """Estimated tau and per-slot accuracy of teacher-forced slots ``[R, S]``.

    Greedy answers are what the target would commit, so 1 plus the mean length of the right prefix estimates the tokens
    of a round that starts at a random position. Decoding starts behind what a draft did not know; see
    :func:`walked_taus`.
    """
    rows = valid[:, 0]
    length = prefix(right & valid).sum(1)[rows].float()
    accuracy = [(right & valid)[:, s].sum().item() / max(1, int(valid[:, s].sum())) for s in range(right.shape[1])]
    return 1 + float(length.mean()), accuracy


@torch.no_grad()
def judged(judge: Judge, batches: list[Batch]) -> tuple[float, list[float]]:
    """:func:`estimated_tau` at the anchors of held-out batches."""
    rights, valids = zip(*(judge(batch) for batch in batches), strict=True)
    return estimated_tau(torch.cat(rights), torch.cat(valids))


def accepted(batch: Batch, right: Tensor, valid: Tensor) -> Tensor:
    """``[B, N]`` int64: slots that a greedy round at each anchor would keep; -1 where no slot is supervised.

    Args:
        right, valid: ``[R, S]`` bool, of all anchors or of those alone whose first slot is supervised.
    """
    supervised, length = batch.labels(1)[1][..., 0], prefix(right & valid).sum(-1)
    if len(length) == supervised.numel():
        return length.view_as(supervised).masked_fill(~supervised, -1)
    return torch.full_like(batch.anchors, -1).masked_scatter(supervised, length)


@torch.no_grad()
def walked_taus(judge: Callable[[Batch], list[Tensor]], batches: list[Batch], chunk: int) -> list[float]:
    """Tokens a round of greedy decoding, exactly: each round starts where the one before it ended.

    Every position of an answer is judged, then the rounds are followed along the text, which greedy decoding commits
    whatever the draft. Only answers at temperature 0 are such texts; others give an estimate.

    Args:
        judge: gives the :func:`accepted` lengths ``[B, N]`` of a batch, for one or more settings.
        batches: of held-out answers; their anchors are not used. chunk: anchors of a text that are judged at once.

    Returns:
        one figure for each setting.
    """
    tokens, rounds = 0, []
    for batch in batches:
        first = batch.loss_mask.long().argmax(1)  # the token that reading the prompt gives
        count = batch.loss_mask.sum(1) - 1  # what is left for rounds
        pieces = []
        for begin in range(0, int(count.max()), chunk):
            steps = torch.arange(begin, min(begin + chunk, int(count.max())), device=first.device)
            keep = steps < count[:, None]
            anchors = torch.where(keep, first[:, None] + steps, first[:, None])
            pieces.append(judge(replace(batch, anchors=anchors, keep=keep)))
        lengths = [torch.cat(parts, 1).tolist() for parts in zip(*pieces, strict=True)]
        tokens += int(count.sum())
        made = [sum(_rounds(row, n) for row, n in zip(rows, count.tolist(), strict=True)) for rows in lengths]
        rounds = made if not rounds else [a + b for a, b in zip(rounds, made, strict=True)]
    return [tokens / max(1, n) for n in rounds]


def _rounds(lengths: list[int], count: int) -> int:
    at = rounds = 0
    while at < count:
        at += lengths[at] + 1
        rounds += 1
    return rounds
