"""What every head with trained weights does around its mathematics: state what it is, load strictly, save, fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from repairzoo.artifact import SCHEMA_VERSION, SLOT_CONVENTION, load_artifact, save_artifact
from repairzoo.errors import IncompatibleArtifact, InvalidArtifact
from repairzoo.pretrained import Head
from repairzoo.safe_file import require_finite, require_tensors

if TYPE_CHECKING:
    from typing_extensions import Self

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
Check = tuple[str, bool, str]  # key, whether its value is allowed, what would be


def is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


# annotation -> what its values are; a check that compares or divides relies on it
_PLAIN: dict[Any, tuple[Callable[[Any], bool], str]] = {
    "int": (lambda value: isinstance(value, int) and not isinstance(value, bool), "an integer"),
    "float": (is_real, "a finite number"),
    "str": (lambda value: isinstance(value, str), "a text"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """The keys that every head states; subclasses set ``kind``, add their own fields and extend ``checks``.

    ``unstated`` names keys that a kind's ``config.json`` leaves out; they keep their defaults.

    Attributes:
        block_size: tokens of the trained block, anchor included: at most ``block_size - 1`` slots.
        pool_size: candidates per slot that the walk should offer.
        hidden_size, vocab_size, padded_vocab_size: of the target.
        backbone: kind of the backbone that it was trained on; None where it claims to fit any.
        dtype: of the stored weights.

    Raises:
        InvalidArtifact: a value that its key cannot hold; names the key.
    """

    kind: ClassVar[str]
    unstated: ClassVar[tuple[str, ...]] = ()

    block_size: int
    pool_size: int
    hidden_size: int
    vocab_size: int
    padded_vocab_size: int
    slot_convention: str = SLOT_CONVENTION
    mask_token_id: int | None = None
    tapped_layers: tuple[int, ...] | None = None
    backbone: str | None = None
    dtype: str = "float32"
    target_id: str
    target_revision: str | None = None
    target_fingerprint: str | None = None

    def checks(self) -> list[Check]:
        def text(value: Any) -> bool:
            return value is None or (isinstance(value, str) and value != "")

        taps = self.tapped_layers
        return [
            ("block_size", is_int(self.block_size, 2), "an integer of at least 2"),
            ("pool_size", is_int(self.pool_size, 1), "a positive integer"),
            ("hidden_size", is_int(self.hidden_size, 1), "a positive integer"),
            ("vocab_size", is_int(self.vocab_size, 1), "a positive integer"),
            ("padded_vocab_size", is_int(self.padded_vocab_size, 1) and self.padded_vocab_size >= self.vocab_size,
             "an integer of at least vocab_size"),
            ("slot_convention", self.slot_convention == SLOT_CONVENTION, f'"{SLOT_CONVENTION}"'),
            ("mask_token_id", self.mask_token_id is None or is_int(self.mask_token_id, 0), "a token id or null"),
            ("tapped_layers", taps is None or (len(taps) > 0 and all(is_int(t, -1) for t in taps)),
             "a list of layer numbers or null"),
            ("backbone", text(self.backbone), "the kind of a backbone or null"),
            ("dtype", self.dtype in DTYPES, f"one of {sorted(DTYPES)}"),
            ("target_id", bool(self.target_id) and text(self.target_id), "a Hub id or a folder name"),
            ("target_revision", text(self.target_revision), "a commit or null"),
            ("target_fingerprint", text(self.target_fingerprint), "a hash or null"),
        ]  # fmt: skip

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type in _PLAIN:
                valid, expected = _PLAIN[field.type]
                if not valid(value := getattr(self, field.name)):
                    raise InvalidArtifact(f"{self.kind} config: {field.name} is {value!r}; expected {expected}")
        for key, ok, expected in self.checks():
            if not ok:
                raise InvalidArtifact(f"{self.kind} config: {key} is {getattr(self, key)!r}; expected {expected}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def slots(self) -> int:
        """Slots of the trained block."""
        return self.block_size - 1

    def to_dict(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        data = {"schema_version": SCHEMA_VERSION, "kind": self.kind} | asdict(self)
        data["target"] = {key: data.pop(f"target_{key}") for key in ("id", "revision", "fingerprint")}
        data["backbone"] = None if self.backbone is None else {"kind": self.backbone}
        return {key: value for key, value in data.items() if key not in self.unstated}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "config.json") -> Self:
        """The inverse of ``to_dict``. Strict: every key is required and no other is allowed.

        Raises:
            InvalidArtifact: names the key and ``source``.
        """
        own = [f.name for f in fields(cls) if not f.name.startswith("target_") and f.name not in cls.unstated]
        expected = ["schema_version", "kind", *own, "target"]
        missing = [key for key in expected if key not in data]
        unknown = [key for key in data if key not in expected]
        if missing or unknown:
            raise InvalidArtifact(
                f"{source}: missing keys {missing}, unknown keys {unknown}; a {cls.kind} config states exactly "
                f"{', '.join(expected)}, and nothing is guessed"
            )
        schema = data["schema_version"]
        if schema != SCHEMA_VERSION or isinstance(schema, bool) or data["kind"] != cls.kind:
            raise InvalidArtifact(
                f"{source}: schema_version {schema!r}, kind {data['kind']!r}; expected {SCHEMA_VERSION}, {cls.kind!r}"
            )
        target, backbone = data["target"], data.get("backbone")
        if not isinstance(target, Mapping) or not {"id", "revision"} <= set(target) <= {
            "id",
            "revision",
            "fingerprint",
        }:
            raise InvalidArtifact(
                f"{source}: target is {target!r}; expected an object with id, revision and, if known, fingerprint"
            )
        if backbone is not None and (not isinstance(backbone, Mapping) or set(backbone) != {"kind"}):
            raise InvalidArtifact(f"{source}: backbone is {backbone!r}; expected an object with kind, or null")
        values = {key: data[key] for key in own} | {f"target_{key}": value for key, value in target.items()}
        if backbone is not None:
            values["backbone"] = backbone["kind"]
        if isinstance(values["tapped_layers"], list):
            values["tapped_layers"] = tuple(values["tapped_layers"])
        try:
            return cls(**values)
        except InvalidArtifact as error:
            raise InvalidArtifact(f"{source}: {error}") from None


class LearnedHead(Head, nn.Module):
    """A head whose state dict is its artifact. Subclasses set ``config_type`` and are correctors."""

    config_type: ClassVar[type[HeadConfig]]
    config: Any

    @property
    def kind(self) -> str:
        """Its name in the registry."""
        return self.config.kind

    @property
    def pool_size(self) -> int:
        """Candidates per slot that the walk should give this head."""
        return self.config.pool_size

    @classmethod
    def stored_dtype(cls, config: Any, name: str) -> torch.dtype:
        """Of a tensor in the file; the config's unless a subclass keeps one wider."""
        return config.torch_dtype

    def state_tensors(self) -> dict[str, Tensor]:
        """Tensors to store, in the configured dtype, on the CPU."""
        stored = {n: self.stored_dtype(self.config, n) for n in self.state_dict()}
        return {n: t.detach().to("cpu", stored[n]).contiguous() for n, t in self.state_dict().items()}

    @classmethod
    def from_config_and_tensors(
        cls, config: Any, tensors: Mapping[str, Tensor], source: str | Path = "head.safetensors"
    ) -> Self:
        """The head with exactly these weights; ``config`` as a dataclass or as a mapping.

        Raises:
            InvalidArtifact: a missing or unknown tensor, a wrong shape or dtype, a value that is not finite.
        """
        if not isinstance(config, HeadConfig):
            config = cls.config_type.from_dict(config)
        for f in fields(config):
            if f.name.endswith("_layers") and is_int(count := getattr(config, f.name), len(tensors) + 1):
                raise InvalidArtifact(f"{source}: holds {len(tensors)} tensors, and the config's {f.name} is {count}")
        try:
            with torch.device("meta"):
                head = cls(config)  # type: ignore[call-arg]
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:  # sizes that nothing can have
            why = str(error).splitlines()[0]
            raise InvalidArtifact(f"{source}: no {config.kind} can be as its config says: {why}") from error
        require_tensors(tensors, {n: tuple(t.shape) for n, t in head.state_dict().items()}, source)
        for name, tensor in tensors.items():
            stored = cls.stored_dtype(config, name)
            if tensor.dtype != stored:
                raise InvalidArtifact(f"{source}: {name} is {tensor.dtype}; the config says {stored}")
        require_finite(tensors, source)
        head.load_state_dict(dict(tensors), strict=True, assign=True)
        return head.requires_grad_(False).eval()

    def save(self, folder: str | Path, card: str | None = None) -> None:
        """Write ``config.json``, ``head.safetensors`` and, if given, the card ``README.md`` into ``folder``."""
        save_artifact(folder, self.config.to_dict(), self.state_tensors(), card)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read what ``save`` wrote.

        Raises:
            InvalidArtifact: a file that is missing or damaged, a config and weights that do not belong together.
            IncompatibleArtifact: an artifact of another kind.
        """
        folder = Path(folder)
        config, tensors = load_artifact(folder, kind=cls.config_type.kind)
        parsed = cls.config_type.from_dict(config, str(folder / "config.json"))
        return cls.from_config_and_tensors(parsed, tensors, folder / "head.safetensors")

    def binding_key(self, *tables: Tensor) -> tuple[Any, ...]:
        """Changes when the head's weights or the target's tables do: what was computed from them is then stale."""
        return tuple((t.data_ptr(), tuple(t.shape), t.dtype, t.device) for t in tables) + tuple(
            (w.data_ptr(), w.dtype, 0 if w.is_inference() else w._version) for w in self.parameters()
        )

    def bind(self, embedding: Tensor, output_weight: Tensor) -> Any:
        """Check that a target fits: ``[V, D]`` input embedding and output head, real or padded vocabulary.

        Weights that are narrower than the target's are widened: half precision is slow where the target avoids it.

        Raises:
            IncompatibleArtifact: another vocabulary or hidden size than the config states.
        """
        c = self.config
        for name, tensor in (("input embedding", embedding), ("output head", output_weight)):
            if tensor.shape[0] not in (c.vocab_size, c.padded_vocab_size) or tensor.shape[1] != c.hidden_size:
                raise IncompatibleArtifact(
                    f"{c.kind} head for {c.target_id}: the target's {name} is {list(tensor.shape)}, the head was made "
                    f"for vocab_size {c.vocab_size} (padded {c.padded_vocab_size}) and hidden_size {c.hidden_size}; "
                    "load a head for this target"
                )
        self.to(torch.promote_types(next(self.parameters()).dtype, embedding.dtype))


def traced(x: Tensor) -> bool:
    """Whether a tensor has no storage: something is being traced, and nothing of it may be kept."""
    try:
        x.data_ptr()
    except RuntimeError:
        return True
    return False
