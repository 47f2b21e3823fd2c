"""Values arrive exactly in any layout, and nobody who dispatches waits for one to be computed."""

import inspect
import threading

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import hetjax
from hetjax.play import Mailbox
from hetjax.sharding import make_submesh
from hetjax.transfer import Carrier, Layout
from tests import zoo
from tests.gate import Gate
from tests.plans import cluster_of, equal, member, plan_of


def layout(first, start, stop, *, dp=1, fsdp=1, tp=1, dim=0, inner=1):
    """Rows `start` to `stop` on the devices from `first` on."""
    devices = jax.devices()[first : first + dp * fsdp * tp]
    submesh = make_submesh(devices, {"dp": dp, "fsdp": fsdp, "tp": tp})
    each = (stop - start) // (dp * fsdp)
    rows = tuple((start + i * each, start + (i + 1) * each) for i in range(dp * fsdp))
    return Layout(submesh, dim, inner, rows)


def whole(rows, dim=0, inner=1, dtype=np.float32):
    shape = [2, 3, 4]
    shape[dim] = rows * inner
    values = np.random.default_rng(rows).standard_normal(shape)
    return values.astype(dtype) if np.issubdtype(dtype, np.floating) else (values * 9).astype(dtype)


def own(values, lay):
    start, stop = lay.rows[0][0] * lay.inner, lay.rows[-1][1] * lay.inner
    return np.take(values, range(start, stop), axis=lay.dim)


def place(values, lay):
    return jax.device_put(own(values, lay), lay.sharding)


CHANGES = {
    "the same grid": ([layout(0, 0, 12, dp=2)], layout(4, 0, 12, dp=2)),
    "four shards to two": ([layout(0, 0, 12, dp=4)], layout(4, 0, 12, dp=2)),
    "two shards to four": ([layout(0, 0, 12, dp=2)], layout(4, 0, 12, dp=2, fsdp=2)),
    "three shards to two": ([layout(0, 0, 12, dp=3)], layout(4, 0, 12, dp=2)),
    "two shards to three": ([layout(0, 0, 12, fsdp=2)], layout(4, 0, 12, dp=3)),
    "one device to four": ([layout(0, 0, 12)], layout(4, 0, 12, dp=4)),
    "four devices to one": ([layout(0, 0, 12, dp=4)], layout(4, 0, 12)),
    "onto a tensor axis": ([layout(0, 0, 12, dp=2)], layout(4, 0, 12, dp=2, tp=2)),
    "from a tensor axis to other shards": ([layout(0, 0, 12, dp=2, tp=2)], layout(4, 0, 12, dp=3)),
    "some of the rows": ([layout(0, 0, 12, dp=2)], layout(4, 4, 10, dp=3)),
    "from two members": ([layout(0, 0, 4, dp=2), layout(2, 4, 12)], layout(4, 0, 12, dp=3)),
    "some of the rows of three members": (
        [layout(0, 0, 2), layout(1, 2, 8, dp=2), layout(3, 8, 12)],
        layout(4, 1, 11, dp=2),
    ),
    "to devices that hold some of it": ([layout(0, 0, 12, dp=4)], layout(2, 0, 12, dp=3)),
}


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")])
@pytest.mark.parametrize("name", CHANGES)
def test_a_move_returns_before_the_value_is_computed_and_brings_it_exactly(name, dtypes):
    sources, to = CHANGES[name]
    values, gate, carrier = whole(12, dtype=jnp.dtype(dtypes[0])), Gate(), Carrier()
    held = [(gate.hold(place(values, lay)), lay) for lay in sources]
    moved = carrier.move(held, to, dtypes[1])
    assert not moved.is_ready() and not any(x.is_ready() for x, _ in held)  # pyrefly: ignore[missing-attribute]
    gate.open()
    assert moved.sharding == to.sharding and moved.dtype == dtypes[1]
    assert equal(moved, own(values, to).astype(dtypes[1]))


@st.composite
def moves(draw):
    """Members that partition the rows, and any rows of them on any shards: arguments of `layout`."""
    sources, stop, first = [], 0, 0
    for _ in range(draw(st.integers(1, 2))):
        dp, each = draw(st.integers(1, 2)), draw(st.integers(1, 3))
        sources.append((first, stop, stop + dp * each, dp, 1))
        stop, first = stop + dp * each, first + dp
    count = draw(st.integers(1, stop))
    start = draw(st.integers(0, stop - count))
    dp = draw(st.sampled_from([n for n in (1, 2, 3) if count % n == 0]))
    return sources, (draw(st.integers(0, 2)), start, start + count, dp, draw(st.integers(1, 2)))


DTYPES = ["float32", "bfloat16", "float16"]


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(
    moves(), st.integers(0, 2), st.integers(1, 3), st.sampled_from(DTYPES), st.sampled_from(DTYPES)
)
def test_any_rows_along_any_dim_arrive_bit_for_bit_in_any_layout(move, dim, inner, dtype, target):
    *sources, to = (
        layout(first, start, stop, dp=dp, tp=tp, dim=dim, inner=inner)
        for first, start, stop, dp, tp in (*move[0], move[1])
    )
    values = whole(sources[-1].rows[-1][1], dim, inner, jnp.dtype(dtype))
    moved = Carrier().move([(place(values, lay), lay) for lay in sources], to, target)
    assert moved.sharding == to.sharding
    assert equal(moved, jnp.asarray(own(values, to)).astype(target))


