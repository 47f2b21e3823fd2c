"""A unit as functions: what it keeps, how products are merged, what is compiled and how often."""

import contextlib
import dataclasses
import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax import segments
from tests import zoo
from tests.plans import cluster_of, distance, equal, member, plan_of, spec_of

POLICIES = ("none", "dots", "full")


@functools.cache
def program_of(name):
    if name == "casts":
        return casting()
    if name == "own remat":
        return own_remat()
    return zoo.ZOO[name]().program()


def features(rows=8, dim=8):
    rng = np.random.default_rng(0)
    return {k: rng.standard_normal((rows, dim), dtype=np.float32) for k in ("x", "y")}


def blocks(key, num=3, dim=8):
    keys = jax.random.split(key, num)
    return [{"w": jax.random.normal(k, (dim, 3 * dim)), "s": jnp.ones((3 * dim,))} for k in keys]


def casting():
    """float32 parameters that every block casts to bfloat16 by itself, one transposed and scaled, too."""

    def loss(params, batch):
        x = batch["x"].astype(jnp.bfloat16)
        for p in params:
            w = p["w"].astype(jnp.bfloat16)
            h = jax.nn.gelu(x @ w * p["s"].astype(jnp.bfloat16)[None])
            x = hetjax.cut(x + jnp.tanh(h @ (w.T * jnp.bfloat16(0.1))))
        return jnp.square(x.astype(jnp.float32) - batch["y"]).mean()

    return hetjax.trace(loss, blocks, spec_of(features()))


def own_remat():
    """Blocks whose author put part of them under jax.checkpoint."""

    @jax.checkpoint
    def wide(x, p):
        return jnp.sin(jnp.cos(x @ p["w"]) * p["s"][None])

    def loss(params, batch):
        x = batch["x"]
        for p in params:
            x = hetjax.cut(x + jnp.tanh(wide(x, p) @ p["w"].T))
        return jnp.square(x - batch["y"]).mean()

    return hetjax.trace(loss, blocks, spec_of(features()))


def unit_function(program, segment, rows, **setting):
    flat = program.flat(rows)
    unit = flat.unit(segment, segment + 1)
    trainable = [program.trainable(p) for p in unit.params]
    return segments.UnitFunction(flat, unit, segments.Setting(**setting), trainable)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["casts", "own remat", *zoo.ZOO])
def test_what_is_kept_follows_the_rows_so_no_weight_nor_a_cast_of_one_is_among_it(name, policy):
    program = program_of(name)
    for segment in range(program.num_segments):
        few, many = (unit_function(program, segment, r, remat=policy).kept_specs for r in (3, 6))
        assert [2 * np.prod(s.shape) for s in few if s.shape] == [np.prod(s.shape) for s in many if s.shape]


@pytest.mark.parametrize("name", ["casts", "own remat", *zoo.ZOO])
def test_full_remat_keeps_least_and_dots_less_than_everything_where_there_is_more_than_products(name):
    for info in program_of(name).segments():
        kept = info.activation_bytes_per_row
        assert kept["full"] <= min(kept["dots"], kept["none"])
        if name in ("casts", "gpt", "llama"):
            assert kept["dots"] <= kept["none"]


def test_full_remat_keeps_the_inputs_alone():
    program = program_of("casts")
    assert [unit_function(program, i, 4, remat="full").kept_specs for i in range(3)] == [[], [], []]
    assert unit_function(program, 1, 4, remat="none").kept_specs


def test_a_users_own_checkpoint_is_honoured_inside_a_segment():
    """Width 3 * dim exists under the checkpoint alone, whether products are merged or not."""
    program = program_of("own remat")
    for flatten in (False, True):
        kept = unit_function(program, 1, 4, remat="none", flatten_dots=flatten).kept_specs
        assert not [s for s in kept if 24 in s.shape[:-1]]
        assert len([s for s in kept if s.shape == (4, 24)]) <= 1  # the checkpoint's own result


