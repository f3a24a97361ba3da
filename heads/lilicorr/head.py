"""LiLiCorr: attention over the lattice of all candidates, then a walk over pairwise scores (arXiv 2608.20530)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repairzoo.block import DraftBlock, Pool
from repairzoo.errors import IncompatibleArtifact, InvalidInput
from repairzoo.learned_head import Check, HeadConfig, LearnedHead, is_int, is_real, traced

Prepared = tuple[Tensor, Tensor, Tensor, Tensor]
LOWEST = -1e6  # a token that the draft excludes has a log-probability of minus infinity, a feature must be finite
TABLE_BYTES = 256 * 2**20  # the product of the whole vocabulary's embeddings is kept up to this size
FEATURES = 5  # log p, p, log p - max, rank / (k - 1), rank == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiLiCorrConfig(HeadConfig):
    """Structure of a LiLiCorr head; the published name of a field is ``lilicorr_<field>`` unless it says otherwise.

    Attributes:
        candidates: ``lilicorr_candidate_topk``, ranks that were trained; ``pool_size`` is how many are served.
        width: ``lilicorr_hidden_size`` (0 there: as wide as the draft).
        decision: ``"published"`` (the pair scores alone choose) or ``"identity_safe"`` (they are added, centred and
            scaled by a zero-initialised factor a slot, to the scores that come in).
    """

    kind: ClassVar[str] = "lilicorr"

    candidates: int
    width: int
    num_layers: int = 2
    num_heads: int = 8
    mlp_ratio: float = 2.0
    factor_dim: int
    logit_scale: float = 8.0
    vector_eps: float = 1e-4
    rms_norm_eps: float = 1e-6
    decision: str = "published"

    def checks(self) -> list[Check]:
        def positive(value: object) -> bool:
            return is_real(value) and value > 0  # type: ignore[operator]

        return [
            *HeadConfig.checks(self),
            ("candidates", is_int(self.candidates, 1), "a positive integer"),
            ("pool_size", self.pool_size <= self.candidates, f"at most candidates ({self.candidates})"),
            ("width", is_int(self.width, 1), "a positive integer"),
            ("num_layers", is_int(self.num_layers, 0), "a non-negative integer"),
            ("num_heads", is_int(self.num_heads, 1) and self.width % self.num_heads == 0, "a divisor of width"),
            ("mlp_ratio", positive(self.mlp_ratio), "a positive number"),
            ("factor_dim", is_int(self.factor_dim, 1), "a positive integer"),
            ("logit_scale", positive(self.logit_scale), "a positive number"),
            ("vector_eps", positive(self.vector_eps), "a positive number"),
            ("rms_norm_eps", positive(self.rms_norm_eps), "a positive number"),
            ("decision", self.decision in ("published", "identity_safe"), '"published" or "identity_safe"'),
        ]


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = wide(x)
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class _Attention(nn.Module):
    """Unmasked multi-head attention with an additive bias; parameters as in ``nn.MultiheadAttention``."""

    def __init__(self, width: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width, dtype=dtype))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width, dtype=dtype))
        self.out_proj = nn.Linear(width, width, dtype=dtype)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        n, t, w = x.shape
        q, k, v = F.linear(x, self.in_proj_weight, self.in_proj_bias).reshape(n, t, 3, self.heads, -1).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [N, heads, T, d]
        weights = wide(q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5 + bias
        mixed = weights.softmax(-1).to(v.dtype) @ v
        return self.out_proj(mixed.transpose(1, 2).reshape(n, t, w))


class _Layer(nn.Module):
    def __init__(self, config: LiLiCorrConfig) -> None:
        super().__init__()
        w, dtype, inner = config.width, config.torch_dtype, int(config.width * config.mlp_ratio)
        self.attn_norm = _RMSNorm(w, config.rms_norm_eps, dtype)
        self.attn = _Attention(w, config.num_heads, dtype)
        self.mlp_norm = _RMSNorm(w, config.rms_norm_eps, dtype)
        self.mlp = nn.Sequential(nn.Linear(w, inner, dtype=dtype), nn.SiLU(), nn.Linear(inner, w, dtype=dtype))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        return x + self.mlp(self.mlp_norm(x))


class _Fixed(NamedTuple):
    """What depends on the weights and on the shape of the lattice alone."""

    places: Tensor  # [S, K, W] slot and rank embeddings
    bias: Tensor  # [heads, S*K, S*K] of the attention
    factor: tuple[Tensor, Tensor]  # weight [2F, W] and bias [2F] of both unit vectors


class _Served(NamedTuple):
    key: tuple[Any, ...]
    embedding: Tensor  # held, so that its address can't be given to another tensor
    tokens: Tensor | None  # [V, W] projected embeddings, where they are not too large
    fixed: dict[tuple[int, int], _Fixed]  # by slots and candidates


class LiLiCorr(LearnedHead):
    """The LiLiCorr head, a corrector (``repairzoo.block.Corrector``).

    All candidates of all slots attend to each other once; each gets an *out* and an *in* vector of unit length, and
    ``psi_s(k -> k') = scale * <out_{s,k}, in_{s+1,k'}>`` scores candidate k' of the next slot after candidate k. The
    first slot is scored from the anchor. In ``decision="published"`` these replace the scores; what correctors before
    this one changed (a backbone's causal part, DeLS) is added on top. The carry is empty: the chosen rank is found from
    the previous token.

    Args:
        config: structure and the target it belongs to.
        generator: source of the initial weights, N(0, 0.02); biases, slot and rank embeddings start at zero.
    """

    config_type = LiLiCorrConfig

    def __init__(self, config: LiLiCorrConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self._served: _Served | None = None
        d, w, f, dtype = config.hidden_size, config.width, config.factor_dim, config.torch_dtype

        def linear(inner: int, outer: int) -> nn.Linear:
            return nn.Linear(inner, outer, dtype=dtype)

        def zeros(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=dtype))

        self.token_proj = nn.Identity() if w == d else linear(d, w)
        self.pass_hidden_proj = linear(d, w)
        self.feature_mlp = nn.Sequential(
            nn.LayerNorm(FEATURES, dtype=dtype), linear(FEATURES, w), nn.SiLU(), linear(w, w)
        )
        self.slot_embedding = zeros(1, 1, config.slots, 1, w)
        self.rank_embedding = zeros(1, 1, 1, config.candidates, w)
        self.relative_slot_bias = zeros(config.num_heads, 2 * config.block_size - 1)
        self.same_slot_bias = zeros(config.num_heads)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        self.output_norm = _RMSNorm(w, config.rms_norm_eps, dtype)
        self.context_proj = linear(d, w)
        self.anchor_norm = _RMSNorm(w, config.rms_norm_eps, dtype)
        self.factor_input_proj = linear(3 * w, w)
        self.out_head, self.in_head, self.anchor_out_head = linear(w, f), linear(w, f), linear(w, f)
        if config.decision == "identity_safe":
            self.gamma = zeros(config.slots)
        for name, parameter in self.named_parameters():
            if name.endswith("bias") and parameter.dim() == 1:
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2 and name != "relative_slot_bias":
                # out and in vectors multiply each other: at zero neither would ever get a gradient
                nn.init.normal_(parameter, std=0.02, generator=generator)

    # ---- the lattice, for serving and training alike

    def scores(
        self, embedded: Tensor, log_probs: Tensor, hidden: Tensor, context: Tensor, valid: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Start and pair scores in one pass.

        Args:
            embedded: ``[N, S, K, D]`` target embeddings of the candidates, K at most ``candidates``.
            log_probs: ``[N, S, K]``, normalised over the whole vocabulary, best first.
            hidden: ``[N, S, D]``. context: ``[N, D]`` fused feature row before the anchor.
            valid: ``[N]`` bool, where there is such a row.

        Returns:
            start ``[N, K]`` and pair ``[N, S-1, K, K]`` (earlier -> later), float32 (float64 if the weights are).

        Raises:
            IncompatibleArtifact: more slots or candidates than were trained.
        """
        fixed = self._fixed(*log_probs.shape[1:])
        tokens = self.token_proj(embedded.to(self.out_head.weight.dtype))
        return self._lattice(fixed, tokens, log_probs, hidden, context, valid)

    def _lattice(
        self, fixed: _Fixed, tokens: Tensor, log_probs: Tensor, hidden: Tensor, context: Tensor, valid: Tensor
    ) -> tuple[Tensor, Tensor]:
        """:meth:`scores` of projected embeddings ``tokens [N, S, K, W]``."""
        dtype = self.out_head.weight.dtype
        n, s, k = log_probs.shape
        x = tokens + self.pass_hidden_proj(hidden.to(dtype))[:, :, None] + fixed.places
        x = x + self.feature_mlp(candidate_features(wide(log_probs)).to(dtype))  # [N, S, K, W]
        x = x.reshape(n, s * k, -1)
        for layer in self.layers:
            x = layer(x, fixed.bias)
        x = self.output_norm(x).reshape(n, s, k, -1)
        # zeroed after the projection, which has a bias
        anchor = self.anchor_norm(self.context_proj(context.to(dtype)) * valid[:, None].to(dtype))  # [N, W]
        beside = anchor[:, None, None].expand_as(x)
        f = F.silu(self.factor_input_proj(torch.cat((x, beside, x * beside), -1)))
        out, inward = self._unit(F.linear(f, *fixed.factor).unflatten(-1, (2, -1))).unbind(-2)  # [N, S, K, F]
        first = self._unit(self.anchor_out_head(anchor))  # [N, F]
        scale = self.config.logit_scale
        start = scale * (inward[:, 0] @ first[..., None])[..., 0]  # [N, K]
        return start, scale * out[:, :-1] @ inward[:, 1:].transpose(-1, -2)

    def _unit(self, x: Tensor) -> Tensor:
        return F.normalize(wide(x), dim=-1, eps=self.config.vector_eps)

    def _fixed(self, slots: int, candidates: int) -> _Fixed:
        c = self.config
        if slots > c.slots or candidates > c.candidates:
            raise IncompatibleArtifact(
                f"lilicorr head for {c.target_id}: a block of {slots} slots with {candidates} candidates; trained for "
                f"at most {c.slots} slots and {c.candidates} candidates"
            )
        slot = torch.arange(slots, device=self.same_slot_bias.device).repeat_interleave(candidates)
        apart = slot[:, None] - slot  # query minus key; a shorter block keeps the trained offset of relative slots
        bias = self.relative_slot_bias[:, apart + c.block_size - 1]
        heads = (self.out_head, self.in_head)
        return _Fixed(
            places=self.slot_embedding[0, 0, :slots] + self.rank_embedding[0, 0, :, :candidates],
            bias=wide(bias + self.same_slot_bias[:, None, None] * (apart == 0)),
            factor=(torch.cat([h.weight for h in heads]), torch.cat([h.bias for h in heads])),
        )

    def _serving(self, embedding: Tensor, slots: int, candidates: int) -> tuple[Tensor | None, _Fixed]:
        """Projected embeddings and tables of this shape, made anew when the embedding or a weight changes."""
        if traced(embedding):
            return None, self._fixed(slots, candidates)
        key = self.binding_key(embedding)
        if self._served is None or self._served.key != key:
            tokens, dtype = None, self.out_head.weight.dtype
            if embedding.shape[0] * self.config.width * dtype.itemsize <= TABLE_BYTES:
                tokens = self.token_proj(embedding.detach().to(dtype))
                if traced(tokens):
                    return None, self._fixed(slots, candidates)
            self._served = _Served(key, embedding, tokens, {})
        known = self._served.fixed
        if (slots, candidates) not in known:
            made = self._fixed(slots, candidates)
            if traced(made.bias):
                return self._served.tokens, made
            known[slots, candidates] = made
        return self._served.tokens, known[slots, candidates]

    # ---- the corrector

    @torch.no_grad()
    def bind(self, embedding: Tensor, output_weight: Tensor) -> None:
        """See :meth:`LearnedHead.bind`; also makes the tables of serving, so that no round has to."""
        super().bind(embedding, output_weight)
        self._serving(embedding, self.config.slots, self.config.pool_size)

    @torch.no_grad()
    def tables(self, block: DraftBlock, pool: Pool) -> tuple[Tensor, Tensor]:
        """Start ``[B, K]`` and pair tables ``[B, S-1, K, K]`` of psi.

        A pool that is larger than the trained one (for the sake of another head) is served in its first ranks.
        """
        served = min(pool.ids.shape[-1], self.config.candidates)
        ids, log_probs = pool.ids[..., :served], pool.log_probs[..., :served]
        tokens, fixed = self._serving(block.embedding, *ids.shape[1:])
        if tokens is None:
            projected = self.token_proj(F.embedding(ids, block.embedding).to(self.out_head.weight.dtype))
        else:
            projected = F.embedding(ids, tokens)
        return self._lattice(fixed, projected, log_probs, block.hidden, block.context, block.history_mask[:, -1])

    @torch.no_grad()
    def prepare(self, block: DraftBlock, pool: Pool | None) -> Prepared:
        """Start ``[B, K]`` and pair tables ``[B, S-1, K, K]`` of psi (``decision="published"``) or of what is
        subtracted for it (``"identity_safe"``), and the pool's ids and log-probabilities ``[B, S, K']``."""
        if pool is None:
            raise InvalidInput("lilicorr chooses within a pool: walk it with pool=make_pool(block.logits, pool_size)")
        start, pair = self.tables(block, pool)
        if self.config.decision == "identity_safe":
            # subtracting +0.0 changes no bit of any score, adding it would turn -0.0 into +0.0
            start = 0.0 - self.weighed(start, 0)
            pair = 0.0 - self.weighed(pair.transpose(1, 2), slice(1, pair.shape[1] + 1)).transpose(1, 2)
        return start, pair, pool.ids, pool.log_probs

    def start(self, block: DraftBlock) -> tuple[()]:
        return ()

    @torch.no_grad()
    def step(
        self, prepared: Prepared, carry: tuple[()], slot: int, previous: Tensor, scores: Tensor
    ) -> tuple[Tensor, tuple[()]]:
        """One slot for ``W`` prefixes; see ``Corrector.step``."""
        start, pair, ids, log_probs = prepared
        b, w = previous.shape
        served, published = start.shape[-1], self.config.decision == "published"
        if slot == 0:
            psi = start[:, None]
        else:
            rank = (ids[:, slot - 1, None, :served] == previous[..., None]).to(torch.uint8).argmax(-1)  # [B, W]
            psi = pair[:, slot - 1].gather(1, rank[..., None].expand(b, w, served))
        psi, known, rest = psi.to(scores.dtype), scores[..., :served], scores[..., served:]
        if published:
            new = self.decide(psi, known, log_probs[:, slot, None, :served].to(scores.dtype), slot)
        else:
            new = known - psi
        if rest.shape[-1] > 0:  # where psi alone decides, ranks without one cannot win
            new = torch.cat((new, torch.full_like(rest, float("-inf")) if published else rest), -1)
        return new, carry

    def decide(self, psi: Tensor, scores: Tensor, log_probs: Tensor, slot: int | slice) -> Tensor:
        """Outgoing scores from psi, incoming scores and the pool's log-probabilities, all ``[..., K]``; differentiable.

        With a slice of slots the second to last dimension runs over them.
        """
        if self.config.decision == "published":
            # an excluded token stays excluded: what came before the head gave it cannot be told from minus infinity
            return torch.where(log_probs == float("-inf"), log_probs, psi + (scores - log_probs))
        return scores + self.weighed(psi, slot)

    def weighed(self, psi: Tensor, slot: int | slice) -> Tensor:
        """What the identity-safe decision adds for psi ``[..., K]``; slots as in :meth:`decide`."""
        gamma = self.gamma[slot].to(psi.dtype)
        gamma = gamma[:, None] if isinstance(slot, slice) else gamma
        return gamma * (psi - psi.mean(-1, keepdim=True))

    @torch.no_grad()
    def chain(self, block: DraftBlock, pool: Pool, base: Tensor) -> tuple[Tensor, Tensor]:
        """The whole greedy walk in one kernel (Triton): what slot by slot ``step`` gives.

        Args:
            base: ``[B, S, K]`` float32 incoming scores.

        Returns:
            ranks ``[B, S]`` int64 and scores ``[B, S, K]``.
        """
        from repairzoo.kernels.walks import lilicorr_walk

        start, pair = self.tables(block, pool)
        gamma = self.gamma.float() if self.config.decision == "identity_safe" else None
        return lilicorr_walk(start, pair, base, pool.log_probs, gamma)

    # ---- diagnostics

    @torch.no_grad()
    def diagnostics(self, block: DraftBlock, pool: Pool) -> dict[str, Tensor]:
        """``factor_spread [B, S]``: standard deviation of a slot's scores over its candidates, mean over predecessors.

        A head that has collapsed (all unit vectors alike) shows 0. Not part of a round; call it on a block of interest.
        """
        start, pair = self.tables(block, pool)
        first = start.std(-1, unbiased=False)[:, None]
        return {"factor_spread": torch.cat((first, pair.std(-1, unbiased=False).mean(-1)), 1)}


def candidate_features(log_probs: Tensor) -> Tensor:
    """``[..., K] -> [..., K, 5]``. The rank fraction divides by the *served* k - 1, as in the reference."""
    log_probs, k = log_probs.clamp_min(LOWEST), log_probs.shape[-1]
    rank = torch.arange(k, device=log_probs.device, dtype=log_probs.dtype).expand_as(log_probs)
    best = log_probs.amax(-1, keepdim=True)
    columns = (log_probs, log_probs.exp(), log_probs - best, rank / max(k - 1, 1), (rank == 0).to(rank.dtype))
    return torch.stack(columns, -1)
