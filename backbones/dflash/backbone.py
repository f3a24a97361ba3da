"""DFlash (arXiv 2602.06036): a block of masks becomes a block of tokens in one pass over injected target features."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import DTYPES, DFlashConfig
from repairzoo.block import HISTORY, DraftBlock
from repairzoo.draft_layers import DraftCache, Trunk, wide
from repairzoo.errors import IncompatibleArtifact, InvalidArtifact, InvalidInput
from repairzoo.linear import Linear
from repairzoo.safe_file import parse_json, read_safetensors, replacing, require_tensors, write_safetensors

DFlashCache = DraftCache
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


class DFlash(Trunk):
    """The DFlash backbone, with the published parameter names ``fc``, ``hidden_norm``, ``layers.*``, ``norm``.

    The embedding and the output head belong to the target; :meth:`bind` borrows them.

    Attributes:
        config: the published config.
        block_size: rows of a block: the anchor and ``block_size - 1`` masks.
        slots: predictions of a block. Block row ``i + 1`` predicts slot ``i``; that shift happens in :meth:`draft`.
        first_slot: block row of slot 0.
        tapped_layers: target layers whose outputs are concatenated into a feature row; -1 is the embedding output.
    """

    kind = "dflash"
    first_slot = 1

    def __init__(self, config: DFlashConfig, *, seed: int | None = None):
        """A new draft. ``seed`` draws matrices from N(0, 0.02); None leaves torch's own initialisation."""
        super().__init__(config)
        self.config = config
        self.block_size = config.block_size
        self.slots = config.block_size - self.first_slot
        self.tapped_layers = config.target_layer_ids
        self.mask_token_id = config.mask_token_id
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self._target: tuple[Tensor, Tensor] | None = None
        self._output: Linear | None = None
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=0.02, generator=generator)

    # --- the target's tensors -----------------------------------------------------------------------------------
    def bind(
        self,
        embedding: Tensor,
        output_weight: Tensor,
        *,
        num_layers: int | None = None,
        output: Linear | None = None,
    ) -> DFlash:
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
                f"mask_token_id {self.mask_token_id} lies outside the target's embedding of {embedding.shape[0]} rows; the "
                "embedding was trimmed, or the draft belongs to another target"
            )
        if embedding.shape[0] != c.vocab_size or output_weight.shape[0] > c.vocab_size:
            raise IncompatibleArtifact(
                f"the draft was trained with a vocabulary of {c.vocab_size}, the target has {shapes}; use the draft of this "
                "target, and its embedding as published (neither resized nor trimmed)"
            )
        if num_layers is not None and num_layers != c.num_target_layers:
            raise IncompatibleArtifact(
                f"the draft taps layers {list(self.tapped_layers)} of a target with {c.num_target_layers} layers; this target "
                f"has {num_layers}"
            )
        self._target = (embedding.detach(), output_weight.detach())
        self._output = output or Linear([self._target[1]], pack=False)
        return self

    @property
    def _bound(self) -> tuple[Tensor, Tensor]:
        if self._target is None:
            raise InvalidInput("this DFlash has no target yet; call bind(embedding, output_weight) first")
        return self._target

    def embed(self, ids: Tensor) -> Tensor:
        """Scaled target embeddings ``[..., D]`` of ``ids [...]``, in the draft's dtype."""
        return F.embedding(ids, self._bound[0]).to(self.dtype) * self.config.input_embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Base logits ``[..., V]`` of hidden rows ``[..., D]``: ``cap * tanh(m W z / cap)``; float32 (float64 if W is)."""
        weight = self._bound[1]
        output = self._output
        assert output is not None
        scores = wide(output(hidden.to(weight.dtype))[0])
        if self.config.output_multiplier != 1:
            scores = scores * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return scores if cap is None else cap * torch.tanh(scores / cap)

    # --- the round ----------------------------------------------------------------------------------------------
    @torch.no_grad()
    def draft(
        self,
        cache: DraftCache,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        bound: int | None = None,
        *,
        rows: int | None = None,
    ) -> DraftBlock:
        """Draft one block after each row's anchor.

        Args:
            cache: features of all positions before the anchor have been injected by ``extend``; it has room for a block at
                every anchor. The block's own keys and values are written past the anchor and overwritten later.
            anchor_ids: ``[B]`` int64. anchor_positions: ``[B]`` int64.
            bound: only the first ``bound`` cache entries are read; at least the largest anchor position + ``rows``. None is
                the whole capacity.
            rows: block rows, at most ``block_size`` (the default): fewer give fewer slots. Full layers are not causal, so a
                shorter block has other drafts, not a prefix of the long one's.

        Returns:
            A block of ``rows - 1`` slots: slot ``i`` predicts the token at ``anchor_positions + 1 + i``.
        """
        rows = rows or self.block_size
        embedding, output_weight = self._bound
        ids = anchor_ids.new_full((anchor_ids.shape[0], rows), self.mask_token_id)
        ids[:, 0] = anchor_ids
        positions = anchor_positions[:, None] + torch.arange(rows, device=anchor_positions.device)
        hidden = self._block_hidden(cache, self.embed(ids), positions, bound or cache.capacity)  # [B, rows, D]
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
            embedding=embedding,
            output_weight=output_weight,
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

    # --- files --------------------------------------------------------------------------------------------------
    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        pack: bool = True,
    ) -> DFlash:
        """Load a published folder: ``config.json`` and ``model.safetensors``, whole or in shards.

        Args:
            folder: local folder. device: default CPU. dtype: default that of the file.
            pack: see :class:`Trunk`.

        Raises:
            InvalidArtifact: a file is missing or damaged, or config and tensors do not agree.
        """
        folder = Path(folder)
        config = read_config(folder)
        with torch.device("meta"):
            model = cls(config)
        expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
        tensors = _read_weights(folder, expected, config.dtype)
        if dtype is not None or device is not None:
            tensors = {name: t.to(device=device, dtype=dtype) for name, t in tensors.items()}
        model.load_state_dict(tensors, strict=True, assign=True)
        model.rotary.frequencies = model.rotary.frequencies.to(model.device)
        model.pack = pack
        return model.requires_grad_(False).eval()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``config.json`` and ``model.safetensors`` (each by a temporary name); ``load`` gives the same draft back."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        published = self.config.to_dict()
        name = next(name for name, dtype in DTYPES.items() if dtype == self.dtype)
        for key in ("dtype", "torch_dtype"):
            if key in published and self.dtype != self.config.dtype:
                published[key] = name
        write_safetensors(folder / WEIGHTS, self.state_dict(), {"format": "pt"})
        with replacing(folder / CONFIG) as file:
            file.write((json.dumps(published, indent=2, allow_nan=False) + "\n").encode())


def read_config(folder: str | os.PathLike[str]) -> DFlashConfig:
    """The config of a published folder, strictly read; see :meth:`DFlashConfig.from_dict`."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise InvalidArtifact(f"{path}: no such file; a DFlash folder holds {CONFIG} and {WEIGHTS}")
    return DFlashConfig.from_dict(parse_json(path.read_bytes(), str(path)), str(path))


