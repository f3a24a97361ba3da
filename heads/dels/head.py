"""DeLS: a short-context expert whose logits are added to those of a parallel draft (arXiv 2607.07409)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repairzoo.block import DraftBlock, Pool
from repairzoo.errors import IncompatibleArtifact, InvalidInput
from repairzoo.learned_head import Check, HeadConfig, LearnedHead, is_int, is_real
from repairzoo.linear import Linear

TABLE_BYTES = 256 * 2**20  # the vocabulary-wide table of GRU input gates is cached up to this size
Prepared = tuple[()] | tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeLSConfig(HeadConfig):
    """What a DeLS head is. It reads no features and fits any backbone, so it states neither taps nor a backbone.

    Where the vectors that enter and leave the recurrence come from is stated, not inferred from tensor names:
    ``input_table`` is ``"target"`` (the frozen embedding, width ``hidden_size``), ``"factored"`` (the frozen embedding
    times ``down``, width ``input_rank``) or ``"vocabulary"`` (a table of the head's own, width ``input_rank``);
    ``output_table`` is ``"target"`` (``up`` followed by the frozen output head) or ``"vocabulary"`` (``readout``).

    ``block_size`` is the longest training window, anchor included. ``dtype`` is that of the stored weights; the prior
    is always float32.
    """

    kind: ClassVar[str] = "dels"
    unstated: ClassVar[tuple[str, ...]] = ("backbone",)

    # structure
    variant: str  # "gru" or "markov"
    rank: int  # width R of the readout
    hidden: int | None = None  # GRU width G; None for Markov
    input_table: str = "factored"
    input_rank: int | None = 256  # width I of the vectors that enter; None when input_table is "target"
    output_table: str = "target"
    activation: str = "silu"  # on the rank state: "silu" or "identity"
    # fusion
    alpha: float = 0.3  # weight of the local logits
    beta: float = 0.3  # weight of the log unigram prior that is divided out
    pure_draft_prefix_len: int = 0  # this many first slots keep their scores; the GRU still consumes their tokens
    anchor_input: bool = True  # False: the first token consumed is that of slot 0 (the released decode loop)
    pool_size: int | None = None  # pyright: ignore - None: any pool, or the whole vocabulary

    def checks(self) -> list[Check]:
        markov = self.variant == "markov"
        factored = self.input_table != "target"
        return [
            *(check for check in HeadConfig.checks(self) if check[0] not in ("pool_size", "tapped_layers")),
            ("variant", self.variant in ("gru", "markov"), '"gru" or "markov"'),
            ("rank", is_int(self.rank, 1), "a positive integer"),
            ("hidden", self.hidden is None if markov else is_int(self.hidden, 1),
             "null for Markov, the GRU width otherwise"),
            ("input_table", self.input_table in (("factored", "vocabulary") if markov
                                                 else ("target", "factored", "vocabulary")),
             '"factored" or "vocabulary"' + ("" if markov else ' or "target"')),
            ("input_rank", is_int(self.input_rank, 1) if factored else self.input_rank is None,
             'a positive integer, or null with input_table "target"'),
            ("input_rank", not markov or self.input_rank == self.rank, "the rank, for Markov"),
            ("output_table", self.output_table in ("target", "vocabulary"), '"target" or "vocabulary"'),
            ("activation", self.activation in (("identity",) if markov else ("silu", "identity")),
             '"identity"' + ("" if markov else ' or "silu"')),
            ("alpha", is_real(self.alpha), "a finite number"),
            ("beta", is_real(self.beta), "a finite number"),
            ("pure_draft_prefix_len", is_int(self.pure_draft_prefix_len, 0), "a non-negative integer"),
            ("anchor_input", isinstance(self.anchor_input, bool), "true or false"),
            ("anchor_input", self.anchor_input is not False or self.pure_draft_prefix_len != 0,
             "true when pure_draft_prefix_len is 0: slot 0 has nothing but the anchor to look at"),
            ("tapped_layers", self.tapped_layers is None, "null (this head reads no target features)"),
            ("pool_size", self.pool_size is None or is_int(self.pool_size, 1), "a positive integer or null"),
        ]  # fmt: skip

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every trained tensor (the prior, ``log_prior [V]`` float32, comes on top)."""
        width = self.input_rank or self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        if self.input_table == "factored":
            shapes["down"] = (width, self.hidden_size)
        elif self.input_table == "vocabulary":
            shapes["table"] = (self.vocab_size, width)
        if self.hidden is not None:
            shapes["gru_input"] = (3 * self.hidden, width)  # rows in the order r, z, n
            shapes["gru_hidden"] = (3 * self.hidden, self.hidden)
            shapes["rank_proj"] = (self.rank, self.hidden)
        if self.output_table == "target":
            shapes["up"] = (self.hidden_size, self.rank)
        else:
            shapes["readout"] = (self.vocab_size, self.rank)
        return shapes


@dataclass(slots=True)
class _Bound:
    """Everything that depends on the weights and on the target, but on no token."""

    key: tuple[Any, ...]
    embedding: Tensor  # [V, D]; held, so that its address can't be given to another tensor
    output_weight: Tensor  # [V, D]
    source: Tensor  # [V, X] rows looked up by token
    fold: Tensor | None  # [3G, X] input projection still to be applied to a row
    readout: Tensor  # [V, R]
    recurrent: Linear | None  # [3G, G]; packed, it costs several prefixes hardly more than one


class DeLS(LearnedHead):
    """The DeLS head, a corrector (``repairzoo.block.Corrector``): GRU or Markov local expert with a unigram prior.

    ``scores + alpha * local_logits - beta * log_prior`` (arXiv 2607.07409; the fusion of its two experts), where the
    local logits of slot i see the anchor and the tokens chosen at slots before i, and nothing else. The carry is the
    GRU state ``[B, W, G]`` (float32; width 0 for Markov). A new head has a zero readout: its local logits are zero.

    Args:
        config: structure, fusion weights and the target it belongs to.
        generator: source of the initial weights.

    Attributes:
        pack: keep a packed copy of the recurrent matrix where that is faster (CPU); it follows the weights.
    """

    config_type = DeLSConfig
    config: DeLSConfig
    pack: bool = True

    down: nn.Parameter
    table: nn.Parameter
    gru_input: nn.Parameter
    gru_hidden: nn.Parameter
    rank_proj: nn.Parameter
    up: nn.Parameter
    readout: nn.Parameter
    log_prior: Tensor

    def __init__(self, config: DeLSConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self._bound: _Bound | None = None
        for name, shape in config.shapes().items():
            value = torch.zeros(shape, dtype=config.torch_dtype)
            if name not in ("up", "readout"):
                # nn.GRU and nn.Linear start alike: uniform within 1/sqrt(fan); a table has unit rows
                bound = 1 / math.sqrt(config.hidden if name.startswith("gru") and config.hidden else shape[-1])
                value.uniform_(-bound, bound, generator=generator)
            self.register_parameter(name, nn.Parameter(value))
        self.register_buffer("log_prior", torch.zeros(config.vocab_size))

    def _apply(self, fn: Any, recurse: bool = True) -> DeLS:
        prior = self.log_prior
        super()._apply(fn, recurse)
        self.log_prior = prior.to(self.log_prior.device)  # half precision would round the prior
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_bound": None}  # packed copies can be neither copied nor pickled

    # ---- weights in and out

    def set_prior(self, counts: Tensor, smoothing: float = 1.0) -> None:
        """Set the prior from token counts ``[<= V]``; see ``log_prior_from_counts``."""
        self.log_prior.copy_(log_prior_from_counts(counts, self.config.vocab_size, smoothing))

    @classmethod
    def stored_dtype(cls, config: DeLSConfig, name: str) -> torch.dtype:
        return torch.float32 if name == "log_prior" else config.torch_dtype

    @torch.no_grad()
    def merged(self, embedding: Tensor, output_weight: Tensor) -> DeLS:
        """The same head with its products with the target's tables carried out: ``readout [V, R]``, ``table [V, I]``.

        A head whose GRU reads the frozen embedding itself keeps doing so (its table would be a copy of it).
        """
        bound = self.bind(embedding, output_weight)
        config, tensors = self.config, self.state_tensors()
        if config.output_table == "target":
            config = replace(config, output_table="vocabulary")
            del tensors["up"]
            tensors["readout"] = bound.readout
        if config.input_table == "factored":
            config = replace(config, input_table="vocabulary")
            tensors["table"] = self._fold(bound.embedding, tensors.pop("down").to(bound.embedding.device))
        tensors = {n: t.to("cpu", config.torch_dtype if n != "log_prior" else t.dtype) for n, t in tensors.items()}
        return self.from_config_and_tensors(config, tensors).to(self.log_prior.device)

    # ---- binding to a target

    @torch.no_grad()
    def bind(self, embedding: Tensor, output_weight: Tensor) -> _Bound:
        """Precompute the tables that depend on the target; a second call with the same tensors costs nothing.

        ``prepare`` calls it. Call it beforehand where the first ``prepare`` is captured into a graph. Tables are made
        anew after the head's weights have changed. The target's tensors are only read.

        Args:
            embedding: ``[V, D]`` frozen input embedding, with ``vocab_size`` or ``padded_vocab_size`` rows.
            output_weight: ``[V, D]`` frozen output head.

        Raises:
            IncompatibleArtifact: the target has another vocabulary or hidden size than the config states.
        """
        key = (self.pack, *self.binding_key(embedding, output_weight))
        if self._bound is not None and self._bound.key == key:
            return self._bound
        super().bind(embedding, output_weight)  # may widen the weights
        key = (self.pack, *self.binding_key(embedding, output_weight))
        c, dtype = self.config, next(self.parameters()).dtype
        embedding, output_weight = embedding.detach()[: c.vocab_size], output_weight.detach()[: c.vocab_size]
        source, fold = embedding, None
        if c.input_table == "vocabulary":
            source = self.table.detach()
        elif c.input_table == "factored":
            fold = self.down.detach()
        if c.variant == "gru":
            fold = self.gru_input.detach() if fold is None else _product(self.gru_input.detach(), fold)
            fold = fold.to(dtype)
        small = c.variant == "markov" or c.vocab_size * 3 * (c.hidden or 0) * dtype.itemsize <= TABLE_BYTES
        if fold is not None and small:
            source, fold = self._fold(source, fold), None
        readout = self.readout.detach() if c.output_table == "vocabulary" else self._fold(output_weight, self.up.T)
        recurrent = Linear([self.gru_hidden.detach()], pack=self.pack) if c.variant == "gru" else None
        self._bound = _Bound(key, embedding, output_weight, source, fold, readout, recurrent)
        return self._bound

    def _fold(self, rows: Tensor, matrix: Tensor) -> Tensor:
        """``rows [V, D] @ matrix.T [D, X]`` in at least float32, in the dtype of the weights."""
        return _product(rows, matrix.detach().T).to(next(self.parameters()).dtype)

    # ---- the corrector

    def prepare(self, block: DraftBlock, pool: Pool | None) -> Prepared:
        """Readout rows ``[B, S, K, R]`` and ``beta`` times the log-prior ``[B, S, K]`` of the pool; nothing for the
        whole vocabulary.

        Raises:
            IncompatibleArtifact: the block's vocabulary or the target isn't the one this head was made for.
        """
        bound = self.bind(block.embedding, block.output_weight)
        if block.logits.shape[-1] != self.config.vocab_size:
            raise IncompatibleArtifact(
                f"dels head for {self.config.target_id}: the draft has {block.logits.shape[-1]} logits a slot, "
                f"the head vocab_size {self.config.vocab_size}"
            )
        if pool is None:
            return ()
        return F.embedding(pool.ids, bound.readout), self._prior(self.log_prior[pool.ids], block.logits.dtype)

    def _prior(self, log_prior: Tensor, dtype: torch.dtype) -> Tensor:
        """What is subtracted; without a weight +0.0, since -0.0 would turn a score of -0.0 into +0.0."""
        return log_prior.to(dtype) * self.config.beta if self.config.beta else torch.zeros_like(log_prior, dtype=dtype)

    def start(self, block: DraftBlock) -> Tensor:
        """The zero state ``[B, 1, G]``: it is reset every block."""
        dtype = _working(next(self.parameters()).dtype)
        return torch.zeros(len(block.anchor_ids), 1, self.config.hidden or 0, dtype=dtype, device=block.logits.device)

    @torch.no_grad()
    def step(
        self, prepared: Prepared, carry: Tensor, slot: int, previous: Tensor, scores: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One slot for ``W`` prefixes; see ``Corrector.step``. ``carry`` and the result are ``[B, W, G]``."""
        c, bound = self.config, self._bound
        if bound is None:
            raise InvalidInput("dels: step was called before prepare or bind")
        if slot > 0 or c.anchor_input:
            carry, state = self._consume(bound, previous, carry)
            if slot >= c.pure_draft_prefix_len and (c.alpha or c.beta):
                if prepared:
                    rows, prior = prepared[0][:, slot], prepared[1][:, slot, None]  # [B, K, R], [B, 1, K]
                else:
                    rows, prior = bound.readout, self._prior(self.log_prior, scores.dtype)
                local = (state @ rows.transpose(-1, -2)).to(scores.dtype)  # [B, W, K]
                # subtracting +0.0 changes no bit of any score, adding it would turn -0.0 into +0.0
                return scores - (prior.to(scores.dtype) - c.alpha * local), carry
        return scores, carry

    def _consume(self, bound: _Bound, tokens: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        """State after ``tokens [B, W]`` and the rank state ``[B, W, R]`` read from it."""
        inputs = F.embedding(tokens, bound.source)
        if bound.fold is not None:
            inputs = inputs.to(bound.fold.dtype) @ bound.fold.T
        if bound.recurrent is None:
            return carry, inputs
        carry = self._gru(inputs, carry, bound.recurrent(carry.to(self.gru_hidden.dtype))[0])
        return carry, self._rank_state(carry)

    def _gru(self, inputs: Tensor, state: Tensor, from_state: Tensor) -> Tensor:
        """One bias-free GRU step, gates r, z, n as in ``nn.GRU``; ``inputs [..., 3G]`` and ``from_state [..., 3G]`` are
        already projected."""
        gates, (inputs, from_state) = 2 * state.shape[-1], (x.to(state.dtype) for x in (inputs, from_state))
        reset, update = torch.sigmoid(inputs[..., :gates] + from_state[..., :gates]).chunk(2, -1)
        new = torch.tanh(inputs[..., gates:] + reset * from_state[..., gates:])
        return new + update * (state - new)

    def _rank_state(self, state: Tensor) -> Tensor:
        rank = (state.to(self.rank_proj.dtype) @ self.rank_proj.T).to(state.dtype)
        return (F.silu(rank) if self.config.activation == "silu" else rank).to(self.rank_proj.dtype)

    # ---- teacher forcing

    def local_logits(self, tokens: Tensor, columns: Tensor | None = None) -> Tensor:
        """Local logits along given tokens, differentiable in the head's weights; needs ``bind`` first.

        Row ``t`` has consumed tokens ``0..t`` (token 0 is the anchor), so it predicts token ``t + 1``. Equal to
        ``step`` fed with the same tokens; the input and output products are batched over the window.

        Args:
            tokens: ``[N, T]`` int64.
            columns: ``[C]`` int64 vocabulary ids to compute, or None for all.

        Returns:
            ``[N, T, C]`` float32 (float64 for a float64 head).
        """
        if self._bound is None:
            raise InvalidInput("dels: bind the head to its target before local_logits")
        c, bound, dtype = self.config, self._bound, next(self.parameters()).dtype
        if c.input_table == "vocabulary":
            inputs = F.embedding(tokens, self.table)
        else:
            inputs = F.embedding(tokens, bound.embedding).to(dtype)
            inputs = inputs @ self.down.T if c.input_table == "factored" else inputs  # [N, T, I]
        rank = inputs
        if c.variant == "gru":
            gates = inputs @ self.gru_input.T  # [N, T, 3G]
            state = gates.new_zeros(len(tokens), c.hidden or 0, dtype=_working(dtype))
            states = []
            for t in range(tokens.shape[1]):
                state = self._gru(gates[:, t], state, state.to(dtype) @ self.gru_hidden.T)
                states.append(state)
            rank = self._rank_state(torch.stack(states, 1))
        if c.output_table == "target":
            rank, rows = rank @ self.up.T, bound.output_weight
        else:
            rows = self.readout
        rows = rows if columns is None else rows[columns]
        return (rank @ rows.to(dtype).T).to(_working(dtype))


def log_prior_from_counts(counts: Tensor, vocab_size: int, smoothing: float = 1.0) -> Tensor:
    """``log((count + smoothing) / sum)`` over ``vocab_size`` ids, float32 ``[V]``.

    Ids behind the counted ones count 0. With ``smoothing`` 0 an unseen id takes the smallest seen value (its own would
    be minus infinity).

    Raises:
        InvalidInput: negative or non-finite counts, none at all, or counts of ids behind the vocabulary.
    """
    counts = counts.reshape(-1).double()
    if not counts.isfinite().all() or (counts < 0).any():
        raise InvalidInput("unigram counts must be finite and not negative")
    if (counts[vocab_size:] > 0).any():
        raise InvalidInput(f"unigram counts for {len(counts)} ids, some of them behind vocab_size {vocab_size}")
    if not math.isfinite(smoothing) or smoothing < 0 or (smoothing == 0 and not counts.any()):
        raise InvalidInput(f"smoothing {smoothing} with {int(counts.sum())} counted tokens gives no distribution")
    counts = F.pad(counts[:vocab_size], (0, max(0, vocab_size - len(counts)))) + smoothing
    log_prior = (counts / counts.sum()).log()
    return log_prior.clamp_min(log_prior[counts > 0].min()).float()


def _working(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def _product(left: Tensor, right: Tensor) -> Tensor:
    dtype = _working(torch.promote_types(left.dtype, right.dtype))
    return left.to(dtype) @ right.to(dtype)
