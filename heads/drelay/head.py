"""DRelay: keep or repair each slot of a draft, seeing all candidates of all slots and the tokens chosen so far
(arXiv 2610.01439)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repairzoo.block import HISTORY, DraftBlock, Pool
from repairzoo.errors import IncompatibleArtifact, InvalidInput
from repairzoo.learned_head import Check, HeadConfig, LearnedHead, is_int, traced

SLOT_STATS, GATE_STATS = 6, 8
TABLE_BYTES = 256 * 2**20  # products of the whole vocabulary's embeddings are kept up to this size
_LOWEST = -30.0  # log-probabilities are clamped here where they are features; scores are not

# Internal widths are not public: `full` is the natural size of this layout (the paper's 35.06 M, at D = 2560).
PRESETS: dict[str, dict[str, int]] = {
    "small": {"width": 192, "heads": 4, "ffn": 768, "residual": 576, "rank": 96, "gate": 192},
    "medium": {"width": 256, "heads": 4, "ffn": 1024, "residual": 1024, "rank": 128, "gate": 256},
    "full": {"width": 512, "heads": 4, "ffn": 2048, "residual": 2048, "rank": 256, "gate": 512},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DRelayConfig(HeadConfig):
    """Structure of a DRelay head; ``**PRESETS["small"]`` gives the widths of the default target.

    Attributes:
        width: d of all attention. heads: of every attention. ffn: of the slot mixing. residual: inner width of the
            shared residual. rank: of the candidate corrections. gate: inner width of the gate. slot_layers: blocks of
            slot mixing. history: verified feature rows that are read, at most 64.
    """

    kind: ClassVar[str] = "drelay"

    width: int
    heads: int
    ffn: int
    residual: int
    rank: int
    gate: int
    slot_layers: int = 2
    history: int = HISTORY

    def checks(self) -> list[Check]:
        positive = [
            (key, is_int(getattr(self, key), 1), "a positive integer")
            for key in ("width", "heads", "ffn", "residual", "rank", "gate")
        ]
        return [
            *HeadConfig.checks(self),
            *positive,
            ("pool_size", self.pool_size >= 2, "at least 2: there is nothing to repair to"),
            ("heads", self.heads > 0 and self.width % self.heads == 0, "a divisor of width"),
            ("slot_layers", is_int(self.slot_layers, 0), "a non-negative integer"),
            ("history", is_int(self.history, 0) and self.history <= HISTORY, f"an integer from 0 to {HISTORY}"),
        ]


class Prepared(NamedTuple):
    """What of a block does not depend on chosen tokens; ``d`` is the width, ``G`` the gate's.

    ``entry_*`` are keys and values of the prefix memory: their token part ``[B, S, K, 2d]`` for every candidate, their
    slot part ``[B, S, 2d]``, and the anchor's ``[B, 2d]``.
    """

    ids: Tensor  # [B, S, K]
    static: Tensor  # [B, S, K] correction of the ranking: shared residual, global and history reads
    query: Tensor  # [B, S, K, d] of the prefix read, without the last token
    last: Tensor  # [B, S, K, d] what a candidate adds to the queries of the next slot
    last_anchor: Tensor  # [B, d]
    entry_token: Tensor
    entry_slot: Tensor
    entry_anchor: Tensor
    through: Tensor  # [B, S, K, d] candidate direction that a prefix read is projected on
    gate: Tensor  # [B, S, G] static part of the gate's first layer
    null_mass: Tensor  # [B, S, K] of the candidate read, mean over heads
    fusion: Tensor  # [B, S] lambda


class _Served(NamedTuple):
    """Products of weights, and of weights with the vocabulary's embeddings: what serving need not do every block."""

    key: tuple[Any, ...]
    embedding: Tensor  # held, so that its address can't be given to another tensor
    tokens: Tensor  # [V, 4d + R] slot, next query, prefix entry (2d), shared residual of every token
    slots: Tensor  # [2d + r, d] of a token's slot part: candidate, direction of a prefix read, of the other reads
    reads: Tensor  # [5d, d] of a candidate: scaled query, key, value of the global read; scaled history, prefix query
    hidden: Tensor  # [3d + R, D] of a slot: slot mixing, prefix entry, anchor, shared residual
    mixed: Tensor  # [R + 2d + G, d] of a mixed slot: shared residual, prefix entry, gate
    ranks: Tensor  # [r, 2d] of the values of the global read and of the history read
    spread: dict[tuple[int, int], Tensor]  # what `spread` makes of the global read's bias, by slots and candidates


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def split_heads(x: Tensor, heads: int) -> Tensor:
    """``[..., T, d] -> [..., heads, T, d / heads]``."""
    return x.view(*x.shape[:-1], heads, -1).transpose(-3, -2)


