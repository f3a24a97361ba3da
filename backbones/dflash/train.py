"""The DFlash objective: cross entropy of every slot, nearer slots weighing more (arXiv 2602.06036, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from repairzoo.train.data import Batch
from repairzoo.train.losses import block_cross_entropy
from repairzoo.train.trainer import Terms

from .backbone import DFlash


@dataclass(slots=True)
class DFlashObjective:
    """Trains a DFlash that is bound to its target.

    Attributes:
        module: the backbone. output_weight: ``[V, D]`` frozen output head.
        gamma: slot decay of the loss. columns: sorted vocabulary ids of the training softmax, or None for all.
        dpace: weigh slots by D-PACE instead.
    """

    module: DFlash
    output_weight: Tensor
    gamma: float | None = 4.0
    columns: Tensor | None = None
    dpace: bool = False

    def terms(self, module: nn.Module, batch: Batch, progress: float) -> Terms:
        backbone = self.module
        hidden = module(batch.features, batch.input_ids, batch.anchors)[:, :, backbone.first_slot :]  # [B, N, S, D]
        labels, mask = batch.labels(backbone.slots)
        return {
            "ce": block_cross_entropy(
                hidden, self.output_weight, labels, mask, gamma=self.gamma, columns=self.columns, dpace=self.dpace
            )
        }

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        backbone = self.module
        hidden = backbone.train_forward(batch.features, batch.input_ids, batch.anchors)[:, :, backbone.first_slot :]
        labels, mask = batch.labels(backbone.slots)
        flat = hidden.flatten(0, 2)
        choice = torch.cat([backbone.logits(rows).argmax(-1) for rows in flat.split(512)]).view_as(labels)
        return (choice == labels).flatten(0, 1), mask.flatten(0, 1)
