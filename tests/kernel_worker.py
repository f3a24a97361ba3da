"""Compile, for a GPU that need not be here, every kernel that a call of its wrapper would launch; names on stdout.

The interpreter runs kernels as Python and accepts what the compiler refuses: types that change in a loop, arguments
equal to 1 (which become constants), shapes that no matrix unit takes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from test_kernels import random_tree, scenes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from repairzoo.block import make_pool
from repairzoo.kernels import accept, pool, walks

_POINTERS = {torch.int64: "*i64", torch.bool: "*i1", torch.float32: "*fp32", torch.bfloat16: "*bf16"}


class Compiled:
    """In place of a kernel: launching compiles it, as the launcher would for these arguments."""

    def __init__(self, kernel: Any, arch: int) -> None:
        self.kernel, self.target = kernel, GPUTarget("cuda", arch, 32)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            values = dict(zip(self.kernel.arg_names, args, strict=False)) | constants
            fixed = {n: v for n, v in values.items() if n in constants or (isinstance(v, int) and v == 1)}
            signature = {n: "constexpr" if n in fixed else _type(v) for n, v in values.items()}
            assert compile(ASTSource(self.kernel, signature, fixed), target=self.target).asm["cubin"]
            print(self.kernel.__name__, self.target.arch, flush=True)

        return launch


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"


def main(arch: int) -> None:
    for module, name in ((accept, "_accept"), (pool, "_pool"), (walks, "_lilicorr"), (walks, "_drelay")):
        setattr(module, name, Compiled(getattr(module, name), arch))
    for eos, nodes in (([7], 2), ([2, 3, 4], 9)):
        tree = random_tree(0, 2, nodes, 5)
        row = torch.ones(2, dtype=torch.int64)
        accept.accept(tree.tokens, tree, row, 2 * row, row > 1, torch.tensor(eos))
    for size, vocabulary in ((1, 100), (8, 49152)):
        pool.pool(torch.zeros(1, 2, vocabulary, dtype=torch.bfloat16), size)
    for kind, slots, size, options in (
        ("lilicorr", 1, 1, {}),
        ("lilicorr", 15, 8, {"decision": "identity_safe"}),
        ("lilicorr", 7, 8, {"candidates": 4}),
        ("drelay", 1, 2, {"width": 2, "heads": 2, "gate": 1}),
        ("drelay", 15, 16, {"width": 96, "heads": 2, "gate": 70}),
    ):
        head, block, candidates = scenes(kind, 0, 1, slots, size, V=32, **options)
        head.chain(block, candidates, make_pool(block.logits, size).log_probs)


if __name__ == "__main__":
    main(int(sys.argv[1]))
