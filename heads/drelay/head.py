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
from repairzoo.learned_head import Check, HeadConfig, LearnedHead, is_int

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
            ("heads", self.width % self.heads == 0, "a divisor of width"),
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
    tokens: Tensor  # [V, 4d] slot, next query, prefix entry (2d) of every token
    reads: Tensor  # [5d, d] of a candidate: query, key, value of the global read; queries of history and prefix
    hidden: Tensor  # [2d + R, D] of a slot: slot mixing, prefix entry, shared residual
    global_rank: Tensor  # [r, d] of the global read's values
    history_rank: Tensor  # [r, d] of the history read's values
    through: Tensor  # [d, d]


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def split_heads(x: Tensor, heads: int) -> Tensor:
    """``[..., T, d] -> [..., heads, T, d / heads]``."""
    return x.unflatten(-1, (heads, -1)).transpose(-3, -2)


def read_with_null(logits: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Attention normalised jointly with one extra key and value of zero (Eq. 1).

    Args:
        logits: ``[..., T, M]`` float32 or wider; minus infinity hides an entry. value: ``[..., M, e]``.

    Returns:
        the read ``[..., T, e]`` and the mass on the null ``[..., T]``.
    """
    weights = F.pad(logits, (0, 1)).softmax(-1)  # the null's logit is 0
    return weights[..., :-1].to(value.dtype) @ value, weights[..., -1]


def candidate_read(query: Tensor, key: Tensor, value: Tensor, log_q: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Every candidate attends to every candidate of the block (Eq. 1).

    Args:
        query, key, value: ``[..., S, K, e]``. log_q: ``[..., S, K]`` prior of the candidates.
        bias: ``[..., 2S - 1]`` by (slot of the key - slot of the query) + S - 1.

    Returns:
        the reads ``[..., S, K, e]`` and the null's mass ``[..., S, K]``.
    """
    s, k, e = query.shape[-3:]
    slot = torch.arange(s, device=query.device).repeat_interleave(k)
    logits = wide(query.flatten(-3, -2) @ key.flatten(-3, -2).transpose(-1, -2)) * e**-0.5
    logits = logits + wide(log_q).flatten(-2)[..., None, :] + wide(bias)[..., slot - slot[:, None] + s - 1]
    read, null = read_with_null(logits, value.flatten(-3, -2))
    return read.unflatten(-2, (s, k)), null.unflatten(-1, (s, k))


def repaired_scores(scores: Tensor, change: Tensor, delta_g: Tensor, native: Tensor) -> Tensor:
    """Scores whose softmax is ``p_act`` and whose argmax is the gate's decision (Eq. 2 and 6; ties keep).

    With ``S = scores + change``, ``r`` the softmax of S over all but the native candidate and
    ``g = lse_{k != native}(scores) - scores_native + delta_g``, candidate k gets ``scores_native + g + log r_k``; the
    native one stays as it is. No change and no delta give the scores bit for bit.

    Args:
        scores: ``[..., K]`` log q up to a constant. change: ``[..., K]`` finite (the native's is not used).
        delta_g: ``[...]`` finite. native: ``[..., 1]`` int64, the candidate that would be kept.
    """
    kept = is_native(native, scores.shape[-1])
    before = others(scores, kept).logsumexp(-1, keepdim=True)
    after = others(scores + change, kept).logsumexp(-1, keepdim=True)
    shift = torch.where(before == float("-inf"), 0.0, before - after)
    correction = change + (delta_g[..., None] + shift)
    return torch.where(kept, scores, scores + correction)


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
    carry is the ranks chosen so far, ``[B, W, slot]``: entries of all candidates are computed once, and only those of
    chosen candidates are ever looked at. A new head returns the scores it was given, bit for bit.

    Args:
        config: structure and the target it belongs to.
        generator: source of the initial weights, N(0, 0.02); output layers start at zero.
    """

    config_type = DRelayConfig

    def __init__(self, config: DRelayConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = c = config
        self._gate: tuple[Any, tuple[Tensor, ...]] | None = None
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
        return self.history_out(self._history_read(self.history_query(n), block))

    def _history_read(self, query: Tensor, block: DraftBlock) -> Tensor:
        """The values that queries ``[B, S, K, d]`` read, ``[B, S, K, d]``."""
        c = self.config
        start = block.history.shape[1] - c.history
        rows, seen = block.history[:, start:].to(query.dtype), block.history_mask[:, start:]  # [B, M, D], [B, M]
        key, value = (split_heads(x, c.heads) for x in self.history_kv(rows).chunk(2, -1))
        q = split_heads(query.flatten(1, 2), c.heads)  # [B, heads, S*K, d / heads]
        logits = wide(q @ key.transpose(-1, -2)) * q.shape[-1] ** -0.5
        logits = logits.masked_fill(~seen[:, None, None], float("-inf"))
        read, _ = read_with_null(logits, value)
        return read.transpose(1, 2).flatten(-2).view_as(query)

    # ---- the same for serving, with what depends on weights and vocabulary alone multiplied out

    @torch.no_grad()
    def bind(self, embedding: Tensor, output_weight: Tensor) -> None:
        """See :meth:`LearnedHead.bind`; also makes the tables of serving, so that no round has to."""
        super().bind(embedding, output_weight)
        self._tables(embedding)

    def _tables(self, embedding: Tensor) -> _Served | None:
        """Tables of this embedding and these weights, made anew when either changes; None where they are too large."""
        d, weight = self.config.width, self.gate_out.weight
        if embedding.shape[0] * 4 * d * weight.dtype.itemsize > TABLE_BYTES:
            return None
        try:
            key = self.binding_key(embedding)
        except RuntimeError:  # a tensor without storage: something is being traced, and nothing of it may be kept
            return None
        if self._served is None or self._served.key != key:
            by_token = self.prefix_kv.weight.chunk(4, -1)[2]
            entry = _product(by_token, self.prefix_token.weight)
            last = _product(self.prefix_last.weight, self.query_token.weight)
            columns = torch.cat((self.slot_token.weight, last, entry))  # [4d, D]
            through = _product(self.prefix_rank.weight.T, self.candidate_rank.weight)  # [d, d] of e
            hidden = (self.slot_hidden.weight, self.prefix_hidden.weight, self.residual_in.weight[:, :-d])
            self._served = _Served(
                key=key,
                embedding=embedding,
                tokens=_product(embedding.detach(), columns.T).to(weight.dtype),
                reads=torch.cat((self.read_qkv.weight, self.history_query.weight, self.prefix_query.weight)).detach(),
                hidden=torch.cat(hidden).detach(),
                global_rank=_product(self.global_rank.weight, self.read_out.weight),
                history_rank=_product(self.history_rank.weight, self.history_out.weight),
                through=_product(self.prefix_out.weight.T, through),
            )
        return self._served

    def _serve(self, t: _Served, block: DraftBlock, pool: Pool) -> Prepared:
        """:meth:`encode` with the tables ``t``."""
        c, dtype = self.config, self.gate_out.weight.dtype
        d, (s, k) = c.width, pool.ids.shape[1:]
        self._check(s, k)
        hidden, context = block.hidden.to(dtype), block.context.to(dtype)
        log_q = wide(pool.log_probs)
        pi = log_q.softmax(-1).to(dtype)
        e, last, entry_token = F.embedding(pool.ids, t.tokens).split((d, d, 2 * d), -1)  # [B, S, K, ...]
        _, last_anchor, anchor_token = F.embedding(block.anchor_ids, t.tokens).split((d, d, 2 * d), -1)
        own, entry_hidden, inner = F.linear(hidden, t.hidden).split((d, d, c.residual), -1)

        u = own + (pi[..., None, :] @ e)[..., 0, :] + self.slot_embedding[:s]
        u = u + self.slot_stats(slot_stats(log_q).to(dtype))
        for layer in self.slot_layers:
            u = layer(u)  # [B, S, d]
        n = self.candidate_norm(u[:, :, None] + self.candidate(e))
        reads = F.linear(n, t.reads)  # [B, S, K, 5d]
        q, key, value, past, query = (reads[..., i * d : (i + 1) * d] for i in range(5))
        q, key, value = (split_heads(x.flatten(1, 2), c.heads).unflatten(-2, (s, k)) for x in (q, key, value))
        first = c.slots - s
        read, null = candidate_read(q, key, value, log_q[:, None], self.read_bias[:, first : first + 2 * s - 1])
        read = read.permute(0, 2, 3, 1, 4).flatten(-2)  # [B, S, K, d]
        lam = torch.sigmoid(self.fusion(torch.cat((hidden, u), -1)))  # [B, S, 1]
        z = u + lam * self.read_out((pi[..., None, :] @ read)[..., 0, :])

        rows = self._history_read(past, block)
        inner = inner + F.linear(z, self.residual_in.weight[:, -d:], self.residual_in.bias)
        shared = self.residual_out(F.silu(inner))  # [B, S, D]
        direction = self.candidate_rank(e)
        static = (wide(F.embedding(pool.ids, block.embedding).to(dtype)) @ wide(shared)[..., None])[..., 0]
        ranks = lam[..., None] * F.linear(read, t.global_rank) + F.linear(rows, t.history_rank)
        static = static + (wide(ranks) * wide(direction)).sum(-1)

        by_hidden, by_z, _, by_anchor = self.prefix_kv.weight.chunk(4, -1)
        about = F.linear(self.anchor(context), by_anchor)
        entry_slot = F.linear(entry_hidden, by_hidden) + F.linear(z, by_z) + about[:, None]
        entry_anchor = F.linear(self.prefix_hidden(context), by_hidden) + about + anchor_token
        gate_hidden, gate_z = self.gate_in.weight[:, :d], self.gate_in.weight[:, d : 2 * d]
        return Prepared(
            ids=pool.ids,
            static=static,
            query=query,
            last=last,
            last_anchor=last_anchor,
            entry_token=entry_token,
            entry_slot=entry_slot,
            entry_anchor=entry_anchor,
            through=F.linear(e, t.through),
            gate=F.linear(own, gate_hidden, self.gate_in.bias) + F.linear(z, gate_z),
            null_mass=null.mean(1),
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
        d, k = c.width, scores.shape[-1]
        q = split_heads(query, c.heads)
        key, value = (split_heads(x, c.heads) for x in memory.chunk(2, -1))
        logits = wide(q @ key.transpose(-1, -2)) * q.shape[-1] ** -0.5  # [..., heads, K, M]
        if visible is not None:
            logits = logits.masked_fill(~visible[..., None, None, :], float("-inf"))
        read = (logits.softmax(-1).to(value.dtype) @ value).transpose(-3, -2).flatten(-2)  # [..., K, d]
        change = (static + (wide(read) * wide(through)).sum(-1)).to(scores.dtype)

        native = scores.argmax(-1, keepdim=True)  # [..., 1]; candidate 0 unless something came before this head
        best = others(scores + change, is_native(native, k)).argmax(-1, keepdim=True)
        pair = torch.cat((native, best), -1)
        reads = self.prefix_out(read.gather(-2, pair[..., None].expand(*pair.shape, d))).flatten(-2)  # [..., 2d]
        stats = gate_stats(wide(scores), wide(change), native, best).to(reads.dtype)
        inner = gate + F.linear(torch.cat((reads, stats), -1), self.gate_in.weight[:, 2 * d :])
        delta_g = wide(self.gate_out(F.silu(inner)))[..., 0].to(scores.dtype)
        return repaired_scores(scores, change, delta_g, native)

    # ---- the corrector

    @torch.no_grad()
    def prepare(self, block: DraftBlock, pool: Pool | None) -> Prepared:
        """See :meth:`encode`; refuses to work without a pool."""
        if pool is None:
            raise InvalidInput("drelay chooses within a pool: walk it with pool=make_pool(block.logits, pool_size)")
        tables = self._tables(block.embedding)
        return self.encode(block, pool) if tables is None else self._serve(tables, block, pool)

    def start(self, block: DraftBlock) -> Tensor:
        """No rank chosen yet: ``[B, 1, 0]`` int64."""
        return torch.zeros(len(block.anchor_ids), 1, 0, dtype=torch.int64, device=block.anchor_ids.device)

    @torch.no_grad()
    def step(
        self, prepared: Prepared, carry: Tensor, slot: int, previous: Tensor, scores: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One slot for ``W`` prefixes; see ``Corrector.step``. ``carry`` and the result are ``[B, W, slot]``."""
        p = prepared
        b, w = previous.shape
        k, width = p.ids.shape[-1], p.entry_anchor.shape[-1]
        last = p.last_anchor[:, None, None]  # [B, 1, 1, d]
        memory = p.entry_anchor[:, None, None].expand(b, w, 1, width)
        if slot > 0:
            rank = (p.ids[:, slot - 1, None] == previous[..., None]).to(torch.uint8).argmax(-1)  # [B, W]
            carry = torch.cat((carry, rank[..., None]), -1)
            at = carry + k * torch.arange(slot, device=carry.device)  # [B, W, slot] among all candidates
            tokens = p.entry_token[:, :slot].flatten(1, 2).gather(1, at.flatten(1)[..., None].expand(-1, -1, width))
            chosen = tokens.unflatten(1, (w, slot)) + p.entry_slot[:, None, :slot]
            memory = torch.cat((memory, chosen), 2)
            last = p.last[:, slot - 1].gather(1, rank[..., None].expand(-1, -1, p.last.shape[-1]))[:, :, None]
        new = self._finish(
            p.query[:, None, slot] + last, memory, None, p.static[:, None, slot], p.through[:, None, slot],
            p.gate[:, None, slot], scores,
        )  # fmt: skip
        return torch.where(new == scores, scores, new), carry  # adding 0.0 has turned -0.0 into 0.0

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

    def _gate_weights(self) -> tuple[Tensor, ...]:
        """The gate with the prefix reads' output projection multiplied in; made anew after the weights have changed."""
        source = (self.gate_in.weight, self.prefix_out.weight, self.gate_out.weight, self.gate_out.bias)
        state = tuple((w.data_ptr(), 0 if w.is_inference() else w._version) for w in source)
        if self._gate is None or self._gate[0] != state:
            d = self.config.width
            inner, out = self.gate_in.weight.float(), self.prefix_out.weight.float()
            parts = (inner[:, 2 * d : 3 * d] @ out, inner[:, 3 * d : 4 * d] @ out, inner[:, 4 * d :])
            self._gate = (state, (*parts, self.gate_out.weight.float()[0], self.gate_out.bias.float()))
        return self._gate[1]

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
    mass = log_q.logsumexp(-1)
    pi = log_q.log_softmax(-1)
    entropy = -(pi.exp() * pi.clamp_min(_LOWEST)).sum(-1)
    odds = log_q[..., 1:].logsumexp(-1) - log_q[..., 0]
    columns = (log_q[..., 0], mass.exp(), log_q[..., 1:].amax(-1) - log_q[..., 0], odds, entropy, pi[..., 0].exp())
    return torch.stack(columns, -1).clamp(_LOWEST, -_LOWEST)


def gate_stats(scores: Tensor, change: Tensor, native: Tensor, best: Tensor) -> Tensor:
    """``[..., 8]`` of incoming scores, their change, the native candidate and the best other; shifts cancel."""
    kept = is_native(native, scores.shape[-1])
    rest = others(scores, kept)
    odds = rest.logsumexp(-1) - scores.gather(-1, native)[..., 0]
    r = others(scores + change, kept).log_softmax(-1)
    r_best = r.gather(-1, best)[..., 0]
    pi = scores.log_softmax(-1)
    columns = (
        odds,
        r_best,
        odds + r_best,  # what decides without the gate's own say
        pi.gather(-1, native)[..., 0].exp(),
        pi.gather(-1, best)[..., 0].exp(),
        (change.gather(-1, best) - change.gather(-1, native))[..., 0],
        -(r.exp() * r.clamp_min(_LOWEST)).sum(-1),
        (scores.gather(-1, best)[..., 0] == rest.amax(-1)).to(scores.dtype),  # the ranking left the favourite
    )
    return torch.stack(columns, -1).nan_to_num(_LOWEST).clamp(_LOWEST, -_LOWEST)


def new_config(preset: str, **values: Any) -> DRelayConfig:
    """A config with the widths of a preset: ``small`` (D = 576), ``medium`` (D = 1024) or ``full`` (D = 2560).

    Raises:
        InvalidInput: no such preset.
    """
    if preset not in PRESETS:
        raise InvalidInput(f"preset={preset!r}: known are {', '.join(PRESETS)}")
    settings: dict[str, Any] = {**PRESETS[preset], **values}
    return DRelayConfig(**settings)