@pytest.mark.parametrize("policy", [*POLICIES, "everything_saveable", "nothing_saveable"])
@pytest.mark.parametrize("name", ["casts", "own remat"])
def test_forward_and_backward_of_a_unit_give_its_own_derivative_under_every_policy(name, policy):
    program = program_of(name)
    plain = unit_function(program, 1, 4, remat="none")
    function = unit_function(program, 1, 4, remat=policy, flatten_dots=True)
    keys = iter(jax.random.split(jax.random.key(0), 9))
    params, inputs, cotangents = (
        [jax.random.normal(next(keys), s.shape).astype(s.dtype) for s in specs]
        for specs in (*function.specs[:2], [plain.flat.piece_spec(v) for v in plain.unit.output_vars])
    )

    @jax.jit
    def ours(params, inputs, cotangents):
        _, _, kept = function.forward(params, inputs, [], jnp.int32(0))
        return function.backward(params, inputs, [], jnp.int32(0), kept, cotangents)

    @jax.jit
    def reference(params, inputs, cotangents):
        _, pull = jax.vjp(lambda p, x: plain.run(p, x, [], jnp.int32(0))[0], params, inputs)
        return pull(cotangents)

    tolerance = 2e-2 if name == "casts" else 1e-5
    assert distance(ours(params, inputs, cotangents), reference(params, inputs, cotangents)) < tolerance


def test_policies_of_jax_are_taken_by_name():
    for name in ("full", "dots", "everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable"):
        assert callable(segments.checkpoint_policy(name))
    assert segments.checkpoint_policy("none") is None


@pytest.mark.parametrize("name", ["all", "save_only_these_names", "__name__", ""])
def test_an_unknown_policy_is_told_the_known_ones(name):
    with pytest.raises(hetjax.UserError, match=r"is unknown. Allowed: none, full, dots, .*dots_saveable"):
        segments.checkpoint_policy(name)


# ---- products ----


@st.composite
def products(draw):
    """Dimension numbers and shapes of any product, its dims in any order."""
    num_batch, num_contract, left, right = (draw(st.integers(0, n)) for n in (2, 2, 3, 3))
    size = st.integers(1, 3)
    batch, contract = draw(st.tuples(*[size] * num_batch)), draw(st.tuples(*[size] * num_contract))
    frees = draw(st.tuples(*[size] * left)), draw(st.tuples(*[size] * right))
    shapes, dims = [], []
    for free in frees:
        named = [*(("b", i, n) for i, n in enumerate(batch)), *(("c", i, n) for i, n in enumerate(contract))]
        named = draw(st.permutations([*named, *(("f", i, n) for i, n in enumerate(free))]))
        shapes.append(tuple(n for *_, n in named))
        place = {(kind, i): at for at, (kind, i, _) in enumerate(named)}
        dims.append(
            [tuple(place[k, i] for i in range(m)) for k, m in (("c", num_contract), ("b", num_batch))]
        )
    return shapes, ((dims[0][0], dims[1][0]), (dims[0][1], dims[1][1]))


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(products(), st.sampled_from([None, jnp.float32]))
def test_a_merged_product_and_its_derivatives_equal_the_product_it_replaces(product, accumulate):
    """Small integers, so that the order of a sum does not show."""
    shapes, dims = product
    rng = np.random.default_rng(len(shapes[0]))
    lhs, rhs = (jnp.asarray(rng.integers(-4, 5, s), jnp.float32) for s in shapes)

    def plain(a, b):
        return jax.lax.dot_general(a, b, dims, preferred_element_type=accumulate)

    eqn = jax.make_jaxpr(plain)(lhs, rhs).eqns[0]

    def merged(a, b):
        out = segments.flatten_dot(eqn, [a, b])
        return plain(a, b) if out is None else out[0]

    weights = jnp.asarray(rng.integers(-2, 3, jax.eval_shape(plain, lhs, rhs).shape), jnp.float32)

    @jax.jit
    def both(a, b):
        out, pulls = zip(*[jax.vjp(f, a, b) for f in (merged, plain)], strict=True)
        return out, [pull(weights) for pull in pulls]

    values, slopes = both(lhs, rhs)
    assert values[0].shape == values[1].shape and values[0].dtype == values[1].dtype
    assert equal(*values) and equal(*slopes)


def test_a_merged_product_contracts_one_dim_and_plain_ones_are_left_alone():
    def of(*shapes):
        spec = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
        return jax.make_jaxpr(lambda a, b: jnp.einsum("rsd,def->rsef", a, b))(*spec).eqns[0]

    eqn = of((2, 3, 4), (4, 5, 6))
    args = [jnp.ones((2, 3, 4)), jnp.ones((4, 5, 6))]
    inner = jax.make_jaxpr(lambda *a: segments.flatten_dot(eqn, list(a)))(*args)
    dot = next(e for e in inner.eqns if e.primitive.name == "dot_general")
    assert [v.aval.shape for v in dot.invars] == [(6, 4), (4, 30)]
    flat = jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 4))).eqns
    dot = next(e for e in flat if e.primitive.name == "dot_general")
    assert segments.flatten_dot(dot, [jnp.ones((2, 3)), jnp.ones((3, 4))]) is None


