"""The table of a round's costs, held to counts made by hand; counting changes nothing."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from conftest import dels, dflash, toy
from typer.testing import CliRunner

import repairzoo
from repairzoo.cli import app
from repairzoo.commands import info
from repairzoo.costs import Counter, costs, held, measured, plain_cost
from repairzoo.errors import InvalidInput


def zoo(head=None, dtype=torch.float32, block=4):
    target = toy(dtype=dtype)
    return repairzoo.build(dflash(target, block_size=block), head, target)


def by_part(table):
    return {cost.part: cost for cost in table}


def test_operations_of_products_and_attention():
    x, w = torch.zeros(3, 5, dtype=torch.float64), torch.zeros(7, 5, dtype=torch.float64)
    q, k = torch.zeros(2, 4, 6, 8), torch.zeros(2, 4, 10, 8)
    with torch.no_grad(), Counter() as found:
        F.linear(x, w)
    assert (found.operations, found.moved) == (2 * 3 * 5 * 7, 8 * (3 * 5 + 5 * 7 + 3 * 7))
    with torch.no_grad(), Counter(weight_bytes=1) as rounded:
        F.linear(x, w)
    assert rounded.moved == found.moved - 7 * 35
    with torch.no_grad(), Counter() as attention:
        F.scaled_dot_product_attention(q, k, k)
    assert attention.operations == 2 * 2 * 2 * 4 * 6 * 10 * 8


def test_views_and_rows_that_are_not_read_cost_nothing():
    table = torch.zeros(1000, 8)
    with torch.no_grad(), Counter() as found:
        table.T.view(8, 1000)[:, ::2].unsqueeze(0).expand(3, -1, -1)
    assert found.moved == 0
    rows = torch.zeros(5, dtype=torch.int64)
    with torch.no_grad(), Counter() as found:
        F.embedding(rows, table)
    assert found.moved == 2 * 5 * 8 * 4 + 5 * 8
    assert held(torch.zeros(1).expand(100)) == 4


def test_least_is_what_lay_there_once():
    """Weights and rows that no stage has made, each once however often they are read; results are nobody's floor."""
    x, w, table = torch.zeros(3, 8), torch.zeros(8, 8), torch.zeros(1000, 8)
    with torch.no_grad(), Counter() as first:
        y = F.linear(F.linear(x, w), w)
        F.embedding(torch.zeros(5, dtype=torch.int64), table)
    assert first.least == 4 * (3 * 8 + 8 * 8 + 5 * 8)
    with torch.no_grad(), Counter(first) as second:
        F.linear(y, w[:4])
        w[:, :2].add_(1)
    assert second.least == 4 * (4 * 8)  # the wider view holds the other
    with torch.no_grad(), Counter(weight_bytes=1) as rounded:
        F.linear(x, w)
    assert rounded.least == 4 * 3 * 8 + 8 * 8


@pytest.mark.parametrize("context", [16, 64])
@pytest.mark.parametrize("batch", [1, 3])
def test_floors_are_weights_and_caches(context, batch):
    z = zoo()
    t, kv = z.target, 2 * 8
    matrices = 4 * (sum(p.numel() for p in t.model.model.layers.parameters()) + t.output_weight.numel())
    table = by_part(costs(z, context=context, batch=batch))
    bound = context + z.backbone.slots + 2
    for part, layers, weights in (
        ("verify", t.num_layers, matrices),
        ("step", t.num_layers, matrices),
        ("draft", 1, 4 * (sum(p.numel() for p in z.backbone.parameters()) + t.output_weight.numel())),
    ):
        heads = kv if part != "draft" else 2 * 8
        least = weights + 4 * batch * layers * bound * heads
        few = 4 * batch * (2 * t.hidden_size * 5 + 64 * t.hidden_size + 200)  # rows of the embedding, features, history
        assert least <= table[part].least <= least + few < table[part].moved + few
    alone = plain_cost(t, context=context, batch=batch)
    assert 0 < table["step"].least - alone.least < 4 * batch * t.num_layers * 6 * kv and table["head"].operations == 0


