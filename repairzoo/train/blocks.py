"""What heads train on: drafted blocks with their pools, at the anchors of a batch, as the loop would hand them over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from repairzoo.block import HISTORY, DraftBlock, Pool, make_pool
from repairzoo.errors import InvalidInput
from repairzoo.target import Target
from repairzoo.train.data import Batch, prefix
from repairzoo.train.teacher import teacher

_CHUNK = 512  # rows whose logits over the whole vocabulary are alive at once


@dataclass(slots=True)
class PoolBlocks:
    """``N`` blocks with a supervised first slot.

    Attributes:
        block: as drafted, but without logits (``[N, S, 0]``). pool: its candidates.
        scores: ``[N, S, K]`` what a head would be given after the true prefix: the pool's log-probabilities, plus what
            the backbone's causal part adds.
        labels, mask: ``[N, S]`` true tokens, and where they are supervised.
        rows, positions: ``[N]`` the text and the anchor of each block.
        entropy: ``[N, S]`` the draft's cross entropy (joint training), or None.
    """

    block: DraftBlock
    pool: Pool
    scores: Tensor
    labels: Tensor
    mask: Tensor
    rows: Tensor
    positions: Tensor
    entropy: Tensor | None = None


def pool_blocks(
    backbone: Any, batch: Batch, size: int, *, joint: bool = False, columns: Tensor | None = None
) -> PoolBlocks:
    """Draft at every anchor of a batch whose first slot is supervised.

    Args:
        backbone: bound to its target. size: candidates of a pool.
        joint: let gradients reach the backbone, through hidden states, log-probabilities and the cross entropy.
        columns: sorted ids that softmax and pools are restricted to; None for all.

    Raises:
        InvalidInput: a pool larger than ``columns``; joint training of a backbone with a causal part, or with scaled
            logits.
    """
    causal = backbone.corrector()
    plain = getattr(backbone.config, "output_multiplier", 1) == 1
    if joint and (causal is not None or not plain or backbone.config.final_logit_softcapping is not None):
        raise InvalidInput(f"a {backbone.kind} backbone of this kind is trained without heads: use joint: false")
    if columns is not None and size > len(columns):
        raise InvalidInput(
            f"a pool of {size} candidates of the {len(columns)} ids that the softmax runs over: lower least_count "
            "(null for the whole vocabulary) or the pool's size"
        )
    labels, mask = batch.labels(backbone.slots)
    keep = mask[..., 0].flatten().nonzero()[:, 0]
    labels, mask = labels.flatten(0, 1)[keep], mask.flatten(0, 1)[keep]
    positions = batch.anchors.flatten()[keep]
    rows = torch.arange(len(batch.anchors), device=keep.device).repeat_interleave(batch.anchors.shape[1])[keep]
    with torch.set_grad_enabled(joint and torch.is_grad_enabled()):
        hidden = backbone.train_forward(batch.features, batch.input_ids, batch.anchors)
        hidden = hidden[:, :, backbone.first_slot :].flatten(0, 1)[keep]  # [N, S, D]
        fused = backbone._fuse(batch.features, backbone._products(False))  # [B, T, D]
        places = positions[:, None] + torch.arange(-HISTORY, 0, device=keep.device)  # [N, 64]
        seen = places >= 0
        history = fused[rows[:, None], places.clamp_min(0)].masked_fill(~seen[..., None], 0)
        pool, entropy = _pools(backbone, hidden, labels, size, joint, columns)
    target = backbone._bound
    block = DraftBlock(
        hidden=hidden,
        logits=hidden.new_empty(*hidden.shape[:2], 0),
        anchor_ids=batch.input_ids[rows, positions],
        anchor_positions=positions,
        context=history[:, -1],
        history=history,
        history_mask=seen,
        embedding=target.embedding,
        output_weight=target.output_weight,
        native=causal,
    )
    scores = pool.log_probs if causal is None else after_labels(causal, block, pool, labels)
    return PoolBlocks(block, pool, scores, labels, mask, rows, positions, entropy)


def _pools(
    backbone: Any, hidden: Tensor, labels: Tensor, size: int, joint: bool, columns: Tensor | None
) -> tuple[Pool, Tensor | None]:
    weight = backbone._bound.output_weight
    weight = weight if columns is None else weight[columns]
    if not joint:

        def logits_of(h: Tensor) -> Tensor:
            return backbone.logits(h) if columns is None else backbone.scaled(F.linear(h.to(weight.dtype), weight))

        parts = [make_pool(logits_of(h[None]), size) for h in hidden.flatten(0, 1).split(_CHUNK)]
        ids, values = (torch.cat([getattr(p, n)[0] for p in parts]) for n in ("ids", "log_probs"))
        shape = (*hidden.shape[:2], size)
        return Pool((ids if columns is None else columns[ids]).view(shape), values.view(shape)), None
    logits = F.linear(hidden.to(weight.dtype), weight).float()
    pool = make_pool(logits, size)
    if columns is not None:
        place = torch.searchsorted(columns, labels.contiguous()).clamp_max(len(columns) - 1)
        known = columns[place] == labels
        entropy = F.cross_entropy(logits.flatten(0, 1), place.flatten(), reduction="none").view(labels.shape)
        return Pool(columns[pool.ids], pool.log_probs), entropy * known
    return pool, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


@torch.no_grad()
def after_labels(corrector: Any, block: DraftBlock, pool: Pool, labels: Tensor) -> Tensor:
    """Scores ``[N, S, K]`` of a corrector along the true tokens."""
    prepared, carry, previous = corrector.prepare(block, pool), corrector.start(block), block.anchor_ids[:, None]
    out = []
    for slot in range(labels.shape[1]):
        scores, carry = corrector.step(prepared, carry, slot, previous, pool.log_probs[:, None, slot])
        out.append(scores[:, 0])
        previous = labels[:, slot : slot + 1]
    return torch.stack(out, 1)


@torch.no_grad()
def target_scores(target: Target, batch: Batch, blocks: PoolBlocks) -> Tensor:
    """The target's own logits ``[N, S, K]`` of every candidate after the true tokens."""
    hidden = teacher(target)(batch)
    steps = torch.arange(blocks.labels.shape[1], device=hidden.device)
    at = (blocks.positions[:, None] + steps).clamp_max(hidden.shape[1] - 1)  # the token before
    rows = hidden[blocks.rows[:, None], at]  # [N, S, D]
    weight = F.embedding(blocks.pool.ids, target.output_weight)  # [N, S, K, D]
    return (weight.float() @ rows[..., None].float())[..., 0]


