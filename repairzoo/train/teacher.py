"""What the target itself says at every position of a batch, for objectives that learn more than its tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from repairzoo.target import Target
from repairzoo.train.data import Batch

Teacher = Callable[[Batch], Tensor]


def teacher(target: Target) -> Teacher:
    """Batch -> the target's states ``[B, T, D]`` after its final norm; row t predicts token t + 1.

    They come from the corpus where it stores the last layer (in bfloat16); where it does not, the target reads the
    texts again, which costs more than training a small draft on them.
    """

    @torch.no_grad()
    def states(batch: Batch) -> Tensor:
        if batch.last is not None:
            return target.final_norm(batch.last.to(target.output_weight.dtype))
        return target.model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state

    return states
