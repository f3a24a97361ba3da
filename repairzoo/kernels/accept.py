"""The accept step in one kernel: walk down the tree, emit, end at end-of-text and budget."""

# A kernel is not Python, whatever it looks like.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportOptionalSubscript=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from repairzoo.tree import TokenTree
from repairzoo.verify import Acceptance


@triton.jit
def _accept(
    choice, tokens, parents, valid, length, limit, done, eos, path, emitted, accepted, bonus, count, stopped,
    M, D, E, MP: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    m = tl.arange(0, MP)
    inside = m < M
    chosen = tl.load(choice + row * M + m, mask=inside, other=-1)
    token = tl.load(tokens + row * M + m, mask=inside, other=-2)
    parent = tl.load(parents + row * M + m, mask=inside, other=-2)
    real = (tl.load(valid + row * M + m, mask=inside, other=0) != 0) & inside
    e = tl.arange(0, EP)
    ends = tl.load(eos + e, mask=e < E, other=-1)
    room = tl.maximum(tl.load(limit + row) - tl.load(length + row), 0)
    room = tl.where(tl.load(done + row) != 0, 0, room)

    node = room * 0  # int64, like everything that it is compared with
    agreed = node
    last = node
    first_end = node + D + 1
    tl.store(path + row * (D + 1), node)
    for step in range(D + 1):
        wanted = tl.sum(tl.where(m == node, chosen, 0))
        match = real & (parent == node) & (token == wanted)
        child = tl.min(tl.where(match, m, MP)).to(tl.int64)
        found = (child < MP) & (step < D)
        stuck_here = (agreed == step) & (found == 0)  # the walk ends at this step: the target's own token follows
        node = tl.where(found, child, node)
        agreed += found.to(tl.int64)
        last = tl.where(stuck_here, wanted, last)
        out = tl.where(stuck_here, wanted, tl.sum(tl.where(m == node, token, 0)))
        tl.store(emitted + row * (D + 1) + step, out)
        if step < D:
            tl.store(path + row * (D + 1) + step + 1, node)
        is_end = tl.max(tl.where((ends == out) & (e < E), 1, 0)) > 0
        first_end = tl.where(is_end, tl.minimum(first_end, step), first_end)
    kept = tl.minimum(agreed + 1, room)
    stop = first_end < kept
    tl.store(accepted + row, agreed)
    tl.store(bonus + row, last)
    tl.store(count + row, tl.where(stop, first_end + 1, kept))
    tl.store(stopped + row, stop)


def accept(
    choice: Tensor, tree: TokenTree, length: Tensor, limit: Tensor, done: Tensor, eos: Tensor
) -> tuple[Acceptance, Tensor, Tensor, Tensor]:
    """``decode.settle`` of a target-first walk, in one kernel; arguments and result as there."""
    B, M = tree.tokens.shape
    D = tree.height
    path, emitted = (torch.empty(B, D + 1, dtype=torch.int64, device=choice.device) for _ in range(2))
    accepted, bonus, count = (torch.empty(B, dtype=torch.int64, device=choice.device) for _ in range(3))
    stopped = torch.empty(B, dtype=torch.bool, device=choice.device)
    inputs = (x.contiguous() for x in (choice, tree.tokens, tree.parents, tree.valid, length, limit, done, eos))
    _accept[(B,)](
        *inputs, path, emitted, accepted, bonus, count, stopped, M, D, len(eos),
        MP=triton.next_power_of_2(M), EP=max(triton.next_power_of_2(len(eos)), 1),
    )  # fmt: skip
    return Acceptance(accepted, path, bonus), emitted, count, stopped
