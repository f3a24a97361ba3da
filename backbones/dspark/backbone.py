"""DSpark (Cheng et al. 2026, arXiv 2607.05147): a low-rank bias from the token before, and a confidence in each slot.

The trunk is :class:`repairzoo.draft_layers.Trunk`; every block row predicts the token after its own position. The bias
of a slot is ``W_2 y`` with a low-rank ``y``, so that full vocabulary, pool rows and training share everything but the
rows of ``W_2`` that they multiply.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from repairzoo.block import DraftBlock, Pool
from repairzoo.draft_backbone import BlockBackbone, _Borrowed
from repairzoo.draft_layers import wide
from repairzoo.errors import IncompatibleArtifact, InvalidArtifact, InvalidInput
from repairzoo.linear import Linear

from .config import CALIBRATION, DSparkConfig

if TYPE_CHECKING:
    from typing_extensions import Self

Prepared = tuple[Tensor | None, Tensor | None]
EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"


class MarkovHead(nn.Module):
    """``y`` of a slot from ``w = W_1[token before]``, the slot's row ``z`` and, for ``"rnn"``, a state.

    vanilla: ``y = w``. gated: ``y = sigmoid(W_g [z; w] + b) * w``. rnn: ``(g, c, o) = W_j [s; w; z] + b``,
    ``s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c)``, ``y = tanh(o)``.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        v, d, r = config.vocab_size, config.hidden_size, config.markov_rank
        self.kind, self.rank = config.markov_head_type, r
        self.markov_w1 = nn.Embedding(v, r)
        self.markov_w2 = nn.Linear(r, v, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(d + r, r)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * r + d, 3 * r)

    def hidden_part(self, hidden: Tensor) -> Tensor | None:
        """What ``hidden [..., D]`` contributes, bias included: ``[..., r]`` (gated), ``[..., 3r]`` (rnn) or None."""
        if self.kind == "gated":
            return F.linear(hidden, self.gate_proj.weight[:, : -self.rank], self.gate_proj.bias)
        if self.kind == "rnn":
            return F.linear(hidden, self.joint_proj.weight[:, 2 * self.rank :], self.joint_proj.bias)
        return None

    def inner(self, part: Tensor | None, previous: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """``y [..., r]`` and the state after the tokens ``previous [...]``."""
        w = self.markov_w1(previous)
        if self.kind == "gated":
            assert part is not None
            return torch.sigmoid(part + F.linear(w, self.gate_proj.weight[:, -self.rank :])) * w, None
        if self.kind == "rnn":
            assert part is not None and state is not None
            joint = part + F.linear(torch.cat((state, w), -1), self.joint_proj.weight[:, : 2 * self.rank])
            gate, candidate, out = joint.chunk(3, -1)
            gate = torch.sigmoid(gate)
            return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(candidate)
        return w, None

    def start(self, shape: tuple[int, ...]) -> Tensor | None:
        """The state ``[*shape, r]`` before a block, or None where there is none."""
        return self.markov_w2.weight.new_zeros(*shape, self.rank) if self.kind == "rnn" else None


class ConfidenceHead(nn.Module):
    """The parameters of the confidence, under the published name."""

    def __init__(self, inputs: int):
        super().__init__()
        self.proj = nn.Linear(inputs, 1)


class DSpark(BlockBackbone):
    """The DSpark backbone: DFlash's parameter names, ``markov_head.*`` and ``confidence_head.proj.*``.

    DeepSpec's files also hold copies of the target's embedding and output head. ``bind`` compares them with the
    target's: equal ones are shared and dropped. Others mean another target, or one that was quantised or fine-tuned;
    they are refused unless ``own_tables`` says that the draft shall use its own.

    Attributes:
        confidence_threshold: slots from the first with a confidence below it on are not proposed; 0 proposes all.
        confidence_temperatures: ``[S]`` divisors of the slots' confidence logits (:meth:`calibrate`), or None.
        own_tables: draft with the file's own embedding and output head where they are not the target's.
    """

    kind = "dspark"
    config_type = DSparkConfig
    config: DSparkConfig
    first_slot = 0

    def __init__(self, config: DSparkConfig, *, seed: int | None = None):
        super().__init__(config)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = None
        if config.confidence:
            extra = config.markov_rank if config.confidence_with_markov else 0
            self.confidence_head = ConfidenceHead(config.hidden_size + extra)
        self.own_tables = False
        self._threshold = 0.0
        self.confidence_temperatures: Tensor | None = None
        self._own: dict[str, Tensor] = {}  # tables as the file held them
        self._shared: set[str] = set()  # of these, those that were dropped because they are the target's
        self._drafting: _Borrowed | None = None
        if seed is not None:
            self.initialise(seed)

    def initialise(self, seed: int) -> None:
        """A new draft: the trunk's matrices as DFlash's of that seed, and no bias yet (``W_2 = 0``)."""
        super().initialise(seed)
        if self.markov_head is not None:
            nn.init.zeros_(self.markov_head.markov_w2.weight)

    @property
    def confidence_threshold(self) -> float:
        return self._threshold

    @confidence_threshold.setter
    def confidence_threshold(self, value: float) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise InvalidInput(f"confidence_threshold={value!r}: give a number from 0 (off) to 1")
        if value and self.confidence_head is None:
            raise InvalidInput(f"confidence_threshold={value!r}: this draft has no confidence head")
        self._threshold = float(value)

    def calibrate(self, temperatures: Sequence[float] | None) -> None:
        """Divide the confidence logit of slot ``i`` by ``temperatures[i]``; None divides by nothing. ``save`` keeps it.

        Raises:
            InvalidInput: not one positive number a slot.
        """
        if temperatures is None:
            self.confidence_temperatures = self.config.confidence_temperatures = None
            self.config.published.pop(CALIBRATION, None)
            return
        values = torch.tensor([float(t) for t in temperatures], device=self.device)
        if len(values) != self.slots or not bool(((values > 0) & values.isfinite()).all()):
            raise InvalidInput(f"temperatures={list(temperatures)!r}: give {self.slots} positive numbers, one a slot")
        self.confidence_temperatures = values
        self.config.confidence_temperatures = tuple(float(t) for t in temperatures)
        self.config.published[CALIBRATION] = [float(t) for t in temperatures]

    def corrector(self) -> DSparkCorrector | None:
        return None if self.markov_head is None and self.confidence_head is None else DSparkCorrector(self)

    @property
    def output_rows(self) -> Tensor:
        """``W_2 [V, r]``: the bias of a token is its row times ``y``. There is none at rank 0."""
        assert self.markov_head is not None
        return self.markov_head.markov_w2.weight

    def teacher_forced(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """``y [..., S, r]`` of whole blocks with given tokens: equals the walk along those tokens.

        Args:
            hidden: ``[..., S, D]`` slot rows. previous: ``[..., S]`` int64, the token before each slot (anchor first).
        """
        head = self.markov_head
        assert head is not None
        part = head.hidden_part(hidden)
        if head.kind != "rnn":
            return head.inner(part, previous, None)[0]
        state, rows = head.start(tuple(previous.shape[:-1])), []
        for slot in range(previous.shape[-1]):
            y, state = head.inner(None if part is None else part[..., slot, :], previous[..., slot], state)
            rows.append(y)
        return torch.stack(rows, -2)

    def corrected_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits ``[..., S, V]`` along given tokens; arguments as for :meth:`teacher_forced`."""
        base = self.logits(hidden)
        if self.markov_head is None:
            return base
        return base + wide(F.linear(self.teacher_forced(hidden, previous), self.output_rows[: base.shape[-1]]))

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Uncalibrated logits ``[...]`` of the confidence in slots with rows ``hidden [..., D]``; float32 or float64.

        Args:
            previous: ``[...]`` int64, the token before each slot: all that is read of the path.

        Raises:
            InvalidInput: the draft has no confidence head.
        """
        if self.confidence_head is None:
            raise InvalidInput("this draft has no confidence head")
        features = hidden
        if self.config.confidence_with_markov:
            assert self.markov_head is not None
            features = torch.cat((hidden, self.markov_head.markov_w1(previous)), -1)
        return wide(self.confidence_head.proj(features))[..., 0]

    # --- the file's own tables ----------------------------------------------------------------------------------
    def _own_tables(self) -> dict[str, tuple[int, ...]]:
        shape = (self.config.vocab_size, self.config.hidden_size)
        return {EMBEDDING: shape, OUTPUT: shape}

    def _optional(self) -> set[str]:
        return {"confidence_head.proj.bias"} if self.confidence_head is not None else set()

    def _keep_tables(self, tables: dict[str, Tensor], folder: Path) -> None:
        if len(tables) == 1:
            here = next(iter(tables))
            other = OUTPUT if here == EMBEDDING else EMBEDDING
            raise InvalidArtifact(
                f"{folder}: the file holds {here!r} but not {other!r}; DeepSpec's drafts store both and SpecForge's "
                "neither: fetch the file again"
            )
        self._own = tables

    def bind(
        self, embedding: Tensor, output_weight: Tensor, *, num_layers: int | None = None, output: Linear | None = None
    ) -> Self:
        """Borrow the target's tables, or use the file's own; see :meth:`BlockBackbone.bind` and the class.

        Raises:
            IncompatibleArtifact: also if the file's own tables are not the target's and ``own_tables`` is False.
        """
        self._own |= self._dropped()
        self._shared.clear()
        super().bind(embedding, output_weight, num_layers=num_layers, output=output)
        self._drafting = None
        if self.config.confidence_temperatures is not None:
            self.calibrate(self.config.confidence_temperatures)
        theirs = {EMBEDDING: self._bound.embedding, OUTPUT: self._bound.output_weight}
        different = [name for name, own in self._own.items() if not _same(own, theirs[name])]
        if different and not self.own_tables:
            raise IncompatibleArtifact(
                f"the draft's own {' and '.join(map(repr, different))} is not the target's: it was trained for another "
                "target, or this one was quantised or fine-tuned. Use the target it was trained for, or set own_tables "
                "to draft with its own (the output stays exact, the acceptance may not)"
            )
        for name, own in list(self._own.items()):
            if not different and torch.equal(theirs[name].to(own.device, own.dtype), own):
                self._shared.add(name)
                del self._own[name]
        if different:
            tables = {n: self._own[n].to(self.device) if n in self._own else theirs[n] for n in theirs}
            weight = tables[OUTPUT][: output_weight.shape[0]]
            self._drafting = _Borrowed(tables[EMBEDDING], weight, Linear([weight], pack=False))
        return self

    @property
    def _tables(self) -> _Borrowed:
        return self._bound if self._drafting is None else self._drafting

    def _dropped(self) -> dict[str, Tensor]:
        """The tables that were dropped, from the target that they are shared with, in the file's dtype."""
        if not self._shared:
            return {}
        found = {EMBEDDING: self._bound.embedding, OUTPUT: self._bound.output_weight}
        return {name: found[name].to(self.config.dtype) for name in self._shared}

    def _file_tensors(self) -> dict[str, Tensor]:
        tables = self._own | self._dropped()
        return super()._file_tensors() | {n: t.to(self.device, self.dtype).clone() for n, t in tables.items()}


def _same(own: Tensor, target: Tensor) -> bool:
    """Whether ``own [V, D]`` is ``target [V', D]``, V' <= V, up to the rounding of the coarser dtype."""
    rows = own[: target.shape[0]].to(target.device)
    return torch.equal(target.to(own.dtype), rows) or torch.equal(target, rows.to(target.dtype))


class DSparkCorrector:
    """DSpark's causal head on the whole vocabulary or on the rows of a pool; the carry is the rnn's state, if any."""

    def __init__(self, backbone: DSpark):
        self.backbone = backbone

    def prepare(self, block: DraftBlock, pool: Pool | None) -> Prepared:
        """Contributions of the hidden rows ``[B, S, r or 3r]`` and rows of ``W_2 [B, S, K, r]``."""
        head = self.backbone.markov_head
        if head is None:
            return None, None
        part = head.hidden_part(block.hidden.to(self.backbone.dtype))
        return part, None if pool is None else F.embedding(pool.ids, self.backbone.output_rows)

    def start(self, block: DraftBlock) -> Tensor | None:
        head = self.backbone.markov_head
        return None if head is None else head.start((block.hidden.shape[0], 1))

    def step(
        self, prepared: Prepared, carry: Tensor | None, slot: int, previous: Tensor, scores: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        head = self.backbone.markov_head
        if head is None:
            return scores, carry
        part, rows = prepared
        y, carry = head.inner(None if part is None else part[:, slot, None], previous, carry)  # [B, W, r]
        if rows is None:
            bias = F.linear(y, self.backbone.output_rows[: scores.shape[-1]])
        else:
            bias = y @ rows[:, slot].transpose(1, 2)
        return scores + bias.to(scores.dtype), carry

    def confidence(self, block: DraftBlock, previous: Tensor) -> Tensor:
        """Estimated probability ``[B, S]`` that each slot's token is accepted if all before it are.

        Args:
            previous: ``[B, S]`` int64, the token before each slot: the decision on a slot never sees its own token.
        """
        logits = self.backbone.confidence_logits(block.hidden.to(self.backbone.dtype), previous)
        temperatures = self.backbone.confidence_temperatures
        if temperatures is not None:
            logits = logits / temperatures[: logits.shape[-1]].to(logits)
        return logits.sigmoid()
