"""``repairzoo generate``: answer a prompt, and say what the decoding did."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from repairzoo.commands.shared import (
    Device,
    Json,
    Proposal,
    TargetDtype,
    TargetName,
    may_write,
    print_json,
    reporting,
    whole,
)
from repairzoo.errors import InvalidInput


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.", show_default=False)],
    backbone: Annotated[str, typer.Option(help="Backbone: a registry name or a folder.")] = "dflash",
    head: Annotated[
        str | None,
        typer.Option(
            help="Head: a name, names joined by +, a folder, none.", show_default="dels; with --tune the fastest"
        ),
    ] = None,
    target: TargetName = None,
    max_new_tokens: Annotated[int, typer.Option(help="Budget of new tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the smallest set with this probability.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Keep tokens at least this likely relative to the best.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random numbers.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    tree: Annotated[
        str | None, typer.Option(help="Verify a tree of this many nodes (best-first: as many as the chain has).")
    ] = None,
    tune: Annotated[
        str | None,
        typer.Option(help="Decode as repairzoo autotune found fastest: auto, or a calibration file."),
    ] = None,
    proposal: Annotated[
        Proposal, typer.Option(help="Propose the draft's best tokens, or draw them and verify by ratio (above 0).")
    ] = Proposal.argmax,
    dtype: TargetDtype = None,
    device: Device = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw", help="Apply the chat template, or continue the text.", show_default="chat if there is one"
        ),
    ] = None,
    compare: Annotated[bool, typer.Option(help="Also decode plainly, and compare speed and tokens.")] = False,
    show_repairs: Annotated[
        bool, typer.Option("--show-repairs", help="Colour drafted, repaired, rejected and the target's own tokens.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with each round's slots, pools, scores and what was accepted.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Answer a prompt, streaming its text, and say what the decoding did."""
    with reporting(as_json):
        text = _stdin() if prompt == "-" else prompt
        if not text:
            raise InvalidInput("the prompt is empty: give a text, or - and a text on standard input")
        watched = show_repairs or html is not None
        if watched and compare:
            raise InvalidInput("--compare times the rounds, --show-repairs and --html look into them: use one of them")
        if html is not None:
            may_write("--html", html)
        nodes = tree if tree in (None, "best-first") else whole("--tree", tree, also="best-first")
        import torch  # here, and not above: --help must answer at once

        import repairzoo
        from repairzoo.sampling import Law

        Law(temperature, top_k, top_p, min_p)  # what cannot be is told before the target is loaded
        wanted: Any = target
        block: int | None = None
        if tune is not None:
            from repairzoo.bench.tune import fastest
            from repairzoo.zoo import as_target

            wanted = as_target(target, device, None if dtype is None else getattr(torch, dtype.value))
            chosen = fastest(tune, wanted, backbone, head=head, tree=nodes)[1]
            head, nodes, block = chosen.head, chosen.tree, chosen.block
        head = "dels" if head is None else head
        zoo = repairzoo.build(
            backbone,
            head=head,
            target=wanted,
            device=device,
            dtype=None if dtype is None else getattr(torch, dtype.value),
            tree=nodes,
            tune=tune,
            block=block,
            proposal=proposal.value,
        )
        who = _drafted_by(backbone, head, zoo.nodes, block)
        options = {
            "chat": chat,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            "stop": stop,
        }
        if compare:  # the first pass of either loop pays for allocation
            zoo.generate(text, **options, max_new_tokens=min(8, max_new_tokens))
            repairzoo.autoregressive(zoo.target, text, **options, max_new_tokens=min(8, max_new_tokens))
        pieces, told = [], []
        if watched:
            told = _watch(
                zoo,
                text,
                {**options, "max_new_tokens": max_new_tokens},
                show_repairs,
                html,
                as_json,
                who,
            )
        else:
            for piece in zoo.stream(text, **options, max_new_tokens=max_new_tokens):
                pieces.append(piece)
                if not as_json:
                    print(piece, end="", flush=True)
        out = zoo.last
        assert out is not None
        pieces = out.text or [] if watched else pieces
        plain = None
        if compare:
            plain = repairzoo.autoregressive(zoo.target, text, **options, max_new_tokens=max_new_tokens)
        if as_json:
            print_json(_as_dict(zoo, backbone, head, "".join(pieces), out, plain, temperature))
        else:
            print(flush=True)
            for row in [*told, *_report(zoo, who, head, out, plain, temperature, timed=not watched)]:
                print(row, file=sys.stderr)


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"standard input is no {error.encoding} text ({error.reason} at {error.start})") from None


