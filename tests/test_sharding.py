"""Parameters lie on a submesh by their logical axis names, and without names in the plain FSDP way."""

import inspect
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import hetjax
from hetjax.sharding import (
    RULES,
    activation_spec,
    compute_spec,
    logical_names,
    make_submesh,
    stored_spec,
)
from tests import zoo
from tests.plans import cluster_of, distance, member, plan_of, spec_of


def submesh(**axes):
    axes = {"dp": 1, "fsdp": 1, "tp": 1} | axes
    return make_submesh(jax.devices()[: axes["dp"] * axes["fsdp"] * axes["tp"]], axes)


class LinenLayer(nn.Module):
    boxed: bool

    @nn.compact
    def __call__(self, x):
        box = nn.with_logical_partitioning if self.boxed else lambda init, _: init
        kernel = self.param("kernel", box(nn.initializers.normal(), ("embed", "mlp")), (4, 6))
        return x @ kernel + self.param("bias", box(nn.initializers.zeros, ("mlp",)), (6,))[None]  # pyrefly: ignore[bad-index]


class NNXLayer(nnx.Module):
    def __init__(self, boxed, rngs):
        def box(init, names):
            return nnx.with_partitioning(init, names) if boxed else init

        self.kernel = nnx.Param(box(nnx.initializers.normal(), ("embed", "mlp"))(rngs.params(), (4, 6)))
        self.bias = nnx.Param(box(nnx.initializers.zeros, (None,))(rngs.params(), (6,)))


def linen_params(boxed):
    return jax.eval_shape(lambda: LinenLayer(boxed).init(jax.random.key(0), jnp.zeros((1, 4))))


def nnx_params(boxed):
    with nnx.use_eager_sharding(False):
        return jax.eval_shape(lambda: nnx.split(NNXLayer(boxed, nnx.Rngs(0)))[1])


def test_names_come_from_linen_boxes():
    assert logical_names(linen_params(True)) == [("mlp",), ("embed", "mlp")]


def test_names_come_from_nnx_metadata():
    assert logical_names(nnx_params(True)) == [(None,), ("embed", "mlp")]


@pytest.mark.parametrize("params", [linen_params(False), nnx_params(False), {"w": jnp.ones((2, 3))}])
def test_without_metadata_no_dim_has_a_name(params):
    names = logical_names(params)
    assert names == [(None,) * leaf.ndim for leaf in jax.tree.leaves(params)]


