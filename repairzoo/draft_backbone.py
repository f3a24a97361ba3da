"""What every backbone with the DFlash trunk does around it: borrow the target's tables, draft, train, load, save."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from repairzoo import statement
from repairzoo.artifact import fingerprint
from repairzoo.block import HISTORY, Corrector, DraftBlock
from repairzoo.draft_config import DTYPES, DraftConfig
from repairzoo.draft_files import CONFIG, INDEX, WEIGHTS, read_weights, write_weights
from repairzoo.draft_layers import DraftCache, Trunk, wide
from repairzoo.errors import IncompatibleArtifact, InvalidArtifact, InvalidInput
from repairzoo.linear import Int8Linear, Linear
from repairzoo.pretrained import Backbone
from repairzoo.safe_file import read_header, read_json, replacing

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(slots=True)
class _Borrowed:
    """The target's tensors; copies of a backbone share them."""

    embedding: Tensor
    output_weight: Tensor
    output: Linear | Int8Linear

    def __deepcopy__(self, memo: dict[int, Any]) -> _Borrowed:
        return self


class BlockBackbone(Backbone, Trunk):
    """A trunk with a slot convention and the target's embedding and output head.

    Subclasses set ``kind``, ``config_type`` and ``first_slot``, and add their own parameters and corrector.

    Attributes:
        config: the published config.
        block_size: rows of a block: the anchor and ``block_size - 1`` masks.
        first_slot: block row of slot 0; row ``first_slot + i`` predicts slot ``i``. The shift is made when a block is
            drafted and nowhere later.
        slots: predictions of a block, ``block_size - first_slot``.
        tapped_layers: target layers whose outputs are concatenated into a feature row; -1 is the embedding output.
    """

    kind: ClassVar[str]
    config_type: ClassVar[type[DraftConfig]]
    redrafts: ClassVar[bool] = True  # drafts partly known blocks, see ``draft(known=...)``
    first_slot: int

    def __init__(self, config: DraftConfig, *, seed: int | None = None):
        """A new draft. ``seed`` draws the matrices from N(0, 0.02); None leaves torch's own initialisation."""
        super().__init__(config)
        self.config = config
        self.block_size = config.block_size
        self.tapped_layers = config.target_layer_ids
        self.mask_token_id = config.mask_token_id
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self._target: _Borrowed | None = None
        self._stored_names: dict[str, str] = {}
        if seed is not None:
            self.initialise(seed)

    def initialise(self, seed: int) -> None:
        """Draw every matrix from N(0, 0.02)."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02, generator=generator)

    @property
    def slots(self) -> int:
        return self.block_size - self.first_slot

    # --- the target's tensors -----------------------------------------------------------------------------------
    def bind(
        self,
        embedding: Tensor,
        output_weight: Tensor,
        *,
        num_layers: int | None = None,
        output: Linear | None = None,
    ) -> Self:
        """Borrow the target's embedding and output head; nothing is copied, registered or trained.

        Args:
            embedding: ``[V, D]`` input embedding. output_weight: ``[V', D]`` output head, ``V' <= V``.
            num_layers: decoder layers of the target, checked when given.
            output: the target's own product with ``output_weight`` (packed weights are shared that way).

        Raises:
            IncompatibleArtifact: the draft was trained for another width, vocabulary or depth.
        """
        c = self.config
        shapes = f"embedding {list(embedding.shape)}, output head {list(output_weight.shape)}"
        if embedding.dim() != 2 or output_weight.dim() != 2:
            raise IncompatibleArtifact(f"embedding and output head must be matrices [vocabulary, width]; got {shapes}")
        if embedding.shape[1] != c.hidden_size or output_weight.shape[1] != c.hidden_size:
            raise IncompatibleArtifact(
                f"the draft has hidden_size {c.hidden_size}, the target has {shapes}; use the draft of this target"
            )
        if self.mask_token_id >= embedding.shape[0]:
            raise IncompatibleArtifact(
                f"mask_token_id {self.mask_token_id} lies outside the target's embedding of {embedding.shape[0]} "
                "rows; the embedding was trimmed, or the draft belongs to another target"
            )
        if embedding.shape[0] != c.vocab_size or output_weight.shape[0] > c.vocab_size:
            raise IncompatibleArtifact(
                f"the draft was trained with a vocabulary of {c.vocab_size}, the target has {shapes}; use the draft "
                "of this target, and its embedding as published (neither resized nor trimmed)"
            )
        if num_layers is not None and c.num_target_layers not in (None, num_layers):
            raise IncompatibleArtifact(
                f"the draft taps layers {list(self.tapped_layers)} of a target with {c.num_target_layers} layers; "
                f"this target has {num_layers}"
            )
        if output is not None and sum(output.sizes) != output_weight.shape[0]:
            raise IncompatibleArtifact(f"the output product has {sum(output.sizes)} rows, the output head {shapes}")
        weight = output_weight.detach()
        self._target = _Borrowed(embedding.detach(), weight, output or Linear([weight], pack=False))
        return self

    def use_int8(self) -> None:
        """See :meth:`Trunk.use_int8`; drafting rounds a copy of the target's output head too."""
        super().use_int8()
        borrowed = self._bound
        self._target = _Borrowed(borrowed.embedding, borrowed.output_weight, Int8Linear([borrowed.output_weight]))

    @property
    def _bound(self) -> _Borrowed:
        if self._target is None:
            raise InvalidInput(
                f"this {self.kind} backbone has no target yet: call bind(embedding, output_weight) first"
            )
        return self._target

    @property
    def _tables(self) -> _Borrowed:
        """The embedding and output head that drafts are made with: the target's."""
        return self._bound

    def embed(self, ids: Tensor) -> Tensor:
        """Scaled embeddings ``[..., D]`` of ``ids [...]``, in the draft's dtype."""
        x = F.embedding(ids, self._tables.embedding).to(self.dtype)
        scale = self.config.input_embedding_scale
        return x if scale == 1 else x * scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[..., V]`` of hidden rows ``[..., D]``: ``cap * tanh(m W z / cap)``; float32 (float64 if W is)."""
        target = self._tables
        return self.scaled(target.output(hidden.to(target.output_weight.dtype))[0])

    def scaled(self, products: Tensor) -> Tensor:
        """Logits of products of hidden rows with (some of) the output head's rows; see :meth:`logits`."""
        scores = wide(products)
        if self.config.output_multiplier != 1:
            scores = scores * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return scores if cap is None else cap * torch.tanh(scores / cap)

    # --- the round ----------------------------------------------------------------------------------------------
    def corrector(self) -> Corrector | None:
        """The backbone's own causal corrector, or None."""
        return None

    @torch.no_grad()
    def draft(
        self,
        cache: DraftCache,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        bound: int | None = None,
        *,
        rows: int | None = None,
        known: Tensor | None = None,
    ) -> DraftBlock:
        """Draft one block after each row's anchor.

        Args:
            cache: features of all positions before the anchor have been injected by ``extend``; it has room for a
                block at every anchor. The block's own keys and values are written past the anchor and overwritten
                later.
            anchor_ids: ``[B]`` int64. anchor_positions: ``[B]`` int64.
            bound: only the first ``bound`` cache entries are read; at least the largest anchor position + ``rows``.
                None is the whole capacity.
            rows: block rows, at most ``block_size`` (the default): fewer give fewer slots. Full layers are not causal,
                so a shorter block has other drafts, not a prefix of the long one's.
            known: ``[B, S]`` int64 tokens of slots that are decided, -1 elsewhere; they take the place of their
                position's mask. Drafts are trained on masks alone, so what follows is a guess beyond their training.

        Returns:
            ``rows - first_slot`` slots: slot ``i`` predicts the token at ``anchor_positions + 1 + i``.
        """
        rows, bound = rows or self.block_size, bound or cache.capacity
        if not self.first_slot < rows <= self.block_size:
            raise InvalidInput(f"rows = {rows} is outside {self.first_slot + 1} .. block_size = {self.block_size}")
        if not rows <= bound <= cache.capacity:
            raise InvalidInput(f"bound = {bound} is outside {rows} (one block) .. {cache.capacity} (the cache)")
        ids = anchor_ids.new_full((anchor_ids.shape[0], rows), self.mask_token_id)
        ids[:, 0] = anchor_ids
        if known is not None:  # whatever a row predicts, the token of slot i belongs to the position of row i + 1
            told = known[:, : rows - 1]
            ids[:, 1 : 1 + told.shape[1]] = torch.where(told >= 0, told, self.mask_token_id)
        positions = anchor_positions[:, None] + torch.arange(rows, device=anchor_positions.device)
        hidden = self._block_hidden(cache, self.embed(ids), positions, bound)  # [B, rows, D]
        hidden = hidden[:, self.first_slot :]  # [B, S, D]
        back = torch.arange(-HISTORY, 0, device=anchor_positions.device)
        places = anchor_positions[:, None] + back  # [B, 64]
        valid = places >= 0
        picked = cache.context.gather(1, places.clamp_min(0)[..., None].expand(-1, -1, cache.context.shape[-1]))
        history = picked.masked_fill(~valid[..., None], 0)
        return DraftBlock(
            hidden=hidden,
            logits=self.logits(hidden),
            anchor_ids=anchor_ids,
            anchor_positions=anchor_positions,
            context=history[:, -1],
            history=history,
            history_mask=valid,
            embedding=self._bound.embedding,
            output_weight=self._bound.output_weight,
            native=self.corrector(),
            redraft=lambda told: self.draft(cache, anchor_ids, anchor_positions, bound, rows=rows, known=told),
        )

    # --- training -----------------------------------------------------------------------------------------------
    def train_forward(self, features: Tensor, input_ids: Tensor, anchors: Tensor) -> Tensor:
        """Hidden rows of many blocks of each text in one pass; equals :meth:`draft` at each anchor.

        Args:
            features: ``[B, T, F*D]`` target features at positions 0 .. T-1.
            input_ids: ``[B, T]`` int64. anchors: ``[B, N]`` int64 positions, below T.

        Returns:
            ``[B, N, block_size, D]``; row ``first_slot + i`` of a block is slot ``i``.
        """
        masks = anchors.new_full((*anchors.shape, self.block_size - 1), self.mask_token_id)
        ids = torch.cat((input_ids.gather(1, anchors)[..., None], masks), -1)  # [B, N, R]
        return self._train_hidden(features, self.embed(ids), anchors)

    def forward(self, features: Tensor, input_ids: Tensor, anchors: Tensor) -> Tensor:
        """:meth:`train_forward`, for wrappers that call the module."""
        return self.train_forward(features, input_ids, anchors)

    # --- files --------------------------------------------------------------------------------------------------
    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        pack: bool = True,
    ) -> Self:
        """Load a published folder: ``config.json`` and ``model.safetensors``, whole or in shards.

        Args:
            folder: local folder. device: default CPU. dtype: default that of the file.
            pack: see :class:`Trunk`.

        Raises:
            InvalidArtifact: a file is missing or damaged, or config and tensors do not agree.
        """
        folder = Path(folder)
        config = cls.read_config(folder)
        weights = folder / WEIGHTS
        if weights.is_file() and config.num_hidden_layers > len(read_header(weights).tensors):
            raise InvalidArtifact(
                f"{folder}: key 'num_hidden_layers' is {config.num_hidden_layers}, more than {WEIGHTS} has tensors; "
                "use config and weights of one release"
            )
        statement.check_weights(config.published, weights)
        try:
            with torch.device("meta"):
                model = cls(config)
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:  # sizes that nothing can have
            why = str(error).splitlines()[0]
            raise InvalidArtifact(f"{folder / CONFIG}: no {cls.kind} can be as it says: {why}") from error
        expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
        tables, optional = model._own_tables(), model._optional()
        tensors, model._stored_names = read_weights(folder, expected | tables, config.dtype, {*tables, *optional})
        model._keep_tables({name: tensors.pop(name) for name in tables if name in tensors}, folder)
        for name in optional - tensors.keys():
            module, _, leaf = name.rpartition(".")
            model.get_submodule(module).register_parameter(leaf, None)
        tensors = {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items()}
        model.load_state_dict(tensors, strict=True, assign=True)
        model.rotary.frequencies = model.rotary.frequencies.to(model.device)
        model.pack = pack
        return model.requires_grad_(False).eval()

    def _own_tables(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the copies of the target's tables that a file may hold."""
        return {}

    def _optional(self) -> set[str]:
        """Parameters that a file may lack."""
        return set()

    def _keep_tables(self, tables: dict[str, Tensor], folder: Path) -> None:
        """Take the tables that the file held."""

    def _file_tensors(self) -> dict[str, Tensor]:
        """What ``save`` writes, by the names that the file had."""
        return {self._stored_names.get(name, name): tensor for name, tensor in self.state_dict().items()}

    @classmethod
    def read_config(cls, folder: str | os.PathLike[str]) -> DraftConfig:
        """The config of a published folder, strictly read.

        Raises:
            InvalidArtifact: no such file, or see ``config_type.from_dict``.
        """
        path = Path(folder) / CONFIG
        if not path.is_file():
            raise InvalidArtifact(f"{path}: no such file; a {cls.kind} folder holds {CONFIG} and {WEIGHTS}")
        raw = read_json(path)
        try:
            config = cls.config_type.from_dict(raw, str(path))
        except (
            TypeError,
            KeyError,
            AttributeError,
            OverflowError,
        ) as error:  # a list where a name belongs, and the like
            raise InvalidArtifact(f"{path}: no sound config of a {cls.kind}: {error!r}") from error
        statement.check(config, cls.kind, cls._first_slot(config), path)
        return config

    @classmethod
    def _first_slot(cls, config: DraftConfig) -> int:
        """``first_slot`` of a draft with this config."""
        return cls.first_slot

    def state_target(self, target: Any) -> Self:
        """State which target this draft is made for (a ``Target``); :meth:`save` writes it, and loading compares it."""
        made_for = {"id": target.name, "revision": target.revision, "fingerprint": fingerprint(target.model)}
        stated = statement.make(self.kind, self.first_slot, target.output_weight.shape[0], made_for)
        self.config.published[statement.KEY] = stated
        return self

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``config.json`` and ``model.safetensors``, each by a temporary name; ``load`` reads the same draft.

        The config is the published one; only its dtype follows the tensors.

        Raises:
            InvalidInput: the folder holds the index of a sharded draft.
        """
        folder = Path(folder)
        if (folder / INDEX).exists():
            raise InvalidInput(f"{folder} holds {INDEX}; save to another folder, or two drafts would lie in one")
        folder.mkdir(parents=True, exist_ok=True)
        published = self.config.to_dict()
        if self.dtype != self.config.dtype:
            name = next(name for name, dtype in DTYPES.items() if dtype == self.dtype)
            published |= {key: name for key in ("dtype", "torch_dtype") if key in published}
        if statement.KEY in published:  # a trunk's, where the draft began with another kind's
            published[statement.KEY] |= {"kind": self.kind, "first_slot": self.first_slot}
        write_weights(folder / WEIGHTS, self._file_tensors(), statement.metadata(published))
        with replacing(folder / CONFIG) as file:
            file.write((json.dumps(published, indent=2, allow_nan=False) + "\n").encode())
