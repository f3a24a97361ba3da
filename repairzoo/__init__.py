"""RepairZoo: repair heads for block-parallel speculative decoding.

zoo = repairzoo.build("dflash", head="dels")
print(zoo.generate("Why is the sky blue?").text[0])
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "build": "zoo",
    "autoregressive": "zoo",
    "Zoo": "zoo",
    "Generation": "results",
    "Stats": "results",
    "Target": "target",
    "load_target": "target_source",
    "Head": "pretrained",
    "Backbone": "pretrained",
    "load_backbone": "load_parts",
    "load_head": "load_parts",
    "list_backbones": "registry",
    "list_heads": "registry",
    "list_targets": "registry",
    "info": "registry",
    "RepairZooError": "errors",
    "UnknownName": "errors",
    "InvalidInput": "errors",
    "InvalidArtifact": "errors",
    "IncompatibleArtifact": "errors",
    "UnsupportedTarget": "errors",
    "DoesNotFit": "errors",
    "CaptureFailed": "errors",
    "HubError": "errors",
}

__all__ = [
    "build",
    "autoregressive",
    "Zoo",
    "Generation",
    "Stats",
    "Target",
    "load_target",
    "Head",
    "Backbone",
    "load_backbone",
    "load_head",
    "list_backbones",
    "list_heads",
    "list_targets",
    "info",
    "RepairZooError",
    "UnknownName",
    "InvalidInput",
    "InvalidArtifact",
    "IncompatibleArtifact",
    "UnsupportedTarget",
    "DoesNotFit",
    "CaptureFailed",
    "HubError",
    "__version__",
]

if TYPE_CHECKING:
    from repairzoo.errors import (
        CaptureFailed,
        DoesNotFit,
        HubError,
        IncompatibleArtifact,
        InvalidArtifact,
        InvalidInput,
        RepairZooError,
        UnknownName,
        UnsupportedTarget,
    )
    from repairzoo.load_parts import load_backbone, load_head
    from repairzoo.pretrained import Backbone, Head
    from repairzoo.registry import info, list_backbones, list_heads, list_targets
    from repairzoo.results import Generation, Stats
    from repairzoo.target import Target
    from repairzoo.target_source import load_target
    from repairzoo.zoo import Zoo, autoregressive, build


def __getattr__(name: str) -> Any:
    # imported on first use: the command line must answer --help without loading torch
    if name not in _WHERE:
        raise AttributeError(f"module 'repairzoo' has no attribute {name!r}")
    # no module may carry a name of __all__: importing it would put it in the function's place
    value = globals()[name] = getattr(import_module(f"repairzoo.{_WHERE[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