@pytest.mark.parametrize("block", [3, 6])
def test_draft_and_verification_are_the_products_of_their_matrices(block):
    """2 m k n of every matrix, for as many rows as pass through it, and attention over the whole bound."""
    z = zoo(block=block)
    b, t, context = z.backbone, z.target, 40
    table = by_part(costs(z, context=context))
    slots = block - 1
    bound = context + slots + 2

    def size(*modules):
        return sum(m.weight.numel() for m in modules)

    (layer,) = b.layers
    a, m = layer.self_attn, layer.mlp
    # fc and the context's keys and values for the slots + 1 rows that a round may commit; the block; the slots' logits
    expected = 2 * (slots + 1) * size(b.fc, a.k_proj, a.v_proj)
    expected += 2 * block * size(a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj)
    expected += 4 * block * bound * a.q_proj.out_features
    expected += 2 * slots * t.output_weight.numel()
    assert table["draft"].operations == expected
    matrices = sum(p.numel() for p in t.model.model.layers.parameters() if p.dim() > 1)
    for part, rows in (("verify", block), ("step", 1)):
        products = 2 * rows * (matrices + t.output_weight.numel())
        assert table[part].operations == products + 4 * rows * bound * t.hidden_size * t.num_layers
    assert table["draft"].parameters == sum(p.numel() for p in b.parameters())
    assert table["verify"].bytes == 4 * sum(p.numel() for p in t.model.parameters())
    assert table["head"].parameters == table["head"].operations == 0


def test_more_context_more_rows_and_heads_cost_more():
    plain, long, wide = (costs(zoo(), context=c, batch=b) for c, b in ((16, 1), (96, 1), (16, 3)))
    for part in ("draft", "verify", "step"):
        one, far, many = (by_part(table)[part] for table in (plain, long, wide))
        assert one.operations < far.operations < 96 / 16 * one.operations and one.moved < far.moved
        assert many.operations == 3 * one.operations and one.moved < many.moved < 3 * one.moved
    local = dels(toy(dtype=torch.float32))
    local.pack = True  # as it is served on a CPU
    head = by_part(costs(zoo(local), context=16))["head"]
    assert head.operations > 0 and head.moved > head.parameters > 0 and local.pack


def test_counting_leaves_the_zoo_as_it_was():
    z = zoo()
    before = z.generate([[3, 1, 4]], max_new_tokens=8, eos_token_id=[])
    packed = [layer.qkv.packed is None for layer in z.target._layers]
    costs(z, context=16)
    assert packed == [layer.qkv.packed is None for layer in z.target._layers] and z.backbone.pack
    after = z.generate([[3, 1, 4]], max_new_tokens=8, eos_token_id=[])
    assert (before.token_ids, before.stats.accepted) == (after.token_ids, after.stats.accepted)


def test_rounded_drafts_move_fewer_bytes():
    exact, rounded = zoo(), zoo()
    rounded.backbone.int8 = True  # as use_int8 marks it; the products themselves need the packed kernels
    a, b = (by_part(costs(z, context=16))["draft"] for z in (exact, rounded))
    assert a.operations == b.operations and b.moved < a.moved and b.bytes < a.bytes and rounded.backbone.int8
    matrices = [p.numel() for p in rounded.backbone.parameters() if p.dim() > 1]
    (kept,) = rounded.backbone.unrounded
    assert a.bytes - b.bytes == 3 * (sum(matrices) - kept.numel())


def test_measured_times_stand_beside_the_counts():
    z = zoo()
    table = measured(z, costs(z, context=16), [[1, 2, 3]], new_tokens=8)
    assert all(c.seconds is not None and c.seconds > 0 for c in table)
    with pytest.raises(InvalidInput, match="new_tokens=1"):
        measured(z, table, [[1, 2, 3]], new_tokens=1)


def test_impossible_shapes_are_refused():
    for options in ({"context": 0}, {"context": 127}, {"batch": 0}):
        with pytest.raises(InvalidInput, match="give 1 to"):
            costs(zoo(), **options)
    with pytest.raises(InvalidInput, match="give 1 to 127"):
        plain_cost(zoo().target, context=128)


def test_command(monkeypatch):
    z = zoo()
    monkeypatch.setattr("repairzoo.zoo.build", lambda backbone, head, target: z)
    out = CliRunner().invoke(app, ["info", "dflash/none", "--context", "32", "--measure"])
    assert out.exit_code == 0, out.output
    for word in ("verification", "bytes moved", "at least", "milliseconds", "32 positions"):
        assert word in out.output
    alone = CliRunner().invoke(app, ["info", "dflash", "--context", "32"])  # of a backbone alone: without a head
    assert alone.exit_code == 0 and "dflash x none on" in alone.output and "32 positions" in alone.output
    for name, kind in (("dels", "head"), ("smollm2-135m", "target")):  # an option is never ignored
        wrong = CliRunner().invoke(app, ["info", name, "--measure"])
        assert wrong.exit_code == 2 and f"{name!r} is a {kind}: costs are of a pair" in wrong.output
    out = CliRunner().invoke(app, ["info", "dflash/none", "--context", "32", "--json"])
    said = json.loads(out.output)
    assert [p["part"] for p in said["parts"]] == ["draft", "head", "verify", "step"] and said["context"] == 32
    assert info._short(12_345_678) == "12.3 M" and info._short(12) == "12"
