"""The acceptance rules. Each commits tokens that have exactly the target's law, whatever was proposed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .sampling import draw
from .tree import TokenTree


@dataclass(slots=True)
class Acceptance:
    """What one round commits: the accepted path below the anchor, then one token of the target's own.

    Attributes:
        count: ``[B]`` int64, accepted draft tokens.
        path: ``[B, D + 1]`` int64, node indices from the anchor (``path[:, 0] == 0``); after the last accepted
            node that node repeats.
        bonus: ``[B]`` int64, the token emitted after the path.
    """

    count: Tensor
    path: Tensor
    bonus: Tensor


def target_first(choice: Tensor, tree: TokenTree) -> Acceptance:
    """Walk down the tree along the tokens that the target chose itself.

    At each node the target's token is fixed first; if a child carries it the walk goes there, otherwise that token is
    emitted. Every committed token is thus a fresh target draw given its prefix: exact for every tree that was built
    without looking at these choices, drafted greedily or sampled, and greedy when the choices are. One choice per node:
    separate draws for paths that share a node, keeping the longest, would be biased. Should siblings carry equal
    tokens, the first is taken.

    Args:
        choice: ``[B, M]`` int64, drawn from the target's processed law after each node, or its argmax.
        tree: the proposal; with ``D = tree.height``.
    """
    index = torch.arange(tree.size, device=choice.device)
    wanted = tree.valid & (tree.tokens == choice.gather(1, tree.parents.clamp_min(0)))  # [B, M], by its parent
    match = wanted[:, None] & (tree.parents[:, None] == index[:, None])  # [B, M, M] node, child
    # where a walk goes from each node; once stuck, it stays there
    then = torch.where(match.any(-1), match.to(torch.uint8).argmax(-1), index)
    node = torch.zeros_like(choice[:, :1])
    steps = [node]
    for _ in range(tree.height):
        node = then.gather(1, node)
        steps.append(node)
    path = torch.cat(steps, 1)
    return Acceptance((path[:, 1:] != path[:, :-1]).sum(1), path, choice.gather(1, node)[:, 0])


def ratio(
    p: Tensor, q: Tensor, tokens: Tensor, keep: Tensor | None, u_accept: Tensor, u_residual: Tensor
) -> Acceptance:
    """Speculative sampling of a chain (Leviathan et al. 2023, algorithm 1; Chen et al. 2023).

    Token x is accepted iff ``u q(x) < p(x)``; the first rejected one is replaced by a draw from ``(p - q)+``. The
    comparison is strict, so that a token the target excludes is refused even at ``u == 0``.

    Args:
        p: ``[B, S + 1, V]`` the target's processed law at the anchor and after every token.
        q: ``[B, S, V]`` the very tensor that ``tokens`` were drawn from.
        tokens: ``[B, S]`` int64.
        keep: ``[B, S]`` bool, or None for all. The decision to drop token i may depend on tokens before i only;
            a chain cut short this way continues with a draw from p.
        u_accept: ``[B, S]`` in ``[0, 1)``.
        u_residual: ``[B]`` in ``[0, 1)``, independent of ``u_accept`` and of what drew ``tokens``.
    """
    B, S = tokens.shape
    # rows are normalised in float64, as ``draw`` does; the laws themselves may be float32
    p_sum, q_sum = p.sum(-1, dtype=torch.float64), q.sum(-1, dtype=torch.float64)
    p_token = p[:, :S].gather(2, tokens[..., None])[..., 0].double() / p_sum[:, :S]
    q_token = q.gather(2, tokens[..., None])[..., 0].double() / q_sum
    passed = u_accept.double() * q_token < p_token  # [B, S]
    kept = torch.ones_like(passed) if keep is None else keep
    count = (passed & kept).long().cumprod(1).sum(1)  # [B]

    # q counts only where its own token was rejected; after a cut or a full run the next token is p's
    rejected = torch.cat([~passed & kept, torch.zeros_like(passed[:, :1])], 1).gather(1, count[:, None])  # [B, 1]
    at_p, at_q = count[:, None, None], count.clamp_max(S - 1)[:, None, None]
    V = p.shape[-1]
    p_row = p.gather(1, at_p.expand(B, 1, V))[:, 0].double() / p_sum.gather(1, count[:, None])
    q_row = q.gather(1, at_q.expand(B, 1, V))[:, 0].double() / q_sum.gather(1, at_q[:, 0])
    residual = (p_row - torch.where(rejected, q_row, 0.0)).clamp_min(0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_row)
    path = torch.arange(S + 1, device=tokens.device).expand(B, S + 1).minimum(count[:, None])
    return Acceptance(count, path, draw(residual, u_residual))
