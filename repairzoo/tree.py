"""TokenTree: what the target verifies. A chain is the unary tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import InvalidInput


@dataclass(slots=True)
class TokenTree:
    """Draft tokens as a tree below the anchor, for ``B`` rows of ``M`` nodes.

    A parent comes before its children; siblings carry different tokens. Padding nodes are not ``valid``, carry some
    real token, have parent -1 and depth 0, and are nobody's parent.

    Attributes:
        tokens: ``[B, M]`` int64; node 0 is the anchor.
        parents: ``[B, M]`` int64, the parent's node index; -1 at node 0 and at padding.
        depths: ``[B, M]`` int64, distance from the anchor; a node's position is the anchor's plus its depth.
        valid: ``[B, M]`` bool, nodes that take part.
        height: no node is deeper than this (a plain int, known before the tensors are); ``M - 1`` unless given.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    valid: Tensor
    height: int = -1

    def __post_init__(self) -> None:
        if self.height < 0:
            self.height = self.tokens.shape[1] - 1

    @property
    def size(self) -> int:
        return self.tokens.shape[1]


def chain(anchor: Tensor, tokens: Tensor, keep: Tensor | None = None) -> TokenTree:
    """The unary tree of a drafted chain.

    Args:
        anchor: ``[B]`` int64.
        tokens: ``[B, S]`` int64.
        keep: ``[B, S]`` bool, or None to keep all; what follows a dropped token is dropped with it.
    """
    B, S = tokens.shape
    index = torch.arange(S + 1, device=tokens.device).expand(B, S + 1)
    nodes = torch.cat([anchor[:, None], tokens], 1)  # [B, M]
    if keep is None:
        return TokenTree(nodes, index - 1, index, torch.ones_like(nodes, dtype=torch.bool), S)
    valid = torch.cat([torch.ones_like(keep[:, :1]), keep.long().cumprod(1).bool()], 1)
    return TokenTree(nodes, torch.where(valid, index - 1, -1), torch.where(valid, index, 0), valid, S)


def ancestor_mask(tree: TokenTree) -> Tensor:
    """``[B, M, M]`` bool: row u may attend to column v iff v is u or an ancestor of u. Padding sees only itself."""
    index = torch.arange(tree.size, device=tree.parents.device)
    reach = (tree.parents[:, :, None] == index) | (index[:, None] == index)  # itself and its parent
    steps = 1
    ways = reach.float()
    while steps < tree.height:  # squaring doubles the steps that are covered
        ways = torch.matmul(ways, ways).clamp_max(1)
        steps *= 2
    return ways > 0


def from_candidates(
    anchor: Tensor, tokens: Sequence[Tensor], parents: Sequence[Tensor], log_probs: Sequence[Tensor], nodes: int
) -> TokenTree:
    """The ``nodes`` likeliest prefixes among the beams of every depth, closed under ancestors.

    A child is never likelier than its parent (it is clamped to that), and equals go to the shallower one, then to the
    lower beam index, so the best ``nodes`` prefixes contain all their ancestors. Nodes are in that order, the order in
    which a best-first heap pops them (DDTree): the first n + 1 nodes are the tree of budget n.

    Args:
        anchor: ``[B]`` int64.
        tokens: per depth d = 1, 2, ..., ``[B, W_d]`` int64.
        parents: per depth, ``[B, W_d]`` int64, index into the beam one depth above (0, the anchor, at depth 1).
        log_probs: per depth, ``[B, W_d]`` cumulative log-probability of the prefix; ``-inf`` never enters the tree.
        nodes: budget, anchor excluded; padded with invalid nodes when there are fewer candidates.
    """
    B, device = anchor.shape[0], anchor.device
    flat_parents, scores, depths = [], [], []
    offset, above = 0, 0  # where this depth and the one above begin in the flat list
    for depth, (parent, score) in enumerate(zip(parents, log_probs, strict=True), start=1):
        if depth == 1:
            flat_parents.append(torch.full_like(parent, -1))
        else:
            flat_parents.append(parent + above)
            score = torch.minimum(score, scores[-1].gather(1, parent))
        scores.append(score)
        depths.append(torch.full_like(parent, depth))
        above, offset = offset, offset + parent.shape[1]
    flat_parent, score = torch.cat(flat_parents, 1), torch.cat(scores, 1)  # [B, N]
    token, depth = torch.cat(list(tokens), 1), torch.cat(depths, 1)

    order = score.sort(dim=1, descending=True, stable=True).indices
    place = torch.empty_like(order).scatter(1, order, torch.arange(offset, device=device).expand(B, offset))
    kept = order[:, :nodes]
    valid = score.gather(1, kept) > float("-inf")
    parent = flat_parent.gather(1, kept)
    parent = torch.where(parent < 0, 0, place.gather(1, parent.clamp_min(0)) + 1)
    anchor = anchor[:, None]
    columns = [
        torch.where(valid, token.gather(1, kept), anchor),
        torch.where(valid, parent, -1),
        torch.where(valid, depth.gather(1, kept), 0),
        valid,
    ]
    missing = nodes - kept.shape[1]
    if missing > 0:
        pads = [anchor.expand(B, missing), *(torch.full((B, missing), v, device=device) for v in (-1, 0, False))]
        columns = [torch.cat([c, pad], 1) for c, pad in zip(columns, pads, strict=True)]
    roots = [anchor, torch.full_like(anchor, -1), torch.zeros_like(anchor), torch.ones_like(valid[:, :1])]
    columns = [torch.cat([root, c], 1) for root, c in zip(roots, columns, strict=True)]
    return TokenTree(columns[0], columns[1], columns[2], columns[3], min(len(depths), nodes))


def check(tree: TokenTree) -> None:
    """Raise ``InvalidInput`` naming the row and node that breaks an invariant.

    It reads tensors on the host: for tests and debugging, never inside a round.
    """
    shape = tree.tokens.shape
    for name in ("parents", "depths", "valid"):
        if getattr(tree, name).shape != shape:
            raise InvalidInput(f"tree.{name} has shape {tuple(getattr(tree, name).shape)}, tokens {tuple(shape)}")
    rows = zip(tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist(), tree.valid.tolist(), strict=True)
    for b, (tokens, parents, depths, valid) in enumerate(rows):
        seen: set[tuple[int, int]] = set()
        for m, (token, parent, depth, taken) in enumerate(zip(tokens, parents, depths, valid, strict=True)):
            where = f"tree row {b}, node {m}"
            if m == 0 or not taken:
                if (parent, depth, taken) != (-1, 0, m == 0):
                    kind = "the anchor must be valid" if m == 0 else "padding must be invalid"
                    raise InvalidInput(f"{where}: {kind} with parent -1 and depth 0, not {(parent, depth, taken)}")
                continue
            if not 0 <= parent < m:
                raise InvalidInput(f"{where}: parent {parent} does not come before it")
            if not valid[parent]:
                raise InvalidInput(f"{where}: parent {parent} is padding")
            if depth != depths[parent] + 1 or depth > tree.height:
                raise InvalidInput(
                    f"{where}: depth {depth} below a parent of depth {depths[parent]}, height {tree.height}"
                )
            if (parent, token) in seen:
                raise InvalidInput(f"{where}: token {token} is already a child of node {parent}")
            seen.add((parent, token))
