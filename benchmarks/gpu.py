"""Measure rounds on a CUDA machine without a network: real shapes, random weights, acceptance forced to chosen lengths.

    python benchmarks/gpu.py --out gpu.json          # less than 8 minutes; JSON, and a short table last
    python benchmarks/gpu.py --tiny --device cpu     # the same on tiny shapes, to see that it runs

A target of Qwen3-4B's shape verifies what full-size backbones and heads draft. Weights are random, so the target would
refuse almost everything; its logits are therefore raised where the draft is to be accepted, by a length that lies in a
device tensor: one captured round serves every length. What a round does and costs is otherwise the real thing. The
default target with its trained drafts is measured too, if its weights are here. At the end stands what was to be shown,
and whether it is.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import repairzoo
import repairzoo.target
from repairzoo.backbones.dflash import DFlash
from repairzoo.backbones.dflash import new_config as dflash_config
from repairzoo.backbones.domino import Domino
from repairzoo.backbones.domino.config import new_config as domino_config
from repairzoo.backbones.dspark import DSpark
from repairzoo.backbones.dspark.config import new_config as dspark_config
from repairzoo.bench.clock import synchronise
from repairzoo.bench.machine import machine, measured_rates
from repairzoo.bench.measure import plain_cell, timed
from repairzoo.bench.roofline import floor, round_cost
from repairzoo.capture import CudaGraphs
from repairzoo.errors import UnsupportedTarget
from repairzoo.generation import make_request, speculate
from repairzoo.graph import Graphs
from repairzoo.heads.cure import CURE
from repairzoo.heads.dels import DeLS, DeLSConfig
from repairzoo.heads.drelay import DRelay
from repairzoo.heads.drelay import new_config as drelay_config
from repairzoo.heads.lilicorr import LiLiCorr, LiLiCorrConfig
from repairzoo.runner import Eager
from repairzoo.target import Target
from repairzoo.zoo import Zoo

BACKBONES = ("dflash", "domino", "dspark")
HEADS = ("none", "drelay", "lilicorr", "dels", "cure")
QWEN3_4B = {
    "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip


class Forced:
    """A target that accepts as many draft tokens as ``accept [1]`` says, whatever it would have said itself.

    Chains of ``slots`` tokens, and CURE's trees, whose first nodes are the chain. What lies behind the chain decides
    nothing: a round of fixed shape holds empty nodes there, which another one leaves out.
    """

    def __init__(self, target: Target, accept: Tensor, slots: int) -> None:
        self._target, self._accept, self.slots = target, accept, slots
        self._ids: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, ids: Tensor, *rest: Any) -> Any:
        self._ids = ids
        return self._target.forward(ids, *rest)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._target.logits(hidden)
        ids = self._ids
        if ids is None or hidden.dim() != 3 or ids.shape[1] < 2:
            return logits
        following = torch.cat([ids[:, 1:], ids[:, -1:]], 1)  # [B, M]
        node = torch.arange(ids.shape[1], device=ids.device)
        following = torch.where(node < self.slots, following, ids)
        chosen = torch.where(node < self._accept, following, (following + 1) % logits.shape[-1])
        return logits.scatter(-1, chosen[..., None], 1e4)


def random_target(shape: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Target:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("qwen3", **shape, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.eval().requires_grad_(False)
    try:
        return Target(model, None, name="random-qwen3", source="random weights")
    except UnsupportedTarget as error:
        # random weights in half precision may round past the limit of the proof; times do not depend on it
        print(f"not proved: {error}", flush=True)
        prove, repairzoo.target._prove = repairzoo.target._prove, lambda target: None
        try:
            return Target(model, None, name="random-qwen3", source="random weights, not proved")
        finally:
            repairzoo.target._prove = prove


def random_backbone(kind: str, target: Target, tiny: bool) -> Any:
    """Full size as published for Qwen3-4B: five layers, 16 rows (DSpark: 7), or tiny."""
    c, taps = target.model.config, 5
    step = (target.num_layers - 4) / (taps - 1)
    trunk = dflash_config(
        block_size=16 if not tiny else 6,
        mask_token_id=c.vocab_size - 1,
        num_target_layers=target.num_layers,
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=5 if not tiny else 1,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        rope_theta=1e6,
        target_layer_ids=sorted({round(1 + i * step) for i in range(taps)}),
        max_position_embeddings=c.max_position_embeddings,
        dtype=str(target.dtype).removeprefix("torch."),
    )
    with torch.device(target.device):
        if kind == "dflash":
            backbone: Any = DFlash(trunk)
        elif kind == "domino":
            sizes = {"emb_dim": 8, "gru_hidden_dim": 16} if tiny else {}
            backbone = Domino(domino_config(trunk, **sizes))
        else:
            backbone = DSpark(dspark_config(trunk, markov_rank=8 if tiny else 256, block_size=5 if tiny else 7))
    fill(backbone)
    backbone = backbone.to(device=target.device, dtype=target.dtype).requires_grad_(False).eval()
    backbone.bind(target.embedding, target.output_weight, num_layers=target.num_layers, output=target.output)
    return backbone


def random_head(kind: str, backbone: Any, target: Target, tiny: bool) -> tuple[Any, ...]:
    """At the published sizes, or tiny."""
    vocab, hidden = target.vocab_size, target.hidden_size
    common: dict[str, Any] = {
        "block_size": backbone.slots + 1,
        "hidden_size": hidden,
        "vocab_size": target.output_weight.shape[0],
        "padded_vocab_size": vocab,
        "target_id": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
    }
    if kind == "none":
        return ()
    if kind == "cure":
        return (CURE(),)
    if kind == "dels":
        small = {"rank": 8, "hidden": 16, "input_rank": 8}
        sizes = small if tiny else {"rank": 256, "hidden": 1024, "input_rank": 256}
        head: Any = DeLS(DeLSConfig(variant="gru", **sizes, **common))
    elif kind == "drelay":
        values = common | {"pool_size": 4 if tiny else 16, "backbone": backbone.kind}
        tiny_sizes = {"width": 16, "heads": 2, "ffn": 32, "residual": 32, "rank": 8, "gate": 16} if tiny else {}
        head = DRelay(drelay_config("small" if tiny else "full", **values, **tiny_sizes))
    else:
        sizes = {"width": 16, "factor_dim": 16, "num_heads": 2} if tiny else {"width": 1024, "factor_dim": 1024}
        pool = 4 if tiny else 8
        head = LiLiCorr(LiLiCorrConfig(candidates=pool, pool_size=pool, **sizes, **common))
    fill(head)
    head = head.to(target.device).requires_grad_(False).eval()
    head.bind(target.embedding, target.output_weight)
    return (head,)


@torch.no_grad()
def fill(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.02)


# --- one cell ---------------------------------------------------------------------------------------------------------
def measure_cell(
    zoo: Zoo, accept: Tensor, lengths: list[int], prompt: list[int], rounds: int, rates: dict[str, float]
) -> dict[str, Any]:
    """Stage times of eager rounds, and whole rounds at each forced length, captured into graphs on CUDA."""
    target = zoo.target
    device = target.device
    slots = zoo.backbone.slots

    def run(graphs: Graphs | None, length: int, count: int, smallest: int | None = None) -> Any:
        accept.fill_(length)
        # the budget ends with the last round
        request = make_request(target, [prompt], max_new_tokens=count * (length + 1) + 1, eos_token_id=[], seed=0)
        engine = zoo.engine(request)
        return timed(speculate(engine, request, graphs, Eager(engine, smallest) if graphs is None else None), device)

    def launched(out: Any) -> int:
        """Rounds that ran: results are read one late on a GPU, and the last round there finds nothing to do."""
        return len(out.accepted[0]) + (device.type == "cuda")

    half = max(1, rounds // 2)
    found: dict[str, Any] = {"slots": slots, "lengths": {}}
    run(None, slots, 3)
    eager = run(None, slots, rounds)
    found["eager_ms"] = 1e3 * eager.wall / launched(eager)
    found["stages_ms"] = {s: 1e3 * v / launched(eager) for s, v in eager.seconds.items() if s != "prefill"}
    found["forced"] = sum(eager.accepted[0][:-1]) / max(1, len(eager.accepted[0]) - 1)
    found["eager_host_reads"] = found["host_reads"] = host_reads(lambda n: run(None, slots, n), half, device)
    graphs = Graphs(CudaGraphs(device)) if device.type == "cuda" else None
    if graphs is not None:
        started = time.perf_counter()
        run(graphs, slots, 3)
        found["capture_s"] = time.perf_counter() - started
        forced = [length for length in lengths if length <= slots]
        # random weights in half precision tie: only products of the same shapes draft the same tokens
        pairs = ((run(graphs, n, 3), run(None, n, 3, graphs.smallest)) for n in forced)
        found["same_tokens"] = all(ours.tokens == theirs.tokens for ours, theirs in pairs)
        found["host_reads"] = host_reads(lambda n: run(graphs, slots, n), half, device)
    for length in lengths:
        if length > slots:
            continue
        out = run(graphs, length, rounds)
        done = len(out.accepted[0])
        found["lengths"][str(length + 1)] = {
            "tau": sum(out.accepted[0]) / done,
            "round_ms": 1e3 * out.wall / launched(out),
            "tokens_per_second": sum(out.accepted[0]) / out.wall,
        }
    cost = round_cost(zoo, target, len(prompt))
    found["floor_ms"] = 1e3 * sum(floor(c, rates) for c in cost.values())
    found["round_ms"] = min((x["round_ms"] for x in found["lengths"].values()), default=found["eager_ms"])
    found["of_floor"] = found["floor_ms"] / found["round_ms"]
    found["faster"] = found["eager_ms"] / found["round_ms"]
    return found


def host_reads(run: Callable[[int], Any], rounds: int, device: torch.device) -> float | None:
    """Calls a round that torch reports as synchronising with the device, from ``run(rounds)`` and ``run(2 * rounds)``:
    what reading the prompt asks for, both do. The packed read of a round waits for an event and is none of them. None
    where there is no device to wait for."""
    if device.type != "cuda":
        return None

    def count(times: int) -> int:
        run(times)  # what is captured for this length must not be counted
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                run(times)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        # the mode itself is announced as one that does not find all "synchronizing operations"
        return sum("called a synchronizing" in str(w.message) for w in seen)

    return (count(2 * rounds) - count(rounds)) / rounds


def small_models(device: torch.device) -> dict[str, Any]:
    """The default target with its trained drafts, graphs against eager and plain decoding, if it is here."""
    try:
        target = repairzoo.load_target(device=device)
        zoo = repairzoo.build("dflash", head="dels", target=target)
        eager = repairzoo.build("dflash", head="dels", target=target, cuda_graphs=False)
    except repairzoo.RepairZooError as error:
        return {"left_out": str(error).split("\n")[0]}
    prompt = "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Explain step by step."
    options: dict[str, Any] = {"max_new_tokens": 128, "temperature": 0.0}
    found: dict[str, Any] = {}
    runs = {
        "plain": lambda: repairzoo.autoregressive(target, prompt, **options),
        "eager": lambda: eager.generate(prompt, **options),
        "graphs": lambda: zoo.generate(prompt, **options),
    }
    tokens = {}
    for name, run in runs.items():
        run()
        synchronise(device)
        started = time.perf_counter()
        out = run()
        synchronise(device)
        seconds = time.perf_counter() - started
        tokens[name] = out.token_ids[0]
        found[name] = {"tokens_per_second": len(tokens[name]) / seconds, "tau": out.stats.tau}
    found["graphs_same_as_eager"] = tokens["graphs"] == tokens["eager"]
    found["same_as_plain"] = tokens["graphs"] == tokens["plain"]
    return found


# --- all of it --------------------------------------------------------------------------------------------------------
def cells(backbones: list[str], heads: list[str]) -> Iterator[tuple[str, str]]:
    """The plain backbones first: if time runs out, what the others are compared with is there."""
    for head in heads:
        for backbone in backbones:
            yield backbone, head


def measure(args: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    device = torch.device(args.device)
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    rates = measured_rates(device, dtype)
    result: dict[str, Any] = {"machine": machine(device), "rates": rates, "dtype": str(dtype), "cells": {}}
    target = random_target(TINY if args.tiny else QWEN3_4B, device, dtype)
    prompt = torch.randint(0, 500, (args.prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    plain = plain_cell(target)
    options = {"max_new_tokens": args.rounds + 1, "temperature": 0.0, "eos_token_id": []}
    plain.run([prompt], {**options, "max_new_tokens": 4})
    out = plain.run([prompt], options)
    steps = round_cost(None, target, args.prompt)["step"]
    result["plain"] = {
        "tokens_per_second": len(out.accepted[0]) / out.wall,
        "floor_tokens_per_second": 1 / floor(steps, rates),
    }
    accept = torch.zeros(1, dtype=torch.int64, device=device)
    left_out = []
    for backbone_kind, head_kind in cells(args.backbones, args.heads):
        name = backbone_kind if head_kind == "none" else f"{backbone_kind}+{head_kind}"
        if time.perf_counter() - began > args.seconds:
            left_out.append(name)
            continue
        try:
            backbone = random_backbone(backbone_kind, target, args.tiny)
            forced: Any = Forced(target, accept, backbone.slots)
            zoo = Zoo(forced, backbone, random_head(head_kind, backbone, target, args.tiny))
            result["cells"][name] = measure_cell(zoo, accept, args.lengths, prompt, args.rounds, rates)
            print(f"{name}: {result['cells'][name]['round_ms']:.2f} ms a round", flush=True)
        except Exception as error:  # one cell that fails must not lose the others
            result["cells"][name] = {"failed": f"{type(error).__name__}: {error}"}
            print(f"{name}: failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for name, cell in result["cells"].items():
        alone = result["cells"].get(name.partition("+")[0], {})
        if "+" in name and "round_ms" in cell and "round_ms" in alone:
            cell["head_share"] = 1 - alone["round_ms"] / cell["round_ms"]
    if not args.tiny:
        result["default_target"] = small_models(device)
    result["left_out"] = left_out
    result["shown"] = shown(result)
    result["seconds"] = time.perf_counter() - began
    return result


def shown(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What captured rounds were to show on DFlash, each with its bound and whether it holds; nothing without them."""
    cells = {name: cell for name, cell in result["cells"].items() if "same_tokens" in cell}
    claims: list[dict[str, Any]] = []

    def claim(what: str, measured: float, bound: float, most: bool = True) -> None:
        holds = measured <= bound if most else measured >= bound
        claims.append({"what": what, "measured": measured, "bound": bound, "most": most, "holds": holds})

    if "dflash" in cells:
        claim("dflash: round / sum of floors", 1 / cells["dflash"]["of_floor"], 1.25)
        claim("dflash: eager round / captured round", cells["dflash"]["faster"], 2.0, most=False)
    for head, share in (("lilicorr", 0.03), ("drelay", 0.08), ("dels", 0.10)):
        if "head_share" in cells.get(f"dflash+{head}", {}):
            claim(f"dflash+{head}: share of the head", cells[f"dflash+{head}"]["head_share"], share)
    for name, cell in cells.items():
        claim(f"{name}: synchronising calls a round", cell["host_reads"], 0)
        claim(f"{name}: forced lengths with the eager tokens", float(cell["same_tokens"]), 1.0, most=False)
    return claims


