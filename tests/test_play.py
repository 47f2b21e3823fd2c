"""Passes over batches of other sizes, dead code, other parameters in evaluation, values divided over tp."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax import jaxprs
from tests import plans

BATCH = {"x": np.random.default_rng(0).standard_normal((8, 4), dtype=np.float32)}


def init_fn(key: jax.Array) -> dict[str, jax.Array]:
    shapes = {"a": (4, 4), "b": (4, 4), "c": (4, 4), "scale": ()}
    return {n: jax.random.normal(jax.random.fold_in(key, i), s) for i, (n, s) in enumerate(shapes.items())}


def loss_fn(params: Any, batch: Any) -> hetjax.Mean:
    h = hetjax.cut(jnp.tanh(batch["x"] @ params["a"]))
    h = hetjax.cut(jnp.tanh(h @ params["b"]))
    return hetjax.Mean(jnp.sum((h @ params["c"]) ** 2), jnp.float32(h.shape[0]))


def three_groups(loss: Any, **options: Any) -> hetjax.Trainer:
    program = hetjax.trace(loss, init_fn, plans.spec_of(BATCH), **options)
    plan = plans.plan_of(program, plans.cluster_of([1, 1, 1]), [1, 2], [0, 1, 2], microbatches=2)
    return hetjax.Trainer(program, plan, optax.sgd(0.1))


@pytest.mark.parametrize("rows", [4, 8, 12, 16])
def test_evaluation_takes_every_row_of_a_batch_of_any_size(rows: int) -> None:
    trainer = three_groups(loss_fn)
    state = trainer.init(seed=0)
    batch = {"x": np.random.default_rng(1).standard_normal((rows, 4), dtype=np.float32)}
    found = trainer.evaluate(state, batch)
    assert found.weight("loss") == rows
    assert np.isclose(found["loss"], loss_fn(trainer.params(state), batch).value, rtol=1e-5)


def test_what_is_computed_and_not_used_reads_nothing() -> None:
    def loss(params: Any, batch: Any) -> hetjax.Mean:
        h = hetjax.cut(jnp.tanh(batch["x"] @ params["a"]))
        g = hetjax.cut(jnp.tanh(h @ params["b"]))
        jnp.mean(h * g)
        return hetjax.Mean(jnp.sum((g @ params["c"]) ** 2), jnp.float32(h.shape[0]))

    trainer = three_groups(loss)
    assert [v.consumers for v in trainer.program.main.values] == [(1,), (2,)]
    state = trainer.init(seed=0)
    value, gradients = trainer.loss_and_grads(state, BATCH)
    expected = jax.value_and_grad(lambda p: loss(p, BATCH).value)(trainer.params(state))
    assert np.isclose(value, expected[0], rtol=1e-5) and plans.distance(gradients, expected[1]) < 1e-5


def test_evaluation_may_read_parameters_that_training_does_not() -> None:
    def eval_loss(params: Any, batch: Any) -> hetjax.Mean:
        mean = loss_fn(params, batch)
        h = jnp.tanh(batch["x"] @ params["a"])
        return hetjax.Mean(mean.total * params["scale"], jnp.float32(h.shape[0]))

    trainer = three_groups(loss_fn, eval_loss_fn=eval_loss)
    state = trainer.init(seed=0)
    expected = eval_loss(trainer.params(state), BATCH).value
    assert np.isclose(trainer.evaluate(state, BATCH)["loss"], expected, rtol=1e-5)
    trainer.step(state, BATCH)


class Wide(nn.Module):
    """Cut where the value is divided over tp."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = nn.initializers.normal(0.5)
        up = nn.Dense(8, kernel_init=nn.with_logical_partitioning(kernel, ("embed", "mlp")), name="up")
        down = nn.Dense(4, kernel_init=nn.with_logical_partitioning(kernel, ("mlp", "embed")), name="down")
        return down(hetjax.cut(jnp.tanh(hetjax.constrain(up(x), "batch", "mlp"))))


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}])
@pytest.mark.parametrize("middle", [8, 4, 2])
def test_a_value_divided_over_tp_crosses_to_any_rows(axes: dict[str, Any], middle: int) -> None:
    def loss(params: Any, batch: Any) -> hetjax.Mean:
        out: Any = Wide().apply(params, batch["x"])
        return hetjax.Mean(jnp.sum(out**2), jnp.float32(out.shape[0]))

    program = hetjax.trace(loss, lambda key: Wide().init(key, jnp.zeros((1, 4))), plans.spec_of(BATCH))
    readers = [plans.member(1, 0, middle, tp=2)]
    readers += [plans.member(2, middle, 8, dp=2)] if middle < 8 else []
    plan = plans.plan_of(
        program,
        plans.cluster_of([4, 2, 2]),
        [1],
        [[plans.member(0, 0, 8, **axes)], readers],
    )
    trainer = hetjax.Trainer(program, plan, optax.sgd(0.1))
    state = trainer.init(seed=0)
    value, gradients = trainer.loss_and_grads(state, BATCH)
    expected = jax.value_and_grad(lambda p: loss(p, BATCH).value)(trainer.params(state))
    assert np.isclose(value, expected[0], rtol=1e-5) and plans.distance(gradients, expected[1]) < 1e-5


def callback_key(function: Any) -> str:
    spec = jax.ShapeDtypeStruct((2,), np.float32)
    return jaxprs.canonical_key(jax.make_jaxpr(lambda x: jax.pure_callback(function, spec, x))(spec))


def test_keys_tell_keyword_defaults_and_tables_of_callbacks_apart() -> None:
    def by_default(factor: float) -> Any:
        def callback(x: Any, *, factor: float = factor) -> Any:
            return x * factor

        return callback

    def by_table(factor: float) -> Any:
        table = {"factors": np.where(np.arange(5000) == 2500, factor, 0.0)}
        return lambda x: x * table["factors"][2500]

    for make in (by_default, by_table):
        functions = make(1.0), make(2.0), make(1.0)
        keys = [callback_key(f) for f in functions]
        assert keys[0] != keys[1] and keys[0] == keys[2]


def test_a_key_that_an_inner_function_holds_has_a_digest() -> None:
    def key_of(seed: int) -> str:
        held = jax.random.key(seed)

        def body(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            return c + jax.random.normal(held, c.shape), None

        scanned = jax.checkpoint(lambda x: jax.lax.scan(body, x, None, length=2)[0])
        return jaxprs.canonical_key(jax.make_jaxpr(scanned)(jnp.ones(2)))

    assert key_of(0) == key_of(0) != key_of(1)
