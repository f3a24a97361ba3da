"""Domino (Huang et al. 2026, arXiv 2605.29707): a GRU reads the drafted tokens and corrects the logits that follow.

The trunk is :class:`repairzoo.draft_layers.Trunk`. Each slot's correction is ``W_2 y`` with a low-rank ``y``, so that
full vocabulary, pool rows and training share everything but the rows of ``W_2`` that they multiply.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from repairzoo.block import DraftBlock, Pool
from repairzoo.draft_backbone import BlockBackbone
from repairzoo.draft_config import DraftConfig
from repairzoo.draft_layers import RMSNorm, wide

from .config import DominoConfig

Prepared = tuple[Tensor, Tensor | None, Tensor | None]


class PrefixGRU(nn.Module):
    """One layer without biases; PyTorch's names and gate order r, z, n.

    Written out: ``nn.GRU`` has no bfloat16 kernel everywhere, and a walk forks the state at any step.
    """

    def __init__(self, inputs: int, size: int):
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * size, inputs))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * size, size))
        for weight in self.parameters():
            nn.init.uniform_(weight, -(size**-0.5), size**-0.5)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        """The state ``[..., G]`` after token embeddings ``x [..., D]``."""
        return self.cell(F.linear(x, self.weight_ih_l0), state)

    def cell(self, gates: Tensor, state: Tensor) -> Tensor:
        """The state after an input whose gates ``W_i x [..., 3G]`` are given."""
        r, z, n = gates.chunk(3, -1)
        state_r, state_z, state_n = F.linear(state, self.weight_hh_l0).chunk(3, -1)
        r, z = torch.sigmoid(r + state_r), torch.sigmoid(z + state_z)
        return (1 - z) * torch.tanh(n + r * state_n) + z * state

    def scan(self, x: Tensor) -> Tensor:
        """States ``[..., S, G]`` after each of ``x [..., S, D]``, from zero."""
        gates = F.linear(x, self.weight_ih_l0)
        state, states = gates.new_zeros(*x.shape[:-2], self.weight_hh_l0.shape[1]), []
        for gate in gates.unbind(-2):
            state = self.cell(gate, state)
            states.append(state)
        return torch.stack(states, -2)


class Domino(BlockBackbone):
    """The Domino backbone: DFlash's parameter names, ``prefix_gru.*`` and ``embed_proj.*``."""

    kind = "domino"
    config_type = DominoConfig
    config: DominoConfig

    def __init__(self, config: DominoConfig, *, seed: int | None = None):
        super().__init__(config)
        d, g, e = config.hidden_size, config.gru_hidden_dim, config.emb_dim
        self.first_slot = self._first_slot(config)
        self.prefix_gru = PrefixGRU(d, g)
        self.embed_proj = nn.Sequential(
            nn.Linear(d + g, e, bias=False), nn.SiLU(), nn.Linear(e, config.vocab_size, bias=False)
        )
        self.bias_norm = RMSNorm(g, config.rms_norm_eps) if config.use_bias_norm else None
        self.bias_gate = nn.Sequential(nn.Linear(d, e), nn.SiLU(), nn.Linear(e, 1)) if config.use_bias_gate else None
        if seed is not None:
            self.initialise(seed)

    @classmethod
    def _first_slot(cls, config: DraftConfig) -> int:
        assert isinstance(config, DominoConfig)
        return 0 if config.shift_label else 1

    def initialise(self, seed: int) -> None:
        """A new draft: the trunk's matrices as DFlash's of that seed, and no correction yet (``W_2 = 0``)."""
        super().initialise(seed)
        nn.init.zeros_(self.output_rows)

    def corrector(self) -> DominoCorrector:
        return DominoCorrector(self)

    @property
    def output_rows(self) -> Tensor:
        """``W_2 [V, E]``: the correction of a token is its row times ``y``."""
        return self._linear(2)

    def _linear(self, place: int) -> Tensor:
        layer = self.embed_proj[place]
        assert isinstance(layer, nn.Linear)
        return layer.weight

    def hidden_part(self, hidden: Tensor) -> Tensor:
        """What ``hidden [..., D]`` contributes to the inner layer, ``[..., E]``: nothing in it is sequential."""
        return F.linear(hidden, self._linear(0)[:, : self.hidden_size])

    def gate(self, hidden: Tensor) -> Tensor | None:
        """``[..., 1]`` factor on the correction, or None."""
        return None if self.bias_gate is None else torch.sigmoid(self.bias_gate(hidden))

    def inner(self, part: Tensor, gate: Tensor | None, state: Tensor) -> Tensor:
        """``y [..., E]``: the correction of the logits is ``W_2 y``."""
        if self.bias_norm is not None:
            state = self.bias_norm(state)
        y = F.silu(part + F.linear(state, self._linear(0)[:, self.hidden_size :]))
        return y if gate is None else y * gate

    def teacher_forced(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """``y [..., S, E]`` of whole blocks with given tokens: equals the walk along those tokens.

        Args:
            hidden: ``[..., S, D]`` slot rows. previous: ``[..., S]`` int64, the token before each slot (anchor first).
        """
        states = self.prefix_gru.scan(self.embed(previous))
        y = self.inner(self.hidden_part(hidden), self.gate(hidden), states)
        corrected = torch.arange(hidden.shape[-2], device=hidden.device) >= self.config.pure_draft_prefix_len
        return y * corrected[:, None]

    def corrected_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits ``[..., S, V]`` along given tokens; arguments as for :meth:`teacher_forced`."""
        base = self.logits(hidden)
        return base + wide(F.linear(self.teacher_forced(hidden, previous), self.output_rows[: base.shape[-1]]))


class DominoCorrector:
    """Domino's causal head on the whole vocabulary or on the rows of a pool; the carry is the GRU's state."""

    def __init__(self, backbone: Domino):
        self.backbone = backbone

    def prepare(self, block: DraftBlock, pool: Pool | None) -> Prepared:
        """Contributions of the hidden rows ``[B, S, E]``, gates ``[B, S, 1]`` and rows of ``W_2 [B, S, K, E]``."""
        hidden = block.hidden.to(self.backbone.dtype)
        rows = None if pool is None else F.embedding(pool.ids, self.backbone.output_rows)
        return self.backbone.hidden_part(hidden), self.backbone.gate(hidden), rows

    def start(self, block: DraftBlock) -> Tensor:
        size = self.backbone.config.gru_hidden_dim
        return torch.zeros(block.hidden.shape[0], 1, size, dtype=self.backbone.dtype, device=block.hidden.device)

    def step(
        self, prepared: Prepared, carry: Tensor, slot: int, previous: Tensor, scores: Tensor
    ) -> tuple[Tensor, Tensor]:
        backbone = self.backbone
        state = backbone.prefix_gru(backbone.embed(previous), carry)  # [B, W, G]
        if slot < backbone.config.pure_draft_prefix_len:
            return scores, state
        part, gate, rows = prepared
        y = backbone.inner(part[:, slot, None], None if gate is None else gate[:, slot, None], state)  # [B, W, E]
        if rows is None:
            delta = F.linear(y, backbone.output_rows[: scores.shape[-1]])
        else:
            delta = y @ rows[:, slot].transpose(1, 2)
        return scores + delta.to(scores.dtype), state
