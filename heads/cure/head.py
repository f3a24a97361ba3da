"""CURE: fork a drafted chain where the draft was not sure, and let the target choose (arXiv 2608.00531)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from repairzoo.block import DraftBlock, Pool, make_pool
from repairzoo.errors import InvalidInput
from repairzoo.tree import TokenTree, chain, from_candidates
from repairzoo.walk import Stack, base_scores, best_of, token_of

EXTRA = 8  # draft nodes beside branch 0 unless `nodes` says otherwise
NEVER = float("-inf")
CAUTION = 1.25  # a row must bring this much more than it was measured to cost: drafts are surer than they are right
FLAT = 1.02  # where unused rows are verified too, a budget may cost this much more than the chain


@dataclass(frozen=True, slots=True, kw_only=True)
class CURE:
    """The CURE head, an expander: the walked chain becomes branch 0 of a tree, and stays in it whatever happens.

    Raises ``InvalidInput`` naming the option that cannot be used.

    Attributes:
        threshold: slots whose margin (best minus second score of the walk, natural-log units) is below it are fragile.
        scale: margin at which a slot's budget has fallen to ``b_min``.
        b_min, b_max: tokens tried at a fragile slot, the chain's own included; ``b_max=1`` adds none.
        repairs: most slots of a block that are forked.
        nodes: V_max, most draft nodes of a tree, branch 0 included and the anchor not; None: 8 more than slots.
        order: ``"gain"`` forks where, and keeps the nodes by which, the expected accepted length grows most;
            ``"margin"`` forks the smallest margins and takes branch after branch (the paper).
        suffix: ``"head"`` walks the stacked correctors on behind a substituted token; ``"reuse"`` keeps the chain's
            tokens there; ``"redraft"`` lets the backbone draft what follows again, with the chain up to the fork and
            the substituted token in its block, and walks the correctors on that: one more draft a branch.
        cost: relative cost of verifying r rows (anchor included) as ``cost[r - 1]``. ``"measured"``: taken from this
            target on this machine before the first run (:meth:`fit`); until then as ``"rows"``, which stands for r
            itself. ``"free"`` always fills the budget (the paper).
        overhead: cost of the rest of a round, in the same unit; None: what a draft takes, where the cost is measured;
            nothing beside a given one; with ``"rows"`` as much as the chain's rows, so that one more row counts half of
            the average one.
    """

    kind: ClassVar[str] = "cure"
    pool_size: ClassVar[None] = None  # any pool, or the whole vocabulary

    threshold: float = 1.0
    scale: float = 1.0
    b_min: int = 1
    b_max: int = 5
    repairs: int = 1
    nodes: int | None = None
    order: str = "gain"
    suffix: str = "head"
    cost: str | Sequence[float] = "measured"
    overhead: float | None = None

    def __post_init__(self) -> None:
        curve = self.cost
        known = isinstance(curve, str) and curve in ("measured", "rows", "free")
        checks = [
            ("threshold", _is_real(self.threshold), "a finite number"),
            ("scale", _is_real(self.scale) and self.scale > 0, "a number above 0"),
            ("b_min", _is_int(self.b_min, 1), "an integer of at least 1 (the chain's own token counts)"),
            ("b_max", _is_int(self.b_max, 1) and self.b_max >= self.b_min, "an integer of at least b_min"),
            ("repairs", _is_int(self.repairs, 0), "a non-negative integer"),
            ("nodes", self.nodes is None or _is_int(self.nodes, 1), "a positive integer or None"),
            ("order", self.order in ("gain", "margin"), "'gain' or 'margin'"),
            ("suffix", self.suffix in ("head", "reuse", "redraft"), "'head', 'reuse' or 'redraft'"),
            ("cost", known or (not isinstance(curve, str) and isinstance(curve, Sequence) and len(curve) > 0
                               and all(_is_real(c) and c > 0 for c in curve)),
             "'measured', 'rows', 'free' or a list of positive numbers, one for each number of verified rows"),
            ("overhead", self.overhead is None or (_is_real(self.overhead) and self.overhead >= 0),
             "a non-negative number or None"),
        ]  # fmt: skip
        for key, ok, expected in checks:
            if not ok:
                raise InvalidInput(f"cure: {key}={getattr(self, key)!r}; give {expected}")
        if not known:
            object.__setattr__(self, "cost", tuple(curve))

    def budget(self, slots: int) -> int:
        """Most draft nodes of a tree over ``slots`` slots, anchor excluded.

        Raises:
            InvalidInput: branch 0 alone has more.
        """
        nodes = slots + EXTRA if self.nodes is None else self.nodes
        if nodes < slots:
            raise InvalidInput(f"cure: nodes={nodes}, but branch 0 is always proposed and has {slots}")
        return nodes

    def check(self, backbone: Any) -> None:
        """Refuse a backbone that cannot do what an option asks of it.

        Raises:
            InvalidInput: ``suffix="redraft"`` on one that does not draft partly known blocks.
        """
        if self.suffix == "redraft" and not getattr(backbone, "redrafts", False):
            raise InvalidInput(
                f"cure: suffix='redraft' asks {type(backbone).__name__} to draft a partly known block, which it does "
                "not offer (docs/protocols.md); use 'head' or 'reuse'"
            )

    def fit(self, target: Any, backbone: Any) -> CURE:
        """With the measured cost of this target's rows where ``cost`` is ``"measured"``; else itself.

        What a row costs beyond the chain's is counted ``CAUTION`` times. Where rows that no branch needs are verified
        all the same (an accelerator keeps its shapes), a budget that was left open becomes the largest whose rows cost
        hardly more than the chain's.
        """
        slots = backbone.slots
        rows = 1 + self.budget(slots)
        idle = rows == 1 + slots or self.repairs == 0 or self.b_max == 1 or self.threshold <= 0
        if self.cost != "measured" or idle:
            return self
        from repairzoo.bench.cost_curve import round_costs

        curve, draft = round_costs(target, backbone, rows)
        chain_rows = curve.at(1 + slots)
        table = list(accumulate(curve.table(rows), max))  # a dip is noise
        cost = [c if r <= slots else chain_rows + CAUTION * max(c - chain_rows, 0.0) for r, c in enumerate(table)]
        nodes = self.nodes
        if nodes is None and target.device.type != "cpu":
            nodes = max(r for r in range(slots, rows) if r == slots or table[r] <= FLAT * chain_rows)
            cost = cost[: 1 + nodes]
        return replace(self, cost=tuple(cost), nodes=nodes, overhead=draft if self.overhead is None else self.overhead)

    def expand(
        self,
        block: DraftBlock,
        stack: Stack,
        pool: Pool | None,
        tokens: Tensor,
        scores: Sequence[Tensor],
        *,
        keep: Tensor | None = None,
        peek: bool = False,
    ) -> TokenTree:
        """The tree of a walked chain: branch 0 first, then what was added, best first.

        Args:
            block, pool: as walked. stack: the correctors, after that walk; it is walked on.
            tokens: ``[B, S]`` int64, the chain. scores: per slot ``[B, K]`` (``[B, V]`` without a pool), what its
                tokens were the argmax of.
            keep: ``[B, S]`` bool, slots that are proposed at all (a confidence cut); None for all.
            peek: read on the host which slots are forked, and skip what no row needs. The tree has the same nodes.

        Raises:
            InvalidInput: ``cost`` has too few entries, or ``nodes`` is below S.
        """
        S = tokens.shape[1]
        rivals = min(self.b_max, scores[0].shape[-1]) - 1  # alternatives of a slot
        forks = min(self.repairs, S)
        extra = min(self.budget(S) - S, rivals * forks * S)
        if extra <= 0 or self.threshold <= 0:
            return chain(block.anchor_ids, tokens, keep)

        base = base_scores(block, pool)
        mass = None if pool is None else base.logsumexp(-1).clamp_max(0)  # [B, S]
        kept = torch.ones_like(tokens, dtype=torch.bool) if keep is None else keep.long().cumprod(1).bool()
        walked = torch.stack(tuple(scores), 1)  # [B, S, K]
        value, rank = best_of(walked, rivals + 1, stable=pool is not None)  # [B, S, 1 + A]
        log_q = _conditional(walked, mass).gather(-1, rank)
        own = log_q[..., 0]  # [B, S]
        before = own.cumsum(1) - own  # log of the chance that a slot is reached

        margin = torch.where(value[..., 1] > NEVER, value[..., 0] - value[..., 1], math.inf)
        number = torch.arange(1, rivals + 1, device=tokens.device)
        tried = number < branch_budget(margin, self.scale, self.b_min, self.b_max)[..., None]
        tried = tried & ((margin < self.threshold) & kept)[..., None] & (value[..., 1:] > NEVER)  # [B, S, A]
        urgency = margin
        if self.order == "gain":
            hope = torch.where(tried, log_q[..., 1:], NEVER).exp().sum(-1)
            urgency = -(before.exp() * hope * _run(own.exp()))
        urgency = torch.where(tried.any(-1), urgency, math.inf)
        at = urgency.sort(dim=1, stable=True).indices[:, :forks]  # [B, R]
        slots = at[..., None].expand(-1, -1, rivals)
        alive = tried.gather(1, slots).flatten(1)  # [B, W], W = R * A
        if peek and not bool(alive.any()):
            return chain(block.anchor_ids, tokens, keep)
        fork = slots.flatten(1)
        first = log_q[..., 1:].gather(1, slots).flatten(1)
        ids = rank if pool is None else pool.ids.gather(-1, rank)  # [B, S, 1 + A]
        rival = ids[..., 1:].gather(1, slots).flatten(1)

        if self.suffix == "redraft":
            branch, step = self._redraft(block, stack, pool, tokens, fork, rival, alive if peek else None)
        elif self.suffix == "head" and stack.correctors:
            begin = int(torch.where(alive, fork, S - 1).min()) if peek else 0
            branch, step = self._walk_on(stack, base, mass, pool, tokens, fork, rival, begin)
        else:
            branch = tokens[:, None].expand(-1, fork.shape[1], -1)  # [B, W, S]
            step = own[:, None].expand_as(branch)
        slot = torch.arange(S, device=tokens.device)
        here, behind = slot == fork[..., None], slot > fork[..., None]  # [B, W, S]
        branch = torch.where(here, rival[..., None], branch)
        start = before.gather(1, fork) + first  # [B, W]
        step = torch.where(here, start[..., None], torch.where(behind, step, 0.0))
        reach = torch.where((here | behind) & alive[..., None], step.cumsum(-1), NEVER)  # log chance of acceptance

        key = reach
        if self.order == "margin":
            place = torch.arange(reach[0].numel(), device=tokens.device).view_as(reach[0]) + 1
            key = torch.where(reach > NEVER, -place.to(reach.dtype), NEVER)
        key, reach = key.transpose(1, 2), reach.transpose(1, 2)  # [B, S, W]: shallower before deeper
        key = self._affordable(key, reach, own, kept, extra)
        key = torch.cat([torch.where(kept, 1.0, NEVER).to(key.dtype)[..., None], key], -1)  # branch 0 before all
        above = torch.where(slot[:, None] == fork[:, None], 0, torch.arange(fork.shape[1], device=slot.device) + 1)
        above = torch.cat([torch.zeros_like(above[..., :1]), above], -1)  # [B, S, 1 + W] index one depth above
        branch = torch.cat([tokens[..., None], branch.transpose(1, 2)], -1)
        return from_candidates(block.anchor_ids, branch.unbind(1), above.unbind(1), key.unbind(1), S + extra)

    def _walk_on(
        self, stack: Stack, base: Tensor, mass: Tensor | None, pool: Pool | None, tokens: Tensor, fork: Tensor,
        rival: Tensor, begin: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Tokens ``[B, W, S]`` that the correctors choose behind a substituted one, and their log-probabilities.

        Every branch follows the chain to its fork; the walk starts at ``begin``, where none has left it yet.
        """
        B, W = fork.shape
        stack.carries = stack.trail[begin]
        stack.fork(torch.zeros_like(fork))
        previous = torch.where(fork == begin, rival, tokens[:, begin, None])
        chosen, log_probs = [previous] * (begin + 1), [torch.zeros_like(base[:, :1, 0]).expand(B, W)] * (begin + 1)
        for slot in range(begin + 1, tokens.shape[1]):
            scores = stack.step(slot, previous, base[:, slot, None].expand(B, W, -1))
            best = scores.argmax(-1)  # [B, W]
            log_q = _conditional(scores, None if mass is None else mass[:, slot, None])
            log_probs.append(log_q.gather(-1, best[..., None])[..., 0])
            free = torch.where(fork < slot, token_of(pool, slot, best), tokens[:, slot, None])
            previous = torch.where(fork == slot, rival, free)
            chosen.append(previous)
        return torch.stack(chosen, -1), torch.stack(log_probs, -1)

    def _redraft(
        self, block: DraftBlock, stack: Stack, pool: Pool | None, tokens: Tensor, fork: Tensor, rival: Tensor,
        alive: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As ``_walk_on``, on a block that the backbone drafts again for every branch.

        ``alive [B, W]``: branches that count, or None to look at none.
        """
        if block.redraft is None:
            raise InvalidInput("cure: suffix='redraft' on a block that its backbone cannot draft again")
        slot = torch.arange(tokens.shape[1], device=tokens.device)
        branches, steps = [], []
        for w in range(fork.shape[1]):
            at = fork[:, w, None]  # [B, 1]
            if alive is not None and not bool(alive[:, w].any()):
                branches.append(tokens)
                steps.append(torch.zeros(tokens.shape, dtype=base_scores(block, pool).dtype, device=tokens.device))
                continue
            forced = torch.where(slot == at, rival[:, w, None], tokens)  # [B, S]
            new = block.redraft(torch.where(slot <= at, forced, -1))
            part = None if pool is None else make_pool(new.logits, pool.ids.shape[-1])
            base = base_scores(new, part)
            mass = None if part is None else base.logsumexp(-1).clamp_max(0)
            again = Stack(new, stack.correctors, part)
            previous, chosen, log_probs = block.anchor_ids[:, None], [], []
            for i in range(tokens.shape[1]):
                scores = again.step(i, previous, base[:, i, None])[:, 0]  # [B, K]
                best = scores.argmax(-1, keepdim=True)
                log_q = _conditional(scores, None if mass is None else mass[:, i])
                log_probs.append(log_q.gather(-1, best))
                previous = torch.where(i <= at, forced[:, i, None], token_of(part, i, best))
                chosen.append(previous)
            branches.append(torch.cat(chosen, 1))
            steps.append(torch.cat(log_probs, 1))
        return torch.stack(branches, 1), torch.stack(steps, 1)

    def _affordable(self, key: Tensor, reach: Tensor, own: Tensor, kept: Tensor, extra: int) -> Tensor:
        """``key [B, S, W]`` without the nodes over the budget or behind the point of highest expected tokens per cost.

        With n nodes added in order, a round commits ``1 + Phi + sum of their chances`` tokens for ``C_d + C_v(rows)``.
        The best n of all is taken, the smallest of equals; n = 0 is one of them.
        """
        S = own.shape[1]
        order = key.flatten(1).sort(dim=1, descending=True, stable=True).indices  # [B, N]
        count = extra
        if self.cost != "free":
            gain = reach.flatten(1).gather(1, order)[:, :extra].exp()
            phi = (own.cumsum(1).exp() * kept).sum(1, keepdim=True)
            expected = 1 + torch.cat([phi, phi + gain.cumsum(1)], 1)  # [B, 1 + extra]
            added = torch.arange(expected.shape[1], device=own.device)
            price = self._curve(S, extra, own)[kept.sum(1, keepdim=True) + added]  # rows - 1 draft nodes
            count = (expected / price).argmax(1, keepdim=True)
        index = torch.arange(order.shape[1], device=own.device).expand_as(order)
        place = torch.empty_like(order).scatter(1, order, index)
        return torch.where((place < count).view_as(key), key, NEVER)

    def fixed_cost(self, slots: int) -> float:
        """What a round costs whatever it verifies, in the unit of ``cost``."""
        if self.overhead is not None:
            return self.overhead
        return 1.0 + slots if self.cost in ("measured", "rows") else 0.0

    def _curve(self, slots: int, extra: int, like: Tensor) -> Tensor:
        """Cost of a round by its draft nodes, 0 to ``slots + extra``."""
        rows, fixed = 1 + slots + extra, self.fixed_cost(slots)
        if isinstance(self.cost, str):
            return fixed + torch.arange(1, rows + 1, dtype=like.dtype, device=like.device)
        if len(self.cost) < rows:
            raise InvalidInput(f"cure: cost states {len(self.cost)} numbers of rows; a round verifies up to {rows}")
        # filled one by one: a copy from the host cannot be captured
        return fixed + torch.stack([like.new_full((), c) for c in self.cost[:rows]])


def branch_budget(margin: Tensor, scale: float, b_min: int, b_max: int) -> Tensor:
    """Tokens to try at slots of ``margin [...]``: int64, from ``b_max`` at 0 to ``b_min`` at ``scale`` (Eq. 2, 3)."""
    urgency = (1 - margin / scale).clamp(0, 1)
    return (b_min + urgency * (b_max - b_min)).round().clamp(b_min, b_max).long()


def _conditional(scores: Tensor, mass: Tensor | None) -> Tensor:
    """Log-probabilities ``[..., K]`` of walked scores; on a pool scaled to the mass ``[...]`` the base gives it."""
    log_q = scores.log_softmax(-1)
    return log_q if mass is None else log_q + mass[..., None]


def _run(q: Tensor) -> Tensor:
    """``[B, S]``: 1 and the expected number of slots that pass right after each, slot t passing with ``q [B, S]``."""
    run = [torch.ones_like(q[:, 0])]
    for slot in range(q.shape[1] - 1, 0, -1):
        run.append(1 + q[:, slot] * run[-1])
    return torch.stack(run[::-1], 1)


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
