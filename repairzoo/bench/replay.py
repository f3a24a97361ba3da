"""Replay a text that is known already: what would have been drafted and accepted, without running the target in rounds.

The target reads prompt and answer once; its features are then handed to the backbone as the rounds would have committed
them. Since verification is target-first, a draft token is accepted exactly if the known text holds it, whatever was
proposed and at whatever temperature the text was drawn. So one answer serves every head, block and tree, and also what
was not proposed: the backbone's own draft and the best that a selector could have made of the pool.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from repairzoo.bench.clock import synchronise
from repairzoo.block import DraftBlock, make_pool
from repairzoo.decode import Engine, propose, shorten, split_heads
from repairzoo.errors import InvalidInput
from repairzoo.generation import make_request
from repairzoo.target import Target
from repairzoo.verify import target_first
from repairzoo.walk import walk
from repairzoo.zoo import Zoo


@dataclass(slots=True)
class Prefix:
    """Drafted tokens that agree with the text, counted from slot 0 until the first that does not; one entry a round.

    Attributes:
        slots: S. pool: candidates a slot of the oracle.
        native: of the backbone's own draft. selected: of the walked chain. oracle: slots whose pool holds the text.
        fixed: slots that only the heads have right. broken: slots that only the backbone had right.
        heads: by head and name, what its ``diagnostics`` say (the null's mass, the histogram of lambda, the spread of
            factors ...), summed over rounds: means over slots, histograms as they are.
    """

    slots: int
    pool: int
    native: list[int] = field(default_factory=list)
    selected: list[int] = field(default_factory=list)
    oracle: list[int] = field(default_factory=list)
    fixed: int = 0
    broken: int = 0
    heads: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """``heads`` only where a head says something: means a round, histograms summed."""
        rounds = max(1, len(self.native))
        said = {
            kind: {n: x.tolist() if x.dim() else round(float(x) / rounds, 5) for n, x in values.items()}
            for kind, values in self.heads.items()
        }
        return {
            "slots": self.slots,
            "pool": self.pool,
            "native": self.native,
            "selected": self.selected,
            "oracle": self.oracle,
            "fixed": self.fixed,
            "broken": self.broken,
            **({"heads": said} if said else {}),
        }


@dataclass(slots=True)
class Replayed:
    """One text.

    Attributes:
        accepted: committed tokens of each round, bonus included, up to the end of the text.
        rows: tokens that the target would verify in each round, anchor included.
        draft, head: seconds of each round.
        prefix: None unless it was asked for, or where no chain is walked (best-first trees).
    """

    accepted: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    draft: list[float] = field(default_factory=list)
    head: list[float] = field(default_factory=list)
    prefix: Prefix | None = None


@dataclass(slots=True)
class KnownText:
    """A text and what the target saw in it.

    Attributes:
        prompt: its tokens before the answer. ids: all tokens, the answer's included.
        features: ``[1, T, F*D]`` of all positions, or None for a backbone that taps nothing.
    """

    prompt: int
    ids: list[int]
    features: Tensor | None


@torch.no_grad()
def read_text(target: Target, prompt: Sequence[int], answer: Sequence[int], taps: tuple[int, ...]) -> KnownText:
    """The target reads prompt and answer in one pass."""
    ids = [*prompt, *answer]
    row = torch.tensor([ids], device=target.device)
    cache = target.new_cache(1, len(ids))
    _, features = target.prefill(row, torch.tensor([len(ids)], device=target.device), cache, taps)
    return KnownText(len(prompt), ids, features)


def replay(
    zoo: Zoo,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    temperature: float = 0.0,
    seed: int = 0,
    oracle: int | None = None,
    text: KnownText | None = None,
) -> Replayed:
    """The rounds of one known answer.

    Args:
        prompt, answer: token ids; the answer's first token comes from reading the prompt.
        oracle: also count native, selected and oracle prefixes, with so many candidates a slot.
        text: ``read_text`` of both, when it is at hand.

    Raises:
        InvalidInput: a sampled proposal above temperature 0, which the text does not decide.
    """
    if zoo.proposal == "sampled" and temperature > 0:
        raise InvalidInput("a sampled proposal is not decided by the text: replay deterministic ones")
    request = make_request(zoo.target, [list(prompt)], temperature=temperature, seed=seed)
    return _replay(
        zoo, zoo.engine(request), text or read_text(zoo.target, prompt, answer, zoo.backbone.tapped_layers), oracle
    )


@torch.no_grad()
def _replay(zoo: Zoo, engine: Engine, text: KnownText, oracle: int | None) -> Replayed:
    target, backbone = zoo.target, zoo.backbone
    device, length = target.device, len(text.ids)
    room = max(engine.budget, backbone.slots) + 2
    padded = torch.tensor([[*text.ids, *[-1] * room]], device=device)  # -1: nothing is right past the end
    bound = length + room
    context = backbone.new_cache(1, bound, target.dtype, device)
    if text.features is not None:
        head = text.features[:, : text.prompt]
        backbone.extend(context, head, torch.arange(text.prompt, device=device)[None])
    out = Replayed()
    chain = engine.nodes is None
    if oracle is not None and chain:
        out.prefix = Prefix(backbone.slots, oracle)
    seed = torch.zeros(1, dtype=torch.int64, device=device)
    at = text.prompt  # position of the anchor
    while at + 1 < length:
        anchor, position = padded[:, at], torch.tensor([at], device=device)
        synchronise(device)
        started = time.perf_counter()
        block = backbone.draft(context, anchor, position, bound)
        synchronise(device)
        drafted = time.perf_counter()
        tree, q, repaired = propose(engine, block, seed)
        if engine.trim:
            tree, q, repaired = shorten(tree, q, repaired)
        synchronise(device)
        out.draft.append(drafted - started)
        out.head.append(time.perf_counter() - drafted)
        truth = padded[:, at + 1 + tree.depths[0]]  # [1, M], what follows each node's depth
        count = int(target_first(truth, tree).count[0])
        committed = min(count + 1, length - 1 - at)
        if out.prefix is not None:
            _count(out.prefix, engine, block, padded[0, at + 1 : at + 1 + block.slots])
        if text.features is not None:
            places = torch.arange(at, at + committed, device=device)[None]
            backbone.extend(context, text.features[:, at : at + committed], places)
        out.accepted.append(committed)
        out.rows.append(tree.size)
        at += committed
    return out


def _count(prefix: Prefix, engine: Engine, block: DraftBlock, truth: Tensor) -> None:
    heads, _ = split_heads(engine.heads)
    native = [block.native] if block.native is not None else []
    pool = make_pool(block.logits, engine.pool) if engine.pool is not None else None
    before = walk(block, native, pool)[0][0] == truth  # [S]
    after = walk(block, [*native, *heads], pool)[0][0] == truth if heads else before
    size = min(prefix.pool, block.logits.shape[-1])
    held = (make_pool(block.logits, size).ids[0] == truth[:, None]).any(-1)
    known = truth >= 0
    for name, right in (("native", before), ("selected", after), ("oracle", held)):
        getattr(prefix, name).append(int((right & known).long().cumprod(0).sum()))
    prefix.fixed += int((after & ~before & known).sum())
    prefix.broken += int((before & ~after & known).sum())
    for head in heads:
        diagnostics = getattr(head, "diagnostics", None)
        told = {} if pool is None or diagnostics is None else diagnostics(block, pool)
        sums = prefix.heads.setdefault(getattr(head, "kind", type(head).__name__), {}) if told else {}
        for name, x in told.items():
            value = x.double().cpu() if name.endswith("histogram") else x.double().mean().cpu()
            sums[name] = sums[name] + value if name in sums else value
