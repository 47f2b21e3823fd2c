"""Under a plan, optax does what it does on one device; what needs the whole tree is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from tests.plans import cluster_of, distance, equal, halves, plan_of, spec_of

ROWS, DIM = 8, 8
STEPS = 3


@pytest.fixture(autouse=True)
def _usual_promotion():
    """optax mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def init(key):
    keys = jax.random.split(key, 4)
    layers = {
        f"layer{i}": {"kernel": jax.random.normal(k, (DIM, DIM)) / 3, "bias": jnp.zeros((DIM,))}
        for i, k in enumerate(keys[:3])
    }
    return {"embed": jax.random.normal(keys[3], (DIM, DIM)) / 3, "scale": jnp.full((DIM,), 1.5)} | layers


def loss(params, batch):
    """The embedding is tied to the head, and the scale is frozen."""
    dtype = params["embed"].dtype
    x = hetjax.cut(batch["x"].astype(dtype) @ params["embed"])
    for i in range(3):
        p = params[f"layer{i}"]
        x = hetjax.cut(x + jnp.tanh(x @ p["kernel"] + p["bias"][None]) * params["scale"][None])
    x = x @ params["embed"].T
    return jnp.square(x.astype(jnp.float32) - batch["y"]).mean()


def make_batch(seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return {k: (scale * rng.standard_normal((ROWS, DIM))).astype(np.float32) for k in ("x", "y")}


BATCHES = [make_batch(i) for i in range(STEPS)]


@functools.cache
def program():
    return hetjax.trace(loss, init, spec_of(BATCHES[0]), frozen=lambda path: path == "scale")


def trainer_of(tx, dtypes=(), **options):
    return hetjax.Trainer(program(), halves(program(), dtypes, microbatches=2), tx, **options)


@functools.cache
def plain_gradient():
    def of(trained, scale, batch):
        return loss(trained | {"scale": scale}, batch)

    return jax.jit(jax.value_and_grad(of))


def plain_steps(tx):
    """Trained parameters, optimizer state and gradients' norms of plain optax on one device."""
    params = jax.jit(init)(jax.random.key(0))
    scale = params.pop("scale")
    state, norms = tx.init(params), []
    update = jax.jit(tx.update)
    for batch in BATCHES:
        _, grads = plain_gradient()(params, scale, batch)
        norms.append(float(optax.tree.norm(grads)))
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state, norms


def steps(trainer, batches=BATCHES):
    state, metrics = trainer.init(seed=0), []
    for batch in batches:
        state, found = trainer.step(state, batch)
        metrics.append(found)
    return state, metrics


def by_name(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "bias" if path[-1].key == "bias" else "rest", params
    )


def is_matrix(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 1, 5)
LABELS = {"embed": "rest", "scale": "rest"} | {
    f"layer{i}": {"kernel": "rest", "bias": "bias"} for i in range(3)
}
TRANSFORMATIONS = {
    "adam": lambda: optax.adam(1e-2),
    "adamw with decay for matrices": lambda: optax.adamw(1e-2, weight_decay=0.3, mask=is_matrix),
    "a schedule": lambda: optax.adamw(SCHEDULE),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "sgd with momentum": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda: optax.rmsprop(1e-3),
    "lamb": lambda: optax.lamb(1e-2),
    "hyperparameters in the state": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
    "groups by path": lambda: optax.multi_transform(
        {"bias": optax.sgd(1e-2), "rest": optax.adam(1e-2)}, by_name
    ),
    "clips by element": lambda: optax.chain(optax.clip(1e-2), optax.adam(1e-2)),
    "unit-wise clips": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(1e-2)),
    "steps over two batches": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "muon": lambda: optax.contrib.muon(1e-2),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(1e-2)),
    "without state": lambda: optax.sgd(1e-2),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_three_steps_of_any_transformation_by_parameter_equal_plain_optax(name):
    tx = TRANSFORMATIONS[name]()
    trainer = trainer_of(tx)
    state, metrics = steps(trainer)
    expected, expected_state, norms = plain_steps(tx)
    got = trainer.params(state)
    assert equal(got.pop("scale"), np.full((DIM,), 1.5, np.float32))
    assert distance(got, expected) < 1e-5
    assert distance([m["grad_norm"] for m in metrics], norms) < 1e-5
    exported = trainer.export(state)["opt_state"]
    is_key = [jnp.issubdtype(a.dtype, jax.dtypes.prng_key) for a in jax.tree.leaves(expected_state)]
    leaves = zip(jax.tree.leaves(expected_state), is_key, strict=True)
    expected = [jax.random.key_data(a) if k else a for a, k in leaves]
    assert distance(list(exported.values()), expected) < 1e-4
    assert equal(trainer.export(trainer.import_(trainer.export(state)))["opt_state"], exported)


