"""``repairzoo train``: corpus, backbone, head. Every step continues where it was interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repairzoo.commands.shared import TargetName, reporting

app = typer.Typer(
    help="Train backbones and heads: first a corpus, then a recipe. Every step continues where it was interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Folders = Annotated[list[Path], typer.Option("--corpus", help="Corpus folder; may be given several times.")]
Out = Annotated[Path, typer.Option("--out", help="Folder of the run; the artifact is written to OUT/artifact.")]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Change a key of the recipe, such as objective.credit=false; several times, if need be."
    ),
]
Passes = Annotated[list[str] | None, typer.Option("--pass", help="Pass to train on; several, or all.")]


_INTERRUPTED = "interrupted; the same command continues"


@app.command()
def corpus(
    prompts: Annotated[Path, typer.Option(help="JSON lines with the keys prompt and source.")],
    out: Annotated[Path, typer.Option(help="Corpus folder; several passes can share one.")],
    name: Annotated[str, typer.Option("--pass", help="Name of this pass.")] = "greedy",
    target: TargetName = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 ...", show_default="chosen")] = None,
    taps: Annotated[str, typer.Option(help="Layers whose features are stored.")] = "1,8,15,22,27",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(help="Longer answers are cut.")] = 256,
    max_prompt_tokens: Annotated[int, typer.Option(help="Longer prompts are skipped.")] = 700,
    batch: Annotated[int, typer.Option(help="Answers at once.")] = 128,
    answers: Annotated[int, typer.Option(help="Answers to each prompt, above temperature 0.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the order and of sampled answers.")] = 0,
    features: Annotated[bool, typer.Option(help="Store features; heads like dels need none.")] = True,
) -> None:
    """Let the target answer prompts."""
    with reporting(False, _INTERRUPTED):
        from repairzoo.train import commands
        from repairzoo.train.corpus import CorpusPlan

        plan = CorpusPlan(
            name=name,
            taps=commands.parse_taps(taps),
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            max_prompt_tokens=max_prompt_tokens,
            batch=batch,
            answers=answers,
            seed=seed,
            features=features,
        )
        commands.run_corpus(prompts, out, plan, target, dtype)


@app.command()
def features(
    corpus: Annotated[Path, typer.Argument(help="A corpus folder that holds tokens alone.")],
    target: TargetName = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 ...", show_default="chosen")] = None,
) -> None:
    """Compute the features of a corpus again."""
    with reporting(False, _INTERRUPTED):
        from repairzoo.target_source import load_target
        from repairzoo.train.corpus import read_manifest, write_features

        read_manifest(corpus)  # before the target, which takes a while
        write_features(load_target(target, dtype=dtype), corpus)
        print(f"{corpus}: features complete")


@app.command()
def backbone(
    recipe: Annotated[Path, typer.Argument(help="A recipe, such as backbones/dflash/recipe.yaml.")],
    corpus: Folders,
    out: Out,
    init: Annotated[Path | None, typer.Option(help="Artifact folder to start from.")] = None,
    target: TargetName = None,
    passes: Passes = None,
    changes: Changes = None,
) -> None:
    """Train a backbone."""
    with reporting(False, _INTERRUPTED):
        from repairzoo.train.commands import run_training

        names = tuple(passes) if passes else None
        if not run_training(
            "backbones", recipe, corpus, out, target=target, init=init, passes=names, changes=changes or ()
        ):
            raise typer.Exit(130)


@app.command()
def head(
    recipe: Annotated[Path, typer.Argument(help="A recipe, such as heads/dels/recipe.yaml.")],
    corpus: Folders,
    out: Out,
    backbone: Annotated[
        str | None, typer.Option(help="Frozen backbone that held-out answers are judged with: a name or a folder.")
    ] = None,
    init: Annotated[Path | None, typer.Option(help="Artifact folder to start from.")] = None,
    target: TargetName = None,
    passes: Passes = None,
    changes: Changes = None,
    control: Annotated[
        bool,
        typer.Option(
            "--control", help="Train the backbone alone, on the same blocks as long: what the head must beat."
        ),
    ] = False,
) -> None:
    """Train a head."""
    with reporting(False, _INTERRUPTED):
        from repairzoo.train.commands import run_training

        names = tuple(passes) if passes else None
        if not run_training(
            "heads", recipe, corpus, out, target=target, init=init, backbone=backbone, passes=names,
            changes=changes or (), control=control,
        ):  # fmt: skip
            raise typer.Exit(130)
