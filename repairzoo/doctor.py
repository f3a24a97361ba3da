"""A quick diagnosis of a drafter: is it healthy, and if not, which fault would explain it?

Wrong slots, layers, mask ids or rotary bases raise nothing: the output stays right and few drafts are accepted. So the
doctor drafts blocks at known places of the target's own greedy text, undoes one possible fault at a time, and names the
one whose undoing clearly raises acceptance. Every intervention goes through ``extend`` and ``draft``, as decoding does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from repairzoo import statement
from repairzoo.artifact import fingerprint
from repairzoo.decode import propose
from repairzoo.draft_backbone import BlockBackbone
from repairzoo.draft_layers import Rotary, wide
from repairzoo.errors import InvalidInput
from repairzoo.generation import make_request
from repairzoo.inputs import prompt_ids
from repairzoo.verify import target_first

PROMPTS = (
    "Explain in a few sentences how a bicycle stays upright while it is moving.",
    "Write a Python function that counts the vowels in a string, and show how it is called.",
    "A shop sells pens at 3 coins each and notebooks at 7 coins each. What do 4 pens and 5 notebooks cost together?",
    "List five things to check before a long hike in the mountains, one line each.",
)
BASES = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0, 5_000_000.0, 10_000_000.0)
PUBLISHED_MASKS = (151669, 248070, 4)  # Qwen3, Qwen3.5, Gemma-4 (spec of the published drafts)
VOCABULARY = 2048  # rows of the output head that interventions are scored on
MASKS = 24  # most mask ids that are tried
LEAST = 4  # places that a spread is estimated from
LOW = 2.0  # tokens a round below which a healthy draft is told to be little trained
USEFUL = 0.5  # nats a slot that a draft gains at least from the features of the text that it continues
CONTROL = "control"

Features = dict[int, Tensor]
_Score = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Probe:
    """One intervention, measured.

    Attributes:
        name: what was changed. cause: the fault that it undoes; None for the draft as it is.
        blocks: places it was measured at. accepted: drafts accepted a block with it; ``before``: without it, there.
        nats: how much likelier the target's tokens became, a slot; ``z``: that in standard errors (paired).
    """

    name: str
    cause: str | None
    blocks: int
    accepted: float
    before: float
    nats: float
    z: float


@dataclass(frozen=True, slots=True)
class Suspect:
    """A possible fault.

    Attributes:
        cause: its name. why: the evidence in words.
        clear: the evidence is beyond chance; other suspects only come first among what was tried.
        strength: for ranking.
    """

    cause: str
    why: str
    clear: bool
    strength: float


@dataclass(slots=True)
class Diagnosis:
    """What the doctor found.

    Attributes:
        healthy: no fault is clear. verdict: the finding in words. suspects: possible faults, likeliest first.
        tau: committed tokens a round in the loop, or as expected from the blocks where no loop was run.
        per_slot: share of blocks whose slot ``i`` was accepted (all before it, too).
        without_head: accepted drafts a block without the heads; None where there are none.
        context: ``(from position, to position, accepted drafts a block)``, for the decay with length.
        probes: every intervention.
    """

    healthy: bool
    verdict: str
    suspects: list[Suspect]
    tau: float
    blocks: int
    accepted: float
    per_slot: list[float]
    without_head: float | None
    context: list[tuple[int, int, float]]
    probes: list[Probe] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class _Case:
    """Blocks at known places of known text."""

    ids: Tensor  # [B, T], padded on the right
    lengths: Tensor  # [B]
    rows: Tensor  # [N], text of each block
    anchors: Tensor  # [N]
    features: Features  # layer -> [B, T, D]
    hidden: Tensor  # [B, T, D] the target's own, after its last norm
    slots: int

    def pick(self, index: Tensor) -> _Case:
        return replace(self, rows=self.rows[index], anchors=self.anchors[index])

    def tokens(self, first: int, count: int) -> Tensor:
        """``[N, count]`` tokens at ``anchor + first`` and on."""
        places = self.anchors[:, None] + first + torch.arange(count, device=self.ids.device)
        return self.ids[self.rows[:, None], places]

    def fused(self, taps: Sequence[int]) -> Tensor:
        return torch.cat([self.features[t] for t in taps], -1)


# --- measuring --------------------------------------------------------------------------------------------------------
@torch.no_grad()
def diagnose(
    zoo: Any,
    prompts: Any = None,
    *,
    new_tokens: int = 48,
    blocks: int = 32,
    texts: Sequence[tuple[Sequence[int], int]] | None = None,
) -> Diagnosis:
    """Diagnose the backbone (and heads) of a ``Zoo`` on its target.

    Args:
        zoo: as ``build`` makes it; with ``draft_int8=False``, so that rounding is no part of the picture.
        prompts: as for ``Zoo.generate``; None takes a few of its own (needs a tokenizer).
        new_tokens: greedy tokens decoded for each prompt.
        blocks: places at which each intervention is measured first; the best ones at up to four times as many.
        texts: ``(ids, prompt length)`` of texts that continue greedily; then nothing is decoded.

    Raises:
        InvalidInput: another kind of backbone than the block-parallel ones, or too little text.
    """
    backbone, target = zoo.backbone, zoo.target
    if not isinstance(backbone, BlockBackbone):
        raise InvalidInput(
            f"{type(backbone).__name__}: the doctor knows DFlash, Domino and DSpark from the inside, no other backbones"
        )
    if new_tokens < backbone.block_size + 2:
        raise InvalidInput(f"new_tokens={new_tokens}: give at least block_size + 2 = {backbone.block_size + 2}")
    if blocks < LEAST:
        raise InvalidInput(
            f"blocks={blocks}: give at least {LEAST} places, since errors are estimated from their spread"
        )
    rounds: list[list[int]] | None = None
    request = make_request(target, _prompts(target, prompts) if texts is None else [[0]], max_new_tokens=new_tokens,
                           eos_token_id=[])  # fmt: skip
    tau = None
    if texts is None:
        out = zoo.generate([list(p) for p in request.prompts], max_new_tokens=new_tokens, eos_token_id=[])
        texts = [([*p, *ids], len(p)) for p, ids in zip(request.prompts, out.token_ids, strict=True)]
        rounds, tau = out.stats.accepted, out.stats.tau
    case, looped = _case(target, backbone, texts, rounds, 4 * blocks)

    engine = zoo.engine(request)
    counts = _accepted(engine, case)
    mean = float(counts.float().mean())
    per_slot = [float((counts > i).float().mean()) for i in range(case.slots)]
    without = None
    if zoo.heads:
        bare = copy.copy(zoo)
        bare.heads, bare.expander, bare.nodes = (), None, None
        without = float(_accepted(bare.engine(request), case).float().mean())

    lab = _Lab(backbone, target, _Scorer.of(target, case))
    probes = _probes(lab, case, blocks)
    suspects = [*_by_intervention(probes), *_by_weights(lab, case)]
    if looped is not None:
        suspects += _by_loop(counts, looped)
    if without is not None and mean < 0.9 * without - 0.05:
        why = (
            f"with the head {mean:.2f} drafts of a block are accepted, without it {without:.2f}: it was trained for "
            "another backbone or target"
        )
        suspects.append(Suspect("head on the wrong backbone", why, True, without - mean))
    suspects += _by_features(probes, suspects)
    suspects.sort(key=lambda s: (not s.clear, -s.strength))
    healthy = not any(s.clear for s in suspects)
    tau = mean + 1 if tau is None else tau
    return Diagnosis(
        healthy=healthy,
        verdict=_verdict(suspects, tau),
        suspects=suspects,
        tau=tau,
        blocks=len(counts),
        accepted=mean,
        per_slot=per_slot,
        without_head=without,
        context=_decay(case, counts),
        probes=probes,
    )


def _prompts(target: Any, prompts: Any) -> list[list[int]]:
    if prompts is None and target.tokenizer is None:
        raise InvalidInput("this target has no tokenizer: give prompts as lists of token ids")
    return prompt_ids(target, list(PROMPTS) if prompts is None else prompts, None, None)


def _case(
    target: Any,
    backbone: Any,
    texts: Sequence[tuple[Sequence[int], int]],
    rounds: list[list[int]] | None,
    most: int,
) -> tuple[_Case, Tensor | None]:
    """Blocks at the loop's own anchors, with what it accepted there; or evenly spread ones."""
    device, slots = target.device, backbone.block_size
    width = max(len(ids) for ids, _ in texts)
    ids = torch.zeros(len(texts), width, dtype=torch.int64, device=device)
    rows, anchors, looped = [], [], []
    for row, (text, prompt) in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(list(text), device=device)
        last = len(text) - 1 - slots  # whose block still has its right answer in the text
        if rounds is None:
            places = list(range(max(prompt, 1), last + 1))
            taken = [None] * len(places)
        else:
            starts = [prompt]
            for count in rounds[row]:
                starts.append(starts[-1] + count)
            places = [p for p in starts[:-1] if p <= last]
            taken = rounds[row][: len(places)]
        rows += [row] * len(places)
        anchors += places
        looped += taken
    if len(anchors) < LEAST:
        raise InvalidInput(f"only {len(anchors)} blocks to look at: give more prompts or more new_tokens")
    lengths = torch.tensor([len(text) for text, _ in texts], device=device)
    near = sorted({t + d for t in backbone.tapped_layers for d in (-1, 0, 1) if -1 <= t + d < target.num_layers})
    places = torch.arange(width, device=device).expand(len(texts), -1)
    seen = places[:, None] <= places[..., None]  # [B, T, T]
    cache = target.new_cache(len(texts), width)
    hidden, features = target.forward(ids, places, places, seen, cache, tuple(near))
    size = target.hidden_size
    layers = {layer: features[..., i * size : (i + 1) * size] for i, layer in enumerate(near)}
    place = (torch.tensor(rows, device=device), torch.tensor(anchors, device=device))
    case = _Case(ids, lengths, *place, layers, hidden, backbone.slots)
    index = _spread(len(anchors), most, device)
    return case.pick(index), None if rounds is None else torch.tensor(looped, device=device)[index] - 1


