"""What hetjax.rows does not report is sound; what models usually do is not reported; what mixes rows is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import hetjax
from hetjax.rows import Independent, Opaque, PerRows, RowDim, analyse, check
from tests.row_programs import DIM, FINE, KEY, MIXING, PARAMS, ROWS, SEQ, make_batch

OTHER = 12


def make_images(rows):
    return jax.random.normal(KEY, (rows, 8, 8, 3))


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


@pytest.mark.smoke
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