def with_null(entries: Tensor) -> Tensor:
    """Keys and values ``[..., M, e]`` with one more of zero: its logit is 0, and it adds nothing (Eq. 1)."""
    return F.pad(entries, (0, 0, 0, 1))


def candidate_read(query: Tensor, key: Tensor, value: Tensor, log_q: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Every candidate attends to every candidate of the block (Eq. 1).

    Args:
        query, key, value: ``[..., S, K, e]``. log_q: ``[..., S, K]`` prior of the candidates.
        bias: ``[..., 2S - 1]`` by (slot of the key - slot of the query) + S - 1.

    Returns:
        the reads ``[..., S, K, e]`` and the null's mass ``[..., S, K]``.
    """
    s, k = query.shape[-3:-1]
    key, value = (with_null(x.flatten(-3, -2)) for x in (key, value))
    query = (query * query.shape[-1] ** -0.5).flatten(-3, -2)
    read, null = lattice_read(query, key, value, log_q.flatten(-2), spread(bias, s, k))
    return read.unflatten(-2, (s, k)), null.unflatten(-1, (s, k))


def spread(bias: Tensor, slots: int, candidates: int) -> Tensor:
    """Bias by relative slot ``[..., 2S - 1]`` -> by candidate and candidate or null ``[..., S*K, S*K + 1]``, float32 or
    wider."""
    slot = torch.arange(slots, device=bias.device).repeat_interleave(candidates)
    return F.pad(wide(bias)[..., slot - slot[:, None] + slots - 1], (0, 1))


def lattice_read(query: Tensor, key: Tensor, value: Tensor, log_q: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`candidate_read` of a flat lattice: scaled queries ``[..., T, e]``, keys and values ``[..., T + 1, e]``
    with their null, ``log_q [..., T]``, and a bias ``[..., T, T + 1]``."""
    prior = F.pad(wide(log_q), (0, 1))[..., None, :] + bias
    weights = (wide(query @ key.transpose(-1, -2)) + prior).softmax(-1)
    return weights.to(value.dtype) @ value, weights[..., -1]


class Contest(NamedTuple):
    """The native candidate against all others, before and after the ranking; scores are minus infinity at the native.

    Where no other candidate is possible, what stands under a logarithm is NaN.
    """

    kept: Tensor  # [..., K] bool, the native one
    best: Tensor  # [..., 1] int64, the best other after the ranking
    rest: Tensor  # [..., K] scores of the others, before
    moved: Tensor  # [..., K] after
    before: Tensor  # [..., 1] log-sum-exp of the others' scores, before
    after: Tensor  # [..., 1] after
    chance: Tensor  # [..., K] log-softmax of the others, after


def contest(scores: Tensor, change: Tensor, native: Tensor) -> Contest:
    """See :func:`repaired_scores`, whose arguments these are."""
    kept = is_native(native, scores.shape[-1])
    rest, moved = others(scores, kept), others(scores + change, kept)
    best = moved.argmax(-1, keepdim=True)
    chance = moved.log_softmax(-1)
    # a log-sum-exp by any entry and its log-softmax: one fused operation instead of a dozen
    before = rest.gather(-1, best) - rest.log_softmax(-1).gather(-1, best)
    after = moved.gather(-1, best) - chance.gather(-1, best)
    return Contest(kept, best, rest, moved, before, after, chance)


def repaired_scores(
    scores: Tensor, change: Tensor, delta_g: Tensor, native: Tensor, seen: Contest | None = None
) -> Tensor:
    """Scores whose softmax is ``p_act`` and whose argmax is the gate's decision (Eq. 2 and 6; ties keep).

    With ``S = scores + change``, ``r`` the softmax of S over all but the native candidate and
    ``g = lse_{k != native}(scores) - scores_native + delta_g``, candidate k gets ``scores_native + g + log r_k``; the
    native one stays as it is. No change and no delta give the scores bit for bit.

    Args:
        scores: ``[..., K]`` log q up to a constant. change: ``[..., K]`` finite (the native's is not used).
        delta_g: ``[...]`` finite. native: ``[..., 1]`` int64, the candidate that would be kept.
        seen: their :func:`contest`, if known.
    """
    c = contest(scores, change, native) if seen is None else seen
    shift = torch.where(c.before.isnan(), 0.0, c.before - c.after)  # no other is possible
    correction = change + (delta_g[..., None] + shift)
    # subtracting +0.0 changes no bit of any score, adding it would turn -0.0 into +0.0
    return torch.where(c.kept, scores, scores - (0.0 - correction))


def is_native(native: Tensor, k: int) -> Tensor:
    """``[..., K]`` bool from an index ``[..., 1]``."""
    return torch.arange(k, device=native.device) == native


def others(x: Tensor, kept: Tensor) -> Tensor:
    """``x`` with minus infinity at the native candidate."""
    return x.masked_fill(kept, float("-inf"))


class _SlotLayer(nn.Module):
    """Pre-norm attention over all slots, then a feed-forward layer."""

    def __init__(self, c: DRelayConfig) -> None:
        super().__init__()
        d, dtype = c.width, c.torch_dtype
        self.heads = c.heads
        self.attention_norm, self.ffn_norm = nn.LayerNorm(d, dtype=dtype), nn.LayerNorm(d, dtype=dtype)
        self.qkv = nn.Linear(d, 3 * d, bias=False, dtype=dtype)
        self.out = nn.Linear(d, d, bias=False, dtype=dtype)
        self.up, self.down = nn.Linear(d, c.ffn, dtype=dtype), nn.Linear(c.ffn, d, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(y, self.heads) for y in self.qkv(self.attention_norm(x)).chunk(3, -1))
        weights = (wide(q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5).softmax(-1).to(v.dtype)
        x = x + self.out((weights @ v).transpose(-3, -2).flatten(-2))
        return x + self.down(F.silu(self.up(self.ffn_norm(x))))


class DRelay(LearnedHead):
    """The DRelay head, a corrector (``repairzoo.block.Corrector``): scores -> scores whose softmax is ``p_act``.

    What comes in counts as log q (of the backbone, of its causal part, of heads before), so the head stacks on all of
    them; pools and the candidate read use the backbone's own log-probabilities, which the walk does not change. The
    carry is the prefix memory, the entries of the anchor and of the tokens chosen so far, ``[B, W, slot * 2d]``: those
    of all candidates are computed once. A new head returns the scores it was given, bit for bit.

    Args:
        config: structure and the target it belongs to.
        generator: source of the initial weights, N(0, 0.02); output layers start at zero.
    """

    config_type = DRelayConfig

    def __init__(self, config: DRelayConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = c = config
        self._gate: tuple[Any, Tensor] | None = None
        self._served: _Served | None = None
        D, d, dtype = c.hidden_size, c.width, c.torch_dtype

        def linear(inner: int, outer: int, bias: bool = False) -> nn.Linear:
            return nn.Linear(inner, outer, bias=bias, dtype=dtype)

        # (a) slot mixing
        self.slot_hidden, self.slot_token, self.anchor = linear(D, d), linear(D, d), linear(D, d)
        self.slot_stats = linear(SLOT_STATS, d)
        self.slot_embedding = nn.Parameter(torch.zeros(c.slots, d, dtype=dtype))
        self.slot_layers = nn.ModuleList(_SlotLayer(c) for _ in range(c.slot_layers))
        # (b) candidate reads, (c) fusion
        self.candidate, self.candidate_norm = linear(d, d), nn.LayerNorm(d, dtype=dtype)
        self.read_qkv, self.read_out = linear(d, 3 * d), linear(d, d)
        self.read_bias = nn.Parameter(torch.zeros(c.heads, 2 * c.slots - 1, dtype=dtype))
        self.fusion = linear(D + d, 1, bias=True)
        # (d) prefix memory: an entry is [hidden; z; token; anchor] -> key, value
        self.prefix_hidden, self.prefix_token, self.query_token = linear(D, d), linear(D, d), linear(D, d)
        self.prefix_kv = linear(4 * d, 2 * d)
        self.prefix_query, self.prefix_last, self.prefix_out = linear(d, d), linear(d, d), linear(d, d)
        # (e) history read
        self.history_kv, self.history_query, self.history_out = linear(D, 2 * d), linear(d, d), linear(d, d)
        # (f) ranking: shared residual read through the embedding, and three compact corrections
        self.residual_in, self.residual_out = linear(D + d, c.residual, bias=True), linear(c.residual, D)
        self.candidate_rank = linear(d, c.rank)
        self.global_rank, self.history_rank, self.prefix_rank = (linear(d, c.rank) for _ in range(3))
        # (g) gate: [hidden; z; prefix read of candidate 0; of the best alternative; stats]
        self.gate_in, self.gate_out = linear(4 * d + GATE_STATS, c.gate, bias=True), linear(c.gate, 1, bias=True)
        zero = (self.residual_out, self.global_rank, self.history_rank, self.prefix_rank, self.gate_out, self.fusion)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02, generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in zero:
            nn.init.zeros_(module.weight)

    # ---- all that does not depend on chosen tokens

    def _check(self, s: int, k: int) -> None:
        if k < 2:
            raise InvalidInput("drelay: a pool of 1 candidate leaves nothing to repair to; give at least 2")
        if s > self.config.slots:
            raise IncompatibleArtifact(
                f"drelay head for {self.config.target_id}: {s} slots; trained for at most {self.config.slots}"
            )

    def encode(self, block: DraftBlock, pool: Pool) -> Prepared:
        """Everything but the walk, differentiable in the head, the hidden states and the pool's log-probabilities.

        Raises:
            InvalidInput: a pool of one candidate. IncompatibleArtifact: more slots than were trained.
        """
        c, dtype = self.config, self.gate_out.weight.dtype
        s, k = pool.ids.shape[1:]
        self._check(s, k)
        hidden, context = block.hidden.to(dtype), block.context.to(dtype)
        embedded = F.embedding(pool.ids, block.embedding).detach().to(dtype)  # [B, S, K, D]
        anchor_token = F.embedding(block.anchor_ids, block.embedding).detach().to(dtype)  # [B, D]
        log_q = wide(pool.log_probs)
        pi = log_q.softmax(-1).to(dtype)

        e = self.slot_token(embedded)  # [B, S, K, d]
        u = self.slot_hidden(hidden) + (pi[..., None] * e).sum(-2) + self.slot_embedding[:s]
        u = u + self.slot_stats(slot_stats(log_q).to(dtype))
        for layer in self.slot_layers:
            u = layer(u)  # [B, S, d]

        n = self.candidate_norm(u[:, :, None] + self.candidate(e))
        q, key, value = (
            split_heads(x.flatten(1, 2), c.heads).unflatten(-2, (s, k)) for x in self.read_qkv(n).chunk(3, -1)
        )
        first = c.slots - s  # a shorter block keeps the trained offset of relative slots
        bias = self.read_bias[:, first : first + 2 * s - 1]
        read, null = candidate_read(q, key, value, log_q[:, None], bias)  # [B, heads, S, K, d / heads]
        lam = torch.sigmoid(self.fusion(torch.cat((hidden, u), -1)))  # [B, S, 1]
        residual = lam[..., None] * self.read_out(read.permute(0, 2, 3, 1, 4).flatten(-2))  # [B, S, K, d]
        z = u + (pi[..., None] * residual).sum(-2)  # lambda scales the slot's residual as well: it is linear

        past = self._history(n, block)
        shared = self.residual_out(F.silu(self.residual_in(torch.cat((hidden, z), -1))))  # [B, S, D]
        direction = self.candidate_rank(e)  # [B, S, K, r]
        static = (wide(embedded) @ wide(shared)[..., None])[..., 0]
        static = static + (wide(self.global_rank(residual) + self.history_rank(past)) * wide(direction)).sum(-1)

        by_hidden, by_z, by_token, by_anchor = self.prefix_kv.weight.chunk(4, -1)  # [2d, d] each
        about = F.linear(self.anchor(context), by_anchor)  # [B, 2d]
        entry_slot = F.linear(self.prefix_hidden(hidden), by_hidden) + F.linear(z, by_z) + about[:, None]
        entry_anchor = F.linear(self.prefix_hidden(context), by_hidden) + about
        entry_anchor = entry_anchor + F.linear(self.prefix_token(anchor_token), by_token)
        gate_hidden, gate_z = self.gate_in.weight[:, : c.width], self.gate_in.weight[:, c.width : 2 * c.width]
        return Prepared(
            ids=pool.ids,
            static=static,
            query=self.prefix_query(n),
            last=self.prefix_last(self.query_token(embedded)),
            last_anchor=self.prefix_last(self.query_token(anchor_token)),
            entry_token=F.linear(self.prefix_token(embedded), by_token),
            entry_slot=entry_slot,
            entry_anchor=entry_anchor,
            through=direction @ self.prefix_rank.weight @ self.prefix_out.weight,
            gate=F.linear(self.slot_hidden(hidden), gate_hidden, self.gate_in.bias) + F.linear(z, gate_z),
            null_mass=null.mean(1),
            fusion=lam[..., 0],
        )

    def _history(self, n: Tensor, block: DraftBlock) -> Tensor:
        """What every candidate ``n [B, S, K, d]`` finds among the last verified features; 0 where there are none."""
        scale = (self.config.width // self.config.heads) ** -0.5
        return self.history_out(self._history_read(self.history_query(n) * scale, block))

    def _history_read(self, query: Tensor, block: DraftBlock) -> Tensor:
        """The values that scaled queries ``[B, S, K, d]`` read, ``[B, S, K, d]``."""
        c = self.config
        start = block.history.shape[1] - c.history
        rows, seen = block.history[:, start:].to(query.dtype), block.history_mask[:, start:]  # [B, M, D], [B, M]
        key, value = (split_heads(x, c.heads) for x in with_null(self.history_kv(rows)).chunk(2, -1))
        q = split_heads(query.flatten(1, 2), c.heads)  # [B, heads, S*K, d / heads]
        hidden = F.pad(~seen, (0, 1))[:, None, None]  # the null is always seen
        weights = wide(q @ key.transpose(-1, -2)).masked_fill(hidden, float("-inf")).softmax(-1)
        return (weights.to(value.dtype) @ value).transpose(1, 2).flatten(-2).view_as(query)

    # ---- the same for serving, with what depends on weights and vocabulary alone multiplied out

    @torch.no_grad()
    def bind(self, embedding: Tensor, output_weight: Tensor) -> None:
        """See :meth:`LearnedHead.bind`; also makes the tables of serving, so that no round has to."""
        super().bind(embedding, output_weight)
        tables = self._tables(embedding)
        if tables is not None:
            self._spread(tables, self.config.slots, self.config.pool_size)
        self._folded_gate()

    def _tables(self, embedding: Tensor) -> _Served | None:
        """Tables of this embedding and these weights, made anew when either changes; None where they are too large."""
        c, weight = self.config, self.gate_out.weight
        d = c.width
        if embedding.shape[0] * (4 * d + c.residual) * weight.dtype.itemsize > TABLE_BYTES:
            return None
        if traced(embedding):
            return None
        key = self.binding_key(embedding)
        if self._served is None or self._served.key != key:
            _, by_z, by_token, _ = self.prefix_kv.weight.detach().chunk(4, -1)
            entry = _product(by_token, self.prefix_token.weight)
            last = _product(self.prefix_last.weight, self.query_token.weight)
            columns = torch.cat((self.slot_token.weight, last, entry, self.residual_out.weight.T))  # [4d + R, D]
            through = _product(self.prefix_rank.weight.T, self.candidate_rank.weight)
            through = _product(self.prefix_out.weight.T, through)  # [d, d] of e
            hidden = (self.slot_hidden, self.prefix_hidden, self.anchor)
            ranks = (
                _product(self.global_rank.weight, self.read_out.weight),
                _product(self.history_rank.weight, self.history_out.weight),
            )
            mixed = (self.residual_in.weight[:, -d:], by_z, self.gate_in.weight[:, d : 2 * d])
            scale = (d // c.heads) ** -0.5
            q, kv = self.read_qkv.weight.split((d, 2 * d))
            served = _Served(
                key=key,
                embedding=embedding,
                tokens=_product(embedding, columns.T).to(weight.dtype),
                slots=torch.cat((self.candidate.weight, through, self.candidate_rank.weight)).detach(),
                reads=torch.cat((q * scale, kv, self.history_query.weight * scale, self.prefix_query.weight)).detach(),
                hidden=torch.cat((*(x.weight for x in hidden), self.residual_in.weight[:, :-d])).detach(),
                mixed=torch.cat(mixed).detach(),
                ranks=torch.cat(ranks, 1),
                spread={},
            )
            if traced(served.tokens):
                return None
            self._served = served
        return self._served

    def _spread(self, t: _Served, slots: int, candidates: int) -> Tensor:
        """``[heads, S*K, S*K + 1]`` bias of the global read; a shorter block keeps the trained offset of relative
        slots."""
        if (slots, candidates) not in t.spread:
            first = self.config.slots - slots
            made = spread(self.read_bias[:, first : first + 2 * slots - 1], slots, candidates)
            if traced(made):
                return made
            t.spread[slots, candidates] = made
        return t.spread[slots, candidates]

    def _serve(self, t: _Served, block: DraftBlock, pool: Pool) -> Prepared:
        """:meth:`encode` with the tables ``t``."""
        c, dtype = self.config, self.gate_out.weight.dtype
        d, (s, k) = c.width, pool.ids.shape[1:]
        self._check(s, k)
        R = c.residual
        hidden, context = block.hidden.to(dtype), block.context.to(dtype)
        log_q = wide(pool.log_probs)
        pi = log_q.softmax(-1).to(dtype)
        e, last, entry_token, through_e = F.embedding(pool.ids, t.tokens).split((d, d, 2 * d, R), -1)  # [B, S, K, ...]
        _, last_anchor, entry_anchor, _ = F.embedding(block.anchor_ids, t.tokens).split((d, d, 2 * d, R), -1)
        rows = F.linear(torch.cat((hidden, context[:, None]), 1), t.hidden)  # [B, S + 1, 3d + R]
        own, by_context = rows[:, :s], rows[:, s]

        u = own[..., :d] + (pi[..., None, :] @ e)[..., 0, :] + self.slot_embedding[:s]
        u = u + self.slot_stats(slot_stats(log_q).to(dtype))
        for layer in self.slot_layers:
            u = layer(u)  # [B, S, d]
        about_e, through, direction = F.linear(e, t.slots).split((d, d, c.rank), -1)
        n = self.candidate_norm(u[:, :, None] + about_e)
        reads = F.linear(n, t.reads)  # [B, S, K, 5d]
        lattice = reads.flatten(1, 2)  # [B, S*K, 5d]
        q = split_heads(lattice[..., :d], c.heads)
        key, value = (split_heads(x, c.heads) for x in with_null(lattice[..., d : 3 * d]).chunk(2, -1))
        read, null = lattice_read(q, key, value, log_q.flatten(1)[:, None], self._spread(t, s, k))
        read = read.transpose(1, 2).flatten(-2).unflatten(1, (s, k))  # [B, S, K, d]
        lam = torch.sigmoid(self.fusion(torch.cat((hidden, u), -1)))  # [B, S, 1]
        z = u + lam * self.read_out((pi[..., None, :] @ read)[..., 0, :])

        inner, entry_z, gate_z = F.linear(z, t.mixed).split((R, 2 * d, c.gate), -1)
        inner = F.silu(own[..., 3 * d :] + (inner + self.residual_in.bias))  # [B, S, R]
        past = self._history_read(reads[..., 3 * d : 4 * d], block)
        ranks = F.linear(torch.cat((lam[..., None] * read, past), -1), t.ranks)
        static = (wide(through_e) @ wide(inner)[..., None])[..., 0] + (wide(ranks) * wide(direction)).sum(-1)

        by_hidden, _, _, by_anchor = self.prefix_kv.weight.chunk(4, -1)
        about = F.linear(by_context[:, 2 * d : 3 * d], by_anchor)
        entries = F.linear(rows[..., d : 2 * d], by_hidden) + about[:, None]  # [B, S + 1, 2d]
        return Prepared(
            ids=pool.ids,
            static=static,
            query=reads[..., 4 * d :],
            last=last,
            last_anchor=last_anchor,
            entry_token=entry_token,
            entry_slot=entries[:, :s] + entry_z,
            entry_anchor=entries[:, s] + entry_anchor,
            through=through,
            gate=F.linear(own[..., :d], self.gate_in.weight[:, :d], self.gate_in.bias) + gate_z,
            null_mass=null.unflatten(-1, (s, k)).mean(1),
            fusion=lam[..., 0],
        )

    # ---- what depends on chosen tokens

    def _finish(
        self, query: Tensor, memory: Tensor, visible: Tensor | None, static: Tensor, through: Tensor, gate: Tensor,
        scores: Tensor,
    ) -> Tensor:  # fmt: skip
        """Prefix read, ranking and gate of one slot of one prefix; leading dimensions broadcast.

        Args:
            query, through: ``[..., K, d]``. memory: ``[..., M, 2d]`` entries of the anchor and of chosen tokens.
            visible: ``[..., M]`` bool, or None for all. static, scores: ``[..., K]``. gate: ``[..., G]``.
        """
        c = self.config
        d = c.width
        q = split_heads(query, c.heads)
        key, value = (split_heads(x, c.heads) for x in memory.chunk(2, -1))
        logits = wide(q @ key.transpose(-1, -2)) * q.shape[-1] ** -0.5  # [..., heads, K, M]
        if visible is not None:
            logits = logits.masked_fill(~visible[..., None, None, :], float("-inf"))
        read = (logits.softmax(-1).to(value.dtype) @ value).transpose(-3, -2).flatten(-2)  # [..., K, d]
        change = (static + (wide(read) * wide(through)).sum(-1)).to(scores.dtype)

        native = scores.argmax(-1, keepdim=True)  # [..., 1]; candidate 0 unless something came before this head
        seen = contest(scores, change, native)
        pair = torch.cat((native, seen.best), -1)
        reads = read.gather(-2, pair[..., None].expand(*pair.shape, d)).flatten(-2)  # [..., 2d]
        stats = gate_stats(scores, change, native, seen).to(reads.dtype)
        inner = gate + F.linear(torch.cat((reads, stats), -1), self._folded_gate().to(reads.dtype))
        delta_g = wide(self.gate_out(F.silu(inner)))[..., 0].to(scores.dtype)
        return repaired_scores(scores, change, delta_g, native, seen)

    # ---- the corrector

    @torch.no_grad()
    def prepare(self, block: DraftBlock, pool: Pool | None) -> Prepared:
        """See :meth:`encode`; refuses to work without a pool."""
        if pool is None:
            raise InvalidInput("drelay chooses within a pool: walk it with pool=make_pool(block.logits, pool_size)")
        tables = self._tables(block.embedding)
        return self.encode(block, pool) if tables is None else self._serve(tables, block, pool)

    def start(self, block: DraftBlock) -> Tensor:
        """Nothing remembered yet: ``[B, 1, 0]``."""
        weight = self.gate_out.weight
        return torch.zeros(len(block.anchor_ids), 1, 0, dtype=weight.dtype, device=weight.device)

    @torch.no_grad()
    def step(
        self, prepared: Prepared, carry: Tensor, slot: int, previous: Tensor, scores: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One slot for ``W`` prefixes; see ``Corrector.step``. ``carry`` comes with ``slot`` entries, leaves with one
        more."""
        p = prepared
        b, w = previous.shape
        width = p.entry_anchor.shape[-1]
        if slot == 0:
            last, entry = p.last_anchor[:, None, None], p.entry_anchor[:, None].expand(b, w, width)
        else:
            found = p.ids[:, slot - 1, None] == previous[..., None]  # [B, W, K]
            rank = found.to(torch.uint8).argmax(-1, keepdim=True)  # [B, W, 1]
            last = p.last[:, slot - 1].gather(1, rank.expand(b, w, width // 2))[:, :, None]  # [B, W, 1, d]
            entry = p.entry_token[:, slot - 1].gather(1, rank.expand(b, w, width)) + p.entry_slot[:, slot - 1, None]
        carry = torch.cat((carry, entry), -1)
        new = self._finish(
            p.query[:, None, slot] + last, carry.unflatten(-1, (slot + 1, width)), None, p.static[:, None, slot],
            p.through[:, None, slot], p.gate[:, None, slot], scores,
        )  # fmt: skip
        return new, carry

    @torch.no_grad()
    def chain(self, block: DraftBlock, pool: Pool, base: Tensor) -> tuple[Tensor, Tensor]:
        """The whole greedy walk in one kernel (Triton): what slot by slot ``step`` gives, in float32 throughout.

        Args:
            base: ``[B, S, K]`` float32 incoming scores.

        Returns:
            ranks ``[B, S]`` int64 and scores ``[B, S, K]``.
        """
        from repairzoo.kernels.walks import drelay_walk

        p = self.prepare(block, pool)
        parts = (
            p.static,
            p.query,
            p.last,
            p.last_anchor,
            p.entry_token,
            p.entry_slot,
            p.entry_anchor,
            p.through,
            p.gate,
        )
        return drelay_walk(parts, self._gate_weights(), base, self.config.heads)

    def _folded_gate(self) -> Tensor:
        """``[G, 2d + 8]`` float32 or wider: the gate on two prefix reads, their output projection multiplied in, and on
        the statistics.

        Without gradient it is made anew only after the weights have changed.
        """
        source = (self.gate_in.weight, self.prefix_out.weight)
        state = None
        if not torch.is_grad_enabled():
            state = tuple((w.data_ptr(), w.dtype, 0 if w.is_inference() else w._version) for w in source)
            if self._gate is not None and self._gate[0] == state:
                return self._gate[1]
        d, (inner, out) = self.config.width, (wide(w) for w in source)
        parts = (inner[:, 2 * d : 3 * d] @ out, inner[:, 3 * d : 4 * d] @ out, inner[:, 4 * d :])
        folded = torch.cat(parts, 1)
        if state is not None and not traced(folded):
            self._gate = (state, folded)
        return folded

    def _gate_weights(self) -> tuple[Tensor, ...]:
        """The gate as the kernel takes it, float32."""
        parts = self._folded_gate().float().split((self.config.width, self.config.width, GATE_STATS), 1)
        return (*parts, self.gate_out.weight.float()[0], self.gate_out.bias.float())

    # ---- teacher forcing

    def forced(self, prepared: Prepared, labels: Tensor, embedding: Tensor, scores: Tensor) -> Tensor:
        """Scores ``[B, S, K]`` of all slots at once, each after the true tokens of the slots before it.

        Equal to :meth:`step` along ``labels`` where they are in the pool; they need not be. Differentiable.

        Args:
            labels: ``[B, S]`` int64. embedding: ``[V, D]`` the target's. scores: ``[B, S, K]`` incoming.
        """
        p = prepared
        s, dtype = labels.shape[1], p.query.dtype
        tokens = F.embedding(labels[:, : s - 1], embedding).detach().to(dtype)  # the last label is nobody's prefix
        by_token = self.prefix_kv.weight.chunk(4, -1)[2]
        chosen = F.linear(self.prefix_token(tokens), by_token) + p.entry_slot[:, : s - 1]
        memory = torch.cat((p.entry_anchor[:, None], chosen), 1)[:, None]  # [B, 1, S, 2d]
        last = torch.cat((p.last_anchor[:, None], self.prefix_last(self.query_token(tokens))), 1)  # [B, S, d]
        order = torch.arange(s, device=labels.device)
        visible = order <= order[:, None]  # entry m is the anchor (0) or slot m - 1
        return self._finish(p.query + last[:, :, None], memory, visible, p.static, p.through, p.gate, scores)

    # ---- diagnostics

    @torch.no_grad()
    def diagnostics(self, block: DraftBlock, pool: Pool) -> dict[str, Tensor]:
        """``null_mass [B, S]`` of the candidate read (mean over heads and candidates), ``fusion [B, S]`` (lambda) and
        its ``fusion_histogram [10]`` over [0, 1]. Not part of a round; call it on a block of interest."""
        p = self.prepare(block, pool)
        bins = torch.histc(p.fusion.float(), bins=10, min=0, max=1)
        return {"null_mass": p.null_mass.mean(-1), "fusion": p.fusion, "fusion_histogram": bins}


def _product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` in at least float32, as wide as ``left`` again."""
    return (wide(left.detach()) @ wide(right.detach())).to(left.dtype)


def slot_stats(log_q: Tensor) -> Tensor:
    """``[..., K] -> [..., 6]``: log q_0, pool mass, best alternative, odds of any alternative, entropy, top share."""
    first, pi, share = log_q[..., 0], log_q.log_softmax(-1), log_q.softmax(-1)
    mass = (first - pi[..., 0]).exp()
    entropy = -(share * pi.clamp_min(_LOWEST)).sum(-1)
    odds = log_q[..., 1:].logsumexp(-1) - first
    columns = (first, mass, log_q[..., 1:].amax(-1) - first, odds, entropy, share[..., 0])
    return torch.stack(columns, -1).clamp(_LOWEST, -_LOWEST)


def gate_stats(scores: Tensor, change: Tensor, native: Tensor, seen: Contest) -> Tensor:
    """``[..., 8]`` of incoming scores, their change, the native candidate and the best other; shifts cancel."""
    pair = torch.cat((native, seen.best), -1)
    score, moved, share = (x.gather(-1, pair) for x in (scores, change, scores.softmax(-1)))  # [..., 2] native, best
    odds = seen.before - score[..., :1]
    chance = seen.chance.gather(-1, seen.best)
    columns = (
        odds,
        chance,
        odds + chance,  # what decides without the gate's own say
        share,
        moved[..., 1:] - moved[..., :1],
        -(seen.moved.softmax(-1) * seen.chance.clamp_min(_LOWEST)).sum(-1, keepdim=True),
        (score[..., 1:] == seen.rest.amax(-1, keepdim=True)).to(scores.dtype),  # the ranking left the favourite
    )
    return torch.cat(columns, -1).nan_to_num(_LOWEST).clamp(_LOWEST, -_LOWEST)


def new_config(preset: str, **values: Any) -> DRelayConfig:
    """A config with the widths of a preset: ``small`` (D = 576), ``medium`` (D = 1024) or ``full`` (D = 2560).

    Raises:
        InvalidInput: no such preset.
    """
    if preset not in PRESETS:
        raise InvalidInput(f"preset={preset!r}: known are {', '.join(PRESETS)}")
    settings: dict[str, Any] = {**PRESETS[preset], **values}
    return DRelayConfig(**settings)
