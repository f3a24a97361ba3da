"""The training loss of DeLS: next-token cross entropy on block windows (arXiv 2607.07409)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from repairzoo.errors import InvalidInput

from .head import DeLS


def gather_windows(input_ids: Tensor, loss_mask: Tensor, anchors: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Windows of ``length`` tokens that start at given anchors.

    Args:
        input_ids: ``[B, T]`` int64.
        loss_mask: ``[B, T]``, non-zero where a token may be a label.
        anchors: ``[B, N]`` int64 positions of the windows' first tokens.
        length: tokens of a window, the anchor included.

    Returns:
        windows ``[B * N, length]`` int64 and label weights ``[B * N, length - 1]`` float32; labels behind the end of
        the sequence weigh 0.
    """
    rows, size = input_ids.shape
    positions = anchors.unsqueeze(-1) + torch.arange(length, device=anchors.device)  # [B, N, L]
    inside = positions < size
    flat = positions.clamp(max=size - 1).reshape(rows, -1)
    windows = input_ids.gather(1, flat).reshape(-1, length)
    mask = (loss_mask.gather(1, flat).float() * inside.reshape(rows, -1)).reshape(-1, length)
    return windows, mask[:, 1:]


def loss(head: DeLS, windows: Tensor, mask: Tensor, gamma: float | None = 7.0, columns: Tensor | None = None) -> Tensor:
    """Weighted next-token cross entropy of the local expert alone (no draft, no target forward).

    ``sum(w * ce) / (sum(w) + 1e-6)`` with ``w = mask * exp(-k / gamma)``, k = 0 at the label right after the anchor.
    A Markov head has no window: give it whole sequences and ``gamma=None`` for the dense loss of the public trainer.

    Args:
        head: bound to its target (``DeLS.bind``).
        windows: ``[N, L]`` int64, the anchor first.
        mask: ``[N, L - 1]``, weight of each label.
        gamma: decay in slots; None or 0 for none.
        columns: ``[C]`` int64 distinct vocabulary ids. The softmax runs over these only, which is exact when they are
            all; every label with a weight must be among them.

    Returns:
        a float32 scalar.

    Raises:
        InvalidInput: shapes that do not belong together, a label outside ``columns``.
    """
    if windows.ndim != 2 or windows.shape[1] < 2 or mask.shape != (windows.shape[0], windows.shape[1] - 1):
        raise InvalidInput(f"windows {list(windows.shape)} need a mask [N, L - 1]; got {list(mask.shape)}")
    labels = windows[:, 1:]
    weights = mask.float()
    if columns is not None:
        ids, order = columns.sort()
        place = torch.searchsorted(ids, labels.contiguous()).clamp(max=len(ids) - 1)
        outside = (ids[place] != labels) & (weights > 0)
        if outside.any():
            raise InvalidInput(
                f"{int(outside.sum())} labels are not among the {len(ids)} columns, the first is token "
                f"{int(labels[outside][0])}; add the labels of the batch to the columns"
            )
        labels = order[place]
    if gamma:
        weights = weights * torch.exp(-torch.arange(labels.shape[1], device=labels.device) / gamma)
    logits = head.local_logits(windows[:, :-1], columns)
    entropy = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (entropy * weights.flatten()).sum() / (weights.sum() + 1e-6)


def plan(*args: Any, **options: Any) -> Any:
    """See :func:`.objective.plan`; imported when called, since decoding needs none of it."""
    from .objective import plan as make

    return make(*args, **options)