def _spread(count: int, most: int, device: torch.device) -> Tensor:
    """Indices of at most ``most`` of ``count`` things, evenly spread."""
    return torch.linspace(0, count - 1, min(most, count), device=device).long().unique()


def _block(backbone: Any, case: _Case, features: Tensor) -> Any:
    """Blocks at every place of the case, drafted from these features as decoding drafts them."""
    b, t = case.ids.shape
    capacity = t + backbone.block_size
    cache = backbone.new_cache(b, capacity, features.dtype, features.device)
    backbone.extend(cache, features, torch.arange(t, device=features.device).expand(b, -1))
    return backbone.draft(cache.select(case.rows), case.tokens(0, 1)[:, 0], case.anchors)


def _accepted(engine: Any, case: _Case) -> Tensor:
    """``[N]`` drafts of each block that greedy verification accepts, whatever the heads propose."""
    parts = []
    for index in torch.arange(len(case.anchors), device=case.ids.device).split(32):
        part = case.pick(index)
        block = _block(engine.backbone, part, part.fused(engine.backbone.tapped_layers))
        tree, _, _ = propose(engine, block, torch.zeros_like(part.anchors))
        places = (part.anchors[:, None] + tree.depths + 1).clamp_max(part.ids.shape[1] - 1)
        parts.append(target_first(part.ids[part.rows[:, None], places], tree).count)
    return torch.cat(parts)


