"""A traced loss is divided at its cuts; what can't be trained over groups is refused with a way out."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import hetjax
from hetjax import segments
from tests.plans import distance, halves, spec_of

ROWS, DIM = 8, 8
RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.standard_normal((ROWS, DIM), dtype=np.float32),
    "y": RNG.standard_normal((ROWS, DIM), dtype=np.float32),
}
SPEC = spec_of(BATCH)


def mse(x, batch):
    return jnp.square(x - batch["y"]).mean()


def weights(key, num=4):
    return [jax.random.normal(k, (DIM, DIM)) / 3 for k in jax.random.split(key, num)]


def traced(loss_fn, init_fn=weights, **options):
    return hetjax.trace(loss_fn, init_fn, SPEC, **options)


def classes(program):
    """The class of each segment as a letter in order of appearance."""
    letters = {}
    return "".join(letters.setdefault(s.segment_class, chr(65 + len(letters))) for s in program.segments())


def chain(program, batch, key=None):
    """The mean loss as a function of the parameters, segment by segment."""

    def loss(params):
        leaves, flat = jax.tree.leaves(params), program.main
        pieces = {
            p: leaves[p.leaf] if p.axis is None else jnp.take(leaves[p.leaf], p.index, axis=p.axis)
            for p in program.pieces
        }
        values, results = {}, {}
        for i in range(program.num_segments):
            unit = flat.unit(i, i + 1)
            function = segments.UnitFunction(
                flat, unit, segments.Setting(remat="none"), [True] * len(unit.params)
            )
            sources = {"batch": lambda d: jax.tree.leaves(batch)[d.index], "rng": lambda d: key}
            sources |= {"const": lambda d: flat.consts[d.index]}
            sources |= {"literal": lambda d: jnp.asarray(d.index, d.dtype)}
            data = [sources[d.kind](d) for d in unit.data]
            outputs, made = function.run(
                [pieces[p] for p in unit.params], [values[v] for v in unit.inputs], data, 0
            )
            values.update(zip(unit.outputs, outputs, strict=True))
            results.update(zip(unit.results, made, strict=True))
        return results["loss.total"] / results["loss.weight"]

    return loss


def check_gradients(program, rng=None):
    """The segments one after the other give the gradients of the loss as it was written."""
    params = jax.jit(program.init_fn)(jax.random.key(0))
    arguments = (BATCH,) if rng is None else (BATCH, rng)
    moving = [not jnp.issubdtype(s.dtype, jax.dtypes.prng_key) for s in program.leaf_specs]

    def of(loss):
        leaves, treedef = jax.tree.flatten(params)

        def f(floats):
            fresh = iter(floats)
            full = [next(fresh) if m else a for a, m in zip(leaves, moving, strict=True)]
            return loss(jax.tree.unflatten(treedef, full))

        floats = [a for a, m in zip(leaves, moving, strict=True) if m]
        return jax.jit(jax.value_and_grad(f, allow_int=True))(floats)

    got = of(chain(program, BATCH, rng))
    expected = of(lambda p: program.loss_fn(p, *arguments))
    trained = [i for i, g in enumerate(expected[1]) if g.dtype != jax.dtypes.float0]
    assert abs(got[0] - expected[0]) < 1e-5 * abs(expected[0])
    assert distance([got[1][i] for i in trained], [expected[1][i] for i in trained]) < 1e-5


# ---- classes ----


class Block(nn.Module):
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, still=True):
        h = nn.Dropout(self.rate)(nn.gelu(nn.Dense(DIM)(x)), deterministic=still)
        return hetjax.cut(x + h)


class Stack(nn.Module):
    num_layers: int = 4
    rate: float = 0.0
    scan_axis: int | None = None
    reverse: bool = False
    remat: bool = False

    @nn.compact
    def __call__(self, x, still=True):
        if self.scan_axis is None:
            for _ in range(self.num_layers):
                x = Block(self.rate)(x, still)
            return x

        class Body(nn.Module):
            @nn.compact
            def __call__(body, x, _):
                return Block(self.rate)(x, still), None

        scan = nn.scan(
            nn.remat(Body, prevent_cse=False) if self.remat else Body,
            variable_axes={"params": self.scan_axis},
            split_rngs={"params": True, "dropout": True},
            length=self.num_layers,
            reverse=self.reverse,
        )
        return scan()(x, None)[0]


def linen(cast=None, **fields):
    model = Stack(**fields)

    def init(key):
        return model.init(key, jnp.zeros((1, DIM)))

    def loss(params, batch, rng=None):
        if cast:
            params = jax.tree.map(lambda a: a.astype(cast).astype(jnp.float32), params)
        rngs = None if rng is None else {"dropout": rng}
        return mse(model.apply(params, batch["x"], rng is None, rngs=rngs), batch)

    return traced(loss if model.rate else lambda p, b: loss(p, b), init)


class Layer(nnx.Module):
    def __init__(self, rate, rngs):
        self.dense = nnx.Linear(DIM, DIM, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return hetjax.cut(x + self.dropout(nnx.gelu(self.dense(x))))


class Layers(nnx.Module):
    def __init__(self, rate, scanned, rngs):
        self.scanned = scanned
        if scanned:
            make = nnx.vmap(lambda r: Layer(rate, r), in_axes=(0,), out_axes=0)
            self.layers = nnx.split_rngs(splits=4)(make)(rngs)
        else:
            self.layers = nnx.List([Layer(rate, rngs) for _ in range(4)])

    def __call__(self, x):
        if self.scanned:
            return nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(
                self.layers, x
            )
        for layer in self.layers:  # pyrefly: ignore[not-iterable]
            x = layer(x)
        return x


def from_nnx(rate=0.0, scanned=False, reseed=True, **options):
    def make(key):
        return nnx.split(Layers(rate, scanned, nnx.Rngs(key)))

    graphdef = nnx.split(nnx.eval_shape(lambda: Layers(rate, scanned, nnx.Rngs(0))))[0]

    def loss(params, batch, rng):
        model = nnx.merge(graphdef, params)
        if rng is None:
            model.eval()
        elif reseed:
            nnx.reseed(model, default=rng, policy="match_shape")
        return mse(model(batch["x"]), batch)

    return traced(loss, lambda key: make(key)[1], **options)


def custom(scale):
    @jax.custom_vjp
    def f(x):
        return jnp.tanh(x)

    f.defvjp(lambda x: (jnp.tanh(x), x), lambda _, g: (g * scale,))
    return f


def layered(functions):
    """A loss with one function after each of the last layers."""

    def loss(params, batch):
        x = hetjax.cut(batch["x"] @ params[0])
        for w, f in zip(params[1:], functions, strict=True):
            x = hetjax.cut(f(x @ w))
        return mse(x, batch)

    return loss


def on_host(function):
    def f(x):
        spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return x + jax.pure_callback(function, spec, jax.lax.stop_gradient(x), vmap_method="sequential")

    return f


def sine(x):
    return np.sin(x)


def cosine(x):
    return np.cos(x)


def saving(name):
    return jax.checkpoint(jnp.tanh, policy=jax.checkpoint_policies.save_only_these_names(name))


def keys_split_at_the_top():
    def loss(params, batch, rng):
        x = hetjax.cut(batch["x"] @ params[0])
        keys = [None] * 3 if rng is None else jax.random.split(rng, 3)
        for w, key in zip(params[1:], keys, strict=True):
            x = jnp.tanh(x @ w)
            if key is not None:
                x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0.0)
            x = hetjax.cut(x)
        return mse(x, batch)

    return traced(loss)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(keys_split_at_the_top, "ABBBC", id="keys split at the top"),
        pytest.param(lambda: linen(num_layers=24), "A" + "B" * 23 + "C", id="24 linen layers"),
        pytest.param(lambda: linen(rate=0.1), "ABBBC", id="linen dropout"),
        pytest.param(lambda: linen(rate=0.1, scan_axis=0), "ABBBC", id="linen scan with dropout"),
        pytest.param(from_nnx, "ABBBC", id="nnx layers"),
        pytest.param(lambda: from_nnx(0.1), "ABBBC", id="nnx dropout"),
        pytest.param(lambda: from_nnx(0.1, scanned=True), "ABBBC", id="nnx scan with dropout"),
        pytest.param(lambda: traced(layered([jax.nn.relu] * 3)), "ABBBC", id="custom_jvp"),
        pytest.param(lambda: traced(layered([custom(1.0)] * 3)), "ABBBC", id="one custom_vjp"),
        pytest.param(
            lambda: traced(layered([custom(s) for s in (1.0, 2.0, 1.0)])),
            "ABCBD",
            id="equal forward, other backward",
        ),
        pytest.param(
            lambda: traced(layered([on_host(f) for f in (sine, cosine, sine)]), rows="split"),
            "ABCBD",
            id="host callbacks",
        ),
        pytest.param(lambda: traced(layered([saving(n) for n in "aba"])), "ABCBD", id="remat policies"),
    ],
)
def test_layers_are_of_one_class_exactly_if_they_compute_the_same(make, expected):
    assert classes(make()) == expected


def test_blocks_of_one_class_have_unlike_dropout():
    program = linen(rate=0.5)
    values = [{d.index for d in program.main.unit(i, i + 1).data if d.kind == "literal"} for i in range(1, 4)]
    assert values[0] != values[1] != values[2]


# ---- scans over layers ----


def lax_scanned(axis=0, reverse=False, cast=False):
    """Stacked along any dim, cast before the loop."""

    def init(key):
        w = jax.random.normal(key, (4, DIM, DIM)) / 3
        return {"w": jnp.moveaxis(w, 0, axis), "b": jnp.zeros((4, DIM)), "out": w[0]}

    def loss(params, batch):
        w, b = jnp.moveaxis(params["w"], axis, 0), params["b"]
        if cast:
            w = w.astype(jnp.bfloat16).astype(jnp.float32)

        def body(x, layer):
            return hetjax.cut(x + jnp.tanh(x @ layer[0] + layer[1][None])), x.mean(axis=-1)

        x, means = jax.lax.scan(body, batch["x"], (w, b), reverse=reverse)
        return mse(x @ params["out"] + means[1][:, None], batch)

    return traced(loss, init)


SCANS = ["lax", "axis 1", "axis 2", "reverse", "cast", "linen", "linen axis 1", "nnx"]


@pytest.mark.parametrize("name", SCANS)
def test_a_scan_with_a_cut_is_unrolled_and_each_segment_owns_its_slice(name):
    program = {
        "lax": lax_scanned,
        "axis 1": lambda: lax_scanned(axis=1, reverse=True, cast=True),
        "axis 2": lambda: lax_scanned(axis=2),
        "reverse": lambda: lax_scanned(reverse=True),
        "cast": lambda: lax_scanned(cast=True),
        "linen": lambda: linen(scan_axis=0, cast=jnp.bfloat16),
        "linen axis 1": lambda: linen(scan_axis=1, reverse=True, remat=True),
        "nnx": lambda: from_nnx(scanned=True),
    }[name]()
    assert program.num_segments == 5
    order = (3, 2, 1, 0) if name in ("reverse", "axis 1", "linen axis 1") else (0, 1, 2, 3)
    stacked = [p for p in program.pieces if p.axis is not None]
    assert len(stacked) == 8
    assert all(program.readers[p] == [order[p.index or 0]] for p in stacked)
    assert {p.axis for p in stacked} <= {0, 1, 2}
    if "axis" in name:
        assert any(p.axis == int(name[-1]) for p in stacked)
    check_gradients(program, jax.random.key(1) if name == "nnx" else None)


def test_a_stack_that_is_also_read_whole_stays_whole():
    def init(key):
        return jax.random.normal(key, (4, DIM, DIM)) / 3

    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (hetjax.cut(jnp.tanh(x @ w)), None), batch["x"], params)
        return mse(x @ params.sum(axis=0), batch)

    program = traced(loss, init)
    assert [p.axis for p in program.pieces] == [None]
    assert program.readers[program.pieces[0]] == [0, 1, 2, 3, 4]
    check_gradients(program)


def test_layers_that_a_python_loop_takes_from_a_stack_are_slices_too_and_some_rows_of_a_table_are_not():
    def init(key):
        w, square = jax.random.normal(key, (3, DIM, DIM)) / 3, jax.random.normal(key, (2, 2, DIM))
        return {"w": w, "table": jnp.ones((50, DIM)), "square": square}

    def loss(params, batch):
        x = batch["x"] + params["table"][0][None]
        for w in params["w"]:
            x = hetjax.cut(jnp.tanh(x @ w))
        rows, columns = (params["square"][i] for i in range(2)), jnp.moveaxis(params["square"], 1, 0)
        first, second = (r.sum(axis=0) for r in rows)
        return mse(x + (first + second)[None] + columns[1].sum(axis=0)[None], batch)

    program = traced(loss, init)
    names = [program.piece_name(p) for p in program.pieces]
    assert names == ["square", "table", "w[0]", "w[1]", "w[2]"]
    check_gradients(program)


# ---- what crosses cuts ----


def test_masks_positions_and_tables_are_repeated_and_not_sent():
    def loss(params, batch):
        mask = batch["y"] > 0
        angles = jnp.cos(jnp.arange(DIM, dtype=jnp.float32) / 7)[None]
        scale = jax.nn.softmax(params[0], axis=0)
        x = hetjax.cut(batch["x"] @ params[1])
        for w in params[2:]:
            x = hetjax.cut(jnp.where(mask, x * angles, 0.0) @ (w * scale))
        return mse(jnp.where(mask, x, 0.0), batch)

    program = traced(loss)
    assert [(e.producer, e.consumer, e.bytes_per_row) for e in program.edges()] == [
        (0, 1, DIM * 4),
        (1, 2, DIM * 4),
        (2, 3, DIM * 4),
    ]
    check_gradients(program)


def test_a_skip_connection_is_an_edge_over_the_segments_between():
    def loss(params, batch):
        first = x = hetjax.cut(batch["x"] @ params[0])
        x = hetjax.cut(jnp.tanh(x @ params[1]))
        x = hetjax.cut(jnp.tanh(x @ params[2]))
        return mse((x + first) @ params[3], batch)

    program = traced(loss)
    edges = {(e.producer, e.consumer): e.bytes_per_row for e in program.edges()}
    assert edges == {(0, 1): 32.0, (0, 3): 32.0, (1, 2): 32.0, (2, 3): 32.0}
    check_gradients(program)


def test_integers_and_booleans_cross_a_cut_with_several_other_arrays():
    def loss(params, batch):
        x = batch["x"] @ params[0]
        x, order, positive = hetjax.cut((x, jnp.argsort(jax.lax.stop_gradient(x)), x > 0))
        x = jnp.where(positive, jnp.take_along_axis(x, order, axis=-1), 0.0) @ params[1]
        return mse(x, batch)

    program = traced(loss)
    assert sorted(str(v.var.aval.dtype) for v in program.main.values) == ["bool", "float32", "int32"]
    assert program.edges()[0].bytes_per_row == DIM * (4 + 4 + 1)
    check_gradients(program)


def test_a_parameter_that_several_segments_read_is_owned_by_the_first():
    def loss(params, batch):
        x = hetjax.cut(batch["x"] @ params[0])
        x = hetjax.cut(jnp.tanh(x @ params[1]))
        return mse(jnp.tanh(x @ params[1]) @ params[0].T, batch)

    program = traced(loss, lambda key: weights(key, 2))
    assert sorted(program.tied) == [(0, 2, DIM * DIM * 4), (1, 2, DIM * DIM * 4)]
    assert [program.owner(p) for p in program.pieces] == [0, 1]


def test_marks_in_a_row_are_one_cut_and_a_cut_before_everything_is_none():
    def loss(params, batch):
        x = hetjax.cut(batch["x"])
        x = hetjax.cut(hetjax.cut({"x": x @ params[0], "y": batch["y"]}))
        return mse(x["x"] @ params[1], x)

    program = traced(loss)
    assert program.num_segments == 2 and len(program.main.values) == 1


# ---- constructs that hold a cut ----


def while_loop(params, batch):
    def body(state):
        return state[0] + 1, hetjax.cut(state[1] @ params[1])

    return mse(jax.lax.while_loop(lambda s: s[0] < 3, body, (0, batch["x"] @ params[0]))[1], batch)


def dynamic_fori(params, batch):
    count = jnp.int32(3) + (batch["x"][0, 0] > 99).astype(jnp.int32)
    x = jax.lax.fori_loop(0, count, lambda _, x: hetjax.cut(x @ params[1]), batch["x"] @ params[0])
    return mse(x, batch)


def branches(params, batch):
    x = batch["x"] @ params[0]
    return mse(jax.lax.cond(batch["x"].sum() > 0, lambda x: hetjax.cut(x @ params[1]), lambda x: x, x), batch)


def switch(params, batch):
    x, index = batch["x"] @ params[0], (batch["x"].sum() > 0).astype(jnp.int32)
    return mse(jax.lax.switch(index, [lambda x: x, jax.jit(lambda x: hetjax.cut(2 * x))], x), batch)


@pytest.mark.parametrize(
    ("loss", "name"), [(while_loop, "while"), (dynamic_fori, "while"), (branches, "cond"), (switch, "cond")]
)
def test_a_cut_in_a_loop_or_branch_names_the_construct_and_the_way_out(loss, name):
    with pytest.raises(
        hetjax.UserError, match=f"hetjax.cut stands inside `{name}`.*Move the cut out of the `{name}`, or w"
    ):
        traced(loss)


def test_cuts_in_jit_remat_and_vmap_divide_the_model():
    def layer(x, w):
        return hetjax.cut(jnp.tanh(x @ w))

    def loss(params, batch):
        x = jax.jit(layer)(batch["x"], params[0])
        x = jax.checkpoint(jax.jit(layer))(x, params[1])
        x = jax.vmap(lambda row: layer(row, params[2]))(x)
        return mse(x @ params[3], batch)

    program = traced(loss)
    assert program.num_segments == 4
    check_gradients(program)


def test_a_cut_inside_a_custom_derivative_is_passed_over_so_that_its_rule_holds():
    @jax.custom_vjp
    def halved(x, w):
        return hetjax.cut(x @ w) * 2

    halved.defvjp(lambda x, w: (halved(x, w), (x, w)), lambda r, g: (g @ r[1].T, 0.5 * r[0].T @ g))

    def loss(params, batch):
        return mse(halved(hetjax.cut(batch["x"] @ params[0]), params[1]), batch)

    with pytest.warns(UserWarning, match="its rule holds for the whole function. Place the cut around"):
        program = traced(loss)
    assert program.num_segments == 2
    with warnings.catch_warnings(action="ignore"):
        check_gradients(program)


# ---- state that a model changes ----


class Normed(nn.Module):
    train: bool

    @nn.compact
    def __call__(self, x):
        x = hetjax.cut(nn.Dense(DIM)(x))
        return nn.BatchNorm(use_running_average=not self.train)(x)


class NormedX(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(DIM, DIM, rngs=rngs)
        self.norm = nnx.BatchNorm(DIM, rngs=rngs)

    def __call__(self, x):
        return self.norm(hetjax.cut(self.dense(x)))


def linen_norm(returned, **options):
    model = Normed(train=returned != "evaluation")

    def loss(params, batch):
        if returned == "evaluation":
            return mse(model.apply(params, batch["x"]), batch)
        x, changed = model.apply(params, batch["x"], mutable=["batch_stats"])
        out = {"state": changed, "aux": (x, changed), "metric": {"stats": changed}}
        return (mse(x, batch), out[returned]) if returned in out else mse(x, batch)

    return traced(loss, lambda key: model.init(key, jnp.zeros((2, DIM))), **options)


def nnx_norm(train, **options):
    graphdef = nnx.split(nnx.eval_shape(lambda: NormedX(nnx.Rngs(0))))[0]

    def loss(params, batch):
        model = nnx.merge(graphdef, params)
        if not train:
            model.eval()
        return mse(model(batch["x"]), batch)

    return traced(loss, lambda key: nnx.split(NormedX(nnx.Rngs(key)))[1], **options)


@pytest.mark.parametrize("rows", ["auto", "whole", "split"])
@pytest.mark.parametrize(
    "make",
    [
        lambda **o: linen_norm("state", **o),
        lambda **o: linen_norm("aux", **o),
        lambda **o: linen_norm("metric", **o),
        lambda **o: linen_norm("dropped", **o),
        lambda **o: nnx_norm(True, **o),
    ],
    ids=["returned", "returned in a tuple", "as a metric", "dropped", "nnx"],
)
def test_batch_norm_in_training_is_refused_with_what_to_use_instead(make, rows):
    with pytest.raises(hetjax.UserError, match="GroupNorm or LayerNorm, or run BatchNorm with use_running"):
        make(rows=rows)


@pytest.mark.parametrize("make", [lambda: linen_norm("evaluation"), lambda: nnx_norm(False)])
def test_running_statistics_that_are_only_read_are_kept_as_they_are(make):
    program = make()
    frozen = {p for p, f in zip(program.leaf_paths, program.frozen, strict=True) if f}
    assert {p.rsplit("/", 1)[-1] for p in frozen} == {"mean", "var"}
    check_gradients(program)


def test_a_key_that_the_model_holds_is_refused_and_the_loss_is_to_take_one():
    with pytest.raises(hetjax.UserError, match=r"at 'layers/0/dropout/rngs/key'.*nnx.reseed\(model"):
        from_nnx(0.1, reseed=False)


def test_keys_and_counters_that_nobody_reads_are_frozen_and_carried():
    program = from_nnx(0.1)
    frozen = {p.rsplit("/", 1)[-1] for p, f in zip(program.leaf_paths, program.frozen, strict=True) if f}
    assert frozen == {"key", "count"}
    check_gradients(program, jax.random.key(1))


# ---- rows ----


def contrastive(params, batch):
    x = hetjax.cut(batch["x"] @ params[0]) @ params[1]
    return optax.softmax_cross_entropy_with_integer_labels(x @ x.T, jnp.arange(x.shape[0])).mean()


def test_a_loss_that_mixes_rows_is_refused_and_the_way_out_is_named():
    with pytest.raises(hetjax.UserError, match=r"(?s)mixes the rows of the batch.*rows=\"whole\""):
        traced(contrastive)


def test_a_metric_that_mixes_rows_is_refused_by_name():
    def loss(params, batch):
        x = hetjax.cut(batch["x"] @ params[0]) @ params[1]
        return mse(x, batch), {"spread": x.std()}

    with pytest.raises(hetjax.UserError, match="The metric 'spread' mixes the rows"):
        traced(loss)


def test_rows_whole_is_obeyed_by_the_trainer():
    program = traced(contrastive, rows="whole")
    assert program.rows_mode == "whole"
    with pytest.raises(hetjax.UserError, match=r"mixes the rows of a batch \(rows='whole'\)"):
        hetjax.Trainer(program, halves(program, microbatches=2), optax.sgd(0.1))
    trainer = hetjax.Trainer(program, halves(program), optax.sgd(0.1))
    state = trainer.init(seed=0)
    params = jax.jit(weights)(jax.random.key(0))
    expected = jax.value_and_grad(contrastive)(params, BATCH)
    loss, grads = trainer.loss_and_grads(state, BATCH)
    assert abs(loss - expected[0]) < 1e-5 * expected[0] and distance(grads, expected[1]) < 1e-5


def test_an_unknown_rows_mode_is_told_what_is_allowed():
    with pytest.raises(hetjax.UserError, match=r"rows is 'parts'. Allowed: 'auto', 'split', 'whole'"):
        hetjax.trace.__wrapped__(contrastive, weights, SPEC, rows="parts")  # pyrefly: ignore[missing-attribute]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"x": SPEC["x"], "y": jax.ShapeDtypeStruct((4, DIM), jnp.float32)}, r"lead with \[4, 8\] rows"),
        ({"x": jax.ShapeDtypeStruct((), jnp.float32)}, r"lead with \[\] rows"),
    ],
)
def test_every_leaf_of_the_batch_leads_with_the_same_rows(spec, message):
    with pytest.raises(hetjax.UserError, match=message):
        hetjax.trace(contrastive, weights, spec)


def test_a_scalar_may_stand_among_the_leaves_of_the_batch():
    def loss(params, batch):
        return mse(batch["scale"] * hetjax.cut(batch["x"] @ params[0]) @ params[1], batch)

    spec = SPEC | {"scale": jax.ShapeDtypeStruct((), jnp.float32)}
    assert hetjax.trace(loss, weights, spec).global_batch == ROWS


def test_a_model_for_one_number_of_rows_is_told_so_when_a_plan_asks_for_another():
    def loss(params, batch):
        x = hetjax.cut(batch["x"] @ params[0]).reshape(ROWS, 2, DIM // 2)
        return mse(x.reshape(ROWS, DIM) @ params[1], batch)

    program = traced(loss)
    with pytest.raises(hetjax.UserError, match="can't be traced with 4 rows, as the plan asks .*from the b"):
        hetjax.Trainer(program, halves(program, microbatches=2), optax.sgd(0.1))


def test_a_model_whose_cuts_depend_on_the_rows_is_told_so():
    def loss(params, batch):
        x = batch["x"] @ params[0]
        return mse((hetjax.cut(x) if x.shape[0] != 4 else x) @ params[1], batch)

    program = traced(loss)
    with pytest.raises(hetjax.UserError, match="has 1 segments .* don't branch on the batch's shape"):
        program.flat(4)


# ---- results ----


def returning(make):
    def loss(params, batch):
        error = jnp.square(hetjax.cut(batch["x"] @ params[0]) @ params[1] - batch["y"])
        return make(error, params)

    return loss


WRONG = {
    "an array": (lambda e, p: e.mean(axis=-1), "'loss' as a float32 of shape .8,."),
    "a dict": (lambda e, p: {"loss": e.mean()}, "'loss' as a dict"),
    "nothing": (lambda e, p: None, "'loss' as a NoneType"),
    "three values": (lambda e, p: (e.mean(), {}, {}), "'loss' as a tuple"),
    "a list of metrics": (lambda e, p: (e.mean(), [e.max()]), "second part is a list"),
    "a Mean beside the loss": (lambda e, p: (e.mean(), hetjax.Mean(e.sum(), 3.0)), "second part is a Mean"),
    "a metric by row": (lambda e, p: (e.mean(), {"row": e.sum(-1)}), "'row' as a float32 of shape"),
    "a boolean": (lambda e, p: (e.mean(), {"good": e.mean() < 1}), "'good' as a bool of shape"),
    "a text": (lambda e, p: (e.mean(), {"note": "hi"}), "'note' as a str"),
    "complex": (lambda e, p: jax.lax.complex(e.mean(), e.mean()), "'loss' as a complex64"),
    "a Mean of arrays": (lambda e, p: hetjax.Mean(e.sum(-1), 8.0), "'loss' as a float32 of shape"),
    "a Mean without weight": (lambda e, p: hetjax.Mean(e.sum(), None), "'loss' as a NoneType"),
    "a metric named loss": (lambda e, p: (e.mean(), {"loss": e.mean()}), "named 'loss'.*choose another"),
    "a metric named grad_norm": (lambda e, p: (e.mean(), {"grad_norm": e.mean()}), "named 'grad_norm'"),
    "a weight from parameters": (
        lambda e, p: hetjax.Mean(e.sum(), jnp.square(p[0]).sum() * e.shape[0]),
        "weight of the loss's hetjax.Mean depends on the parameters.*compute it from the batch",
    ),
    "a sum": (lambda e, p: e.sum(), "plain scalar, which hetjax reads as a mean.*hetjax.Mean"),
    "a mean as total": (lambda e, p: hetjax.Mean(e.mean(), 1.0), "does not grow with the rows"),
    "no parameters": (lambda e, p: (0.0 * e.shape[0] + 1.0, {"e": e.mean()}), "depends on no parameter"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_loss_may_not_return_is_told_with_what_it_may(name):
    make, message = WRONG[name]
    with pytest.raises(hetjax.UserError, match=f"(?s){message}"):
        traced(returning(make))


RIGHT = {
    "a scalar": lambda e, p: e.mean(),
    "a scalar and no metrics": lambda e, p: (e.mean(), {}),
    "a Mean with a Python count": lambda e, p: hetjax.Mean(e.sum(), e.size),
    "metrics of both forms": lambda e, p: (e.mean(), {"a": e.mean(), "b": hetjax.Mean(e.sum(), e.size)}),
    "a metric of the weights alone": lambda e, p: (e.mean(), {"norm": jnp.square(p[0]).sum()}),
    "half precision": lambda e, p: e.astype(jnp.bfloat16).mean(),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_a_loss_may_return(name):
    assert traced(returning(RIGHT[name])).num_segments == 2


def test_a_loss_without_cuts_is_one_segment():
    assert traced(lambda p, b: mse(b["x"] @ p[0], b)).num_segments == 1


def test_a_loss_that_never_joins_parameters_and_batch_is_refused():
    with pytest.raises(hetjax.UserError, match="never combines its parameters with its batch"):
        traced(lambda p, b: hetjax.Mean(p[0].sum(), 1.0))


# ---- parameters ----


def two_layers(params, batch):
    return mse(hetjax.cut(batch["x"] @ params["a"]) @ params["b"]["w"], batch)


def two_init(key):
    a, b = weights(key, 2)
    return {"a": a, "b": {"w": b, "steps": jnp.int32(3)}}


def test_frozen_parameters_are_told_by_their_path():
    asked = []
    program = traced(two_layers, two_init, frozen=lambda path: asked.append(path) or path == "b/w")
    assert {"a", "b/w"} <= set(asked)
    assert dict(zip(program.leaf_paths, program.frozen, strict=True)) == {
        "a": False,
        "b/steps": True,
        "b/w": True,
    }


def test_freezing_everything_is_refused():
    with pytest.raises(hetjax.UserError, match="depends on no parameter that is trained.*Check `frozen`"):
        traced(two_layers, two_init, frozen=lambda path: True)


def test_a_leaf_that_no_segment_reads_is_kept_by_the_first():
    program = traced(two_layers, two_init)
    unread = next(p for p in program.pieces if program.piece_name(p) == "b/steps")
    assert program.readers[unread] == [] and program.owner(unread) == 0


@pytest.mark.parametrize("init", [lambda key: {}, lambda key: {"a": {"b": key}, "a/b": key}])
def test_parameters_need_a_path_each(init):
    with pytest.raises(hetjax.UserError, match="a pytree of arrays, each under a path of its own"):
        traced(two_layers, init)


def test_a_program_prints_as_a_table():
    text = str(traced(layered([jnp.tanh] * 3))).splitlines()
    assert text[0] == "5 segments, 256 parameters, 8 rows a step"
    for word in ("segment", "class", "parameters", "boundary KiB/row", "forward MFLOP/row"):
        assert word in text[1]
    assert [line.split()[-4] for line in text[2:]] == ["A", "B", "B", "B", "C"]
    assert [line.split()[-3] for line in text[2:]] == ["64", "64", "64", "64", "0"]


def test_flops_bytes_and_names_of_a_segment():
    info = linen().segments()[1]
    assert info.name == "Block_1/Dense_0" and info.num_params == DIM * DIM + DIM
    assert info.param_bytes == 4 * info.num_params and info.boundary_bytes_per_row == 4 * DIM
    assert 2 * DIM * DIM <= info.forward_flops_per_row < 2 * DIM * DIM + 30 * DIM


def test_the_fingerprint_follows_the_model_and_not_the_batch():
    def at(num, rows):
        spec = {k: jax.ShapeDtypeStruct((rows, DIM), jnp.float32) for k in ("x", "y")}
        loss = layered([jnp.tanh] * (num - 1))
        return hetjax.trace(loss, lambda key: weights(key, num), spec).fingerprint

    assert at(3, 8) == at(3, 16) != at(4, 8)


# ---- evaluation ----


def test_evaluation_without_dropout_has_the_segments_of_training():
    program = linen(rate=0.3)
    assert program.flat(4, None, False).num_segments == program.num_segments
    models = program.flat(4, None, False).row_model, program.main.row_model
    assert models[0] and models[1] and not models[0].draws and models[1].draws


def test_a_segment_that_only_exists_in_training_is_refused_in_evaluation():
    def loss(params, batch, rng):
        x = hetjax.cut(batch["x"] @ params[0])
        if rng is not None:
            x = hetjax.cut(jnp.where(jax.random.bernoulli(rng, 0.5, x.shape), x, 0.0))
        return mse(x @ params[1], batch)

    program = traced(loss)
    with pytest.raises(hetjax.UserError, match="In evaluation the model has 2 segments and in training 3"):
        program.flat(4, None, False)


def test_a_metric_of_evaluation_that_mixes_rows_is_refused():
    def evaluation(params, batch):
        return contrastive(params, batch)

    program = traced(layered([jnp.tanh]), lambda key: weights(key, 2), eval_loss_fn=evaluation)
    with pytest.raises(hetjax.UserError, match="The loss in evaluation mixes the rows"):
        program.flat(4, None, False)