def _watch(
    zoo: Any, text: str, options: dict[str, Any], show: bool, html: Path | None, quiet: bool, who: str
) -> list[str]:
    """Decode round by round, print each as it ends, write the page; gives lines to print beside the answer."""
    from repairzoo.safe_file import replacing
    from repairzoo.show import legend, line, page, wants_colour, watch

    colour, rounds = wants_colour(sys.stdout), []
    for done in watch(zoo, text, **options):
        rounds.append(done)
        if not quiet:
            plain = "".join(p.text for p in done.pieces if p.kind != "rejected")
            print(line(done, colour) if show else plain, end="", flush=True)
    told = ["", legend(rounds, colour and wants_colour(sys.stderr))] if show else []
    if html is not None:
        stats = zoo.last.stats
        facts = [
            f"{zoo.target.name}, drafted by {who}: {stats.rounds} rounds, {stats.tau:.2f} committed tokens per round",
            f"{sum(stats.drafted)} tokens proposed, {sum(stats.agreed)} accepted; {sum(stats.repaired)} repaired, "
            f"{sum(stats.repairs_accepted)} of those accepted",
        ]
        html.absolute().parent.mkdir(parents=True, exist_ok=True)
        with replacing(html) as file:
            file.write(page(rounds, text, facts).encode())
        told += ["", f"wrote {html}"]
    return told


def _drafted_by(backbone: str, head: str, nodes: int | None, block: int | None) -> str:
    parts = [backbone if head == "none" else f"{backbone} + {head}"]
    parts += [] if nodes is None else [f"tree of {nodes} nodes"]
    parts += [] if block is None else [f"blocks of {block}"]
    return ", ".join(parts)


def _decode_speed(out: Any) -> float:
    """Tokens per second of the decode loop: prefill, which yields the first token, is not in it."""
    seconds = out.stats.decode_seconds
    tokens = sum(len(ids) - 1 for ids in out.token_ids if ids)
    return tokens / seconds if seconds > 0 else 0.0


def _first_difference(left: list[int], right: list[int]) -> int | None:
    if left == right:
        return None
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _comparison(out: Any, plain: Any, temperature: float) -> dict[str, Any]:
    ours, theirs = _decode_speed(out), _decode_speed(plain)
    result: dict[str, Any] = {
        "tokens_per_second": ours,
        "plain_tokens_per_second": theirs,
        "ratio": ours / theirs if theirs > 0 else None,
    }
    if temperature == 0:  # above 0 the law is equal, not the draw
        result["first_difference"] = _first_difference(out.token_ids[0], plain.token_ids[0])
        result["identical"] = result["first_difference"] is None
    return result


def _as_dict(zoo: Any, backbone: str, head: str, text: str, out: Any, plain: Any, temperature: float) -> dict[str, Any]:
    result = {
        "text": text,
        "token_ids": out.token_ids[0],
        "finish_reason": out.finish_reason[0],
        "stats": out.stats.as_dict(),
        "backbone": backbone,
        "head": head,
        "target": {"name": zoo.target.name, "revision": zoo.target.revision, "source": zoo.target.source},
    }
    return result if plain is None else {**result, "compare": _comparison(out, plain, temperature)}


def _report(zoo: Any, who: str, head: str, out: Any, plain: Any, temperature: float, timed: bool = True) -> list[str]:
    stats = out.stats
    rows = [
        ("target", f"{zoo.target.name} ({zoo.target.source})"),
        ("drafted by", who),
        ("tokens", f"{sum(map(len, out.token_ids))} in {stats.rounds} rounds, finish: {out.finish_reason[0]}"),
        ("τ", f"{stats.tau:.2f} committed tokens per round"),
    ]
    if head != "none":
        rows.append(("repaired", f"{sum(stats.repaired)} slots, {sum(stats.repairs_accepted)} of them committed"))
    if not timed:
        rows.append(("speed", "not measured: every round was drafted twice, to be looked at"))
    elif plain is None:
        rows.append(("speed", f"{_decode_speed(out):.1f} tokens/s"))
    else:
        versus = _comparison(out, plain, temperature)
        ratio = "" if versus["ratio"] is None else f": {versus['ratio']:.2f} times as fast"
        ours, theirs = versus["tokens_per_second"], versus["plain_tokens_per_second"]
        rows.append(("speed", f"{ours:.1f} tokens/s against {theirs:.1f} plain{ratio}"))
        if temperature > 0:
            rows.append(("same tokens", "not comparable above temperature 0: the law is the same, the draws are not"))
        elif versus["identical"]:
            rows.append(("same tokens", "yes, token for token"))
        else:
            where = f"no, from token {versus['first_difference']} on"
            hint = "" if str(zoo.target.dtype) == "torch.float32" else f" (near ties differ in {zoo.target.dtype})"
            rows.append(("same tokens", where + hint))
    width = max(len(name) for name, _ in rows)
    return ["", *(f"{name.ljust(width)}  {value}" for name, value in rows)]
