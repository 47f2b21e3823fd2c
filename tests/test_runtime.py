"""A trainer refuses what is wrong and is none the worse; evaluates, tells its time, moves to other plans."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hetjax
from hetjax.runtime import Metrics
from tests import zoo
from tests.plans import alone, cluster_of, distance, equal, halves, member, plan_of, spec_of

TX = optax.adamw(1e-2)


@functools.cache
def specimen(name):
    return zoo.ZOO[name]()


@functools.cache
def program_of(name):
    return specimen(name).program()


@pytest.fixture(scope="module")
def trainer():
    """The multi-layer perceptron with a metric on two groups, the first with uneven members."""
    program = program_of("mlp")
    first = [member(0, 0, 3), member(1, 3, 4)]
    plan = plan_of(program, cluster_of([1, 1, 2]), [2], [first, [member(2, 0, 4, dp=2)]], microbatches=2)
    return hetjax.Trainer(program, plan, TX)


def plain(name, params, batch):
    out = specimen(name).loss_fn(params, batch)
    return out[0] if isinstance(out, tuple) else out


# ---- batches ----


WRONG_BATCHES = {
    "a missing leaf": (lambda b: {"x": b["x"]}, "the program was traced with"),
    "another leaf": (lambda b: b | {"z": b["x"]}, "the program was traced with"),
    "a list": (lambda b: [b["x"], b["y"]], "the program was traced with"),
    "another width": (lambda b: b | {"x": b["x"][:, :4]}, r"has shape \(8, 4\) and dtype float32.*\(8, 8\)"),
    "another rank": (lambda b: b | {"x": b["x"][..., None]}, r"has shape \(8, 8, 1\)"),
    "another dtype": (lambda b: b | {"x": b["x"].astype(np.float64)}, "dtype float64.*and float32"),
    "too few rows": (lambda b: {k: v[:4] for k, v in b.items()}, r"have \[4\] rows. Give 8 rows"),
    "unlike rows": (lambda b: b | {"x": b["x"][:4]}, r"have \[4, 8\] rows. Give 8 rows"),
    "a scalar": (lambda b: b | {"x": np.float32(1)}, r"has shape \(\)"),
}


@pytest.mark.parametrize("name", WRONG_BATCHES)
def test_a_wrong_batch_is_refused_and_the_state_still_works(trainer, name):
    change, message = WRONG_BATCHES[name]
    batch, state = specimen("mlp").batch, trainer.init(seed=0)
    for call in (trainer.step, trainer.loss_and_grads):
        with pytest.raises(hetjax.UserError, match=message):
            call(state, change(batch))
    assert np.isfinite(trainer.step(state, batch)[1]["loss"])


@pytest.mark.parametrize("rows", [4, 8, 12, 16])
def test_evaluation_takes_any_multiple_of_the_microbatch(trainer, rows):
    batch, state = specimen("mlp").batch, trainer.init(seed=0)
    some = {k: np.resize(v, (rows, v.shape[1])) for k, v in batch.items()}
    expected = plain("mlp", jax.jit(program_of("mlp").init_fn)(jax.random.key(0)), some)
    metrics = trainer.evaluate(state, some)
    assert abs(metrics["loss"] - expected) < 1e-5 * expected
    assert sorted(metrics) == ["largest", "loss"] and metrics.weight("loss") == rows
    assert np.isfinite(trainer.step(state, batch)[1]["loss"])


@pytest.mark.parametrize("rows", [0, 3, 6])
def test_evaluation_refuses_parts_of_a_microbatch(trainer, rows):
    some = {k: np.resize(v, (rows, v.shape[1])) for k, v in specimen("mlp").batch.items()}
    with pytest.raises(hetjax.UserError, match=rf"have \[{rows}\] rows. Give a multiple of 4 rows"):
        trainer.evaluate(trainer.init(seed=0), some)


def test_arrays_of_jax_and_lists_of_them_are_batches_too(trainer):
    batch = {k: jnp.asarray(v) for k, v in specimen("mlp").batch.items()}
    assert np.isfinite(trainer.step(trainer.init(seed=0), batch)[1]["loss"])


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}])
def test_a_step_uses_the_old_state_up(options):
    program = program_of("mlp")
    trainer = hetjax.Trainer(program, halves(program), TX, **options)
    old = trainer.init(seed=0)
    trainer.step(old, specimen("mlp").batch)
    trained = [a for p, a in old.masters.items() if program.trainable(p)]
    matrices = [a for unit in old.optimizer for a in unit if a.ndim]
    assert trained and all(a.is_deleted() for a in [*trained, *matrices])


# ---- metrics ----


def test_metrics_are_the_means_over_the_whole_batch_and_a_mapping(trainer):
    batch, state = specimen("mlp").batch, trainer.init(seed=0)
    params = jax.jit(program_of("mlp").init_fn)(jax.random.key(0))
    loss, extra = jax.jit(specimen("mlp").loss_fn)(params, batch)
    _, metrics = trainer.step(state, batch)
    assert list(metrics) == ["loss", "largest", "grad_norm"] and len(metrics) == 3
    assert abs(metrics["loss"] - loss) < 1e-5 * loss
    assert abs(metrics["largest"] - extra["largest"].value) < 1e-5 * extra["largest"].value
    assert metrics.fetch() == {k: metrics[k] for k in metrics}
    assert metrics.timeline is None and metrics.busy == {}
    with pytest.raises(KeyError):
        metrics["unheard of"]


class Unread:
    """A device scalar that counts how often it is fetched."""

    def __init__(self):
        self.reads = 0

    def __float__(self):
        self.reads += 1
        return 2.0


def test_a_metric_is_fetched_when_it_is_read_and_not_before():
    total, weight, square = Unread(), Unread(), Unread()
    metrics = Metrics({"loss": [(total, weight), (total, weight)]}, [square, square], None)
    assert len(metrics) == 2 and "loss" in list(metrics) and total.reads == square.reads == 0
    assert metrics["loss"] == 1.0 and metrics["grad_norm"] == 2.0 and square.reads == 2


def test_a_mean_of_nothing_is_zero(trainer):
    assert Metrics({"loss": [(0.0, 0.0)]}, [], None)["loss"] == 0.0


def test_a_timeline_tells_when_each_task_ran_and_how_busy_each_group_was(trainer):
    state, metrics = trainer.step(trainer.init(seed=0), specimen("mlp").batch, timeline=True)
    tasks = [task for _, task, *_ in metrics.timeline]
    expected = [t for t in trainer.schedule.order if t.op in "FB"]
    assert sorted(tasks) == sorted(expected)
    ends = {task: end for _, task, _, end in metrics.timeline}
    for group, task, start, end in metrics.timeline:
        assert 0 <= start <= end
        assert group == trainer.plan.stages[task.stage].members[task.member].group
        assert all(ends[d] <= end for d in trainer.schedule.dependencies(task) if d in ends)
    assert set(metrics.busy) == {"g0", "g1", "g2"} and all(0 < b <= 1 for b in metrics.busy.values())
    assert state.step == 1


# ---- random draws ----


def test_draws_follow_seed_step_and_microbatch_and_nothing_else():
    program, batch = program_of("dropout"), specimen("dropout").batch
    plan = halves(program, microbatches=2)
    trainer = hetjax.Trainer(program, plan, optax.sgd(0.0))
    losses = {}
    for seed in (0, 1):
        state = trainer.init(seed=seed)
        for step in range(2):
            state, metrics = trainer.step(state, batch)
            losses[seed, step] = metrics["loss"]
    again = trainer.init(seed=0)
    again, metrics = trainer.step(again, batch)
    assert metrics["loss"] == losses[0, 0] and len(set(losses.values())) == 4
    same = {k: np.concatenate([v[:4], v[:4]]) for k, v in batch.items()}
    one = {k: v[:4] for k, v in batch.items()}
    whole = trainer.step(trainer.init(seed=0), same)[1]["loss"]
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), 0)
    first = specimen("dropout").loss_fn(jax.jit(program.init_fn)(jax.random.key(0)), one, key)
    assert abs(whole - first) > 1e-4  # the second microbatch drew others


def test_evaluation_draws_nothing_and_is_that_of_plain_jax():
    program, batch = program_of("dropout"), specimen("dropout").batch
    plan = plan_of(program, cluster_of([1, 1]), [2], [[member(0, 0, 1), member(1, 1, 4)], 1], microbatches=2)
    trainer = hetjax.Trainer(program, plan, TX)
    state = trainer.init(seed=0)
    expected = specimen("dropout").loss_fn(jax.jit(program.init_fn)(jax.random.key(0)), batch, None)
    assert abs(trainer.evaluate(state, batch)["loss"] - expected) < 1e-5 * expected
    assert trainer.evaluate(state, batch)["loss"] == trainer.evaluate(state, batch)["loss"]


def test_draws_inside_a_loop_are_refused_where_rows_are_split():
    def loss(params, batch, rng):
        x = hetjax.cut(batch["x"] @ params)

        def body(x, key):
            return x * jax.random.bernoulli(key, 0.5, x.shape).astype(x.dtype) @ params, None

        x, _ = jax.lax.scan(body, x, jax.random.split(jax.random.key(0) if rng is None else rng, 2))
        return jnp.square(x - batch["y"]).mean()

    program = hetjax.trace(loss, lambda key: jax.random.normal(key, (8, 8)), spec_of(specimen("mlp").batch))
    assert np.isfinite(_first_loss(program, alone(program)))
    with pytest.raises(hetjax.UserError, match="draws random numbers for its rows inside a loop"):
        hetjax.Trainer(program, alone(program, microbatches=2), TX)


def _first_loss(program, plan):
    trainer = hetjax.Trainer(program, plan, TX)
    return trainer.step(trainer.init(seed=0), specimen("mlp").batch)[1]["loss"]


def test_another_loss_may_be_evaluated():
    def evaluation(params, batch):
        loss, _ = specimen("mlp").loss_fn(params, batch)
        return 2 * loss

    case = specimen("mlp")
    program = hetjax.trace(case.loss_fn, case.init_fn, spec_of(case.batch), eval_loss_fn=evaluation)
    trainer = hetjax.Trainer(program, halves(program), TX)
    state = trainer.init(seed=0)
    metrics = trainer.evaluate(state, case.batch)
    assert list(metrics) == ["loss"]
    assert abs(metrics["loss"] - 2 * trainer.loss_and_grads(state, case.batch)[0]) < 1e-5


# ---- moving to other plans ----


def after(trainer, state, name, steps=2):
    metrics = {}
    for _ in range(steps):
        state, metrics = trainer.step(state, specimen(name).batch)
    return state, metrics["loss"]


@pytest.mark.parametrize("name", ["scanned", "mlp"])
def test_an_exported_state_goes_on_bit_for_bit_under_its_plan_and_whole_under_any_other(name):
    program = program_of(name)
    one = hetjax.Trainer(program, halves(program, microbatches=2), TX)
    plan = plan_of(program, cluster_of([2, 1]), [1, 3], [1, [member(0, 0, 8, fsdp=2)], 1])
    other = hetjax.Trainer(program, plan, TX)
    state, _ = after(one, one.init(seed=3), name)
    saved = one.export(state)
    moved = other.export(other.import_(saved))
    assert saved["step"] == moved["step"] == 2 and saved["seed"] == moved["seed"] == 3
    for part in ("params", "opt_state"):
        assert list(saved[part]) == list(moved[part]) and equal(saved[part], moved[part])
        assert {k: (a.shape, a.dtype) for k, a in saved[part].items()} == {
            k: (s.shape, s.dtype) for k, s in one.canonical_spec()[part].items()
        }
    restored, loss = after(one, one.import_(moved), name)
    through, expected = after(one, state, name)
    assert loss == expected and equal(one.params(restored), one.params(through))
    elsewhere, close = after(other, other.import_(saved), name)
    assert abs(close - expected) < 1e-5 * expected
    assert distance(other.params(elsewhere), one.params(through)) < 1e-4


@pytest.mark.parametrize("name", ["scanned", "gpt", "llama"])
def test_exported_paths_and_shapes_are_those_of_plain_optax(name):
    program = program_of(name)
    trainer = hetjax.Trainer(program, alone(program), TX)
    params = jax.eval_shape(program.init_fn, jax.random.key(0))
    state = jax.eval_shape(TX.init, params)

    def by_path(tree):
        def text(key):
            return str(next(getattr(key, a) for a in ("key", "name", "idx") if hasattr(key, a)))

        found = {}
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            words = [text(k) for k in path]
            found["/".join(words[:-1] if words[-1] == "value" else words)] = leaf.shape
        return found

    spec = trainer.canonical_spec()
    assert {k: s.shape for k, s in spec["params"].items()} == by_path(params)
    assert {k: s.shape for k, s in spec["opt_state"].items()} == by_path(state)


def change_missing(saved):
    saved["params"].pop("w0/bias")


def change_extra(saved):
    saved["params"]["w9/bias"] = saved["params"]["w0/bias"]


def change_shape(saved):
    saved["params"]["w0/bias"] = saved["params"]["w0/bias"][:3]


def change_optimizer(saved):
    saved["opt_state"] = {k: v for k, v in saved["opt_state"].items() if "/nu/" not in k}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_missing, r"saved parameters are not those .* missing \['w0/bias'\]"),
        (change_extra, r"not known here \['w9/bias'\]"),
        (change_shape, r"w0/bias has shape \(3,\), here \(8,\)"),
        (change_optimizer, r"saved optimizer states are not those of this program: missing"),
    ],
)
def test_a_state_of_another_model_or_optimizer_is_refused(trainer, change, message):
    saved = trainer.export(trainer.init(seed=0))
    change(saved)
    with pytest.raises(hetjax.UserError, match=f"{message}.*Restore with the model and optimizer that"):
        trainer.import_(saved)


def test_a_loss_scale_is_part_of_what_is_exported():
    program = program_of("mlp")
    scale = hetjax.LossScale(initial=8.0, growth_interval=2)
    scaled = hetjax.Trainer(program, halves(program), TX, loss_scale=scale)
    state, _ = after(scaled, scaled.init(seed=0), "mlp", steps=3)
    saved = scaled.export(state)
    assert saved["loss_scale"] == [16.0, 1]
    assert scaled.export(scaled.import_(saved))["loss_scale"] == [16.0, 1]
    without = hetjax.Trainer(program, halves(program), TX)
    assert without.export(without.import_(saved))["loss_scale"] is None
    assert scaled.export(scaled.import_(without.export(without.init(seed=0))))["loss_scale"] == [8.0, 0]


# ---- parameters ----


def test_frozen_leaves_get_zero_gradients_and_integers_stay_as_they_are():
    program = program_of("mlp")
    trainer = hetjax.Trainer(program, halves(program), TX)
    _, grads = trainer.loss_and_grads(trainer.init(seed=0), specimen("mlp").batch)
    assert equal(grads["scale"], np.zeros(8, np.float32)) and np.any(grads["w0"]["kernel"])


class Dropping(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(hetjax.cut(self.first(x))))


def test_an_nnx_state_with_keys_and_counters_comes_back_ready_for_merge():
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: Dropping(nnx.Rngs(0))))

    def loss(params, batch, rng):
        model = nnx.merge(graphdef, params)
        model.eval() if rng is None else nnx.reseed(model, default=rng)
        return jnp.square(model(batch["x"]) - batch["y"]).mean()

    batch = specimen("mlp").batch
    program = hetjax.trace(loss, lambda key: nnx.split(Dropping(nnx.Rngs(key)))[1], spec_of(batch))
    trainer = hetjax.Trainer(program, halves(program, microbatches=2), TX)
    state, _ = after(trainer, trainer.init(seed=0), "mlp")
    model = nnx.merge(graphdef, trainer.params(trainer.import_(trainer.export(state))))
    fresh = Dropping(nnx.Rngs(jax.random.key(0)))
    assert model.dropout.rngs.key[...] == fresh.dropout.rngs.key[...]  # pyrefly: ignore[missing-attribute]
    assert not equal(model.first.kernel[...], fresh.first.kernel[...])
    model.eval()
    got = trainer.evaluate(state, batch)["loss"]
    assert abs(jnp.square(model(batch["x"]) - batch["y"]).mean() - got) < 1e-5


class Statistics(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.BatchNorm(use_running_average=True)(hetjax.cut(nn.Dense(8)(x))))


def test_running_statistics_are_carried_unchanged_in_the_tree_of_linen():
    model, batch = Statistics(), specimen("mlp").batch

    def init(key):
        variables = model.init(key, jnp.zeros((1, 8)))
        return dict(variables) | {"batch_stats": jax.tree.map(lambda a: a + 0.5, variables["batch_stats"])}

    program = hetjax.trace(
        lambda p, b: jnp.square(model.apply(p, b["x"]) - b["y"]).mean(), init, spec_of(batch)
    )
    trainer = hetjax.Trainer(program, halves(program), TX)
    state, _ = after(trainer, trainer.init(seed=0), "mlp")
    variables = trainer.params(state)
    start = jax.jit(init)(jax.random.key(0))
    assert jax.tree.structure(variables) == jax.tree.structure(start)
    assert equal(variables["batch_stats"], start["batch_stats"])
    assert not equal(variables["params"], start["params"])


def test_a_plan_for_another_program_or_for_missing_devices_is_refused():
    program, other = program_of("mlp"), program_of("tied")
    with pytest.raises(hetjax.UserError, match="another program|fingerprint"):
        hetjax.Trainer(program, alone(other), TX)
    with pytest.raises(hetjax.UserError, match="needs 9 devices"):
        hetjax.Trainer(program, plan_of(program, cluster_of([9]), [], [0]), TX)


def test_a_value_without_rows_between_unlike_splits_is_refused_with_the_way_out():
    program = program_of("partial_sums")
    plan = plan_of(program, cluster_of([2, 1]), [1], [[member(0, 0, 8, dp=2)], 1])
    with pytest.raises(hetjax.UserError, match="no dim that follows the rows.*need equal rows and equal dp"):
        hetjax.Trainer(program, plan, TX)


def test_rows_that_do_not_divide_by_the_shards_are_refused():
    program = program_of("mlp")
    plan = plan_of(program, cluster_of([3]), [], [[member(0, 0, 8, dp=3)]])
    with pytest.raises(hetjax.UserError, match="rows"):
        hetjax.Trainer(program, plan, TX)
