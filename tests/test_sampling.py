"""Counter-based random numbers, inverse-CDF draws and the processed target law."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from repairzoo.errors import InvalidInput
from repairzoo.sampling import Law, Stream, draw, shortlist, uniform

seeds = st.integers(0, 2**31)
int64 = st.integers(-(2**63), 2**63 - 1)
ALMOST_ONE = 1 - 2.0**-53


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(
    seed=seeds,
    size=st.integers(1, 900),
    count=st.integers(1, 4),
    levels=st.sampled_from([1, 2, 9, 10**6]),
    excluded=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_shortlist_holds_the_largest_and_the_first_of_equals(seed, size, count, levels, excluded):
    """Whatever ties and however much is minus infinity, also where the last block is not whole."""
    g = generator(seed)
    x = torch.randint(levels, (2, 3, size), generator=g).float()
    x = x.masked_fill(torch.rand(2, 3, size, generator=g) < excluded, float("-inf"))
    near = shortlist(x, count)
    assert (near is None) == (size // 64 < 4 * count)
    if near is not None:
        assert (near.diff(dim=-1) > 0).all() and near.shape[-1] < size
        found = x.gather(-1, near)
        assert torch.equal(found.topk(count).values, x.topk(count).values)
        assert torch.equal(near.gather(-1, found.argmax(-1, keepdim=True))[..., 0], x.argmax(-1))


# --- uniform ---------------------------------------------------------------------------------------------------------


def splitmix(word: int) -> int:
    """SplitMix64's finaliser in Python's unbounded integers, where a right shift of a positive number is logical."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


def uniform_by_hand(seed: int, counter: int, stream: int) -> float:
    gamma = 0x9E3779B97F4A7C15
    offset = stream * (0xBF58476D1CE4E5B9 - 2**64) % 2**62
    key = splitmix((splitmix((seed + gamma) % 2**64) + offset) % 2**64)
    word = splitmix(splitmix((key + counter * gamma) % 2**64) ^ key)
    return (word >> 11) / 2**53


@given(seed=int64, counter=int64, stream=st.sampled_from(Stream))
@settings(deadline=None, max_examples=200)
def test_uniform_equals_unbounded_integer_arithmetic(seed, counter, stream):
    """Wrapping products and logical shifts on signed words, over the whole int64 range."""
    u = uniform(torch.tensor([seed]), torch.tensor([counter]), stream)
    assert u.dtype == torch.float64
    assert u.item() == uniform_by_hand(seed, counter, stream)
    assert 0 <= u.item() < 1


@given(seed=seeds, batch=st.integers(1, 6))
@settings(deadline=None, max_examples=30)
def test_uniform_of_a_row_ignores_the_batch_around_it(seed, batch):
    g = generator(seed)
    row_seeds = torch.randint(-(2**62), 2**62, (batch,), generator=g)
    counter = torch.randint(0, 10_000, (batch, 5), generator=g)
    together = uniform(row_seeds, counter, Stream.DRAFT)
    for b in range(batch):
        assert torch.equal(together[b : b + 1], uniform(row_seeds[b : b + 1], counter[b : b + 1], Stream.DRAFT))
        # one number at a time, and in another shape, is the same number again
        assert torch.equal(together[b, 3:4], uniform(row_seeds[b : b + 1], counter[b, 3:4], Stream.DRAFT))
        deep = uniform(row_seeds[b : b + 1], counter[b].reshape(1, 5, 1), Stream.DRAFT)
        assert torch.equal(together[b], deep.flatten())


def chi_square_tail(counts: torch.Tensor) -> float:
    """Probability that equal cells scatter at least this much."""
    expected = counts.sum() / counts.numel()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((counts.numel() - 1) / 2.0).double(), statistic / 2).item()


def joint_tail(a: torch.Tensor, b: torch.Tensor, cells: int = 16) -> float:
    index = (a * cells).long() * cells + (b * cells).long()
    return chi_square_tail(torch.bincount(index.flatten(), minlength=cells * cells).double())


