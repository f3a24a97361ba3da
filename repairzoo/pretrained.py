"""The methods that users of ``transformers``, PEFT and timm expect, for heads and backbones alike."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, cast

from repairzoo.errors import IncompatibleArtifact, InvalidArtifact, InvalidInput

if TYPE_CHECKING:
    from typing_extensions import Self


class Pretrained:
    """Save, load and publish. Subclasses have ``load(folder)`` and ``save(folder)``, and set ``part``."""

    part: ClassVar[str]
    info: dict[str, Any] | None = None  # what the config holds beside what is computed: ``artifact.INFO_KEYS``

    @classmethod
    def from_pretrained(cls, source: str | Path, revision: str | None = None, **options: Any) -> Self:
        """Load from a folder or from the Hub. A base class loads whatever kind the config states.

        Args:
            source: a folder, ``owner/name``, or ``hf:owner/name@revision``.
            revision: a branch, a tag or, safest, a commit.
            options: ``token``, ``cache_dir``, ``local_files_only``, ``force_download``; backbones also take ``device``
                and ``dtype``.

        Raises:
            HubError: not found, private, gated, interrupted, offline.
            InvalidInput: a name of the registry, an unknown option.
            InvalidArtifact: damaged, incomplete, unknown keys, a kind that is not installed.
            IncompatibleArtifact: a sound artifact of another kind.
        """
        from repairzoo.hub import blaming, check_config_file, locate, read_info
        from repairzoo.registry import registry

        if isinstance(source, str) and source in registry().entries[cls.part] and not Path(source).is_dir():
            raise InvalidInput(
                f"{source!r} is a name of the registry, no folder or Hub id: repairzoo.load_{cls.part}({source!r})"
            )
        load = {key: options.pop(key) for key in ("device", "dtype") if key in options}
        folder = locate(source, revision, **options)
        with blaming(folder):
            kind = check_config_file(folder)["kind"]
            entry = registry().entries[cls.part].get(kind)
            other = next((part for part in ("head", "backbone") if kind in registry().entries[part]), None)
            if entry is None and other is not None:
                raise IncompatibleArtifact(
                    f"{folder}: holds the {other} {kind!r}, not a {cls.part}; load it with repairzoo.load_{other}"
                )
            if entry is None and not hasattr(cls, "load"):
                raise InvalidArtifact(
                    f"{folder / 'config.json'}: key 'kind' is {kind!r}, and this installation has no such {cls.part} "
                    f"(it has {', '.join(registry().names(cls.part))}): install what provides it, or update repairzoo"
                )
            found: Any = entry.load() if entry is not None else cls
            if not issubclass(found, cls):
                raise IncompatibleArtifact(f"{folder}: holds a {kind!r}; load it with {found.__name__}.from_pretrained")
            loaded = cast(Any, found).load(folder, **load)
            loaded.info = read_info(folder)
            return loaded

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        card: str | None = None,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **options: Any,
    ) -> Path:
        """Write ``config.json``, the weights and the card ``README.md``; each appears whole or not at all.

        Args:
            save_directory: the folder. card: the card's text; None writes one where none lies.
            push_to_hub: publish it too, as ``repo_id`` (None: the folder's name, under the owner of the token).
            options: of :meth:`push_to_hub`.

        Returns:
            the folder.

        Raises:
            InvalidInput: ``repo_id`` or options of publishing, without ``push_to_hub``; an unknown option.
        """
        from repairzoo.card import write_card

        if not push_to_hub and (repo_id is not None or options):
            names = [*(["repo_id"] if repo_id is not None else []), *options]
            raise InvalidInput(f"{', '.join(names)}: only with push_to_hub=True; leave it out")
        _refuse_unknown(options)
        folder = Path(save_directory)
        self._write(folder, {**(self.info or {}), "library_version": version("repairzoo")})
        write_card(folder, card)
        if push_to_hub:
            self.push_to_hub(repo_id or folder.name, card=(folder / "README.md").read_text(encoding="utf-8"), **options)
        return folder

    def push_to_hub(self, repo_id: str, *, card: str | None = None, **options: Any) -> Any:
        """Publish in one commit; see :func:`repairzoo.hub.push` for ``options``, the result and the errors.

        Args:
            repo_id: ``owner/name``, or a name under the owner of the token.
            card: the card's text; None writes one, or keeps the text that the repository has.
            options: ``revision``, ``private``, ``token``, ``commit_message``, ``create_pr``.
        """
        from repairzoo import hub

        _refuse_unknown(options)
        with TemporaryDirectory() as place:
            folder = self.save_pretrained(Path(place) / "artifact", card=card)
            return hub.push(folder, hub.full_id(repo_id, options.get("token")), **options)

    def _write(self, folder: Path, info: dict[str, Any]) -> None:
        """Config and weights."""
        raise NotImplementedError


def _refuse_unknown(options: dict[str, Any]) -> None:
    """Raise ``InvalidInput`` for options that publishing does not have, before anything is written or sent."""
    from repairzoo.hub import PUSH_OPTIONS

    if unknown := sorted(options.keys() - set(PUSH_OPTIONS)):
        raise InvalidInput(f"unknown options {', '.join(unknown)}; publishing has {', '.join(PUSH_OPTIONS)}")


class Head(Pretrained):
    """A repair head with weights. ``Head.from_pretrained`` loads any kind."""

    part: ClassVar[str] = "head"
    config: Any

    def state_tensors(self) -> dict[str, Any]:
        """Tensors to store, on the CPU, in the configured dtype."""
        raise NotImplementedError

    def _write(self, folder: Path, info: dict[str, Any]) -> None:
        from repairzoo.artifact import save_artifact

        save_artifact(folder, {**self.config.to_dict(), "info": info}, self.state_tensors())


class Backbone(Pretrained):
    """A drafter with weights. ``Backbone.from_pretrained`` loads any kind."""

    part: ClassVar[str] = "backbone"
    config: Any

    def save(self, folder: Path) -> None:
        """Write the config and the weights."""
        raise NotImplementedError

    def _write(self, folder: Path, info: dict[str, Any]) -> None:
        if "repairzoo" in self.config.published:
            self.config.published["repairzoo"]["info"] = info
        self.save(folder)
