"""Decoding by others, on the very model that our target runs: ``transformers``, and the packages dflash and flashspec.

Nothing of theirs is changed. Forward hooks on the model note when each pass ended and at which position it began; from
that come prefill time, rounds and accepted lengths, for every loop alike. Greedy, batch 1.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repairzoo.bench.clock import synchronise
from repairzoo.bench.outcome import Outcome
from repairzoo.errors import InvalidInput
from repairzoo.target import Target

Run = Callable[[list[int], int], list[int]]  # prompt ids, new tokens -> new ids (may go on past end-of-text)


class Watch:
    """Notes every forward pass of a model: the position of its first token, and when it ended."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model, self.device = model, device
        self.starts: list[int | None] = []
        self.ends: list[float] = []

    def __enter__(self) -> Watch:
        self._hooks = [
            self.model.register_forward_pre_hook(self._before, with_kwargs=True),
            self.model.register_forward_hook(self._after),
        ]
        self.began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        synchronise(self.device)
        self.ended = time.perf_counter()
        for hook in self._hooks:
            hook.remove()

    def _before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))  # the name changed with transformers 5
        self.starts.append(int(cache.get_seq_length()) if cache is not None else None)

    def _after(self, *_: Any) -> None:
        if not self.ends:  # the prompt has been read
            synchronise(self.device)
        self.ends.append(time.perf_counter())

    def outcome(self, prompt: int, tokens: list[int], eos: tuple[int, ...], limit: int) -> Outcome:
        """``tokens`` as far as they count, with the accepted length of every pass after the first."""
        tokens = tokens[:limit]
        stop = next((i for i, t in enumerate(tokens) if t in eos), None)
        finish = "length" if stop is None else "stop"
        if stop is not None:
            tokens = tokens[: stop + 1]
        # pass k begins at its anchor, so that prompt .. anchor were committed before it; the rest came last
        committed = [min(len(tokens), start + 1 - prompt) for start in self.starts[1:] if start is not None]
        if len(committed) != len(self.starts) - 1 or any(b < a for a, b in pairwise(committed)):
            committed = []  # a loop that does not keep its cache this way: tokens count, rounds are unknown
        edges = [*committed, len(tokens)] if committed else [len(tokens)]
        steps = [b - a for a, b in pairwise(edges)]
        accepted = [n for n in steps if n]  # a pass may commit nothing, or come after the last token that counts
        first = len(tokens) - sum(accepted)
        prefill, after = self.ends[0] - self.began, self.ended - self.ends[0]
        return Outcome(
            tokens=[tokens],
            finish=[finish],
            accepted=[accepted],
            first=[first],
            seconds={"prefill": prefill, "decode": after},
            wall=after,
        )


def bare_loop(target: Target) -> Run:
    """The least that decodes with a model of ``transformers``: its dynamic cache, one token a pass, an argmax."""
    from transformers import DynamicCache

    model, eos = target.model, set(target.eos_token_ids)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def run(prompt: list[int], new: int) -> list[int]:
        cache = DynamicCache(config=model.config)
        ids, tokens = torch.tensor([prompt], device=target.device), []
        while len(tokens) < new:
            out = model(input_ids=ids, **{name: cache}, use_cache=True, logits_to_keep=1)
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(int(ids))
            if tokens[-1] in eos:
                break
        return tokens

    return run


def hf_generate(target: Target, **options: Any) -> Run:
    """``model.generate``, greedy; ``options`` choose an assisted mode."""
    model = target.model
    eos = list(target.eos_token_ids)
    fixed: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if eos:
        fixed |= {"eos_token_id": eos, "pad_token_id": eos[0]}
    else:
        fixed["pad_token_id"] = 0

    def run(prompt: list[int], new: int) -> list[int]:
        ids = torch.tensor([prompt], device=target.device)
        out: Any = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **fixed, **options)
        return out[0, len(prompt) :].tolist()

    return run


def hf_dflash(target: Target, folder: Path) -> Run:
    """``transformers``' own DFlash candidates, drafted by our checkpoint in its assistant class."""
    return hf_generate(target, assistant_model=assistant(target, folder), speculation_type="dflash")


