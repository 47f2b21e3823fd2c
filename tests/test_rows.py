"""What hetjax.rows does not report is sound; what models usually do is not reported; what mixes rows is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import hetjax
from hetjax.rows import Independent, Opaque, PerRows, RowDim, analyse, check

ROWS, OTHER = 8, 12
SEQ, DIM, VOCAB = 5, 4, 7
KEY = jax.random.key(0)


def make_batch(rows):
    x, t, y, m = jax.random.split(KEY, 4)
    return {
        "x": jax.random.normal(x, (rows, SEQ, DIM)),
        "tokens": jax.random.randint(t, (rows, SEQ), 0, VOCAB),
        "label": jax.random.randint(y, (rows,), 0, DIM),
        "mask": jax.random.bernoulli(m, 0.7, (rows, SEQ)).astype(jnp.float32),
    }


def make_images(rows):
    return jax.random.normal(KEY, (rows, 8, 8, 3))


PARAMS = {"embed": jax.random.normal(KEY, (VOCAB, DIM)), "w": jax.random.normal(KEY, (DIM, DIM))}


def report_of(fn, params=PARAMS, make=make_batch, *, rows=ROWS, other=OTHER):
    """The outputs of the trace, and the report."""
    traces = [jax.make_jaxpr(fn)(params, make(r)) for r in (rows, other or rows)]
    num_params, num_batch = (len(jax.tree.leaves(tree)) for tree in (params, make(rows)))
    input_rows = [None] * num_params + [RowDim(0)] * num_batch
    second = traces[1] if other else None
    report = analyse(traces[0], rows, input_rows, other=second, other_rows=other)
    return traces[0].jaxpr.outvars, report


def part(batch, start, stop):
    return jax.tree.map(lambda a: a[start:stop], batch)


def close(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) <= 1e-4 * (1 + np.linalg.norm(a))


def adds_up(fn, params=PARAMS, make=make_batch):
    """Whether totals of unequal parts add up (a pair), or a mean is the mean of equal parts (a scalar)."""
    whole, run = make(ROWS), jax.jit(fn)
    out = run(params, whole)
    if isinstance(out, tuple):
        parts = [run(params, part(whole, *at)) for at in ((0, 2), (2, ROWS))]
        return all(close(a, b + c) for a, b, c in zip(out, *parts, strict=True))
    parts = [run(params, part(whole, *at)) for at in ((0, ROWS // 2), (ROWS // 2, ROWS))]
    return close(out, sum(parts) / 2)


def logits_of(p, b):
    return jax.nn.silu(p["embed"][b["tokens"]] @ p["w"]) @ p["embed"].T


def nll_of(p, b):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(p, b), b["tokens"])


def masked(p, b):
    return (nll_of(p, b) * b["mask"]).sum(), b["mask"].sum()


def attention_bqhd(p, b):
    q = b["x"].reshape(-1, SEQ, 2, 2)
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q), where=jnp.tril(jnp.ones((SEQ, SEQ), bool)))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, q).mean()


def attention_bhqd(p, b):
    flat = b["x"].reshape(-1, DIM) @ p["w"]
    q = flat.reshape(-1, SEQ, 2, 2).transpose(0, 2, 1, 3)
    weights = jax.nn.softmax(q @ q.swapaxes(-1, -2))
    return ((weights @ q).transpose(0, 2, 1, 3).reshape(-1, DIM) @ p["w"]).mean()


def grouped_query(p, b):
    q = jnp.repeat(b["x"][:, :, None], 4, axis=2)
    k, v = (jnp.repeat(b["x"][:, :, None, :], 2, axis=2) for _ in range(2))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).mean()


def rotary(p, b):
    angle = jnp.arange(SEQ, dtype=jnp.float32)[:, None] * jnp.ones((1, DIM // 2))
    a, c = jnp.split(b["x"], 2, axis=-1)
    sin, cos = jnp.sin(angle)[None], jnp.cos(angle)[None]
    return jnp.concatenate([a * cos - c * sin, a * sin + c * cos], -1).mean()


def two_views(p, b):
    both = jnp.concatenate([b["x"], 2 * b["x"]]) @ p["w"]
    a, c = jnp.split(both, 2)
    return (a * jnp.cos(c)).mean()


def top_experts(p, b):
    gates, which = jax.lax.top_k(jax.nn.softmax(b["x"] @ p["w"]), 2)
    chosen = jax.nn.one_hot(which, DIM) * gates[..., None]
    return jnp.einsum("rske,rsd,ed->rsd", chosen, b["x"], p["w"]).mean()


def layers(p, b):
    stacked = jnp.stack([p["w"], p["w"] + 1])
    body = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
    return jax.lax.scan(body, b["x"], stacked)[0].mean()


def recurrent(p, b):
    xs = b["x"].swapaxes(0, 1)
    start = jnp.zeros((xs.shape[1], DIM))
    return jax.lax.scan(lambda h, x: (jnp.tanh(h @ p["w"] + x), h), start, xs)[1].mean()


def chunked(p, b):
    def step(total, x):
        return total + jnp.square(x @ p["w"]).sum(), None

    total = jax.lax.scan(step, jnp.zeros(()), b["x"].swapaxes(0, 1))[0]
    return total, jnp.float32(b["x"].size)


MIDDLE = make_batch(ROWS)["x"].mean()


@jax.custom_jvp
def relu(x):
    return jnp.maximum(x, 0.0)


relu.defjvp(lambda primals, tangents: (relu(*primals), tangents[0] * (primals[0] > 0)))


@jax.custom_vjp
def cube(x):
    return x**3


cube.defvjp(lambda x: (x**3, x), lambda x, ct: (3 * x**2 * ct,))

FINE = {
    "a mean over everything": lambda p, b: (b["x"] @ p["w"]).mean(),
    "a mean of examples": lambda p, b: jnp.square(b["x"]).sum((1, 2)).mean(),
    "examples weighted by 1 / rows": lambda p, b: (b["x"].sum((1, 2)) / b["x"].shape[0]).sum(),
    "cross entropy with masked sums": masked,
    "total and number of tokens": lambda p, b: (nll_of(p, b).sum(), jnp.float32(b["tokens"].size)),
    "masked by where": lambda p, b: (jnp.where(b["mask"] > 0, nll_of(p, b), 0.0).sum(), b["mask"].sum()),
    "a mean and a penalty on parameters": lambda p, b: b["x"].mean() + 0.1 * jnp.square(p["w"]).sum(),
    "a penalty times the weight": lambda p, b: (
        masked(p, b)[0] + 0.1 * jnp.square(p["w"]).sum() * masked(p, b)[1],
        masked(p, b)[1],
    ),
    "one_hot": lambda p, b: (
        -(jax.nn.one_hot(b["label"], DIM) * jax.nn.log_softmax(b["x"][:, 0])).sum(-1).mean()
    ),
    "take_along_axis": lambda p, b: jnp.take_along_axis(b["x"][:, 0], b["label"][:, None], -1).mean(),
    "logits[arange(rows), labels]": lambda p, b: jax.nn.log_softmax(b["x"][:, 0] @ p["w"])[
        jnp.arange(b["label"].shape[0]), b["label"]
    ].mean(),
    "logits[arange(rows * seq), labels]": lambda p, b: jax.nn.log_softmax(logits_of(p, b).reshape(-1, VOCAB))[
        jnp.arange(b["tokens"].size), b["tokens"].reshape(-1)
    ].mean(),
    "writes at [arange(rows), labels]": lambda p, b: (
        jnp.zeros((b["label"].shape[0], DIM)).at[jnp.arange(b["label"].shape[0]), b["label"]].set(1.0)
        * b["x"][:, 0]
    ).mean(),
    "attention in bqhd": attention_bqhd,
    "attention in bhqd on flat rows": attention_bhqd,
    "grouped queries": grouped_query,
    "rotary": rotary,
    "two views concatenated and split": two_views,
    "top experts": top_experts,
    "scan over layers with remat": layers,
    "scan over time": recurrent,
    "sums over chunks of the sequence": chunked,
    "custom_jvp": lambda p, b: relu(b["x"] @ p["w"]).mean(),
    "custom_vjp": lambda p, b: cube(b["x"] @ p["w"]).mean(),
    "jit": lambda p, b: jax.jit(lambda x: jnp.tanh(x).mean())(b["x"]),
    "activations": lambda p, b: sum(
        f(b["x"]).mean() for f in (jax.nn.gelu, jax.nn.relu, jax.nn.silu, jax.nn.elu)
    ),
    "vmap over examples": lambda p, b: jax.vmap(lambda x, y: (x @ p["w"])[:, y].max())(
        b["x"], b["label"]
    ).mean(),
    "map over examples": lambda p, b: jax.lax.map(lambda x: jnp.sort(x @ p["w"]).max(), b["x"]).mean(),
    "cond on a parameter": lambda p, b: jax.lax.cond(p["w"][0, 0] > 0, jnp.sin, jnp.cos, b["x"]).mean(),
    "a loop of known length": lambda p, b: jax.lax.fori_loop(
        0, 3, lambda i, x: x * jnp.sin(x), b["x"]
    ).mean(),
    "sorts, cumsums, argmax over features": lambda p, b: (
        jnp.sort(b["x"], -1)[..., 0]
        + jnp.cumsum(b["x"], 1)[..., 0]
        + b["x"][..., 0] * b["x"].argmax(-1).astype(jnp.float32)
    ).mean(),
    "fft and cholesky of each row": lambda p, b: (
        jnp.abs(jnp.fft.fft(b["x"])).mean()
        + jnp.linalg.cholesky(jnp.einsum("rsi,rsj->rij", b["x"], b["x"]) + jnp.eye(DIM)[None]).mean()
    ),
    "a covariance": lambda p, b: (jnp.einsum("rsi,rsj->ij", b["x"], b["x"]) * p["w"]).sum() / b["x"].shape[0],
    "counts of tokens": lambda p, b: (
        (jnp.zeros(VOCAB).at[b["tokens"]].add(1.0) * p["embed"][:, 0]).sum(),
        jnp.float32(b["tokens"].size),
    ),
    "segment sums": lambda p, b: (
        (jax.ops.segment_sum(b["x"].reshape(-1, DIM), b["tokens"].reshape(-1), VOCAB) * p["embed"]).sum(),
        jnp.float32(b["tokens"].size),
    ),
    "a gradient within": lambda p, b: jnp.square(
        jax.grad(lambda x: jnp.tanh(x @ p["w"]).sum())(b["x"])
    ).mean(),
    "average pooling": lambda p, b: (
        jax.lax.reduce_window(b["x"], 0.0, jax.lax.add, (1, 2, 1), (1, 1, 1), "VALID").mean() / 2
    ),
    "marks": lambda p, b: hetjax.constrain(hetjax.cut(b["x"]), "batch", None, "embed").mean(),
    "padding, slices and updates of the sequence": lambda p, b: (
        jnp.pad(b["x"], ((0, 0), (1, 0), (0, 0)))[:, :-1]
        * jax.lax.dynamic_update_slice(b["x"], b["x"][:, :1], (0, 2, 0))
    ).mean(),
    "a constant": lambda p, b: jnp.square(p["w"]).sum(),
    "zero and a weight": lambda p, b: (jnp.zeros(()), b["mask"].sum()),
}

MIXING = {
    "total / weight": (lambda p, b: masked(p, b)[0] / masked(p, b)[1], "divides by a value that is summed"),
    "total / max(weight, 1)": (
        lambda p, b: masked(p, b)[0] / jnp.maximum(masked(p, b)[1], 1.0),
        "non-linear function to a value that is summed",
    ),
    "Mean.value": (lambda p, b: hetjax.Mean(*masked(p, b)).value, "non-linear function"),
    "contrastive": (
        lambda p, b: -jnp.diag(jax.nn.log_softmax(b["x"][:, 0] @ b["x"][:, 1].T)).mean(),
        "every row with every other row",
    ),
    "pairs by broadcasting": (
        lambda p, b: jnp.square(b["x"][:, None, 0] - b["x"][None, :, 0]).mean(),
        "rows with other rows",
    ),
    "max over the batch": (lambda p, b: (b["x"] @ p["w"]).max(), "takes the max over the rows"),
    "norm over the batch": (lambda p, b: jnp.linalg.norm(b["x"]), "non-linear function"),
    "exp of the mean": (lambda p, b: jnp.exp(b["x"].mean()), "non-linear function"),
    "sort over the rows": (lambda p, b: (jnp.sort(b["x"], 0) * b["x"]).mean(), "sorts over the rows"),
    "cumsum over the rows": (lambda p, b: jnp.sin(jnp.cumsum(b["x"], 0)).mean(), "accumulates over the rows"),
    "softmax over the rows": (lambda p, b: (jax.nn.softmax(b["x"], 0) * b["x"]).mean(), "max over the rows"),
    "subtracting the batch mean": (
        lambda p, b: jnp.square(b["x"] - b["x"].mean(0, keepdims=True)).mean(),
        "combines each row with a value that was computed from all rows",
    ),
    "std over the batch": (lambda p, b: jnp.std(b["x"], 0).mean(), "computed from all rows"),
    "product of two batch means": (
        lambda p, b: (b["x"].mean((0, 1)) * jnp.square(b["x"]).mean((0, 1))).sum(),
        "multiplies values that are each summed",
    ),
    "square of a batch mean": (lambda p, b: jnp.square(b["x"].mean(0)).sum(), "multiplies values"),
    "reversed rows": (lambda p, b: (b["x"] * b["x"][::-1]).mean(), "reverses the rows"),
    "rolled rows": (lambda p, b: (b["x"] * jnp.roll(b["x"], 1, 0)).mean(), "takes some of the rows"),
    "halves of the batch": (
        lambda p, b: (lambda a, c: (a * c).mean())(*jnp.split(b["x"] @ p["w"], 2)),
        "takes some of the rows",
    ),
    "rows folded into features": (
        lambda p, b: jnp.square(b["x"].reshape(2, -1, SEQ, DIM).sum(0)).mean(),
        "reshapes the rows into parts",
    ),
    "shuffled rows": (
        lambda p, b: (b["x"] * b["x"][jax.random.permutation(KEY, b["x"].shape[0])]).mean(),
        "rows",
    ),
    "rows looked up by data": (lambda p, b: (b["x"][b["label"]] * b["x"]).mean(), "rows"),
    "the first row for all": (lambda p, b: (b["x"] * b["x"][:1]).mean(), "takes some of the rows"),
    "weights by place in the batch": (
        lambda p, b: (b["x"] * jnp.arange(b["x"].shape[0], dtype=jnp.float32)[:, None, None]).mean(),
        "place in the batch",
    ),
    "divided by rows - 1": (
        lambda p, b: b["x"].sum() / (b["x"].shape[0] - 1),
        "the number of rows for more than",
    ),
    "a scan over the rows": (
        lambda p, b: jax.lax.scan(lambda h, x: (jnp.tanh(h + x), h), jnp.zeros((SEQ, DIM)), b["x"])[1].mean(),
        "carries a value from row to row",
    ),
    "a loop until all rows are done": (
        lambda p, b: jax.lax.while_loop(lambda x: jnp.abs(x).sum() > 20, lambda x: x * 0.5, b["x"]).mean(),
        "the number of iterations depends on the rows",
    ),
    "a branch by the batch": (
        lambda p, b: jax.lax.cond(b["x"].mean() > MIDDLE, jnp.sin, jnp.cos, b["x"]).mean(),
        "non-linear function",
    ),
    "a sum and a penalty on parameters": (
        lambda p, b: (b["x"].sum() + jnp.square(p["w"]).sum(), jnp.float32(b["x"].size)),
        "some grow with the number of rows and others don't",
    ),
    "a triangle over the rows": (
        lambda p, b: jnp.einsum("rq,qsd->rsd", jnp.tril(jnp.ones((b["x"].shape[0],) * 2)), b["x"]).mean(),
        "place in the batch",
    ),
    "as many iterations as rows": (
        lambda p, b: jax.lax.fori_loop(0, b["x"].shape[0], lambda i, x: x * 0.5, b["x"]).mean(),
        "carries a value from row to row",
    ),
    "a loop that adds its counter to a sum": (
        lambda p, b: (
            jax.lax.fori_loop(0, 3, lambda i, total: total + jnp.float32(i), b["x"].sum()),
            jnp.float32(b["x"].size),
        ),
        "some grow with the number of rows and others don't",
    ),
    "capacity of experts": (
        lambda p, b: (jnp.cumsum(jax.nn.one_hot(b["label"], DIM), 0) * b["x"][:, 0]).mean(),
        "accumulates over the rows",
    ),
}


@pytest.mark.parametrize("name", FINE)
def test_what_models_do_is_not_reported_and_adds_up(name):
    outs, report = report_of(FINE[name])
    assert not report.mixtures and report.counted
    check(report, *outs)
    assert adds_up(FINE[name])


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_rows_is_reported_and_does_not_add_up(name):
    fn, why = MIXING[name]
    outs, report = report_of(fn)
    with pytest.raises(hetjax.UserError, match=f'(?s)mixes the rows of the batch.*{why}.*rows="whole"'):
        check(report, *outs)
    assert not adds_up(fn)


@pytest.mark.parametrize("name", [n for n in FINE if "arange" not in n])
def test_one_trace_is_enough_not_to_report_what_models_do(name):
    outs, report = report_of(FINE[name], other=None)
    assert not report.mixtures and not report.counted
    check(report, *outs)


LAYOUTS = {
    "as it is": (lambda x: x, RowDim(0)),
    "flat tokens": (lambda x: x.reshape(-1, DIM), RowDim(0, 1, SEQ)),
    "flat": (lambda x: x.reshape(-1), RowDim(0, 1, SEQ * DIM)),
    "and back": (lambda x: x.reshape(-1, DIM).reshape(-1, SEQ, 2, 2).transpose(0, 2, 1, 3), RowDim(0)),
    "features first": (lambda x: x.transpose(2, 0, 1), RowDim(1)),
    "tokens last": (lambda x: x.transpose(2, 0, 1).reshape(DIM, -1), RowDim(1, 1, SEQ)),
    "sequence before rows": (lambda x: x.swapaxes(0, 1).reshape(-1, DIM), RowDim(0, SEQ, 1)),
    "heads into rows": (
        lambda x: x.reshape(-1, SEQ, 2, 2).transpose(2, 0, 1, 3).reshape(-1, SEQ, 2),
        RowDim(0, 2),
    ),
    "repeated rows": (lambda x: jnp.repeat(x, 3, axis=0), RowDim(0, 1, 3)),
    "tiled rows": (lambda x: jnp.tile(x, (3, 1, 1)), RowDim(0, 3)),
    "one copy of tiled rows": (lambda x: jnp.tile(x, (3, 1, 1))[x.shape[0] : 2 * x.shape[0]], RowDim(0)),
    "stacked": (lambda x: jnp.stack([x, x]), RowDim(1)),
    "zeros": (lambda x: jnp.zeros((x.shape[0], 3)), RowDim(0)),
    "a product": (lambda x: jnp.einsum("rsd,rtd->srt", x, x), RowDim(1)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_rows_are_followed_through_reshapes(name):
    fn, expected = LAYOUTS[name]
    x = make_batch(ROWS)["x"]
    for rows, other in ((ROWS, OTHER), (SEQ, DIM)):  # rows that equal other sizes, too
        (out,), report = report_of(
            lambda p, x: fn(x), make=lambda rows: make_batch(rows)["x"], rows=rows, other=other
        )
        assert report.of(out) == expected and not report.mixtures
    if expected.outer == 1:
        parts = [fn(x[:2]), fn(x[2:])]
        np.testing.assert_array_equal(fn(x), np.concatenate(parts, expected.dim))


def test_values_without_rows_say_how_they_grow():
    def fn(p, b):
        rows = b["x"].shape[0]
        return b["x"].sum(), b["x"].mean(0), p["w"] * rows, p["w"] / rows, p["w"], jnp.float32(rows) + p["w"]

    outs, report = report_of(fn)
    expected = [PerRows(True, 1), PerRows(True, 0), *map(Independent, (1, -1, 0, None))]
    assert [report.of(out) for out in outs] == expected
    assert [report.growth(out) for out in outs] == [1, 0, 1, -1, 0, None]
    assert [report.depends_on_batch(out) for out in outs] == [True, True, False, False, False, False]
    _, single = report_of(fn, other=None)
    assert not single.counted and not single.mixtures


def test_a_literal_output_is_a_constant():
    outs, report = report_of(lambda p, b: (b["x"].sum(), float(b["x"].shape[0]), 2.0))
    assert [report.of(out) for out in outs[1:]] == [Independent(1), Independent(0)]


def test_values_after_a_mixture_keep_their_layout_and_name_their_causes():
    def fn(p, b):
        centred = b["x"] - b["x"].mean(0, keepdims=True)
        return centred, b["x"] * 2.0, centred.reshape(-1, DIM), jnp.sort(b["x"].reshape(-1))

    outs, report = report_of(fn)
    assert [report.of(out) for out in outs[:3]] == [RowDim(0), RowDim(0), RowDim(0, 1, SEQ)]
    assert [len(report.causes(out)) for out in outs] == [1, 0, 1, 1]
    assert "tests/test_rows.py" in report.causes(outs[0])[0].where
    (out,), report = report_of(lambda p, b: b["x"].reshape(2, -1, SEQ, DIM).sum(0))
    assert report.of(out) == Opaque()


def test_only_mixtures_that_reach_the_loss_stand_in_its_way():
    outs, report = report_of(lambda p, b: (b["x"].mean(), jnp.exp(b["x"].mean())))
    check(report, outs[0])
    with pytest.raises(hetjax.UserError, match="The metric 'perplexity' mixes the rows"):
        check(report, outs[1], what="The metric 'perplexity'")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.RMSNorm()(nn.LayerNorm()(nn.gelu(nn.Dense(DIM)(x))))
        mask = nn.make_causal_mask(x[..., 0])
        attend: Any = nn.MultiHeadDotProductAttention(2)
        return x + attend(x, x, mask=mask)


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        body = nn.scan(
            nn.remat(lambda block, x, _: (block(x), None)),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        return body(Block(), x, None)[0]


class Convolutions(nn.Module):
    norm: str = "group"

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3))(x)
        norm = nn.GroupNorm(2) if self.norm == "group" else nn.BatchNorm(use_running_average=False)
        x = nn.max_pool(nn.relu(norm(x)), (2, 2), (2, 2))
        x = nn.ConvTranspose(4, (2, 2))(x)
        return nn.Dense(5)(x.reshape(x.shape[0], -1))


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.RNN(nn.LSTMCell(6))(x)


def linen_loss(module, make, **kwargs):
    def fn(variables, batch):
        out = module.apply(variables, batch, **kwargs)
        return jnp.square(out[0] if kwargs else out).mean()

    return fn, jax.jit(module.init)(KEY, make(2))


def make_x(rows):
    return make_batch(rows)["x"]


@pytest.mark.parametrize(
    "module, make",
    [(Block(), make_x), (Scanned(), make_x), (Recurrent(), make_x), (Convolutions(), make_images)],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_linen_layers_are_not_reported(module, make):
    fn, variables = linen_loss(module, make)
    outs, report = report_of(fn, variables, make)
    assert not report.mixtures
    check(report, *outs)
    assert adds_up(fn, variables, make)


class Stack(nnx.Module):
    def __init__(self, norm, rngs):
        self.inner = nnx.Linear(DIM, DIM, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, DIM, decode=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.norm = norm

    def __call__(self, x):
        return self.norm(self.dropout(self.attention(self.inner(x))))


def nnx_loss(norm):
    graph, params, rest = nnx.split(Stack(norm, nnx.Rngs(0)), nnx.Param, ...)
    return lambda params, x: jnp.square(nnx.merge(graph, params, rest, copy=True)(x)).mean(), params


def test_nnx_layers_are_not_reported_and_dropout_is_told_apart():
    fn, params = nnx_loss(nnx.LayerNorm(DIM, rngs=nnx.Rngs(0)))
    outs, report = report_of(fn, params, make_x)
    assert not report.mixtures
    check(report, *outs)
    ((_, row),) = report.random_rows
    assert row == RowDim(0)


def test_nnx_scan_over_layers_is_not_reported():
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(key):
        return nnx.Linear(DIM, DIM, rngs=nnx.Rngs(key))

    graph, params = nnx.split(create(jax.random.split(KEY, 3)))

    def fn(params, x):
        body = nnx.scan(lambda x, layer: nnx.relu(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return body(x, nnx.merge(graph, params)).mean()

    outs, report = report_of(fn, params, make_x)
    assert not report.mixtures
    check(report, *outs)
    assert adds_up(fn, params, make_x)


def test_batch_norm_in_training_is_reported_by_its_name():
    fn, params = nnx_loss(nnx.BatchNorm(DIM, rngs=nnx.Rngs(0)))
    outs, report = report_of(fn, params, make_x)
    with pytest.raises(
        hetjax.UserError, match=r"(?s)tests/test_rows.py:\d+ in Stack.__call__ \(BatchNorm\).*GroupNorm"
    ):
        check(report, *outs)
    fn, variables = linen_loss(Convolutions("batch"), make_images, mutable=["batch_stats"])
    outs, report = report_of(fn, variables, make_images)
    with pytest.raises(hetjax.UserError, match=r"in Convolutions.__call__ \(BatchNorm\)"):
        check(report, *outs)
    assert not adds_up(fn, variables, make_images)


def test_batch_norm_in_evaluation_is_not_reported():
    norm: Any = nn.BatchNorm(use_running_average=True)
    variables = norm.init(KEY, make_x(2))
    outs, report = report_of(lambda v, x: norm.apply(v, x).mean(), variables, make_x)
    check(report, *outs)


def test_random_values_in_the_shape_of_the_rows_are_listed():
    def fn(p, b):
        noise = jax.random.normal(KEY, (b["x"].shape[0], SEQ, 1))
        return (b["x"] * noise + jax.random.normal(KEY, (1, SEQ, DIM))).mean()

    outs, report = report_of(fn)
    check(report, *outs)
    assert [row for _, row in report.random_rows] == [RowDim(0)]
    _, report = report_of(lambda p, b: (b["x"] * jax.random.normal(KEY, (1, SEQ, DIM))).mean())
    assert not report.random_rows


def test_traces_that_are_other_programs_fall_back_to_one():
    def fn(p, b):
        return sum(jnp.sin(x).sum() for x in b["x"]) if b["x"].shape[0] < 10 else jnp.sin(b["x"]).sum()

    outs, report = report_of(fn)
    assert "8 and 12 rows are different programs" in str(report.misaligned)
    assert not report.counted
    with pytest.raises(hetjax.UserError, match="takes single rows out of the batch|takes some of the rows"):
        check(report, *outs)


def test_a_primitive_without_a_rule_may_mix():
    def fn(p, b):
        shape = jax.ShapeDtypeStruct(b["x"].shape, b["x"].dtype)
        return jax.pure_callback(lambda x: x, shape, b["x"]).mean()

    outs, report = report_of(fn)
    assert [m.known for m in report.mixtures] == [False]
    with pytest.raises(hetjax.UserError, match="(?s)may mix the rows.*does not know how 'pure_callback'"):
        check(report, *outs)


@pytest.mark.parametrize(
    "fn, why",
    [
        (lambda p, b: b["x"].sum(), "a plain scalar, which hetjax reads as a mean .* is a sum over them"),
        (lambda p, b: b["x"].sum() / b["x"].shape[0] ** 2, "changes with their number in another way"),
        (lambda p, b: (b["x"].mean(), b["mask"].sum()), "The loss's total does not grow with the rows"),
        (lambda p, b: (b["x"].sum(), 1.0), "The loss's weight does not grow with the rows"),
        (
            lambda p, b: (b["x"].sum() * b["x"].size, 1.0),
            "The loss's total does not grow as the number of rows",
        ),
        (lambda p, b: b["x"][:, 0, 0], "The loss is not reduced over the rows"),
    ],
)
def test_values_that_do_not_add_up_are_refused(fn, why):
    outs, report = report_of(fn)
    assert not report.mixtures
    with pytest.raises(hetjax.UserError, match=why):
        check(report, *outs)


def test_inputs_are_checked():
    jaxpr = jax.make_jaxpr(lambda x: x)(jnp.ones((6, 2)))
    with pytest.raises(AssertionError, match="at least 2 rows, not 1"):
        analyse(jaxpr, 1, [RowDim(0)])
    with pytest.raises(AssertionError, match="RowDim"):
        analyse(jaxpr, 5, [RowDim(0)])
    with pytest.raises(AssertionError, match="both of other and other_rows"):
        analyse(jaxpr, 6, [RowDim(0)], other=jaxpr)
    with pytest.raises(AssertionError, match="not a variable"):
        analyse(jaxpr, 6, [RowDim(0)]).of(object())


STEPS = [
    lambda x, p: jnp.tanh(x),
    lambda x, p: x * 0.5 + 1.0,
    lambda x, p: x.sum(-1, keepdims=True) + jnp.zeros_like(x),
    lambda x, p: x - x.mean(0, keepdims=True),
    lambda x, p: x - x.mean(1, keepdims=True),
    lambda x, p: x.swapaxes(0, 1),
    lambda x, p: x.reshape(x.shape[1], x.shape[0], x.shape[2]),
    lambda x, p: x.reshape(-1, 2, x.shape[1]) if x.shape[2] == 2 else x.reshape(x.shape[0], -1, 2),
    lambda x, p: x.reshape(-1, 1, x.shape[-1]),
    lambda x, p: x.transpose(2, 0, 1),
    lambda x, p: jnp.concatenate([x, jnp.cos(x)], 0),
    lambda x, p: jnp.concatenate([x, jnp.cos(x)], 1),
    lambda x, p: x[: x.shape[0] // 2] if x.shape[0] > 1 else x,
    lambda x, p: x[:, : x.shape[1] // 2] if x.shape[1] > 1 else x,
    lambda x, p: jnp.cumsum(x, 0),
    lambda x, p: jnp.cumsum(x, 1),
    lambda x, p: jnp.sort(x, 0),
    lambda x, p: jnp.sort(x, -1),
    lambda x, p: jnp.flip(x, 1),
    lambda x, p: jnp.einsum("abc,abd->adc", x, x),
    lambda x, p: jnp.einsum("abc,dbc->adc", x, x),
    lambda x, p: jnp.einsum("abc,cd->abd", x, jnp.ones((x.shape[2], 2))),
    lambda x, p: jnp.einsum("abc,ad->dbc", x, jnp.ones((x.shape[0], 2))),
    lambda x, p: x / x.shape[0],
    lambda x, p: x * x.shape[1],
    lambda x, p: x + jnp.arange(x.shape[0], dtype=jnp.float32)[:, None, None],
    lambda x, p: x * jnp.arange(x.shape[1], dtype=jnp.float32)[None, :, None],
    lambda x, p: jnp.where(x > 0, x, 0.0),
    lambda x, p: jnp.repeat(x, 2, axis=0),
    lambda x, p: jnp.pad(x, ((0, 0), (0, 1), (0, 0))),
    lambda x, p: jnp.maximum(x.max(1, keepdims=True), x),
    lambda x, p: jax.lax.scan(lambda h, y: (h * 0.5 + y, h), jnp.zeros(x.shape[1:]), x)[1],
    lambda x, p: jax.lax.map(jnp.sin, x),
    lambda x, p: x.sum(0, keepdims=True),
    lambda x, p: x[jnp.arange(x.shape[0]), jnp.argmax(x[:, :, 0], 1)][:, None],
]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, len(STEPS) - 1), min_size=1, max_size=6))
def test_what_is_not_reported_is_sound(steps):
    def run(p, x):
        for step in steps:
            x = STEPS[step](x, p)
        return x, x.sum()

    def make(rows):
        return 1.0 + 0.1 * jax.random.normal(KEY, (12, 2, 3))[:rows]

    try:
        (out, total), report = report_of(run, make=make, rows=4, other=6)
        whole, parts = make(4), [make(4)[:2], make(4)[2:]]
        results = [run(PARAMS, x) for x in (whole, *parts)]
    except (TypeError, ValueError):  # shapes that the step can't take
        return
    value = report.of(out)
    kept = report.growth(out) == 0 and not report.causes(out)
    if kept and isinstance(value, RowDim) and value.outer == 1:
        assert close(results[0][0], np.concatenate([r[0] for r in results[1:]], value.dim))
    value = report.of(total)
    if not report.causes(total) and report.counted:
        assert isinstance(value, PerRows | Independent)
        if value.growth is not None and isinstance(value, PerRows):
            scale = 2.0 ** (value.growth - 1)
            assert close(results[0][1], scale * (results[1][1] + results[2][1]))
