"""``repairzoo doctor``: is a draft healthy on its target, and if not, why?"""

from __future__ import annotations

from typing import Annotated

import typer

from repairzoo.commands.shared import Dtype, HeadName, Json, TargetName, print_json, reporting


def doctor(
    backbone: Annotated[str, typer.Argument(help="Backbone: a registry name, a folder or a Hub id.")] = "dflash",
    head: HeadName = "none",
    target: TargetName = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt; may be repeated.", show_default="four own")
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="Greedy tokens decoded for each prompt.")] = 48,
    blocks: Annotated[int, typer.Option(help="Places at which each intervention is measured first.")] = 32,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Number format of target and draft.", show_default="chosen")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draft blocks of known text, undo one possible fault at a time, and name the one that explains a low τ."""
    with reporting(as_json):
        import torch

        from repairzoo.doctor import diagnose
        from repairzoo.zoo import build

        kind = None if dtype is None else getattr(torch, dtype.value)
        zoo = build(backbone, head, target, dtype=kind, draft_int8=False)
        found = diagnose(zoo, prompt, new_tokens=new_tokens, blocks=blocks)
        if as_json:
            print_json(found.as_dict())
            return
        print(f"{found.verdict}\n")
        told = 0 if found.healthy else 1  # the verdict tells the first that is clear
        for place, suspect in enumerate(found.suspects[told:], told + 1):
            print(f"suspect {place}: {suspect.cause}{'' if suspect.clear else ' (not clear)'}: {suspect.why}")
        print(f"tau                      {found.tau:.2f} tokens a round")
        if found.without_head is not None:
            print(f"without the head         {found.without_head + 1:.2f}")
        print(f"accepted, slot by slot   {' '.join(f'{share:.2f}' for share in found.per_slot)}")
        decay = ", ".join(f"{first}-{last}: {1 + n:.2f}" for first, last, n in found.context)
        print(f"tau by position          {decay}\n")
        print(f"{'with':34}  tau     nats a slot  standard errors")
        for probe in found.probes:
            print(f"{probe.name:34}  {1 + probe.accepted:5.2f}  {probe.nats:+10.2f}  {probe.z:+10.1f}")
        print("\nnats: how much likelier the target's own tokens become. A fault is clear where undoing it gives at")
        print("least 0.03 at 2.5 standard errors and more drafts are accepted. Another text's features should do harm.")