def test_a_layer_axis_that_a_scan_adds_has_a_place_among_the_names():
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return LinenLayer(True)(x)[:, :4], None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(
                Body,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            return scan()(x, None)[0]

    params = jax.eval_shape(lambda: Stack().init(jax.random.key(0), jnp.zeros((1, 4))))
    assert logical_names(params) == [("layers", "mlp"), ("layers", "embed", "mlp")]


@pytest.mark.parametrize("name", sorted(RULES))
def test_each_rule_lays_its_dim_over_the_tensor_axis(name):
    assert compute_spec((4, 8), ("embed", name), submesh(tp=2)) == P(None, "tp")


@pytest.mark.parametrize(
    ("shape", "names", "axes", "computed", "stored"),
    [
        ((6, 8), (None, None), {"fsdp": 2}, P(None, None), P(None, "fsdp")),
        ((8, 6), (None, None), {"fsdp": 2}, P(None, None), P("fsdp", None)),
        ((6, 8), ("embed", "mlp"), {"fsdp": 2}, P(None, None), P("fsdp", None)),
        ((6, 8), ("embed", "mlp"), {"fsdp": 2, "tp": 2}, P(None, "tp"), P("fsdp", "tp")),
        ((6, 8), ("mlp", "heads"), {"tp": 2}, P("tp", None), P("tp", None)),
        ((5, 8), ("mlp", "heads"), {"tp": 2}, P(None, "tp"), P(None, "tp")),
        ((5, 7), (None, None), {"fsdp": 2}, P(None, None), P(None, None)),
        ((1, 7), (None, None), {"fsdp": 2}, P(None, None), P(None, None)),
        ((8,), ("mlp",), {"fsdp": 2, "tp": 2}, P("tp"), P("tp")),
        ((), (), {"fsdp": 4}, P(), P()),
        ((8, 8), (None, None), {"dp": 4}, P(None, None), P(None, None)),
        ((8, 8), ("unheard of", None), {"tp": 2}, P(None, None), P(None, None)),
    ],
)
def test_layout_of_a_parameter_in_use_and_in_store(shape, names, axes, computed, stored):
    """In use over tp alone; in store over fsdp too, along `embed` or else the largest dim that divides."""
    assert compute_spec(shape, names, submesh(**axes)) == computed
    assert stored_spec(shape, names, submesh(**axes)) == stored


def test_an_activation_is_laid_over_the_tensor_axis_by_the_names_that_constrain_gives():
    assert activation_spec((2, 4, 8), ("batch", None, "heads"), submesh(dp=2, tp=2)) == P(None, None, "tp")


def test_devices_of_a_submesh_are_in_mesh_order_shards_first():
    mesh = submesh(dp=2, fsdp=2, tp=2)
    assert mesh.num_shards == 4 and mesh.tp == 2 and mesh.fsdp == 2
    assert [[d.id for d in row] for row in mesh.shard_devices] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_submesh_joins_as_many_devices_as_its_axes_say_and_of_one_kind():
    with pytest.raises(hetjax.UserError, match="dp=3 x fsdp=1 x tp=2 needs 6 devices and 4 are given"):
        make_submesh(jax.devices()[:4], {"dp": 3, "tp": 2})
    unlike = [types.SimpleNamespace(platform="gpu", device_kind=kind) for kind in ("A100", "V100")]
    with pytest.raises(
        hetjax.UserError, match="can't join unlike devices .*Give each kind a group of its own"
    ):
        inspect.unwrap(make_submesh)(unlike, {"dp": 2})


def test_a_tensor_axis_without_names_is_refused():
    case = zoo.tied()
    program = case.program()
    plan = plan_of(program, cluster_of([2]), [], [[member(0, 0, 8, tp=2)]])
    with pytest.raises(
        hetjax.UserError, match="tp > 1 and the model's parameters carry no logical axis names"
    ):
        hetjax.Trainer(program, plan, optax.sgd(0.1))


class Blocks(nn.Module):
    @nn.compact
    def __call__(self, x):
        for names in (("embed", "mlp"), ("mlp", "embed")):
            init = nn.with_logical_partitioning(nn.initializers.normal(0.3), names)
            x = jnp.tanh(x @ self.param(names[0], init, (8, 8)))
            x = hetjax.cut(hetjax.constrain(x, "batch", names[1]))
        return x


@pytest.mark.parametrize("axes", [{"fsdp": 4}, {"fsdp": 2, "tp": 2}])
def test_masters_and_optimizer_state_are_sharded_and_gradients_stay_right(axes):
    """A quarter of each matrix a device, at rest."""
    model, batch = Blocks(), zoo.mlp().batch

    def init(key):
        return model.init(key, jnp.zeros((1, 8)))

    def loss(params, batch):
        return jnp.square(model.apply(params, batch["x"]) - batch["y"]).mean()

    program = hetjax.trace(loss, init, spec_of(batch))
    plan = plan_of(program, cluster_of([4]), [], [[member(0, 0, 8, **axes)]])
    trainer = hetjax.Trainer(program, plan, optax.adam(1e-2))
    state = trainer.init(seed=0)
    matrices = [a for unit in state.optimizer for a in unit if a.ndim == 2] + list(state.masters.values())
    assert len(matrices) == 3 * 2
    assert all(a.addressable_shards[0].data.size * 4 == a.size for a in matrices)
    expected = jax.jit(jax.grad(loss))(jax.jit(init)(jax.random.key(0)), batch)
    assert distance(trainer.loss_and_grads(state, batch)[1], expected) < 1e-5


def test_an_axis_that_does_not_fit_the_devices_is_an_error_of_the_plan():
    program = zoo.mlp().program()
    made = member(0, 0, 8, dp=2)
    made["axes"] = {"dp": 3, "fsdp": 1, "tp": 1}
    with pytest.raises(hetjax.UserError, match="axes"):
        hetjax.Trainer(program, plan_of(program, cluster_of([2]), [], [[made]]), optax.sgd(0.1))


def test_user_structures_come_back_with_their_metadata():
    """An nnx.State stays one, and a linen box keeps its names."""
    for name, kind in (("gpt", nnx.State), ("llama", dict)):
        case = zoo.ZOO[name]()
        program = case.program()
        trainer = hetjax.Trainer(program, plan_of(program, cluster_of([1]), [], [0]), optax.sgd(0.1))
        params = trainer.params(trainer.init(seed=0))
        expected = jax.eval_shape(case.init_fn, jax.random.key(0))
        assert isinstance(params, kind) and jax.tree.structure(params) == jax.tree.structure(expected)
        assert logical_names(params) == logical_names(expected)
        assert all(isinstance(a, np.ndarray) for a in jax.tree.leaves(params))