def table(result: dict[str, Any]) -> str:
    plain = result["plain"]
    lines = [
        f"plain decoding: {plain['tokens_per_second']:.1f} tokens/s (the floor allows "
        f"{plain['floor_tokens_per_second']:.1f}); {result['rates']['bytes_per_second'] / 1e9:.0f} GB/s measured",
        f"{'cell':18}{'eager':>8}{'round':>8}{'floor':>8}{'of it':>7}{'head':>7}{'reads':>7}  tokens/s at forced τ",
    ]
    for name, cell in result["cells"].items():
        if "failed" in cell:
            lines.append(f"{name:18}failed: {cell['failed'][:90]}")
            continue
        speeds = ", ".join(f"{tau}: {x['tokens_per_second']:.0f}" for tau, x in cell["lengths"].items())
        share = f"{100 * cell['head_share']:.0f} %" if "head_share" in cell else ""
        reads = "" if cell["host_reads"] is None else f"{cell['host_reads']:.1f}"
        lines.append(
            f"{name:18}{cell['eager_ms']:8.2f}{cell['round_ms']:8.2f}{cell['floor_ms']:8.2f}"
            f"{100 * cell['of_floor']:5.0f} %{share:>7}{reads:>7}  {speeds}"
        )
    small = result.get("default_target")
    if small and "graphs" in small:
        lines.append(
            f"default target: {small['graphs']['tokens_per_second']:.0f} tokens/s with graphs, "
            f"{small['eager']['tokens_per_second']:.0f} eager, {small['plain']['tokens_per_second']:.0f} plain; same "
            f"tokens as eager: {small['graphs_same_as_eager']}, as plain: {small['same_as_plain']}"
        )
    for claim in result["shown"]:
        word, sign = "holds" if claim["holds"] else "DOES NOT HOLD", "<=" if claim["most"] else ">="
        lines.append(f"{claim['what']}: {claim['measured']:.3g} {sign} {claim['bound']:g} {word}")
    if result["left_out"]:
        lines.append(f"out of time: {', '.join(result['left_out'])}")
    lines.append(f"{result['seconds']:.0f} seconds in all")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="JSON to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--tiny", action="store_true", help="tiny shapes")
    parser.add_argument("--backbones", nargs="+", default=list(BACKBONES), choices=BACKBONES)
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=HEADS)
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[0, 2, 4, 7, 15], help="draft tokens accepted a round"
    )
    parser.add_argument("--rounds", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--seconds", type=float, default=390, help="no cell begins after so long")
    args = parser.parse_args(words)
    result = measure(args)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))
    return result


if __name__ == "__main__":
    main()
