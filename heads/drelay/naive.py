"""A slow oracle for DRelay: float64, one block, one prefix, one candidate and one attention head at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .head import DRelayConfig

_LOWEST = -30.0


def gate(q: Sequence[float], score: Sequence[float], delta_g: float) -> tuple[float, list[float], int]:
    """Gate logit, ``p_act`` and the decision (Eq. 2 and 6): 0 keeps; among equal alternatives the lower index."""
    g = math.log(sum(q[1:])) - math.log(q[0]) + delta_g
    total = sum(math.exp(s) for s in score[1:])
    r = [math.exp(s) / total for s in score[1:]]
    repair = 1 / (1 + math.exp(-g))
    best = max(range(len(r)), key=lambda k: (r[k], -k))
    return g, [1 - repair] + [repair * x for x in r], best + 1 if g + math.log(r[best]) > 0 else 0


def read(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], priors: Sequence[float], null: bool
) -> tuple[Tensor, float]:
    """One attention head's read of one query, with or without the zero key and value; and the null's mass."""
    logits = [float(query @ key) / math.sqrt(len(query)) + prior for key, prior in zip(keys, priors, strict=True)]
    top = max([*logits, 0.0] if null else logits)
    weights = [math.exp(x - top) for x in logits]
    rest = math.exp(-top) if null else 0.0
    total = sum(weights) + rest
    out = torch.zeros(len(values[0]) if values else len(query), dtype=torch.float64)
    for weight, value in zip(weights, values, strict=True):
        out = out + weight / total * value
    return out, rest / total


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _clamp(x: float) -> float:
    return min(max(x, _LOWEST), -_LOWEST)


def _lse(x: Sequence[float]) -> float:
    top = max(x)
    return top if top == -math.inf else top + math.log(sum(math.exp(y - top) for y in x))


def _entropy(log_p: Sequence[float]) -> float:
    return -sum(math.exp(x) * max(x, _LOWEST) for x in log_p)


def scores(
    config: DRelayConfig,
    tensors: Mapping[str, Tensor],
    embedding: Tensor,
    ids: Sequence[Sequence[int]],
    log_probs: Tensor,
    hidden: Tensor,
    context: Tensor,
    history: Tensor,
    history_mask: Sequence[bool],
    anchor: int,
    chosen: Sequence[int],
    incoming: Sequence[Sequence[float]],
) -> list[list[float]]:
    """Outgoing scores ``[S][K]`` of one block along the tokens ``chosen`` (README, equations 1 to 12).

    Slot i sees ``chosen[:i]``, which need not be in the pool.
    """
    t = {name: tensor.double() for name, tensor in tensors.items()}
    slots, k, d = len(ids), len(ids[0]), config.width
    size = d // config.heads

    def times(name: str, x: Tensor) -> Tensor:
        y = t[f"{name}.weight"] @ x
        return y + t[f"{name}.bias"] if f"{name}.bias" in t else y

    def norm(name: str, x: Tensor) -> Tensor:
        y = (x - x.mean()) / torch.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)
        return y * t[f"{name}.weight"] + t[f"{name}.bias"]

    def attend(query: Tensor, keys: list[Tensor], values: list[Tensor], priors: list[list[float]], null: bool):
        parts = []
        for h in range(config.heads):
            cut = slice(h * size, (h + 1) * size)
            parts.append(read(query[cut], [x[cut] for x in keys], [x[cut] for x in values], priors[h], null)[0])
        return torch.cat(parts)

    E, h, c = embedding.double(), hidden.double(), context.double()
    every = range(config.heads)
    lp = [[float(x) for x in row] for row in log_probs]
    pi = [torch.tensor(row, dtype=torch.float64).softmax(0) for row in lp]
    e = [[times("slot_token", E[v]) for v in row] for row in ids]

    u = []
    for i in range(slots):
        mass = _lse(lp[i])
        stats = [
            lp[i][0], math.exp(mass), max(lp[i][1:]) - lp[i][0], _lse(lp[i][1:]) - lp[i][0],
            _entropy([x - mass for x in lp[i]]), math.exp(lp[i][0] - mass),
        ]  # fmt: skip
        x = times("slot_hidden", h[i]) + t["slot_embedding"][i]
        x = x + times("slot_stats", torch.tensor([_clamp(y) for y in stats], dtype=torch.float64))
        u.append(x + sum(pi[i][r] * e[i][r] for r in range(k)))
    for layer in range(config.slot_layers):
        name = f"slot_layers.{layer}"
        qkv = [times(f"{name}.qkv", norm(f"{name}.attention_norm", x)) for x in u]
        none = [[0.0] * slots for _ in every]
        mixed = [attend(y[:d], [x[d : 2 * d] for x in qkv], [x[2 * d :] for x in qkv], none, False) for y in qkv]
        u = [x + times(f"{name}.out", y) for x, y in zip(u, mixed, strict=True)]
        u = [x + times(f"{name}.down", _silu(times(f"{name}.up", norm(f"{name}.ffn_norm", x)))) for x in u]

    n = [[norm("candidate_norm", u[i] + times("candidate", e[i][r])) for r in range(k)] for i in range(slots)]
    nodes = [(j, r) for j in range(slots) for r in range(k)]
    qkv_of = {(j, r): times("read_qkv", n[j][r]) for j, r in nodes}
    keys, values = [qkv_of[x][d : 2 * d] for x in nodes], [qkv_of[x][2 * d :] for x in nodes]
    z, m = [], []
    for i in range(slots):
        lam = 1 / (1 + torch.exp(-times("fusion", torch.cat((h[i], u[i])))))
        priors = [[lp[j][r] + float(t["read_bias"][a, j - i + config.slots - 1]) for j, r in nodes] for a in every]
        m.append([lam * times("read_out", attend(qkv_of[i, r][:d], keys, values, priors, True)) for r in range(k)])
        z.append(u[i] + sum(pi[i][r] * m[i][r] for r in range(k)))

    rows = [row.double() for row, seen in zip(history, history_mask, strict=True) if seen]
    rows = rows[len(rows) - min(len(rows), config.history) :]
    past = [times("history_kv", row) for row in rows]
    none = [[0.0] * len(rows) for _ in every]

    def entry(state: Tensor, z_part: Tensor, token: int) -> Tensor:
        parts = (times("prefix_hidden", state), z_part, times("prefix_token", E[token]), times("anchor", c))
        return times("prefix_kv", torch.cat(parts))

    memory = [entry(c, torch.zeros(d, dtype=torch.float64), anchor)]
    out, last = [], anchor
    for i in range(slots):
        change, reads = [], []
        for r in range(k):
            query = times("prefix_query", n[i][r]) + times("prefix_last", times("query_token", E[last]))
            empty = [[0.0] * len(memory) for _ in every]
            p = attend(query, [x[:d] for x in memory], [x[d:] for x in memory], empty, False)
            reads.append(times("prefix_out", p))
            shared = times("residual_out", _silu(times("residual_in", torch.cat((h[i], z[i])))))
            asked = times("history_query", n[i][r])
            found = times("history_out", attend(asked, [x[:d] for x in past], [x[d:] for x in past], none, True))
            left = times("global_rank", m[i][r]) + times("history_rank", found) + times("prefix_rank", reads[r])
            change.append(float(E[ids[i][r]] @ shared + left @ times("candidate_rank", e[i][r])))
        q = [float(x) for x in incoming[i]]
        new = [a + b for a, b in zip(q, change, strict=True)]
        native = max(range(k), key=lambda r: (q[r], -r))
        others = [r for r in range(k) if r != native]
        best = max(others, key=lambda r: (new[r], -r))
        odds, mass, rest = _lse([q[r] for r in others]) - q[native], _lse(q), _lse([new[r] for r in others])
        stats = [
            odds, new[best] - rest, odds + new[best] - rest, math.exp(q[native] - mass), math.exp(q[best] - mass),
            change[best] - change[native], _entropy([new[r] - rest for r in others]),
            float(q[best] == max(q[r] for r in others)),
        ]  # fmt: skip
        about = torch.tensor([_clamp(x) for x in stats], dtype=torch.float64)
        inner = torch.cat((times("slot_hidden", h[i]), z[i], reads[native], reads[best], about))
        g = odds + float(times("gate_out", _silu(times("gate_in", inner))))
        out.append([q[r] if r == native else q[native] + g + new[r] - rest for r in range(k)])
        if i < len(chosen):
            memory.append(entry(h[i], z[i], chosen[i]))
            last = chosen[i]
    return out


def credit(p: Sequence[float], covered: Sequence[bool]) -> list[float]:
    """Eq. 5, written out."""
    survive = [c * (1 + x) / 2 for x, c in zip(p, covered, strict=True)]
    values = []
    for i in range(len(p)):
        ahead = sum(math.prod(survive[i + 1 : t + 1]) for t in range(i + 1, len(p)))
        values.append(covered[i] * math.prod(survive[:i]) * (1 + ahead))
    return values