def assistant(target: Target, folder: Path) -> Any:
    """A DFlash checkpoint as the assistant model of ``transformers``.

    Its only such class belongs to another model, but computes DFlash: the same layers under two other names.

    Raises:
        InvalidInput: no such class in this version, or a checkpoint that it does not compute.
    """
    from repairzoo.load_parts import load_backbone

    try:
        from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
    except ImportError as error:
        raise InvalidInput("this version of transformers has no DFlash assistant") from error
    draft = load_backbone(folder, device=target.device, dtype=target.dtype)
    c = draft.config
    plain = (c.input_embedding_scale, c.output_multiplier, c.final_logit_softcapping) == (1, 1, None)
    if draft.kind != "dflash" or not plain or draft.first_slot != 1:
        raise InvalidInput("transformers' DFlash assistant computes plain DFlash checkpoints only")
    published = c.to_dict()
    config = MuseGlimmerAssistantConfig(
        **{key: published[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")},
        **{key: published[key] for key in ("num_attention_heads", "num_key_value_heads", "rms_norm_eps")},
        rope_parameters={"rope_type": "default", "rope_theta": published["rope_theta"]},
        max_position_embeddings=published["max_position_embeddings"],
        layer_types=["full_attention"] * published["num_hidden_layers"],
        hidden_act=published["hidden_act"],
        block_size=c.block_size,
        mask_token_id=c.mask_token_id,
        target_layer_ids=list(c.target_layer_ids),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model: Any = MuseGlimmerAssistantModel(config)
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    model.load_state_dict({names.get(str(k), str(k)): v for k, v in draft.state_dict().items()}, strict=True)
    return model.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)


def dflash_package(target: Target, folder: Path) -> Run:
    """The loop of the package ``dflash`` on the same checkpoint. Raises ``InvalidInput``: not installed."""
    if importlib.util.find_spec("dflash") is None:
        raise InvalidInput("the package dflash is not installed: pip install --no-deps dflash==0.1.0")
    package: Any = importlib.import_module("dflash.model")
    model = package.DFlashDraftModel.from_pretrained(folder, dtype=target.dtype).to(target.device).eval()
    eos = list(target.eos_token_ids) or None

    def run(prompt: list[int], new: int) -> list[int]:
        ids = torch.tensor([prompt], device=target.device)
        out = package.dflash_generate(model, target.model, ids, max_new_tokens=new, stop_token_ids=eos)
        return out[0, len(prompt) :].tolist()

    return run


def flashspec_lookup(target: Target, folder: Path | None = None) -> Run:
    """The package ``flashspec`` with its prompt lookup: it has no block drafter. Raises ``InvalidInput``."""
    if importlib.util.find_spec("flashspec") is None:
        raise InvalidInput("the package flashspec is not installed: pip install --no-deps flashspec==0.3.1")
    package: Any = importlib.import_module("flashspec")
    parts: Any = importlib.import_module("flashspec.engine")
    config = package.FlashSpecConfig(
        device=str(target.device),
        drafter_strategy="bandit",  # one arm: the lookup
        bandit=package.BanditConfig(n_arms=1),
        sampling=package.SamplingConfig(temperature=0.0),
    )
    wrapped = parts.TargetModel(target.name, target.device, target.dtype, model=target.model)
    engine = package.SpeculativeEngine(config, [parts.NgramDrafter()], wrapped)

    def run(prompt: list[int], new: int) -> list[int]:
        ids = torch.tensor([prompt], device=target.device)
        out: Any = engine.generate(ids, max_new_tokens=new)
        return out.output_ids[0, : out.n_tokens_generated].tolist()

    return run


OTHERS: dict[str, Callable[[Target, Path], Run]] = {
    "hf-greedy": lambda target, _: hf_generate(target),
    "hf-loop": lambda target, _: bare_loop(target),
    "hf-lookup": lambda target, _: hf_generate(target, prompt_lookup_num_tokens=10),
    "hf-dflash": hf_dflash,
    "dflash-package": dflash_package,
    "flashspec-lookup": flashspec_lookup,
}
WHAT = {
    "hf-greedy": "`transformers` greedy (`model.generate`)",
    "hf-loop": "a bare loop over the model of `transformers` with its cache",
    "hf-lookup": "`transformers` prompt lookup (10 tokens)",
    "hf-dflash": "`transformers`' own DFlash candidates, same checkpoint",
    "dflash-package": "the package `dflash`, same checkpoint",
    "flashspec-lookup": "the package `flashspec`, prompt lookup",
}


def other(name: str, target: Target, folder: Path | None) -> Callable[[list[list[int]], dict[str, Any]], Outcome]:
    """One of ``OTHERS`` as a cell's run.

    Args:
        folder: a DFlash checkpoint in the published format.

    Raises:
        InvalidInput: it cannot run here; the message says why.
    """
    if name not in OTHERS:
        raise InvalidInput(f"baseline {name!r}: choose from {', '.join(OTHERS)}")
    if folder is None and name in ("hf-dflash", "dflash-package"):
        raise InvalidInput(f"{name} needs a DFlash checkpoint")
    run = OTHERS[name](target, folder or Path())

    @torch.no_grad()
    def go(prompts: list[list[int]], options: dict[str, Any]) -> Outcome:
        (prompt,) = prompts
        limit = min(options["max_new_tokens"], target.max_context - len(prompt))
        with Watch(target.model, target.device) as watch:
            tokens = run(prompt, limit)
        return watch.outcome(len(prompt), tokens, target.eos_token_ids, limit)

    return go


def published_folder(backbone: Any) -> tempfile.TemporaryDirectory[str]:
    """A backbone written in the published format, for others to load. The caller closes it."""
    place = tempfile.TemporaryDirectory(prefix="repairzoo-bench-")
    backbone.save(place.name)
    return place


def first_difference(a: list[int], b: list[int]) -> int | None:
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def last_logits(target: Target, ids: list[int]) -> Tensor:
    """Logits ``[V]`` of the target after ``ids``."""
    with torch.no_grad():
        row = torch.tensor([ids], device=target.device)
        return target.prefill(row, torch.tensor([len(ids)], device=target.device), target.new_cache(1, len(ids)))[0][0]
