"""``build``: a target, a backbone and heads become a ``Zoo`` that generates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repairzoo.capacity import Plan, plan
from repairzoo.capture import CudaGraphs
from repairzoo.decode import Engine, fused_walk, refuse_beside_expander, split_heads
from repairzoo.errors import IncompatibleArtifact, InvalidInput, UnsupportedTarget
from repairzoo.generation import (
    Request,
    autoregress,
    finish,
    hugging_face_processor,
    make_request,
    pieces,
    speculate,
    streamed,
)
from repairzoo.graph import Graphs
from repairzoo.inputs import prompt_ids
from repairzoo.kernels import check as check_kernels
from repairzoo.linear import int8_available
from repairzoo.results import Generation
from repairzoo.target import Target

POOL = 64  # candidates a slot of `pool="auto"` for rounded drafts


class Zoo:
    """A target with a backbone and heads. ``last`` is the result of the latest run.

    Attributes:
        target: the verifier. backbone: the drafter. heads: repair heads in the order they apply.
        expander: the last of them if it makes a tree of the chain (CURE), or None.
        nodes: budget of a best-first tree, or None for a chain.
        proposal: ``"argmax"`` (deterministic, target-first) or ``"sampled"`` (p/q rule above temperature 0).
        graphs: captured rounds and their buffers, kept between runs, or None where every operation runs by itself.
        kernels: ``"torch"`` or ``"triton"``.
        pool: candidates a slot that walks choose from; None for as many as the heads ask for, or else the whole
            vocabulary.
    """

    def __init__(
        self,
        target: Target,
        backbone: Any,
        heads: tuple[Any, ...],
        nodes: int | None = None,
        proposal: str = "argmax",
        graphs: Graphs | None = None,
        kernels: str = "torch",
        pool: int | None = None,
    ) -> None:
        if proposal not in ("argmax", "sampled"):
            raise InvalidInput(f"proposal={proposal!r}: give 'argmax' or 'sampled'")
        if proposal == "sampled" and nodes is not None:
            raise InvalidInput("a tree is proposed deterministically: use proposal='argmax' with tree=...")
        from repairzoo.load_parts import refuse_no_head  # here, since that reads files and this does not

        for head in heads:
            refuse_no_head(head)
        _, self.expander = split_heads(heads)
        if self.expander is not None:
            refuse_beside_expander(nodes, proposal == "sampled")
            self.expander.budget(backbone.slots)  # refuses here what would not fit
            getattr(self.expander, "check", _nothing)(backbone)
        self.target, self.backbone, self.heads = target, backbone, heads
        self.nodes, self.proposal, self.graphs = nodes, proposal, graphs
        self.pool = self._pool(pool)
        self.kernels = check_kernels(kernels, target.device, target.dtype)
        if graphs is not None:
            graphs.sampled = proposal == "sampled"
        self.last: Generation | None = None

    def _pool(self, asked: int | None) -> int | None:
        """Candidates a slot, from what was asked for and what the heads need.

        Raises:
            InvalidInput: not a size, or one that a head cannot work with. IncompatibleArtifact: a head's is too large.
        """
        needed, vocabulary = _pool_size(self.heads), self.target.output_weight.shape[0]
        if needed is not None and needed > vocabulary:
            raise IncompatibleArtifact(
                f"a head asks for {needed} candidates a slot, the vocabulary has {vocabulary} tokens"
            )
        if asked is None:
            return needed
        if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked <= vocabulary:
            raise InvalidInput(f"pool={asked!r}: give None, or 1 to {vocabulary} candidates a slot")
        if needed is not None and asked < needed:
            raise InvalidInput(f"pool={asked}: a head chooses among {needed} candidates; give as many, or 'auto'")
        return asked

    def generate(
        self,
        inputs: Any,
        *,
        attention_mask: Tensor | None = None,
        chat: bool | None = None,
        streamer: Any = None,
        **options: Any,
    ) -> Generation:
        """Generate for one or more prompts.

        Args:
            inputs: a string, strings, chat messages (or several), ids ``[T]`` / ``[B, T]``, or lists of ids.
            attention_mask: with a tensor of ids; padding on either side.
            chat: treat strings as a user's turn; None does so where the tokenizer has a chat template.
            streamer: a ``transformers`` streamer (``put`` / ``end``); single prompts only.
            options: ``max_new_tokens=128, temperature=0.0, top_k, top_p, min_p, seed, stop, eos_token_id,
                logits_processor, stopping_criteria``.

        Raises:
            InvalidInput: a prompt or an option cannot be used; the message names it.
        """
        request = self._request(inputs, attention_mask, chat, options)
        if streamer is not None:
            self.last = streamed(self._run(request), request, streamer)
        else:
            self.last = finish(self._run(request))
        return self.last

    def stream(self, inputs: Any, *, chat: bool | None = None, **options: Any) -> Iterator[str]:
        """Yield the text of one prompt as it becomes final; options as in ``generate``. ``last`` is set at the end."""
        request = self._request(inputs, None, chat, options)
        if len(request.prompts) != 1:
            raise InvalidInput(f"stream takes one prompt, not {len(request.prompts)}: use generate for a batch")
        if self.target.tokenizer is None:
            raise InvalidInput(f"target {self.target.name!r} has no tokenizer: text cannot be streamed; use generate")
        session = None
        for piece, session in pieces(self._run(request)):  # noqa: B007 - the last one is the result
            if piece:
                yield piece
        assert session is not None
        self.last = session.result()

    def custom_generate(self, model: Any, input_ids: Tensor, **kwargs: Any) -> Tensor:
        """For ``model.generate(**batch, custom_generate=zoo.custom_generate)``; returns ``LongTensor [B, T]``."""
        from repairzoo.hf_generate import custom_generate

        return custom_generate(self, model, input_ids, **kwargs)

    def engine(self, request: Request) -> Engine:
        """The fixed part of a run; before the first, an expander may measure what it goes by."""
        fit = getattr(self.expander, "fit", None)
        if fit is not None:
            self.expander = fit(self.target, self.backbone)
            self.heads = (*self.heads[:-1], self.expander)
        confidence = getattr(self.backbone, "confidence_threshold", 0.0)
        return Engine(
            target=self.target,
            backbone=self.backbone,
            heads=self.heads,
            law=request.law,
            eos=torch.tensor(request.eos, dtype=torch.int64, device=self.target.device),
            nodes=self.nodes,
            sampled=self.proposal == "sampled" and not request.law.greedy,
            pool=self.pool,
            processor=hugging_face_processor(request) if request.processors else None,
            confidence=confidence,
            trim=(confidence > 0 or self.expander is not None) and self.target.device.type == "cpu",
            kernels=self.kernels,
        )

    @property
    def fused(self) -> dict[str, str]:
        """Which version of each part that has a kernel runs for greedy drafts: ``"triton"`` or ``"torch"``."""
        engine = self.engine(make_request(self.target, [[0]]))
        native = getattr(self.backbone, "corrector", lambda: None)()
        walk = "triton" if engine.pool and not engine.confidence and fused_walk(engine, native) else "torch"
        pool = self.kernels if engine.pool else "torch"
        return {"accept": self.kernels, "pool": pool, "walk": walk}

    def memory(self, rows: int = 1, positions: int = 2048, **options: Any) -> Plan:
        """What a run holds beside the weights, in bytes; nothing is allocated.

        Args:
            rows: prompts at once. positions: of the longest row, prompt and answer.
            options: as in ``generate``; sampling needs more than greedy decoding.
        """
        _check_size(rows, positions)
        engine = self.engine(make_request(self.target, [[0]] * rows, **options))
        return plan(engine, rows, positions + engine.slack)

    def warm_up(self, rows: int = 1, positions: int = 2048, **options: Any) -> None:
        """Capture every round that runs of up to ``rows`` rows and ``positions`` positions replay, so that none of them
        waits for a capture; without graphs there is nothing to do. Options as in ``generate``."""
        _check_size(rows, positions)
        if self.graphs is not None:
            engine = self.engine(make_request(self.target, [[0]] * rows, **options))
            self.graphs.warm_up(engine, rows, positions)

    def _request(self, inputs: Any, mask: Tensor | None, chat: bool | None, options: dict[str, Any]) -> Request:
        return make_request(self.target, prompt_ids(self.target, inputs, mask, chat), **options)

    def _run(self, request: Request) -> Iterator[Any]:
        return speculate(self.engine(request), request, self.graphs)


def _check_size(rows: int, positions: int) -> None:
    for name, value in (("rows", rows), ("positions", positions)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidInput(f"{name}={value!r}: give an integer of at least 1")


def _nothing(backbone: Any) -> None:
    return None


def _pool_size(heads: tuple[Any, ...]) -> int | None:
    sizes = {h.pool_size for h in heads if getattr(h, "pool_size", None) is not None}
    return max(sizes) if sizes else None


def autoregressive(
    target: Any, inputs: Any, *, attention_mask: Tensor | None = None, chat: bool | None = None, **options: Any
) -> Generation:
    """Plain decoding with the lean loop: the baseline. Arguments and result as ``Zoo.generate``."""
    target = as_target(target)
    request = make_request(target, prompt_ids(target, inputs, attention_mask, chat), **options)
    return finish(autoregress(target, request))


def as_target(target: Any, device: Any = None, dtype: torch.dtype | str | None = None) -> Target:
    """A ``Target`` from None (the default), a Hub id, a folder, ``(model, tokenizer)``, a model, or a ``Target``.

    Raises:
        UnsupportedTarget: none of these. InvalidInput: a device or dtype that a loaded model does not have.
    """
    from repairzoo.target_source import load_target, parse_device, parse_dtype

    if target is None or isinstance(target, (str, Path)):
        return load_target(target, device=device, dtype=dtype)
    model, tokenizer = target if isinstance(target, tuple) and len(target) == 2 else (target, None)
    if isinstance(target, Target):
        loaded = target
    elif isinstance(model, torch.nn.Module):
        loaded = Target(model, tokenizer, name=getattr(model, "name_or_path", None) or "custom")
    else:
        what = type(model).__name__
        raise UnsupportedTarget(
            f"cannot use {what} as a target: give None, a Hub id, a folder, a model, (model, tokenizer) or a Target"
        )
    if dtype is not None and parse_dtype(dtype) != loaded.dtype:
        raise InvalidInput(f"dtype={dtype!r}: the target is loaded in {loaded.dtype} already; load it in the other one")
    if device is not None and torch.empty(0, device=parse_device(device)).device != loaded.device:
        raise InvalidInput(f"device={str(device)!r}: the target is on {loaded.device} already; move it first")
    return loaded


def build(
    backbone: Any = "dflash",
    head: Any = None,
    target: Any = None,
    *,
    device: Any = None,
    dtype: torch.dtype | str | None = None,
    tree: int | str | None = None,
    tune: Any = None,
    block: int | None = None,
    proposal: str = "argmax",
    draft_int8: bool | None = None,
    cuda_graphs: bool | str = "auto",
    kernels: str = "torch",
    pool: int | str | None = "auto",
) -> Zoo:
    """Put a target, a backbone and heads together.

    Args:
        backbone: a registry name, a folder in a published format, a Hub repository in one (``owner/name`` or
            ``hf:owner/name@revision``), or a module with the backbone protocol.
        head: a registry name, names joined by ``+``, a folder, a Hub repository, a module, or None / ``"none"``;
            several in a list. An expander (CURE) comes last, and without ``tree`` or ``proposal="sampled"``.
        target: None (the default target), a Hub id, a folder, ``(model, tokenizer)``, or a ``Target``.
        device, dtype: of the target; None chooses (bfloat16 where the processor multiplies it natively).
        tree: None for a chain; a number of nodes for a best-first tree, or ``"best-first"`` for as many as the chain
            has.
        tune: ``"auto"`` takes what ``repairzoo autotune`` found fastest for this target on this machine, as far as
            ``head``, ``tree`` and ``block`` leave it open (``head="none"`` asks for no head); a path names another
            calibration file; None leaves everything as given.
        block: rows of a drafted block, anchor included: from 2 to as many as the backbone was trained with (None).
        proposal: ``"argmax"`` or ``"sampled"`` (p/q rule above temperature 0).
        draft_int8: draft with 8-bit matrix products (CPU). They cost a little acceptance and save most of the draft's
            time; the output is the target's all the same. None: yes for backbones loaded here, unless they are sampled
            from (a row's law would depend on the rows beside it).
        cuda_graphs: capture whole rounds into CUDA graphs. ``"auto"``: on a GPU, except for requests with logits
            processors, which run on the host; True: those are refused; False: every operation by itself.
        kernels: ``"triton"`` runs fused kernels for accepting, for the pool, and for a walk of LiLiCorr or DRelay alone
            (``Zoo.fused`` tells which apply); refused where they cannot run. ``"torch"``: none.
        pool: candidates a slot that correctors, the backbone's own included, score and walks choose from: the draft's
            best. None: as many as the heads ask for, or else the whole vocabulary. ``"auto"``: the same, but 64 where
            drafts are rounded (``draft_int8``): scoring the whole vocabulary again at every slot moves megabytes.

    Raises:
        UnknownName, InvalidArtifact, IncompatibleArtifact, UnsupportedTarget, InvalidInput.
    """
    if not isinstance(cuda_graphs, bool) and cuda_graphs != "auto":
        raise InvalidInput(f"cuda_graphs={cuda_graphs!r}: give 'auto', True or False")
    from repairzoo.load_parts import bound_backbone, bound_heads, located

    if (
        tree is not None
        and tree != "best-first"
        and (isinstance(tree, (bool, str)) or not isinstance(tree, int) or tree < 1)
    ):
        raise InvalidInput(f"tree={tree!r}: give None, 'best-first', or a number of nodes of at least 1")
    backbone, head = located(backbone, head)  # before the target, which takes seconds
    verifier = as_target(target, device, dtype)
    if tune is not None:
        from repairzoo.bench.tune import tuned

        head, tree, block = tuned(tune, verifier, backbone, head=head, tree=tree, block=block)
    drafter = bound_backbone(backbone, verifier)
    if block is not None:
        _shorten(drafter, backbone, block)
    top = max(drafter.tapped_layers, default=0)
    if top >= verifier.num_layers:
        raise IncompatibleArtifact(
            f"backbone taps layer {top}, and target {verifier.name!r} has layers 0 to {verifier.num_layers - 1}"
        )
    if draft_int8 not in (None, True, False):
        raise InvalidInput(f"draft_int8={draft_int8!r}: give None, True or False")
    if draft_int8 is None:
        draft_int8 = drafter is not backbone and proposal == "argmax" and int8_available(verifier.device)
    if draft_int8:
        if not hasattr(drafter, "use_int8"):
            raise InvalidInput(f"draft_int8=True: {type(drafter).__name__} has no use_int8; use None or False")
        if not int8_available(verifier.device):
            raise InvalidInput(f"draft_int8=True: there are no 8-bit products on {verifier.device}; use None or False")
        drafter.use_int8()
    heads = bound_heads(head, verifier, drafter)
    nodes = drafter.slots if tree == "best-first" else tree
    assert nodes is None or isinstance(nodes, int)
    if isinstance(pool, str):
        vocabulary = verifier.output_weight.shape[0]
        if pool != "auto":
            raise InvalidInput(f"pool={pool!r}: give 'auto', None, or 1 to {vocabulary} candidates a slot")
        pool = narrow_pool(drafter, heads, nodes, vocabulary)
    return Zoo(verifier, drafter, heads, nodes, proposal, _graphs(cuda_graphs, verifier.device), kernels, pool)


def narrow_pool(drafter: Any, heads: tuple[Any, ...], nodes: int | None, vocabulary: int) -> int | None:
    """``pool="auto"``: the size for a bound backbone with heads, None where the heads' own or the whole vocabulary is
    used: drafts are not rounded, nothing is scored again after every slot, or the vocabulary is as small."""
    correctors, _ = split_heads(heads)
    if not getattr(drafter, "int8", False) or _pool_size(heads) is not None:
        return None
    size = max(POOL, nodes or 0)
    return size if (correctors or drafter.corrector() is not None) and size < vocabulary else None


def _graphs(asked: bool | str, device: torch.device) -> Graphs | None:
    if device.type == "cuda" and asked:
        return Graphs(CudaGraphs(device), required=asked is True)
    if asked is True:
        raise InvalidInput(f"cuda_graphs=True: the target is on {device}; use 'auto', or device='cuda'")
    return None


def _shorten(drafter: Any, given: Any, block: int) -> None:
    """Draft fewer rows than trained. A module that the caller keeps is left alone."""
    trained = getattr(drafter, "block_size", None)
    if trained is None:
        raise InvalidInput(f"block={block!r}: {type(drafter).__name__} has no block_size; give None")
    least = trained - drafter.slots + 1
    if isinstance(block, bool) or not isinstance(block, int) or not least <= block <= trained:
        raise InvalidInput(f"block={block!r}: this backbone drafts {least} to {trained} rows, anchor included")
    if drafter is given and block != trained:
        raise InvalidInput(f"block={block}: set block_size of the {type(drafter).__name__} that you pass")
    drafter.block_size = block