# ---- executables ----


@contextlib.contextmanager
def compilations():
    """A list that gets an entry for each program that XLA compiles meanwhile."""
    seen, on = [], [True]

    def listen(event, duration_secs, **_):
        if on[0] and event.endswith("backend_compile_duration"):
            seen.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    on[0] = False


def deep(num_layers, dim):
    """Equal residual layers behind a first one of another class."""

    def init(key):
        first, *rest = jax.random.split(key, num_layers + 1)
        made = {"embed": jax.random.normal(first, (dim, dim))}
        return made | {f"layer{i}": {"w": jax.random.normal(k, (dim, dim)) / 9} for i, k in enumerate(rest)}

    def loss(params, batch):
        x = hetjax.cut(batch["x"] @ params["embed"])
        for i in range(num_layers):
            x = hetjax.cut(x + jnp.tanh(x @ params[f"layer{i}"]["w"]))
        return jnp.square(x - batch["y"]).mean()

    return hetjax.trace(loss, init, spec_of(features(dim=dim)))


def run(program, plan, dim, steps=1):
    trainer = hetjax.Trainer(program, plan, optax.adam(1e-3))
    state, metrics = trainer.init(seed=0), {}
    for _ in range(steps):
        state, metrics = trainer.step(state, features(dim=dim))
    return trainer, metrics["loss"]