def test_uniform_pairs_are_independent():
    """vllm#54282: draft and residual noise from one stream biases the output. False alarm 1e-9 a pair, fixed input."""
    n = 1 << 16
    counter = torch.arange(n)[None]
    row = {s: uniform(torch.tensor([7]), counter, s)[0] for s in Stream}
    pairs = [(row[a], row[b]) for a in Stream for b in Stream if a < b]
    pairs += [(row[s][:-1], row[s][1:]) for s in Stream]  # neighbouring positions
    by_seed = uniform(torch.arange(n), torch.zeros(n, 1, dtype=torch.long), Stream.DRAFT)[:, 0]
    pairs += [(by_seed[:-1], by_seed[1:])]  # neighbouring seeds
    pairs += [(row[Stream.DRAFT], uniform(torch.tensor([8]), counter, Stream.DRAFT)[0])]
    pairs += [(row[a][1:], row[b][:-1]) for a in Stream for b in Stream if a != b]  # no stream is another one shifted
    for a, b in pairs:
        assert joint_tail(a, b) > 1e-9
    # the same test does see a shared stream, and a slight tilt
    assert joint_tail(row[Stream.DRAFT], row[Stream.DRAFT]) < 1e-9
    assert joint_tail(row[Stream.DRAFT], row[Stream.ACCEPT] ** 1.05) < 1e-9


def test_uniform_uses_all_53_bits():
    words = (uniform(torch.tensor([3]), torch.arange(4096)[None], Stream.VERIFY) * 2.0**53).long()
    ones = torch.stack([(words >> bit & 1).double().mean() for bit in range(53)])
    assert ((ones - 0.5).abs() < 6 * 0.5 / 64).all()  # six standard deviations of the mean of 4096 coins


# --- draw ------------------------------------------------------------------------------------------------------------


