"""THE loop: draft, head, verify, accept, commit; for any backbone, any stack of heads, chains and trees.

``round`` is a pure tensor function of the state's buffers: its shapes depend on the engine and on ``bound`` only, it
reads nothing on the host and never branches on data. What must look at tokens between rounds (streaming, stop strings,
stopping criteria) is in ``generation.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from repairzoo.block import Corrector, DraftBlock, Pool, make_pool
from repairzoo.errors import InvalidInput
from repairzoo.row_law import RowLaw
from repairzoo.sampling import Law, Stream, draw, uniform
from repairzoo.target import KVCache, Target
from repairzoo.tree import TokenTree, ancestor_mask, chain
from repairzoo.verify import Acceptance, ratio, target_first
from repairzoo.walk import Stack, base_scores, best_first, walk

Mark = Callable[[str], None]
Processor = Callable[[Tensor, "State", TokenTree], Tensor]


class Backbone(Protocol):
    """What the loop needs of a backbone; ``context`` is its own cache of committed positions."""

    kind: str
    slots: int
    tapped_layers: tuple[int, ...]

    def new_cache(self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device) -> Any: ...

    def extend(self, cache: Any, features: Tensor, positions: Tensor) -> None: ...

    def draft(
        self, cache: Any, anchor_ids: Tensor, anchor_positions: Tensor, bound: int | None = None
    ) -> DraftBlock: ...


@runtime_checkable
class Expander(Protocol):
    """The last head of a stack may extend the walked chain to a tree instead of correcting scores."""

    def budget(self, slots: int) -> int:
        """Most draft nodes of its trees, anchor excluded; raises ``InvalidInput`` when ``slots`` do not fit."""
        ...

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
        """A tree that holds the chain ``tokens [B, S]`` as its first nodes (cut by ``keep [B, S]``); valid nodes
        come before padding.

        Args:
            stack: the correctors, prepared, after the walk; ``stack.trail[i]`` are their carries after slot i.
            scores: what the tokens were chosen from, S tensors ``[B, K]`` (or ``[B, V]`` without a pool).
            peek: values may be read on the host to save work. Otherwise: static shapes, no branch on data.
        """
        ...


def refuse_order(names: str, expanders: Sequence[bool]) -> None:
    """Raise ``InvalidInput`` for a stack ``names`` with an expander that is not the last, or two of them."""
    if sum(expanders) > 1:
        raise InvalidInput(f"head {names}: two expanders; each makes the tree that is verified, so keep one")
    if any(expanders[:-1]):
        raise InvalidInput(f"head {names}: an expander forks what the other heads have chosen, so it comes last")


def split_heads(heads: Sequence[Any]) -> tuple[tuple[Corrector, ...], Expander | None]:
    """The correctors of a stack, and its expander or None.

    Raises:
        InvalidInput: an expander that is not the last, or two of them; one kind of trained head twice.
    """
    found = [isinstance(head, Expander) for head in heads]
    names = "+".join(str(getattr(head, "kind", type(head).__name__)) for head in heads)
    refuse_order(names, found)
    kinds = [head.kind for head in heads if hasattr(head, "config") and hasattr(head, "kind")]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise InvalidInput(
                f"head {names}: {kind} twice; each was trained to correct scores that it has not corrected yet, so the "
                "second would repeat the first: keep one"
            )
    return (tuple(heads[:-1]), heads[-1]) if any(found) else (tuple(heads), None)


@dataclass(frozen=True, slots=True)
class Engine:
    """Everything about a run that is fixed before its first round.

    Attributes:
        target, backbone: as loaded; ``heads``: repair heads in the order they apply (after the backbone's own
            corrector); the last may be an expander.
        law: the processed target law.
        eos: ``[E]`` int64, ids that end a row (may be empty; -1 stands for none).
        nodes: budget of a best-first tree, or None for a chain.
        sampled: draw the chain from q and verify by ratio (needs temperature above 0); otherwise propose the best.
        pool: candidates per slot that the walk chooses from; None for the whole vocabulary.
        processor: extra processing of the verify logits ``[B, M, V]``, or None. It may run on the host.
        confidence: slots of a chain from the first whose confidence is lower on are not proposed; 0 proposes all. The
            backbone's corrector then has ``confidence(block, previous [B, S]) -> [B, S]``.
        trim: verify only the slots that some row proposes: rows saved on a CPU, for one host read a round. Without it a
            round reads nothing and keeps its shapes.
        kernels: ``"torch"``, or ``"triton"`` for fused kernels where there are any (``repairzoo.kernels``).
        correctors, expander: the heads as ``split_heads`` parts them, once: it asks each what it is.
    """

    target: Target
    backbone: Backbone
    heads: tuple[Corrector | Expander, ...]
    law: Law | RowLaw
    eos: Tensor
    nodes: int | None = None
    sampled: bool = False
    pool: int | None = None
    processor: Processor | None = None
    confidence: float = 0.0
    trim: bool = False
    kernels: str = "torch"
    correctors: tuple[Corrector, ...] = field(init=False, repr=False, compare=False)
    expander: Expander | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        correctors, expander = split_heads(self.heads)
        object.__setattr__(self, "correctors", correctors)
        object.__setattr__(self, "expander", expander)
        if self.confidence and self.nodes is not None:
            raise InvalidInput("a confidence threshold cuts chains: use it without tree=...")
        if self.sampled and self.law.greedy:
            raise InvalidInput("proposal='sampled' needs a temperature above 0")
        if self.sampled and self.nodes is not None:
            raise InvalidInput("a tree is proposed deterministically: use proposal='argmax' with tree=...")
        if self.expander is not None:
            refuse_beside_expander(self.nodes, self.sampled)

    @property
    def budget(self) -> int:
        """Draft nodes a round, anchor excluded."""
        if self.expander is not None:
            return self.expander.budget(self.backbone.slots)
        return self.backbone.slots if self.nodes is None else self.nodes

    @property
    def slack(self) -> int:
        """Cache entries that a round may write past the last committed token."""
        return max(self.budget, self.backbone.slots) + 2


def refuse_beside_expander(nodes: int | None, sampled: bool) -> None:
    """Raise ``InvalidInput`` for what has no meaning with an expander."""
    if nodes is not None:
        raise InvalidInput("an expander makes the tree itself: use it without tree=... (its own option is nodes=...)")
    if sampled:
        raise InvalidInput("an expander proposes a tree, deterministically: use proposal='argmax' with it")


@dataclass(slots=True)
class State:
    """Device buffers of a batch of ``B`` rows with room for ``C`` positions.

    Attributes:
        ids: ``[B, C]`` int64, committed tokens (entries past ``length`` are scratch).
        length: ``[B]`` int64, committed tokens; the anchor sits at ``length - 1``.
        limit: ``[B]`` int64, length at which a row has used its budget.
        done: ``[B]`` bool. seed: ``[B]`` int64.
        kv: the target's cache, committed up to the anchor. context: the backbone's, likewise.
    """

    ids: Tensor
    length: Tensor
    limit: Tensor
    done: Tensor
    seed: Tensor
    kv: KVCache
    context: Any


@dataclass(slots=True)
class RoundOutput:
    """What a round did; all of it still on the device.

    Attributes:
        emitted: ``[B, D+1]`` int64, accepted tokens then the bonus; only the first ``count`` are committed.
        count: ``[B]`` int64, committed tokens after end-of-text and budget; 0 for rows that were done.
        accepted: ``[B]`` int64, draft tokens that the target agreed with, before truncation.
        drafted: ``[B]`` int64, draft nodes that were verified.
        repaired: ``[B, M-1]`` bool, draft nodes of a chain (branch 0 of an expander's tree) where the heads chose
            another token than the backbone had.
        branches: ``[B, M-1]`` bool, draft nodes where a tree leaves its first path (branch 0 of an expander's).
        added: ``[B]`` int64, draft nodes that are not on it.
        path: ``[B, D]`` int64, the accepted nodes, numbered from 1; after the last, that one repeats.
        stopped: ``[B]`` bool, an end-of-text token was committed.
    """

    emitted: Tensor
    count: Tensor
    accepted: Tensor
    drafted: Tensor
    repaired: Tensor
    branches: Tensor
    added: Tensor
    path: Tensor
    stopped: Tensor


def _no_mark(stage: str) -> None:
    return None


@dataclass(slots=True)
class _Native:
    """A corrector that leaves the scores alone and notes what they would have chosen: what the heads repair is seen
    against it."""

    choices: list[Tensor] = field(default_factory=list)

    def prepare(self, block: DraftBlock, pool: Any) -> None:
        return None

    def start(self, block: DraftBlock) -> None:
        return None

    def step(self, prepared: None, carry: None, slot: int, previous: Tensor, scores: Tensor) -> tuple[Tensor, None]:
        self.choices.append(scores[:, 0].argmax(-1))
        return scores, None


def propose(engine: Engine, block: DraftBlock, seed: Tensor) -> tuple[TokenTree, Tensor | None, Tensor]:
    """What the target will verify.

    Returns:
        the tree, the law ``q [B, S, V]`` that a sampled chain was drawn from (else None), and ``repaired [B, M-1]``.
    """
    native = [block.native] if block.native is not None else []
    pool = _pool(engine, block)
    heads, expander = engine.correctors, engine.expander
    if engine.nodes is not None:
        tree = best_first(block, [*native, *heads], pool, engine.nodes)
        return tree, None, torch.zeros_like(tree.valid[:, 1:])
    if pool is not None and not engine.confidence and fused_walk(engine, block.native) is not None:
        base = base_scores(block, pool)
        rank, _ = heads[0].chain(block, pool, base)  # type: ignore[attr-defined]
        return chain(block.anchor_ids, pool.ids.gather(-1, rank[..., None])[..., 0]), None, rank != base.argmax(-1)
    u = None
    if engine.sampled:
        slots = torch.arange(block.slots, device=seed.device)
        u = uniform(seed, block.anchor_positions[:, None] + 1 + slots, Stream.DRAFT)  # [B, S]
    before = _Native()
    stack = Stack(block, [*native, before, *heads] if heads else native, pool)
    tokens, q, seen = walk(block, stack, pool, law=engine.law if engine.sampled else None, u=u)
    repaired = torch.zeros_like(tokens, dtype=torch.bool)
    if heads:
        repaired = torch.stack(before.choices, 1) != seen["rank"]
    keep = None
    if engine.confidence:
        # slot k is judged by its hidden row and the token before it, never by its own: cutting leaves the law exact
        previous = torch.cat([block.anchor_ids[:, None], tokens[:, :-1]], 1)
        keep = confidences(block, previous) >= engine.confidence
        repaired = repaired & keep.long().cumprod(1).bool()
    if expander is None:
        return chain(block.anchor_ids, tokens, keep), q, repaired
    tree = expander.expand(block, stack, pool, tokens, seen["scores"], keep=keep, peek=engine.trim)
    return tree, None, torch.nn.functional.pad(repaired, (0, tree.size - 1 - block.slots))


def _pool(engine: Engine, block: DraftBlock) -> Pool | None:
    if engine.pool is None:
        return None
    if engine.kernels == "triton":
        from repairzoo.kernels.pool import pool

        return pool(block.logits, engine.pool)
    return make_pool(block.logits, engine.pool)


def fused_walk(engine: Engine, native: Corrector | None) -> str | None:
    """The head whose whole greedy chain is one kernel, or None: it must be the only one that corrects."""
    alone = native is None and len(engine.heads) == 1 and engine.nodes is None and not engine.sampled
    if engine.kernels == "triton" and alone and hasattr(engine.heads[0], "chain"):
        return str(getattr(engine.heads[0], "kind", type(engine.heads[0]).__name__.lower()))
    return None


def confidences(block: DraftBlock, previous: Tensor) -> Tensor:
    """``[B, S]`` probability that each slot's token is accepted if all before it are, as the backbone estimates it.

    Raises:
        InvalidInput: it has no confidence head.
    """
    judge = getattr(block.native, "confidence", None)
    if judge is None:
        raise InvalidInput("a confidence threshold needs a backbone with a confidence head (DSpark)")
    return judge(block, previous)


def shorten(tree: TokenTree, q: Tensor | None, repaired: Tensor) -> tuple[TokenTree, Tensor | None, Tensor]:
    """The tree without the nodes that no row proposes; valid nodes come first.

    A captured round keeps its shape; on a processor every row that is not verified is time saved, for one host read.
    """
    longest = int(tree.valid[:, 1:].sum(1).max())
    size = 1 + (longest if q is None else max(longest, 1))  # the ratio rule needs a slot
    tokens, parents, depths, valid = (x[:, :size] for x in (tree.tokens, tree.parents, tree.depths, tree.valid))
    cut = TokenTree(tokens, parents, depths, valid, min(tree.height, size - 1))
    return cut, None if q is None else q[:, : size - 1], repaired[:, : size - 1]


def branches_of(tree: TokenTree, reach: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Where a tree leaves its first path, ``[B, M-1]`` bool, and the nodes beside that path, ``[B]``.

    The first path goes to the first child everywhere: CURE's branch 0, or the likeliest token after the likeliest. A
    node with an elder sibling begins a branch, on whichever path it lies. ``reach``: its ``ancestor_mask``, if known.
    """
    same = tree.parents[:, :, None] == tree.parents[:, None, :]  # [B, M, M]
    leaves = same.tril(-1).any(2) & tree.valid  # it has an elder sibling
    reach = ancestor_mask(tree) if reach is None else reach
    beside = (reach & leaves[:, None, :]).any(2) & tree.valid
    return leaves[:, 1:], beside.sum(1)


def verify_mask(tree: TokenTree, anchor: Tensor, bound: int, reach: Tensor | None = None) -> Tensor:
    """``[B, M, bound]`` bool: a node sees everything committed before the anchor, its ancestors and itself.

    Node ``m`` of the tree lies in cache entry ``anchor + m``. ``reach``: the tree's ``ancestor_mask``, if known.
    """
    size, reach = tree.size, ancestor_mask(tree) if reach is None else reach
    relative = torch.arange(bound, device=anchor.device) - anchor[:, None]  # [B, bound]
    inside = (relative >= 0) & (relative < size)
    index = relative.clamp(0, size - 1)[:, None].expand(-1, size, -1)
    own = reach.gather(2, index) & inside[:, None]
    return own | (relative < 0)[:, None]


def choose(law: Law | RowLaw, logits: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """The target's own token at every node ``[B, M]``: argmax, or a draw by the counter of the position it will fill.

    Nodes of one depth share a number; only one of them lies on the path, and the path never looks at later draws.
    """
    if law.greedy:
        return logits.argmax(-1)
    return draw(law.probs(logits), uniform(seed, positions, Stream.VERIFY))


@torch.no_grad()
def round(engine: Engine, state: State, bound: int, mark: Mark = _no_mark) -> RoundOutput:
    """One round for every row; the state's buffers are updated in place.

    Args:
        bound: cache entries that take part; at least every row's ``length - 1 + slack``. Known to the host.
        mark: called with a stage's name when it has ended (for timing).
    """
    target, backbone = engine.target, engine.backbone
    position = state.length - 1  # [B], of the anchor
    anchor = state.ids.gather(1, position[:, None])[:, 0]
    block = backbone.draft(state.context, anchor, position, bound)
    mark("draft")
    tree, q, repaired = propose(engine, block, state.seed)
    if engine.trim:
        tree, q, repaired = shorten(tree, q, repaired)
    mark("head")

    entries = position[:, None] + torch.arange(tree.size, device=position.device)  # [B, M]
    positions = position[:, None] + tree.depths
    reach = ancestor_mask(tree)
    mask = verify_mask(tree, position, bound, reach)
    hidden, features = target.forward(tree.tokens, positions, entries, mask, state.kv, backbone.tapped_layers)
    logits = target.logits(hidden)  # [B, M, V]
    if engine.processor is not None:
        logits = engine.processor(logits, state, tree)
    mark("verify")

    accepted, emitted, count, stopped = _commit(engine, state, tree, q, logits, position)
    order = torch.arange(emitted.shape[1], device=position.device)
    mark("accept")

    if engine.nodes is not None or engine.expander is not None:
        state.kv.compact(entries.gather(1, accepted.path), position[:, None] + order)
    if features is not None:  # a backbone may tap nothing
        rows = accepted.path[..., None].expand(-1, -1, features.shape[-1])
        backbone.extend(state.context, features.gather(1, rows), position[:, None] + order)
    state.ids.scatter_(1, state.length[:, None] + order, emitted)
    state.length += count
    state.done |= stopped | (state.length >= state.limit)
    mark("commit")
    branches, added = torch.zeros_like(repaired), torch.zeros_like(count)
    if engine.nodes is not None or engine.expander is not None:
        branches, added = branches_of(tree, reach)
    drafted, path = tree.valid[:, 1:].sum(1), accepted.path[:, 1:]
    return RoundOutput(emitted, count, accepted.count, drafted, repaired, branches, added, path, stopped)


def _commit(
    engine: Engine, state: State, tree: TokenTree, q: Tensor | None, logits: Tensor, position: Tensor
) -> tuple[Acceptance, Tensor, Tensor, Tensor]:
    """What the target accepts, and what is committed of it; see ``settle``."""
    room = (state.length, state.limit, state.done, engine.eos)
    if q is None and engine.kernels == "triton":
        from repairzoo.kernels.accept import accept

        return accept(choose(engine.law, logits, state.seed, position[:, None] + tree.depths + 1), tree, *room)
    return settle(_accept(engine, state, tree, q, logits, position), tree, *room)


def _accept(
    engine: Engine, state: State, tree: TokenTree, q: Tensor | None, logits: Tensor, position: Tensor
) -> Acceptance:
    if q is None:
        return target_first(choose(engine.law, logits, state.seed, position[:, None] + tree.depths + 1), tree)
    slots = torch.arange(tree.size - 1, device=position.device)
    u_accept = uniform(state.seed, position[:, None] + 1 + slots, Stream.ACCEPT)
    u_residual = uniform(state.seed, position, Stream.RESIDUAL)
    return ratio(engine.law.probs(logits), q, tree.tokens[:, 1:], tree.valid[:, 1:], u_accept, u_residual)


def settle(
    accepted: Acceptance, tree: TokenTree, length: Tensor, limit: Tensor, done: Tensor, eos: Tensor
) -> tuple[Acceptance, Tensor, Tensor, Tensor]:
    """What really is committed: up to the first end-of-text, at most the budget, nothing where a row was done.

    Args:
        length, limit, done: ``[B]``, see ``State``. eos: ``[E]`` int64.

    Returns:
        ``accepted``; emitted ``[B, D+1]`` int64, the accepted tokens, then the bonus; count ``[B]`` int64 and stopped
        ``[B]`` bool, see ``RoundOutput``.
    """
    emitted = tree.tokens.gather(1, accepted.path)  # [B, D+1], the anchor first
    order = torch.arange(emitted.shape[1], device=emitted.device)
    shifted = torch.cat([emitted[:, 1:], emitted[:, -1:]], 1)
    emitted = torch.where(order == accepted.count[:, None], accepted.bonus[:, None], shifted)
    count = torch.minimum(accepted.count + 1, (limit - length).clamp_min(0)) * ~done
    ends = _ends(emitted, eos) & (order < count[:, None])  # [B, D+1]
    stopped = ends.any(1)
    return accepted, emitted, torch.where(stopped, ends.to(torch.uint8).argmax(1) + 1, count), stopped


def _ends(tokens: Tensor, eos: Tensor) -> Tensor:
    # torch.isin sorts, and asks a GPU for a size, once there are a dozen ids
    return (tokens[..., None] == eos).any(-1)


@torch.inference_mode(False)  # buffers that are made inside it could not be written outside
def new_state(engine: Engine, rows: int, capacity: int) -> State:
    """Buffers of ``rows`` rows that hold nothing yet."""
    target, device = engine.target, engine.target.device

    def counter() -> Tensor:
        return torch.zeros(rows, dtype=torch.int64, device=device)

    return State(
        ids=torch.zeros(rows, capacity, dtype=torch.int64, device=device),
        length=counter(),
        limit=counter(),
        done=torch.zeros(rows, dtype=torch.bool, device=device),
        seed=counter(),
        kv=target.new_cache(rows, capacity),
        context=engine.backbone.new_cache(rows, capacity, target.dtype, device),
    )


@torch.no_grad()
def start(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    budgets: Sequence[int],
    seeds: Sequence[int],
    capacity: int | None = None,
    into: State | None = None,
) -> State:
    """Read the prompts and commit each row's first token, which needs no draft.

    Args:
        prompts: token ids, one non-empty list a row.
        budgets: new tokens that each row may have. seeds: one a row.
        capacity: positions to allocate; as many as the run can use unless given.
        into: buffers to use instead, for as many rows; what they hold is overwritten or hidden.
    """
    target, backbone = engine.target, engine.backbone
    device = target.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    width = max(len(p) for p in prompts)
    state = into or new_state(engine, len(prompts), capacity or width + max(budgets) + engine.slack)
    ids = state.ids
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(list(prompt), device=device)
    state.length.copy_(lengths)
    state.limit.copy_(lengths + torch.tensor(list(budgets), device=device))
    state.done.fill_(False)
    state.seed.copy_(torch.tensor(list(seeds), dtype=torch.int64, device=device))
    logits, features = target.prefill(ids[:, :width], lengths, state.kv, backbone.tapped_layers)
    if features is not None:
        backbone.extend(state.context, features, torch.arange(width, device=device).expand(len(prompts), -1))
    logits = logits[:, None]  # [B, 1, V]
    if engine.processor is not None:
        last = ids.gather(1, lengths[:, None] - 1)
        logits = engine.processor(logits, state, chain(last[:, 0], last[:, :0]))
    token = choose(engine.law, logits, state.seed, lengths[:, None])[:, 0]
    state.ids.scatter_(1, lengths[:, None], token[:, None])
    state.length += 1
    state.done |= _ends(token, engine.eos) | (state.length >= state.limit)
    return state