def test_labels_may_be_a_tree_like_that_of_the_parameters():
    tx = optax.multi_transform({"bias": optax.sgd(1e-2), "rest": optax.adam(1e-2)}, LABELS)
    reference = TRANSFORMATIONS["groups by path"]()
    trainer = trainer_of(tx)
    assert (
        distance(trainer.params(steps(trainer)[0]) | {"scale": 0}, plain_steps(reference)[0] | {"scale": 0})
        < 1e-5
    )


# ---- whole trees ----

NEED_TREE = {
    "a global-norm clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    "a wide global-norm clip": lambda: optax.chain(optax.clip_by_global_norm(1e6), optax.adam(1e-2)),
    "skipping of steps that are not finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "a unit norm of the update": lambda: optax.chain(optax.normalize_by_update_norm(), optax.sgd(1e-2)),
    "a line search": lambda: optax.lbfgs(),
    "the loss": lambda: optax.chain(optax.sgd(1e-2), optax.contrib.reduce_on_plateau()),
}


@pytest.mark.parametrize("name", NEED_TREE)
def test_what_needs_the_whole_tree_is_refused_with_the_way_out(name):
    with pytest.raises(
        hetjax.UserError, match=r"needs the whole parameter tree: .*\(\.\.\., clip_norm=1\.0\)"
    ):
        trainer_of(NEED_TREE[name]())


def stacked_program():
    def make(key):
        return {"kernel": jax.random.normal(key, (4, DIM, DIM)) / 3, "bias": jnp.zeros((4, DIM))}

    def stacked(params, batch):
        def body(x, p):
            return hetjax.cut(x + jnp.tanh(x @ p["kernel"] + p["bias"][None])), None

        return jnp.square(jax.lax.scan(body, batch["x"], params)[0] - batch["y"]).mean()

    return stacked, hetjax.trace(stacked, make, spec_of(BATCHES[0]))


@pytest.mark.parametrize(
    "tx", [optax.adamw(1e-2, mask=is_matrix), optax.lamb(1e-2)], ids=["a mask by rank", "a norm of the leaf"]
)
def test_what_treats_a_slice_of_a_stack_as_another_leaf_is_refused(tx):
    _, program = stacked_program()
    with pytest.raises(
        hetjax.UserError, match="a slice of .*, which a scan over layers stacks, gets another"
    ):
        hetjax.Trainer(program, halves(program), tx)


def test_stacked_leaves_are_updated_as_in_plain_optax():
    stacked, program = stacked_program()
    tx = optax.adamw(1e-2, b1=0.8)
    trainer = hetjax.Trainer(program, halves(program, microbatches=2), tx)
    state, _ = steps(trainer)
    params = jax.jit(program.init_fn)(jax.random.key(0))
    plain, gradient = tx.init(params), jax.jit(jax.grad(stacked))
    for batch in BATCHES:
        updates, plain = tx.update(gradient(params, batch), plain, params)
        params = optax.apply_updates(params, updates)
    assert distance(trainer.params(state), params) < 1e-5
    assert distance(list(trainer.export(state)["opt_state"].values()), jax.tree.leaves(plain)) < 1e-4


@pytest.mark.parametrize("clip_norm", [0.05, 1e3])
def test_clip_norm_is_the_global_norm_clip_of_optax_and_the_metric_is_the_norm_before_it(clip_norm):
    trainer = trainer_of(optax.adam(1e-2, eps=1e-3), clip_norm=clip_norm)
    state, metrics = steps(trainer)
    chain = optax.chain(optax.clip_by_global_norm(clip_norm), optax.adam(1e-2, eps=1e-3))
    expected, _, norms = plain_steps(chain)
    got = trainer.params(state)
    del got["scale"]
    assert distance(got, expected) < 1e-5
    assert distance([m["grad_norm"] for m in metrics], norms) < 1e-5


# ---- who updates what ----


def test_each_trained_parameter_is_updated_in_one_place_and_frozen_ones_have_no_state():
    """The tied embedding is read by both groups."""
    trainer = trainer_of(optax.adam(1e-2))
    updated = [p for unit in trainer._units for p in unit.pieces]
    trained = [p for p in program().pieces if program().trainable(p)]
    assert sorted(updated) == sorted(trained)
    paths = trainer.export(trainer.init(seed=0))["opt_state"]
    assert not [p for p in paths if "scale" in p]
    assert sorted(p for p in paths if "embed" in p) == ["0/mu/embed", "0/nu/embed"]


