"""The sequential part, shared by all heads: slot by slot through stacked correctors, as a chain or as a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .block import Corrector, DraftBlock, Pool
from .errors import InvalidInput
from .row_law import RowLaw
from .sampling import Law, at_least_float32, draw, shortlist
from .tree import TokenTree, from_candidates


def walk(
    block: DraftBlock,
    correctors: Sequence[Corrector] | Stack,
    pool: Pool | None,
    *,
    law: Law | RowLaw | None = None,
    u: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """One chain through the block; each slot sees the tokens chosen before it and no later ones.

    Args:
        block: ``B`` rows of ``S`` slots over ``V`` tokens.
        correctors: applied in this order to the scores of every slot, which start as the base scores; a ``Stack`` of
            them when the walk is to be forked afterwards.
        pool: candidates to choose from, or None for the whole vocabulary.
        law: how scores become the sampling law q; None is temperature 1. Ignored without ``u``.
        u: ``[B, S]`` float64 uniform numbers of the draft's own stream; None chooses the best score, first of equals.

    Returns:
        tokens ``[B, S]`` int64; the law q ``[B, S, V]`` they were drawn from (zero off the pool), None without
        ``u``; and diagnostics: ``rank`` ``[B, S]`` (place in the pool, or the token id without one) and ``scores``, S
        tensors ``[B, K]`` (or ``[B, V]``) that were chosen from.
    """
    law = law or Law(1.0)
    base = base_scores(block, pool)  # [B, S, K]
    stack = correctors if isinstance(correctors, Stack) else Stack(block, correctors, pool)
    if not stack.correctors:
        if u is None:
            rank, q = base.argmax(-1), None
            tokens = token_of(pool, slice(None), rank)
        else:
            q = _dense(block, pool, slice(None), law.probs(base))
            tokens = draw(q, u)
            rank = _rank(pool, slice(None), tokens)
        return tokens, q, {"rank": rank, "scores": base.unbind(1)}

    stack.restart()
    previous = block.anchor_ids[:, None]  # [B, 1]
    tokens, laws, ranks, seen = [], [], [], []
    for slot in range(block.slots):
        scores = stack.step(slot, previous, base[:, slot : slot + 1])[:, 0]  # [B, K]
        stack.trail.append(stack.carries)
        if u is None:
            rank = scores.argmax(-1)
            token = token_of(pool, slot, rank)
        else:
            q = _dense(block, pool, slot, law.probs(scores))
            token = draw(q, u[:, slot])
            rank = _rank(pool, slot, token)
            laws.append(q)
        tokens.append(token)
        ranks.append(rank)
        seen.append(scores)
        previous = token[:, None]
    q = torch.stack(laws, 1) if laws else None
    return torch.stack(tokens, 1), q, {"rank": torch.stack(ranks, 1), "scores": tuple(seen)}


def best_first(
    block: DraftBlock,
    correctors: Sequence[Corrector],
    pool: Pool | None,
    nodes: int,
    width: int | None = None,
    branch: int | None = None,
) -> TokenTree:
    """The tree of the ``nodes`` prefixes with the highest cumulative conditional log-probability.

    It is built level by level from a beam, yet equals the best-first heap (DDTree, DominoTree) when ``width`` and
    ``branch`` do not bind: a child is never likelier than its parent, so a prefix of depth d brings d - 1 ancestors
    along, and at most ``nodes - d + 1`` prefixes of that depth can be in the tree.

    Args:
        block: ``B`` rows of ``S`` slots.
        correctors: as in ``walk``; the carry is forked with the prefixes.
        pool: candidates of every slot, or None for the whole vocabulary. Conditional probabilities on a pool are scaled
            to the mass that the base gives the pool, so that depths compare as they would over the vocabulary.
        nodes: budget, anchor excluded.
        width: most prefixes kept per depth; 1 gives the chain of ``walk``.
        branch: most children per prefix.

    Raises:
        InvalidInput: a budget below 1.
    """
    for name, value in (("nodes", nodes), ("width", width), ("branch", branch)):
        if value is not None and value < 1:
            raise InvalidInput(f"{name}={value}: a tree needs at least 1")
    base = base_scores(block, pool)  # [B, S, K]
    B, K = base.shape[0], base.shape[2]
    mass = base.logsumexp(-1).clamp_max(0) if pool is not None else None  # [B, S]
    machine = Stack(block, correctors, pool)
    shared = None if correctors else base.log_softmax(-1)  # all prefixes have the same scores
    previous = block.anchor_ids[:, None]  # [B, W]
    so_far = torch.zeros_like(previous, dtype=base.dtype)
    tokens, parents, log_probs = [], [], []
    height = min(block.slots, nodes)
    for slot in range(height):
        W = previous.shape[1]
        if shared is None:
            conditional = machine.step(slot, previous, base[:, slot, None].expand(B, W, K)).log_softmax(-1)
        else:
            conditional = shared[:, slot, None]  # [B, 1, K]
        if mass is not None:
            conditional = conditional + mass[:, slot, None, None]
        keep = min(nodes - slot, width or nodes)
        children = min(K, keep, branch or K)
        value, rank = best_of(conditional, children, stable=pool is not None)
        value = (so_far[..., None] + value).flatten(1)  # [B, W * C]
        rank = rank.expand(B, W, children).flatten(1)
        so_far, place = value.sort(dim=1, descending=True, stable=True)
        so_far, place = so_far[:, :keep], place[:, :keep]  # [B, W']
        parent = place // children
        previous = token_of(pool, slot, rank.gather(1, place))
        if slot + 1 < height:
            machine.fork(parent)
        tokens.append(previous)
        parents.append(parent)
        log_probs.append(so_far)
    return from_candidates(block.anchor_ids, tokens, parents, log_probs, nodes)


def fork(carry: Any, index: Tensor) -> Any:
    """The carry of the prefixes ``index [B, W']``: every tensor ``[B, W, ...]`` of the pytree gathered along axis 1."""
    if isinstance(carry, Tensor):
        shape = (*index.shape, *carry.shape[2:])
        return carry.gather(1, index.reshape(*index.shape, *[1] * (carry.dim() - 2)).expand(shape))
    if carry is None:
        return None
    if isinstance(carry, dict):
        return {key: fork(value, index) for key, value in carry.items()}
    if isinstance(carry, tuple) and hasattr(carry, "_fields"):
        return type(carry)(*(fork(value, index) for value in carry))
    if isinstance(carry, (tuple, list)):
        return type(carry)(fork(value, index) for value in carry)
    raise TypeError(f"a carry is a tensor, tuple, list, dict or None, not {type(carry).__name__}")


class Stack:
    """The correctors of one block, prepared once, with what they carry for the ``W`` prefixes being walked.

    Attributes:
        carries: one a corrector. trail: the carries of the latest ``walk`` after every slot, by which it can be forked
            where it has already been; carries are never changed in place, so keeping them costs nothing.
    """

    def __init__(self, block: DraftBlock, correctors: Sequence[Corrector], pool: Pool | None) -> None:
        self.block, self.correctors = block, list(correctors)
        self.prepared = [c.prepare(block, pool) for c in self.correctors]
        self.restart()

    def restart(self) -> None:
        """Back to before slot 0, with one prefix a row."""
        self.carries = [c.start(self.block) for c in self.correctors]
        self.trail: list[list[Any]] = []

    def step(self, slot: int, previous: Tensor, scores: Tensor) -> Tensor:
        """Scores ``[B, W, K]`` of one slot after ``previous [B, W]``; see ``Corrector.step``."""
        carries = []
        for corrector, prepared, carry in zip(self.correctors, self.prepared, self.carries, strict=True):
            scores, carry = corrector.step(prepared, carry, slot, previous, scores)
            carries.append(carry)
        self.carries = carries
        return scores

    def fork(self, index: Tensor) -> None:
        """Go on with the prefixes ``index [B, W']``."""
        self.carries = [fork(carry, index) for carry in self.carries]


def base_scores(block: DraftBlock, pool: Pool | None) -> Tensor:
    """``[B, S, K]`` (or ``[B, S, V]`` without a pool): what a walk starts from."""
    return at_least_float32(block.logits if pool is None else pool.log_probs)


def token_of(pool: Pool | None, slot: int | slice, rank: Tensor) -> Tensor:
    """Token ids of ranks ``[B, ...]``; without a pool a rank is the id."""
    if pool is None:
        return rank
    ids = pool.ids[:, slot]
    if rank.dim() == ids.dim():
        return ids.gather(-1, rank)
    return ids.gather(-1, rank[..., None])[..., 0]


def _rank(pool: Pool | None, slot: int | slice, token: Tensor) -> Tensor:
    if pool is None:
        return token
    return (pool.ids[:, slot] == token[..., None]).to(torch.uint8).argmax(-1)


def _dense(block: DraftBlock, pool: Pool | None, slot: int | slice, probs: Tensor) -> Tensor:
    """Probabilities of the pool's rows as a law over the vocabulary."""
    if pool is None:
        return probs
    law = probs.new_zeros((*probs.shape[:-1], block.logits.shape[-1]))
    return law.scatter(-1, pool.ids[:, slot], probs)


def best_of(scores: Tensor, count: int, stable: bool) -> tuple[Tensor, Tensor]:
    """Values and indices of the ``count`` best of the last axis, best first; equals by lower index if ``stable``."""
    if stable:
        order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    else:
        # sorting a vocabulary is too slow and topk leaves the order of equals open; the argmax must be the walk's
        near = shortlist(scores, count)
        few = scores if near is None else scores.gather(-1, near)
        top = few.argmax(-1, keepdim=True)
        rest = few.scatter(-1, top, float("-inf")).topk(count - 1, dim=-1)
        # values of the masked scores: where nothing finite is left, the top may come again, and must not count twice
        order = torch.cat([top, rest.indices], -1)
        order = order if near is None else near.gather(-1, order)
        return torch.cat([few.gather(-1, top), rest.values], -1), order
    return scores.gather(-1, order), order
