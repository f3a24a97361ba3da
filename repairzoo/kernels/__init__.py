"""Fused kernels of the round, in Triton; each has a PyTorch version elsewhere that it equals and that is the default.

Which of the two runs is *chosen* (``build(..., kernels="triton")``): where Triton is missing or cannot run, the choice
is refused, and nothing falls back in silence. In Triton's interpreter (``TRITON_INTERPRET=1``) the same kernels run on
a CPU.
"""

from __future__ import annotations

import importlib.util
import os

import torch

from repairzoo.errors import InvalidInput

CHOICES = ("torch", "triton")


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter; it reads the variable when a kernel is defined."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def check(choice: str, device: torch.device, dtype: torch.dtype) -> str:
    """``choice``, if these kernels can run on this device.

    Raises:
        InvalidInput: says why not and what to choose instead.
    """
    if choice not in CHOICES:
        raise InvalidInput(f"kernels={choice!r}: give one of {', '.join(map(repr, CHOICES))}")
    if choice == "torch":
        return choice
    if importlib.util.find_spec("triton") is None:
        raise InvalidInput("kernels='triton': triton is not installed; pip install triton, or choose kernels='torch'")
    if device.type != "cuda" and not interpreted():
        raise InvalidInput(
            f"kernels='triton' run on a GPU, and the target is on {device}; choose kernels='torch', or set "
            "TRITON_INTERPRET=1 to run them slowly on a CPU"
        )
    if dtype == torch.float64:
        raise InvalidInput("kernels='triton' compute in float32, and the target is float64; choose kernels='torch'")
    return choice