@pytest.mark.parametrize("dtype", [np.int32, np.bool_])
def test_integers_and_booleans_move_too(dtype):
    sources, to = CHANGES["three shards to two"]
    values = whole(12, dtype=np.int32) > 0 if dtype == np.bool_ else whole(12, dtype=dtype)
    moved = Carrier().move([(place(values, sources[0]), sources[0])], to, np.dtype(dtype).name)
    assert equal(moved, values)


def test_a_value_without_rows_moves_between_equal_shards_alone():
    source, to = layout(0, 0, 12, dp=2), layout(4, 0, 12, dp=2)
    source, to = (Layout(lay.submesh, None, 1, lay.rows) for lay in (source, to))
    value = jax.device_put(np.arange(6, dtype=np.float32).reshape(2, 3), source.sharding)
    assert equal(Carrier().move([(value, source)], to, "float32"), value)
    other = Layout(layout(4, 0, 12, dp=4).submesh, None, 1, layout(4, 0, 12, dp=4).rows)
    with pytest.raises(AssertionError, match="without a row dim can't be divided anew"):
        Carrier().move([(value, source)], other, "float32")


def test_what_stays_on_its_submesh_is_not_copied():
    lay, carrier = layout(0, 0, 12, dp=2), Carrier()
    value = place(whole(12), lay)
    assert carrier.move([(value, lay)], lay, "float32") is value
    assert carrier.replicate(value, lay.submesh, lay.submesh, lay.sharding) is value
    assert carrier.num_bytes == 0
    assert carrier.move([(value, lay)], lay, "bfloat16").dtype == jnp.bfloat16


def test_a_value_is_sent_in_the_smaller_of_the_two_dtypes():
    source, to = layout(0, 0, 12, dp=2), layout(4, 0, 12, dp=2)
    for dtype, target in (("float32", "bfloat16"), ("bfloat16", "float32")):
        carrier = Carrier()
        carrier.move([(place(whole(12, dtype=jnp.dtype(dtype)), source), source)], to, target)
        assert carrier.num_bytes == 12 * 3 * 4 * 2


@pytest.mark.parametrize("stored", [P(), P("fsdp"), P(None, "tp"), P("fsdp", "tp")])
@pytest.mark.parametrize("axes", [{"dp": 3}, {"dp": 2, "tp": 2}, {}])
def test_a_parameter_is_copied_to_any_layout_before_it_is_computed(stored, axes):
    source = make_submesh(jax.devices()[:4], {"dp": 1, "fsdp": 2, "tp": 2})
    axes = {"dp": 1, "fsdp": 1, "tp": 1} | axes
    to = make_submesh(jax.devices()[4 : 4 + axes["dp"] * axes["tp"]], axes)
    target = NamedSharding(to.mesh, P(None, "tp"))
    value, gate = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32), Gate()
    held = gate.hold(jax.device_put(value, NamedSharding(source.mesh, stored)))
    copied = Carrier().replicate(held, source, to, target)
    assert not copied.is_ready()
    gate.open()
    assert copied.sharding.is_equivalent_to(target, 2) and equal(copied, value)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}])
def test_a_step_returns_before_the_devices_are_done_and_the_batch_may_be_changed_then(options):
    """Uneven rows on unlike submeshes and a skip; a parameter of the last segment is held back.

    In one microbatch, since XLA itself lets no more than 32 programs wait on a device of the CPU.
    """
    case = zoo.skips()
    program = case.program()
    first = [member(0, 0, 6, dp=3), member(1, 6, 8)]
    plan = plan_of(program, cluster_of([3, 1, 2]), [4], [first, [member(2, 0, 8, dp=2)]])
    trainer = hetjax.Trainer(program, plan, optax.adam(1e-2), **options)
    expected_state, metrics = trainer.step(trainer.init(seed=0), case.batch)
    expected, expected_params = metrics.fetch(), trainer.params(expected_state)
    state, gate = trainer.init(seed=0), Gate()
    state.masters[program.pieces[-1]] = gate.hold(state.masters[program.pieces[-1]])
    batch = {k: v.copy() for k, v in case.batch.items()}
    step = inspect.unwrap(type(trainer).step)  # the check of its annotation would read a metric
    state, metrics = step(trainer, state, batch)
    assert not any(a.is_ready() for a in state.masters.values())
    for array in batch.values():
        array[:] = np.nan
    gate.open()
    assert metrics.fetch() == expected and equal(trainer.params(state), expected_params)


def test_an_error_of_one_dispatching_thread_wakes_the_others():
    mail, caught = Mailbox(), []

    def reader():
        try:
            mail.take("me", 0, 1)
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=reader)
    thread.start()
    mail.fail(ValueError("lost"))
    thread.join(timeout=60)
    assert str(caught[0]) == "another dispatching thread of this step failed"
    assert isinstance(caught[0].__cause__, ValueError)