# ---- precision ----


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "float16"), ("float16", "bfloat16")])
def test_masters_and_state_stay_float32_whatever_the_groups_compute_in(dtypes):
    scale = hetjax.LossScale(initial=64.0) if "float16" in dtypes else None
    trainer = trainer_of(optax.sgd(1e-2, momentum=0.9), dtypes, loss_scale=scale)
    state, metrics = steps(trainer)
    expected, _, norms = plain_steps(optax.sgd(1e-2, momentum=0.9))
    exported = trainer.export(state)
    assert {a.dtype for part in ("params", "opt_state") for a in exported[part].values()} == {
        np.dtype("float32")
    }
    for name in ("layer0/kernel", "layer2/kernel"):
        kernel = jnp.asarray(exported["params"][name])
        assert not any(equal(kernel, kernel.astype(d).astype(jnp.float32)) for d in ("bfloat16", "float16"))
    got = trainer.params(state)
    del got["scale"]
    assert distance(got, expected) < 2e-2
    assert distance([m["grad_norm"] for m in metrics], norms) < 2e-2


def test_parameters_that_are_stored_in_bfloat16_stay_so():
    def half(key):
        return jax.tree.map(lambda a: a.astype(jnp.bfloat16), init(key))

    made = hetjax.trace(loss, half, spec_of(BATCHES[0]))
    trainer = hetjax.Trainer(made, halves(made), optax.adam(1e-2))
    state, _ = trainer.step(trainer.init(seed=0), BATCHES[0])
    assert {a.dtype for a in state.masters.values()} == {jnp.dtype("bfloat16")}


def test_float16_scales_the_loss_by_itself_and_other_dtypes_do_not():
    assert trainer_of(optax.adam(1e-2), ("float32", "float16")).loss_scale == hetjax.LossScale()
    assert trainer_of(optax.adam(1e-2), ("float32", "bfloat16")).loss_scale is None


def test_the_loss_scale_grows_after_good_steps_and_does_not_show_in_gradients():
    scale = hetjax.LossScale(initial=256.0, growth_interval=2)
    trainer = trainer_of(optax.sgd(1e-2), ("float16", "float16"), loss_scale=scale)
    state = trainer.init(seed=0)
    found, metrics = [], {}
    for batch in (*BATCHES, *BATCHES):
        state, metrics = trainer.step(state, batch)
        found.append(trainer.export(state)["loss_scale"])
    assert found == [[256.0, 1], [512.0, 0], [512.0, 1], [1024.0, 0], [1024.0, 1], [2048.0, 0]]
    assert 0.1 < metrics["grad_norm"] < 10
    loss_, grads = trainer.loss_and_grads(trainer.init(seed=0), BATCHES[0])
    params = jax.jit(init)(jax.random.key(0))
    value, expected = jax.value_and_grad(loss)(params, BATCHES[0])
    assert abs(loss_ - value) < 2e-2 * value
    del grads["scale"], expected["scale"]
    assert distance(grads, expected) < 2e-2


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}])
def test_a_step_whose_gradients_overflow_changes_nothing_and_halves_the_scale(options):
    scale = hetjax.LossScale(initial=1024.0, growth_interval=2)
    trainer = trainer_of(optax.adam(1e-2), ("float32", "float16"), loss_scale=scale, **options)
    state, _ = trainer.step(trainer.init(seed=0), BATCHES[0])
    before = trainer.export(state)
    state, metrics = trainer.step(state, make_batch(1, 3e5))
    after = trainer.export(state)
    assert not np.isfinite(metrics["grad_norm"])
    assert equal(after["params"], before["params"]) and equal(after["opt_state"], before["opt_state"])
    assert before["loss_scale"] == [1024.0, 1] and after["loss_scale"] == [512.0, 0] and after["step"] == 2
    state, _ = trainer.step(state, BATCHES[2])
    assert not equal(trainer.export(state)["params"], after["params"])


def test_the_scale_stays_within_its_bounds():
    low = trainer_of(optax.sgd(0.0), loss_scale=hetjax.LossScale(initial=1.0))
    state, _ = low.step(low.init(seed=0), make_batch(0, np.inf))
    assert low.export(state)["loss_scale"] == [1.0, 0]
    high = trainer_of(optax.sgd(0.0), loss_scale=hetjax.LossScale(initial=2.0**24, growth_interval=1))
    state, _ = high.step(high.init(seed=0), BATCHES[0])
    assert high.export(state)["loss_scale"][0] == 2.0**24


def test_groups_of_unlike_dtypes_exchange_gradients_of_tied_parameters_in_float32():
    plan = plan_of(program(), cluster_of([1, 1], ("bfloat16", "float32")), [2], [0, 1], microbatches=2)
    trainer = hetjax.Trainer(program(), plan, optax.sgd(1e-2))
    _, grads = trainer.loss_and_grads(trainer.init(seed=0), BATCHES[0])
    expected = jax.grad(loss)(jax.jit(init)(jax.random.key(0)), BATCHES[0])
    assert grads["embed"].dtype == np.float32 and distance(grads["embed"], expected["embed"]) < 2e-2