def _read_weights(folder: Path, expected: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of a folder, single-file or sharded, checked against names, shapes and dtype."""
    single, index = folder / WEIGHTS, folder / INDEX
    if single.is_file() and index.is_file():
        raise InvalidArtifact(f"{folder}: has both {WEIGHTS} and {INDEX}; remove the one that is not the release's")
    if single.is_file():
        tensors, where = read_safetensors(single), single
        homes = dict.fromkeys(tensors, single)
    elif index.is_file():
        tensors, homes = _read_shards(folder, index)
        where = index
    else:
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        remedy = (
            f"it holds {', '.join(pickled)}, which is never unpickled here: run `repairzoo convert`" if pickled else ""
        )
        raise InvalidArtifact(f"{folder}: no {WEIGHTS} (nor {INDEX}); {remedy or 'fetch the draft again'}")
    borrowed = [n for n in tensors if n.startswith(("embed_tokens.", "lm_head.")) and n not in expected]
    if borrowed:
        raise InvalidArtifact(
            f"{homes[borrowed[0]]}: unknown tensor {borrowed[0]!r}: a DFlash draft borrows it from its target; drafts that store "
            "it (DeepSpec) read slot 0 as a prediction and are no DFlash drafts"
        )
    require_tensors(tensors, expected, where)
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            raise InvalidArtifact(
                f"{homes[name]}: tensor {name!r} is {tensor.dtype}, config key 'dtype' states {dtype}; use config and weights "
                "of one release"
            )
    return tensors


def _read_shards(folder: Path, index: Path) -> tuple[dict[str, Tensor], dict[str, Path]]:
    table = parse_json(index.read_bytes(), str(index))
    weight_map = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise InvalidArtifact(f"{index}: key 'weight_map' must map tensor names to files; fetch the file again")
    tensors: dict[str, Tensor] = {}
    homes: dict[str, Path] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise InvalidArtifact(f"{index}: shard {shard!r} is not a plain file name")
        path = folder / shard
        if not path.is_file():
            raise InvalidArtifact(f"{path}: shard listed in {INDEX} is missing; fetch it")
        for name, tensor in read_safetensors(path).items():
            if weight_map.get(name) != shard:
                raise InvalidArtifact(f"{path}: tensor {name!r} is not listed for this shard in {INDEX}")
            tensors[name], homes[name] = tensor, path
    absent = sorted(set(weight_map) - set(tensors))
    if absent:
        raise InvalidArtifact(
            f"{folder / weight_map[absent[0]]}: tensor {absent[0]!r} is listed in {INDEX} but not there"
        )
    return tensors, homes
