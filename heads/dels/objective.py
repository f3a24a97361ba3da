"""Training DeLS on answers: tokens alone teach it, a frozen backbone judges it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repairzoo.errors import IncompatibleArtifact, InvalidInput
from repairzoo.target import Target
from repairzoo.train.data import Batch, Corpus, prefix, softmax_columns
from repairzoo.train.heads import common_facts, target_keys
from repairzoo.train.held import accepted, walked_taus
from repairzoo.train.losses import decay_weights, place_in
from repairzoo.train.recipe import Job, RunRecipe, read_section
from repairzoo.train.trainer import Recipe, Terms

from .head import DeLS, DeLSConfig
from .train import gather_windows

_CHUNK = 64  # blocks whose logits over the whole vocabulary are alive at once


class LocalExpert(nn.Module):
    """``DeLS.local_logits`` as a module's forward, so that several processes can wrap it."""

    def __init__(self, head: DeLS):
        super().__init__()
        self.head = head

    def forward(self, tokens: Tensor, columns: Tensor | None) -> Tensor:
        return self.head.local_logits(tokens, columns)


class Fusion(NamedTuple):
    """How local logits are added: their weight, that of the prior, and how many first slots keep their scores."""

    alpha: float
    beta: float
    prefix: int


@dataclass(slots=True)
class DeLSObjective:
    """Next-token cross entropy of the local expert on windows that start at random anchors (arXiv 2607.07409).

    Attributes:
        head: bound to its target, in float32.
        gamma: decay of the weights, in slots; None for none.
        columns: sorted ids that the softmax runs over, or None for all; other labels carry no weight.
        backbone: bound and frozen, for ``evaluate``; None evaluates the local expert alone.
    """

    head: DeLS
    gamma: float | None = 7.0
    columns: Tensor | None = None
    backbone: Any = None
    module: LocalExpert = field(init=False)

    def __post_init__(self) -> None:
        self.module = LocalExpert(self.head)

    def terms(self, module: nn.Module, batch: Batch, progress: float) -> Terms:
        windows, weights = gather_windows(batch.input_ids, batch.loss_mask, batch.anchors, self.head.config.block_size)
        weights = weights * batch.keep.flatten()[:, None] * decay_weights(weights.shape[1], self.gamma, weights.device)
        some = weights.any(-1)
        windows, weights = windows[some], weights[some]
        labels = windows[:, 1:]
        if self.columns is not None:
            labels, known = place_in(self.columns, labels)
            weights = weights * known
        logits = module(windows[:, :-1], self.columns)  # [N, S, C]
        entropy = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
        return {"ce": ((entropy * weights.flatten()).sum(), weights.sum())}

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        c = self.head.config
        rights, valids = zip(*(self._judge(batch, [Fusion(c.alpha, c.beta, c.pure_draft_prefix_len)])), strict=True)
        return torch.cat([r[0] for r in rights]), torch.cat(valids)

    def fusion(self, batches: list[Batch], settings: list[Fusion], chunk: int) -> list[float]:
        """Tokens a round of the fused greedy chain for each setting, along the walk of decoding: at random places the
        draft is surer.

        Slot i is judged with the true tokens before it: up to the first error that is what the walk has chosen, so the
        length of the right prefix is exact.
        """

        def lengths(hop: Batch) -> list[Tensor]:
            rights, valids = zip(*self._judge(hop, settings), strict=True)
            valid = torch.cat(valids)
            return [accepted(hop, torch.cat([r[i] for r in rights]), valid) for i in range(len(settings))]

        return walked_taus(lengths, batches, chunk)

    def _judge(self, batch: Batch, settings: list[Fusion]) -> Iterator[tuple[list[Tensor], Tensor]]:
        """For chunks of blocks: for each setting whether slots are right ``[n, S]``, and which count ``[n, S]``."""
        head, backbone = self.head, self.backbone
        slots = head.config.block_size - 1 if backbone is None else backbone.slots
        labels, mask = batch.labels(slots)
        anchors = batch.input_ids.gather(1, batch.anchors)[..., None]
        windows = torch.cat((anchors, labels), -1).flatten(0, 1)  # [N, S+1]
        valid = prefix(mask).flatten(0, 1)
        hidden = None
        if backbone is not None:
            hidden = backbone.train_forward(batch.features, batch.input_ids, batch.anchors)
            hidden = hidden[:, :, backbone.first_slot :].flatten(0, 1)  # [N, S, D]
        some = valid[:, 0].nonzero()[:, 0]
        for rows in some.split(_CHUNK):
            window = windows[rows]
            local = head.local_logits(window[:, :-1])  # [n, S, V]
            if backbone is None or hidden is None:
                choices = [local.argmax(-1)]
            else:
                base = backbone.logits(hidden[rows])[..., : local.shape[-1]]
                choices = [self._fused(base, local, setting) for setting in settings]
            yield [choice == window[:, 1:] for choice in choices], valid[rows]

    def _fused(self, base: Tensor, local: Tensor, setting: Fusion) -> Tensor:
        first = setting.prefix
        scores = base[:, first:] + setting.alpha * local[:, first:] - setting.beta * self.head.log_prior
        return torch.cat((base[:, :first].argmax(-1), scores.argmax(-1)), 1)