def right(blocks: PoolBlocks, scores: Tensor) -> Tensor:
    """``[N, S]`` bool: the best of ``scores [N, S, K]`` is the label."""
    return blocks.pool.ids.gather(-1, scores.argmax(-1, keepdim=True))[..., 0] == blocks.labels


def prefixes(blocks: PoolBlocks, scores: Tensor) -> dict[str, float]:
    """Diagnostics of a head's teacher-forced scores ``[N, S, K]``.

    Returns:
        mean length of the right prefix: ``native`` (incoming scores), ``selected`` (the head's) and ``oracle`` (a label
        counts where it is in the pool); ``fixed`` and ``broken``: slots of supervised prefixes that the head made right
        or wrong; ``slots``: how many those are.
    """
    valid = prefix(blocks.mask)
    before, after = right(blocks, blocks.scores), right(blocks, scores)
    reachable = (blocks.pool.ids == blocks.labels[..., None]).any(-1)

    def length(x: Tensor) -> float:
        return prefix(x & valid).sum(-1).float().mean().item()

    return {
        "native": length(before),
        "selected": length(after),
        "oracle": length(reachable),
        "fixed": int((after & ~before & valid).sum()),
        "broken": int((before & ~after & valid).sum()),
        "slots": int(valid.sum()),
    }


def summed(parts: list[dict[str, float]], counts: list[int]) -> dict[str, float]:
    """:func:`prefixes` of several batches of ``counts`` blocks as one."""
    total = max(1, sum(counts))
    weighted = [{key: p[key] * n for key in p} for p, n in zip(parts, counts, strict=True)]
    means = {key: round(sum(p[key] for p in weighted) / total, 4) for key in ("native", "selected", "oracle")}
    return means | {key: sum(p[key] for p in parts) for key in ("fixed", "broken", "slots")}