@given(
    weights=st.lists(st.integers(0, 4), min_size=1, max_size=7).filter(any),
    numerator=st.integers(0, 7),  # few enough that u often falls on a cumulative sum
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
@settings(deadline=None, max_examples=200)
def test_draw_inverts_the_exact_cdf(weights, numerator, dtype):
    """Against exact fractions; small integers and dyadic u leave no rounding to hide behind."""
    u = Fraction(numerator, 8)
    total, running, expected = sum(weights), 0, None
    for token, weight in enumerate(weights):
        running += weight
        if expected is None and running > u * total:
            expected = token
    got = draw(torch.tensor(weights, dtype=dtype), torch.tensor(float(u), dtype=torch.float64))
    assert got.dtype == torch.int64
    assert got.item() == expected


@given(seed=seeds, size=st.integers(1, 40))
@settings(deadline=None, max_examples=100)
def test_draw_never_returns_a_token_without_mass(seed, size):
    """Pitfall vllm#10198: at u = 0, at every cumulative sum, and just below 1."""
    g = generator(seed)
    probs = torch.rand(size, generator=g) * (torch.rand(size, generator=g) < 0.4)
    probs[torch.randint(size, (1,), generator=g)] += 1e-6
    probs = probs / probs.sum()
    edges = probs.double().cumsum(0) / probs.double().sum()
    u = torch.cat([torch.tensor([0.0, ALMOST_ONE], dtype=torch.float64), edges.clamp_max(ALMOST_ONE)])
    u = torch.cat([u, torch.nextafter(u, torch.zeros_like(u))])
    token = draw(probs.expand(len(u), size), u)
    assert (probs[token] > 0).all()
    massive = probs.nonzero().flatten()
    assert token[0] == massive[0] and token[1] == massive[-1]


def test_draw_falls_back_to_the_last_token_with_mass():
    """u a rounding above the last cumulative sum: a plain search would run off the row, into the padding."""
    assert draw(torch.tensor([0.25, 0.75, 0.0, 0.0]), torch.tensor(1.0)).item() == 1


# --- Law -------------------------------------------------------------------------------------------------------------


def by_transformers(logits, temperature, top_k, top_p, min_p):
    """The order of ``generate``: a filter is left out when it is off."""
    warpers = [TemperatureLogitsWarper(temperature)] if temperature != 1.0 else []
    if top_k is not None:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p is not None:
        warpers.append(MinPLogitsWarper(min_p))
    for warper in warpers:
        logits = warper(None, logits)
    return logits.softmax(-1)


@given(
    seed=seeds,
    temperature=st.sampled_from([0.05, 0.7, 1.0, 1.9, 30.0]),
    top_k=st.sampled_from([None, 1, 2, 5, 100]),
    top_p=st.sampled_from([None, 1e-6, 0.3, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([None, 0.0, 0.05, 0.3, 1.0]),
    ties=st.booleans(),
    double=st.booleans(),
)
@settings(deadline=None, max_examples=200)
def test_law_equals_transformers(seed, temperature, top_k, top_p, min_p, ties, double):
    """Bit for bit, with tied logits and excluded tokens too (pitfall: top-k / top-p tests of sglang, xllm#2279)."""
    g = generator(seed)
    logits = torch.randn(6, 12, generator=g) * 3
    if ties:
        logits = logits.round()
    logits[:, 4] = float("-inf")
    logits = logits.double() if double else logits
    p = Law(temperature, top_k, top_p, min_p).probs(logits)
    assert p.dtype == logits.dtype
    assert torch.equal(p, by_transformers(logits, temperature, top_k, top_p, min_p))
    assert torch.allclose(p.sum(-1), torch.ones_like(p[:, 0]))
    assert torch.equal(p, Law(temperature, top_k, top_p, min_p).probs(logits.reshape(2, 3, 12)).reshape(6, 12))


@given(seed=seeds, top_p=st.sampled_from([0.2, 0.5, 0.8]), top_k=st.integers(1, 6))
@settings(deadline=None, max_examples=50)
def test_law_filters_are_exactly_zero_and_minimal(seed, top_p, top_k):
    """Straight from the definitions: the k likeliest tokens; the smallest likeliest set of at least that mass."""
    logits = torch.randn(10, generator=generator(seed), dtype=torch.float64)
    full = logits.softmax(-1)
    assert int((Law(1.0, top_k=top_k).probs(logits) > 0).sum()) == top_k
    kept = Law(1.0, top_p=top_p).probs(logits) > 0
    assert full[kept].sum() >= top_p  # enough mass
    assert full[kept].sum() - full[kept].min() < top_p  # and no token too many
    assert full[kept].min() > full[~kept].max() if (~kept).any() else True
    assert torch.allclose(Law(1.0, top_p=top_p).probs(logits)[kept], full[kept] / full[kept].sum())


def test_law_at_temperature_zero_is_one_hot():
    """Pitfalls jaymody#9 and litgpt: greedy is a point mass, not a soft law; the first of equals, in every dtype."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [-5.0, -6.0, float("-inf"), -5.0]])
    expected = torch.tensor([[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        p = Law(0, top_k=3, top_p=0.1, min_p=0.9).probs(logits.to(dtype))
        assert torch.equal(p, expected.to(p.dtype))
        assert p.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert Law().greedy and not Law(0.1).greedy


@pytest.mark.parametrize("temperature", [1e-4, 1e-12, 1e-30])
def test_law_tends_to_the_argmax_without_overflow(temperature):
    logits = torch.tensor([[80.0, 80.001, -90.0], [-1e4, -2e4, -3e4]])
    p = Law(temperature, top_p=0.9, min_p=0.1).probs(logits)
    assert torch.allclose(p, Law(0.0).probs(logits), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 1e-40),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("temperature", "0.7"),
        ("temperature", None),
        ("temperature", True),
        ("top_k", 0),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("min_p", [0.1]),
    ],
)
def test_law_names_the_bad_argument(name, value):
    with pytest.raises(InvalidInput, match=f"^{name}="):
        Law(**{name: value})


def test_sampling_traces_without_a_host_read():
    seed, counter = torch.tensor([1, 2]), torch.arange(6).reshape(2, 3)
    logits = torch.randn(2, 3, 11)
    law = Law(0.8, top_k=7, top_p=0.9, min_p=0.01)

    def sample(seed, counter, logits):
        return draw(law.probs(logits), uniform(seed, counter, Stream.VERIFY)), Law().probs(logits)

    traced = make_fx(sample, tracing_mode="fake")(seed, counter, logits)
    for got, expected in zip(traced(seed, counter, logits), sample(seed, counter, logits), strict=True):
        assert torch.equal(got, expected)