def test_three_times_the_layers_compile_no_more_programs():
    counts = []
    for num_layers, dim in ((4, 24), (12, 40)):
        program = deep(num_layers, dim)
        plan = plan_of(program, cluster_of([1, 1]), [num_layers // 2], [0, 1], microbatches=2)
        with compilations() as seen:
            run(program, plan, dim)
        counts.append(len(seen))
    assert 0 < counts[1] <= counts[0]


def test_a_class_has_one_set_of_executables_on_a_submesh():
    program = deep(12, 8)
    plan = plan_of(program, cluster_of([1, 1]), [7], [0, 1], microbatches=2)
    trainer = hetjax.Trainer(program, plan, optax.adam(1e-3))
    for stage, expected in ((0, 2), (1, 2)):  # the first and the layers; the layers and the loss
        units = trainer.placement.training[stage, 0].units
        assert len(units) == 7 and len({id(u.functions) for u in units}) == expected


def test_moving_a_stage_boundary_compiles_nothing():
    program = deep(6, 16)
    cluster = cluster_of([1, 1])
    run(program, plan_of(program, cluster, [4], [0, 1], microbatches=2), 16)
    with compilations() as seen:
        run(program, plan_of(program, cluster, [2], [0, 1], microbatches=2), 16)
    assert seen == []


def test_another_order_and_another_trainer_of_one_model_compile_nothing():
    program = deep(6, 16)
    cluster = cluster_of([1, 1])
    run(program, plan_of(program, cluster, [4], [0, 1], microbatches=2), 16)
    again = deep(6, 16)
    with compilations() as seen:
        run(again, plan_of(again, cluster, [4], [0, 1], microbatches=2, schedule="gpipe"), 16)
    assert seen == []


class Recorder:
    """A compiled function that notes its text and its arguments at each call."""

    def __init__(self, function, calls):
        self.function, self.calls = function, calls

    def __call__(self, *args):
        text = self.function.lower(*args).compile().as_text()
        out = self.function(*args)
        self.calls.append((text, args, out))
        return out


def recorded(program, plan, batch):
    """Calls of forward and backward of one step."""
    trainer = hetjax.Trainer(program, plan, optax.sgd(1e-2))
    calls = {"forward": [], "backward": []}
    for run_ in trainer.placement.training.values():
        for unit in run_.units:
            for name, seen in calls.items():
                if not isinstance(getattr(unit.functions, name), Recorder):
                    original = getattr(unit.functions, name)
                    setattr(unit.functions, name, Recorder(original, seen))
    try:
        trainer.step(trainer.init(seed=0), batch)[1].fetch()
    finally:
        for run_ in trainer.placement.training.values():
            for unit in run_.units:
                for name in calls:
                    recorder = getattr(unit.functions, name)
                    setattr(unit.functions, name, getattr(recorder, "function", recorder))
    return calls


COLLECTIVE = re.compile(r"= \S+ (all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)")


def partners(text):
    """The sets of partitions that each collective of a compiled program joins."""
    for line in text.splitlines():
        if not COLLECTIVE.search(line):
            continue
        found = re.search(r"replica_groups=(\S+)( \{[^}]*\})?", line)
        assert found, f"a collective without replica_groups: {line}"
        numbers = [list(map(int, part.split(","))) for part in re.findall(r"[\d,]*\d", found[1])]
        if found[1].startswith("mesh"):
            names = re.findall(r"'(\w+)'=(\d+)", found[1])
            joined = [n for n, _ in names if n in found[2]]
            ids = np.arange(np.prod([int(n) for _, n in names])).reshape([int(n) for _, n in names])
            order = sorted(range(len(names)), key=lambda i: names[i][0] in joined)
            ids = ids.transpose(order).reshape(-1, np.prod([int(n) for name, n in names if name in joined]))
        elif "<=" in found[1]:
            ids = np.arange(np.prod(numbers[1])).reshape(numbers[1])
            ids = ids.transpose(numbers[2] if len(numbers) > 2 else None).reshape(numbers[0])
        else:
            ids = np.array(numbers)
        yield {frozenset(group) for group in ids.tolist()}


def test_fused_neighbours_are_one_program():
    program = deep(6, 8)
    plan = plan_of(program, cluster_of([1]), [], [0], fuse=3)
    trainer = hetjax.Trainer(program, plan, optax.sgd(1e-2))
    assert [(u.unit.start, u.unit.stop) for u in trainer.placement.training[0, 0].units] == [
        (0, 3),
        (3, 6),
        (6, 8),
    ]


def test_each_segment_of_a_stage_has_its_own_remat_policy_and_fused_ones_share_one():
    program = deep(2, 8)
    plan = plan_of(program, cluster_of([1]), [], [0])
    (stage,) = plan.stages
    policies = ("none", "full", "dots", "dots")

    def remade(fuse):
        mixed = dataclasses.replace(stage.members[0], remat=policies)
        return dataclasses.replace(plan, stages=(dataclasses.replace(stage, members=(mixed,), fuse=fuse),))

    trainer = hetjax.Trainer(program, remade(1), optax.sgd(1e-2))
    units = trainer.placement.training[0, 0].units
    assert tuple(u.functions.setting.remat for u in units) == policies
    with pytest.raises(hetjax.UserError, match="remat policies full, none for segments that fuse = 2 comp"):
        hetjax.Trainer(program, remade(2), optax.sgd(1e-2))


def test_weights_are_cast_once_a_step_and_not_for_each_microbatch():
    program = program_of("casts")
    plan = plan_of(program, cluster_of([2], ["bfloat16"]), [], [[member(0, 0, 2, fsdp=2)]], microbatches=4)
    calls = recorded(program, plan, features())
    for name in ("forward", "backward"):
        given = [args[0] for _, args, _ in calls[name] if args[0]]
        assert len(given) == 4 * 3 and len({tuple(map(id, params)) for params in given}) == 3
        assert {a.dtype for params in given for a in params} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("axes", [{"dp": 2}, {"fsdp": 2}])
def test_gradients_are_not_reduced_in_a_backward(axes):
    program = deep(2, 8)
    plan = plan_of(program, cluster_of([2]), [], [[member(0, 0, 4, **axes)]], microbatches=2)
    calls = recorded(program, plan, features())
    assert len(calls["backward"]) == 2 * program.num_segments
    for text, *_ in [*calls["forward"], *calls["backward"]]:
        assert not COLLECTIVE.search(text)


def test_accumulators_are_donated():
    program = deep(2, 8)
    plan = plan_of(program, cluster_of([2]), [], [[member(0, 0, 4, dp=2)]], microbatches=2)
    calls = recorded(program, plan, features())
    accumulators = [a for _, args, _ in calls["backward"] for a in args[7]]
    assert len(accumulators) == 2 * 3 and all(a.is_deleted() for a in accumulators)


def test_a_tensor_parallel_backward_reduces_over_the_tensor_axis_alone():
    case = zoo.gpt()
    program = case.program()
    plan = plan_of(program, cluster_of([4]), [], [[member(0, 0, 4, dp=2, tp=2)]], microbatches=2)
    calls = recorded(program, plan, case.batch)
    joined = [group for text, *_ in calls["backward"] for group in partners(text)]
    assert joined and all(group == {frozenset({0, 1}), frozenset({2, 3})} for group in joined)
