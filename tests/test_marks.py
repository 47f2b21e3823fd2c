"""Marks are identities wherever a model runs; a Mean is exact and its value never divides by zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetjax
from tests.plans import equal

VALUES = {
    "float32": jnp.linspace(-2.0, 3.0, 6).reshape(2, 3),
    "bfloat16": jnp.arange(4, dtype=jnp.bfloat16),
    "float16": jnp.arange(4, dtype=jnp.float16),
    "int32": jnp.arange(5),
    "uint8": jnp.arange(5, dtype=jnp.uint8),
    "bool": jnp.array([True, False]),
    "complex64": jnp.array([1 + 2j, 3 - 1j], jnp.complex64),
    "a scalar": jnp.float32(3),
    "an empty array": jnp.zeros((0, 4)),
    "numpy": np.arange(3.0, dtype=np.float32),
    "a tree": {"a": jnp.ones((2,)), "b": (jnp.arange(3), [None, jnp.array(True)])},
    "nothing": {},
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", VALUES)
def test_a_cut_gives_the_same_values_in_the_same_tree_eagerly_and_under_jit(name):
    x = VALUES[name]
    for f in (hetjax.cut, jax.jit(hetjax.cut)):
        out = f(x)
        assert jax.tree.structure(out) == jax.tree.structure(x)
        assert [a.dtype for a in jax.tree.leaves(out)] == [a.dtype for a in jax.tree.leaves(x)]
        assert equal(out, x)


def test_a_cut_passes_keys_and_python_numbers():
    assert equal(jax.random.key_data(hetjax.cut(jax.random.key(3))), jax.random.key_data(jax.random.key(3)))
    assert hetjax.cut(2.5) == 2.5


def marked(x):
    a, b = hetjax.cut((jnp.sin(x), x * x))
    return hetjax.constrain(a * b, "batch", None).sum()


def plain(x):
    return (jnp.sin(x) * (x * x)).sum()


@pytest.mark.parametrize(
    "transform",
    [
        jax.grad,
        jax.hessian,
        jax.jacfwd,
        lambda f: jax.vmap(f),
        lambda f: jax.jit(jax.vmap(jax.grad(f))),
        lambda f: jax.grad(jax.checkpoint(f)),
        lambda f: jax.linearize(f, jnp.ones((2, 2, 3)))[1],
    ],
    ids=["grad", "hessian", "jacfwd", "vmap", "jit of vmap of grad", "grad of checkpoint", "linearize"],
)
def test_marks_are_identities_under_every_transformation(transform):
    x = jnp.linspace(-1.0, 2.0, 12).reshape(2, 2, 3)

    def of(f):
        def rank2(y):
            return f(y.reshape(-1, 3))

        return transform(rank2)(x)

    assert equal(of(marked), of(plain))


def test_constrain_needs_a_name_for_each_dim():
    with pytest.raises(ValueError, match=r"got 1 names \('batch',\) for an array of shape \(2, 3\)"):
        hetjax.constrain(jnp.ones((2, 3)), "batch")


@pytest.mark.parametrize("name", ["a,b", "a:b"])
def test_names_hold_no_separators(name):
    with pytest.raises(ValueError, match="may hold neither ',' nor ':'"):
        hetjax.constrain(jnp.ones((2,)), name)


@pytest.mark.parametrize("weight", [4, 4.0, np.int64(4), jnp.int32(4), jnp.float32(4), np.float32(4)])
def test_the_value_of_a_mean_is_total_over_weight_for_any_kind_of_count(weight):
    value = hetjax.Mean(jnp.float32(10), weight).value
    assert value == 2.5 and value.dtype == jnp.float32


@pytest.mark.parametrize("total", [jnp.bfloat16(3), jnp.float32(3), 3.0, jnp.int32(3)])
def test_the_value_of_a_mean_without_weight_is_zero_with_zero_gradient(total):
    assert hetjax.Mean(total, 0).value == 0
    assert jax.grad(lambda x: hetjax.Mean(x, jnp.float32(0)).value)(2.0) == 0


def test_a_mean_goes_through_jit_grad_and_vmap():
    def value(x, mask):
        return hetjax.Mean((x * mask).sum(), mask.sum()).value

    x, mask = jnp.array([[1.0, 2.0, 6.0]]), jnp.array([[1.0, 1.0, 0.0]])
    assert jax.vmap(value)(x, mask)[0] == 1.5
    assert equal(jax.grad(value)(x, mask), jnp.array([[0.5, 0.5, 0.0]]))
    assert jax.jit(lambda m: m)(hetjax.Mean(jnp.float32(1), jnp.float32(2))).value == 0.5