@dataclass(frozen=True, slots=True)
class ModelSection:
    """``model`` of a recipe; see :class:`DeLSConfig`. ``dtype`` is that of the stored weights."""

    variant: str
    rank: int
    block_size: int
    hidden: int | None = None
    input_table: str = "factored"
    input_rank: int | None = 256
    output_table: str = "target"
    activation: str = "silu"
    pure_draft_prefix_len: int = 0
    pool_size: int | None = None
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class ObjectiveSection:
    """``objective`` of a recipe.

    Attributes:
        gamma: slot decay, or null. least_count: the softmax runs over ids that occur at least so often in training
            answers; null for all. smoothing: of the unigram prior, which is counted on training answers.
        alphas, betas, prefixes: fusion weights, and numbers of first slots that keep their scores, that are tried on
            held-out answers when a backbone is given. Without one, the first of each is stored. ``prefixes`` null: the
            model's ``pure_draft_prefix_len`` alone.
    """

    gamma: float | None = 7.0
    least_count: int | None = 1
    smoothing: float = 1.0
    alphas: tuple[float, ...] = (0.3,)
    betas: tuple[float, ...] = (0.3,)
    prefixes: tuple[int, ...] | None = None


def plan(
    recipe: RunRecipe,
    target: Target,
    folders: list[Path],
    *,
    init: Path | None = None,
    backbone: Any = None,
    passes: tuple[str, ...] | None = None,
    control: bool = False,
) -> Job:
    """A DeLS of a recipe's shape, new or from ``init``, on the target's answers.

    Raises:
        InvalidInput: a key of the recipe. InvalidArtifact: a value that the head's config refuses.
        IncompatibleArtifact: ``init`` has another shape than the recipe.
    """
    model = read_section(ModelSection, recipe.model, recipe.path, "model")
    objective = read_section(ObjectiveSection, recipe.objective, recipe.path, "objective")
    if control:
        raise InvalidInput("dels never trains the backbone: its control is the backbone as it is")
    vocabulary = target.output_weight.shape[0]
    stored = DeLSConfig(**asdict(model), alpha=objective.alphas[0], beta=objective.betas[0], **target_keys(target))
    if backbone is not None and backbone.slots + 1 > stored.block_size:
        raise InvalidInput(
            f"{recipe.path}: key 'model.block_size' is {stored.block_size}, but the backbone drafts {backbone.slots} "
            f"slots: train on windows of {backbone.slots + 1} tokens"
        )
    corpus = Corpus(folders, (), target.hidden_size, passes=passes)
    held = None if backbone is None else Corpus(folders, backbone.tapped_layers, target.hidden_size, passes=passes)
    head = DeLS(replace(stored, dtype="float32"), torch.Generator().manual_seed(recipe.run.seed))
    if init is not None:
        _start_from(head, init)
    head.set_prior(corpus.counts(vocabulary), objective.smoothing)
    head.to(target.device)
    head.bind(target.embedding, target.output_weight)
    columns = softmax_columns(corpus, target, objective.least_count)
    trained = DeLSObjective(head, objective.gamma, columns, backbone)

    def save(folder: Path) -> None:
        # the fusion weights are those of the head now: finish() chooses them
        config = replace(head.config, dtype=stored.dtype)
        tensors = {n: t.to(DeLS.stored_dtype(config, n)) for n, t in head.state_tensors().items()}
        DeLS.from_config_and_tensors(config, tensors).save(folder)

    def finish(run: Recipe) -> list[dict[str, Any]]:
        if held is None:
            return []
        prefixes = objective.prefixes or (model.pure_draft_prefix_len,)
        tried = [Fusion(*x) for x in itertools.product(objective.alphas, objective.betas, prefixes)]
        batches = [b.to(target.device) for b in held.held_batches(run.batch, run.anchors, run.eval_sequences)]
        alone, *taus = trained.fusion(batches, [Fusion(0.0, 0.0, 0), *tried], run.anchors)
        best = max(range(len(tried)), key=lambda i: taus[i])
        a, b, first = tried[best]
        head.config = replace(head.config, alpha=a, beta=b, pure_draft_prefix_len=first)
        lines = [{**f._asdict(), "held_walked_tau": round(t, 4)} for f, t in zip(tried, taus, strict=True)]
        return [{"fusion": lines, "without": round(alone, 4), "chosen": tried[best]._asdict()}]

    facts = common_facts("dels", target, model, objective, head, init) | {
        "columns": None if columns is None else len(columns),
        "judged_with": None if backbone is None else getattr(backbone, "kind", type(backbone).__name__),
    }
    return Job(trained, corpus, save, facts, held=held, finish=finish)


def _start_from(head: DeLS, folder: Path) -> None:
    """Load the weights of an artifact; its fusion weights, dtype and window may differ."""
    found = DeLS.load(folder)
    for f in fields(DeLSConfig):
        mine, theirs = getattr(head.config, f.name), getattr(found.config, f.name)
        if f.name not in ("alpha", "beta", "dtype", "block_size", "pure_draft_prefix_len") and mine != theirs:
            raise IncompatibleArtifact(f"{folder}: {f.name} is {theirs!r}, here it is {mine!r}")
    head.load_state_dict({name: tensor.float() for name, tensor in found.state_dict().items()})