@dataclass(slots=True)
class _Scorer:
    """Scores drafted rows against the target on a part of the vocabulary, the backbone's own causal head included."""

    rows: Tensor  # [V'] sorted token ids
    weight: Tensor  # [V', D]
    laws: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # of a case and so many slots

    @classmethod
    def of(cls, target: Any, case: _Case) -> _Scorer:
        vocabulary = target.output_weight.shape[0]
        spread = torch.linspace(0, vocabulary - 1, min(VOCABULARY, vocabulary), device=target.device).long()
        present = case.ids[case.ids < vocabulary]
        rows = torch.cat([spread, present]).unique()
        return cls(rows, target.output_weight[rows])

    def base(self, hidden: Tensor) -> Tensor:
        return wide(F.linear(hidden.to(self.weight.dtype), self.weight))

    def __call__(self, backbone: Any, case: _Case, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """``[N]`` accepted drafts, and ``[N]`` minus the cross-entropy of the target's law and the draft's, in nats.

        The target's whole law instead of its one token: the same comparison with less noise. Slot ``i`` counts
        ``2 ** -i``, as its chance to be reached falls.

        Args:
            hidden: ``[N, S, D]`` rows of the slots.
        """
        count = hidden.shape[1]
        logits = self.base(hidden)
        if getattr(backbone, "markov_head", self) is not None and hasattr(backbone, "teacher_forced"):
            y = backbone.teacher_forced(hidden.to(backbone.dtype), case.tokens(0, count))
            logits = logits + wide(F.linear(y, backbone.output_rows[self.rows]))
        right = torch.searchsorted(self.rows, case.tokens(1, count))
        accepted = (logits.argmax(-1) == right).long().cumprod(1).sum(1)
        key = (id(case), count)
        if key not in self.laws:
            places = case.anchors[:, None] + torch.arange(count, device=right.device)
            self.laws[key] = self.base(case.hidden[case.rows[:, None], places]).softmax(-1)  # [N, S, V']
        law = self.laws[key]
        entropy = -(law * logits.log_softmax(-1).nan_to_num(-100.0, -100.0, -100.0).clamp_min(-100)).sum(-1)
        weights = 0.5 ** torch.arange(count, device=right.device)
        return accepted.float(), -(entropy * weights).sum(1) / weights.sum()


@dataclass(slots=True)
class _Lab:
    """A drafter, its target, and how both are measured."""

    backbone: Any
    target: Any
    scorer: _Scorer

    def rows(self, case: _Case, features: Tensor, backbone: Any = None, **changes: Any) -> Tensor:
        """``[N, R, D]`` every row of the blocks, also those that are no slots."""
        drafter = self.backbone if backbone is None else backbone
        with altered(drafter, first_slot=0, logits=self.scorer.base, **changes):
            return _block(drafter, case, features).hidden

    def score(self, case: _Case, hidden: Tensor, first: int | None = None, backbone: Any = None) -> _Score:
        first = self.backbone.first_slot if first is None else first
        return self.scorer(self.backbone if backbone is None else backbone, case, hidden[:, first:])

    def plain(self, case: _Case) -> Tensor:
        return case.fused(self.backbone.tapped_layers)


def _interventions(lab: _Lab, case: _Case) -> Iterator[tuple[str, str, Callable[[_Case], _Score]]]:
    """``(what is changed, the fault that this undoes, how it is measured)``."""
    backbone, target, taps = lab.backbone, lab.target, list(lab.backbone.tapped_layers)
    first = backbone.first_slot
    for other in (first - 1, first + 1):
        if 0 <= other < backbone.block_size - 1:
            yield (
                f"slot 0 at block row {other}",
                "slot shift",
                lambda c, at=other: lab.score(c, lab.rows(c, lab.plain(c)), at),
            )
    for step in (-1, 1):
        if all(t + step in case.features for t in taps):
            moved = [t + step for t in taps]
            yield (
                f"tapped layers {step:+d}",
                "tapped layers",
                lambda c, taps=moved: lab.score(c, lab.rows(c, c.fused(taps))),
            )
    for step, word in ((-1, "earlier"), (1, "later")):
        yield (
            f"features one row {word}",
            "stale feature row",
            lambda c, by=step: lab.score(c, lab.rows(c, lab.plain(c).roll(by, 1))),
        )
    for theta in bases(backbone, target):
        turned = Rotary({**backbone.config.rope, "rope_theta": theta}, backbone.config.head_dim).to(backbone.device)
        yield (
            f"rope_theta {theta:g}",
            "rope base",
            lambda c, rotary=turned: lab.score(c, lab.rows(c, lab.plain(c), rotary=rotary)),
        )

    def exchanged(c: _Case) -> _Score:
        with swapped(backbone):
            return lab.score(c, lab.rows(c, lab.plain(c)))

    yield "k_proj and v_proj exchanged", "swapped k/v", exchanged
    if backbone.dtype in (torch.float16, torch.bfloat16):
        exact = copy.deepcopy(backbone).float()
        yield (
            "float32",
            "half-precision overflow",
            lambda c: lab.score(c, lab.rows(c, lab.plain(c), exact), backbone=exact),
        )
    for mask in masks(backbone, target):
        yield (
            f"mask_token_id {mask}",
            "mask id",
            lambda c, m=mask: lab.score(c, lab.rows(c, lab.plain(c), mask_token_id=m)),
        )


def _probes(lab: _Lab, case: _Case, blocks: int) -> list[Probe]:
    """The draft as it is, with features that tell it nothing, and with every intervention.

    Interventions are measured at ``blocks`` places; the best of each fault, unless it clearly harms, at all of them.
    """
    few = case.pick(_spread(len(case.anchors), blocks, case.ids.device))
    base = {id(c): lab.score(c, lab.rows(c, lab.plain(c))) for c in (few, case)}

    def judged(name: str, cause: str | None, found: _Score, at: _Case) -> Probe:
        before = base[id(at)]
        difference = found[1] - before[1]
        error = max(float(difference.std()) / len(difference) ** 0.5, 1e-6)
        return Probe(
            name=name,
            cause=cause,
            blocks=len(difference),
            accepted=float(found[0].mean()),
            before=float(before[0].mean()),
            nats=float(difference.mean()),
            z=float(difference.mean()) / error,
        )

    known = lab.plain(case)
    foreign = known.roll(1, 0) if len(known) > 1 else known.flip(1)
    out = [
        judged("as it is", None, base[id(case)], case),
        judged("features of another text", CONTROL, lab.score(few, lab.rows(few, foreign)), few),
    ]
    tried = list(_interventions(lab, case))
    found = [judged(name, cause, run(few), few) for name, cause, run in tried]
    for cause in dict.fromkeys(p.cause for p in found):
        best = max((i for i, p in enumerate(found) if p.cause == cause), key=lambda i: found[i].nats)
        if found[best].z > -1.5 and len(few.anchors) < len(case.anchors):
            name, _, run = tried[best]
            found[best] = judged(name, cause, run(case), case)
    return out + found


def bases(backbone: Any, target: Any) -> list[float]:
    """Other rotary bases to try: the target's own, and the common ones."""
    config = target.model.config
    stated = (getattr(config, "rope_parameters", None) or {}).get("rope_theta") or getattr(config, "rope_theta", None)
    found = [float(stated)] if stated else []
    return [b for b in dict.fromkeys([*found, *BASES]) if b != float(backbone.config.rope["rope_theta"])]


def masks(backbone: Any, target: Any) -> list[int]:
    """Other mask ids to try: special tokens, rows past the tokenizer's, and the published ones.

    Tokens that the target never saw share one embedding, more or less; one of them stands for all.
    """
    rows, found = target.vocab_size, []
    tokenizer = target.tokenizer
    if tokenizer is not None:
        found += [
            len(tokenizer),
            *sorted({*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}),
        ]
    found += [*PUBLISHED_MASKS, rows - 1, 0, 1, 2]
    found = [i for i in dict.fromkeys(found) if 0 <= i < rows]
    table = F.normalize(target.embedding[[backbone.mask_token_id, *found]].float(), dim=-1)
    alike = (table @ table.T > 0.99).tril(-1).any(1)[1:].tolist()
    return [i for i, twin in zip(found, alike, strict=True) if not twin][:MASKS]


@contextmanager
def altered(backbone: Any, **changes: Any) -> Iterator[None]:
    """Attributes of the instance, changed for a while."""
    missing = object()
    modules = backbone._modules
    before = {name: backbone.__dict__.get(name, modules.get(name, missing)) for name in changes}
    try:
        for name, value in changes.items():
            setattr(backbone, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is missing:
                delattr(backbone, name)
            else:
                setattr(backbone, name, value)


@contextmanager
def swapped(backbone: Any) -> Iterator[None]:
    """Keys' and values' projections exchanged in every layer, for a while."""

    def exchange() -> None:
        for layer in backbone.layers:
            attention = layer.self_attn
            attention.k_proj, attention.v_proj = attention.v_proj, attention.k_proj

    packed, backbone._packed = backbone._packed, None
    exchange()
    try:
        yield
    finally:
        exchange()
        backbone._packed = packed


# --- judging ----------------------------------------------------------------------------------------------------------
WORDS = {
    "slot shift": "the block's rows are read with another slot convention than the draft was trained with",
    "tapped layers": "the layer ids of the config are off by one (0-based decoder layers are wanted; vllm#40727)",
    "stale feature row": "context features arrive one row away from where they belong",
    "rope base": "rope_theta of the config is not the one that the draft was trained with",
    "swapped k/v": "k_proj and v_proj of the checkpoint were exchanged",
    "half-precision overflow": "it overflows or rounds too coarsely: load it with dtype=float32 or bfloat16",
    "mask id": "mask_token_id of the config is not the one that the draft was trained with",
}


def _by_intervention(probes: Sequence[Probe]) -> Iterator[Suspect]:
    """The best intervention of each fault, if it makes the target's tokens likelier."""
    for cause in WORDS:
        best = max((p for p in probes if p.cause == cause), key=lambda p: p.nats, default=None)
        if best is None or best.z < 1 or best.nats < 0.005:
            continue
        clear = best.z >= 2.5 and best.nats >= 0.03 and best.accepted > best.before
        why = (
            f"with {best.name}, {best.accepted:.2f} drafts of a block are accepted instead of {best.before:.2f}, and "
            f"the target's tokens are {best.nats:.2f} nats likelier ({best.z:.1f} standard errors): "
            f"{'' if clear else 'unless that is chance, '}{WORDS[cause]}"
        )
        yield Suspect(cause, why, clear, best.nats)


def _by_weights(lab: _Lab, case: _Case) -> Iterator[Suspect]:
    """Faults that the weights, the numbers and the statement show by themselves."""
    backbone = lab.backbone
    if not bool(lab.rows(case, lab.plain(case)).isfinite().all()):
        name = str(backbone.dtype).removeprefix("torch.")
        why = f"hidden rows of the draft are not finite in {name}: load it with dtype=float32 or bfloat16"
        yield Suspect("half-precision overflow", why, True, 1e6)
    for name in ("hidden_norm", "norm"):
        weight = getattr(getattr(backbone, name), "weight", None)
        if weight is None or bool((weight == 1).all()):
            why = f"{name}.weight is 1 everywhere, as it is before training: it was lost on the way"
            yield Suspect(f"missing {name}", why, True, 1e5)
    stated = (backbone.config.published.get(statement.KEY) or {}).get("target") or {}
    if stated.get("fingerprint") and fingerprint(lab.target.model) != stated["fingerprint"]:
        why = f"the draft was made for {stated['id']} with other weights than this target's (fingerprints differ)"
        yield Suspect("wrong target", why, True, 1e4)


def _by_loop(counts: Tensor, looped: Tensor) -> Iterator[Suspect]:
    """The loop against fresh drafts at the same places: what it carries from round to round."""
    fresh, loop = float(counts.float().mean()), float(looped.float().mean())
    worse, better = int((looped < counts).sum()), int((looped > counts).sum())
    if worse - better > 0.1 * len(counts):
        why = (
            f"in the loop {loop:.2f} drafts of a block are accepted, and {fresh:.2f} at the same places where features "
            "are read afresh: what is carried from round to round is stale or misplaced"
        )
        yield Suspect("stale feature row", why, True, 10 * (fresh - loop))


def _by_features(probes: Sequence[Probe], found: Sequence[Suspect]) -> Iterator[Suspect]:
    """A draft that gets nothing from the target's features, though nothing that was tried helps."""
    used = -next(p for p in probes if p.cause == CONTROL).nats
    if used < USEFUL:
        why = (
            f"the target's tokens are only {used:.2f} nats likelier than with the features of another text: the draft "
            "does not understand this target's features. It was trained for another target (other weights, quantised, "
            "another chat template), or hardly trained"
        )
        clear = not any(s.clear for s in found)
        yield Suspect("wrong target", why, clear, 0.0 if not clear else 1.0)


def _verdict(suspects: Sequence[Suspect], tau: float) -> str:
    if suspects and suspects[0].clear:
        return f"{suspects[0].cause}: {suspects[0].why}"
    low = "; a low figure without a fault: it was trained little, or on other texts than these" if tau < LOW else ""
    near = f"; nearest to one, and not clear: {suspects[0].cause}" if suspects else ""
    return f"healthy: {tau:.2f} tokens a round, and no fault that was tried would explain a low figure{low}{near}"


def _decay(case: _Case, counts: Tensor) -> list[tuple[int, int, float]]:
    """Accepted drafts by position, in quarters."""
    order = case.anchors.argsort()
    parts = [p for p in order.chunk(4) if len(p)]
    return [(int(case.anchors[p].min()), int(case.anchors[p].max()), float(counts[p].float().mean())) for p in parts]
