"""The property that everything rests on: any plan gives the loss, gradients and steps of one device."""

from __future__ import annotations

import functools
import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax.cluster import Cluster
from hetjax.plan import Member, Plan, Stage
from tests import zoo

EXAMPLES = 6
TX = optax.adamw(1e-2, eps=1e-3)  # a large eps: rounding noise in gradients that are zero stays noise
STEPS = 3


@functools.cache
def specimen(name: str) -> zoo.Specimen:
    return zoo.ZOO[name]()


@functools.cache
def program_of(name: str) -> hetjax.Program:
    return specimen(name).program()


def reference_loss(name: str, num_microbatches: int, step: int) -> Any:
    """The mean loss of plain JAX; a model with random draws sees the microbatches one by one."""
    case = specimen(name)
    key = jax.random.fold_in(jax.random.key(0), step)

    def mean(out: Any) -> tuple[Any, Any]:
        out = out[0] if isinstance(out, tuple) else out
        return (out.total, out.weight) if isinstance(out, hetjax.Mean) else (out, 1.0)

    def loss(params: Any, batch: Any) -> Any:
        if not program_of(name).uses_rng:
            total, weight = mean(case.loss_fn(params, batch))
            return total / weight
        rows = zoo.ROWS // num_microbatches
        total = jnp.zeros(())
        for m in range(num_microbatches):
            part = jax.tree.map(lambda a, m=m: a[m * rows : (m + 1) * rows], batch)
            total = total + mean(case.loss_fn(params, part, jax.random.fold_in(key, m)))[0]
        return total / num_microbatches

    return loss


def frozen_mask(name: str) -> list[bool]:
    return program_of(name).frozen


@functools.cache
def reference(name: str, num_microbatches: int) -> tuple[Any, Any, list]:
    """(initial parameters, (loss, gradients) of the first step, parameters after STEPS steps of plain
    optax)."""
    case = specimen(name)
    params = jax.jit(case.init_fn)(jax.random.key(0))
    leaves, treedef = jax.tree.flatten(params)
    trained = [i for i, f in enumerate(frozen_mask(name)) if not f]
    state = TX.init([leaves[i] for i in trained])
    start = [np.asarray(a) for a in leaves]
    first = None
    for step in range(STEPS):
        loss = reference_loss(name, num_microbatches, step)
        value, grads = jax.jit(
            jax.value_and_grad(lambda l, loss=loss: loss(jax.tree.unflatten(treedef, l), case.batch))
        )(leaves)
        first = first or (float(value), [np.asarray(g) for g in grads])
        updates, state = TX.update([grads[i] for i in trained], state, [leaves[i] for i in trained])
        new = optax.apply_updates([leaves[i] for i in trained], updates)
        for i, leaf in zip(trained, jax.tree.leaves(new), strict=True):
            leaves[i] = leaf
    return start, first, [np.asarray(a) for a in leaves]


def distance(got: Any, expected: Any) -> float:
    """Relative norm of the difference of two lists of arrays, worst leaf."""
    worst = 0.0
    for a, b in zip(got, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = np.linalg.norm(b)
        worst = max(
            worst, float(np.linalg.norm(a - b) / scale) if scale > 1e-6 else float(np.linalg.norm(a - b))
        )
    return worst


GROUP_SIZES = [(1,), (1, 1), (2, 1), (2, 2), (4, 2), (1, 2, 1), (2, 3, 1), (1, 1, 1, 1), (2, 2, 2, 2)]


def draw_axes(draw: Any, devices: int, rows: int, named: bool) -> tuple[dict[str, int], int]:
    """Sizes of the axes, and how many of the devices they use: any that divide the rows."""
    options = [
        {"dp": dp, "fsdp": fsdp, "tp": tp}
        for dp in (1, 2, 3, 4)
        for fsdp in (1, 2, 4)
        for tp in ((1, 2) if named else (1,))
        if dp * fsdp * tp <= devices and rows % (dp * fsdp) == 0
    ]
    axes = draw(st.sampled_from(options))
    return axes, math.prod(axes.values())


def draw_members(
    draw: Any, sizes: tuple[int, ...], rows: int, count: int, fuse: int, case: zoo.Specimen
) -> tuple[Member, ...]:
    """One member, or two unlike ones that share the rows unevenly; two policies where nothing is fused."""
    remat = st.sampled_from(["none", "full", "dots", "everything_saveable"])

    def member(group: int, start: int, stop: int) -> Member:
        axes, used = draw_axes(draw, sizes[group], stop - start, case.named)
        one = draw(remat)
        two = draw(remat) if fuse == 1 < count else one
        policies = (one,) * (count - count // 2) + (two,) * (count // 2)
        return Member(f"g{group}", tuple(range(used)), axes, (start, stop), policies)

    first = draw(st.integers(0, len(sizes) - 1))
    if len(sizes) > 1 and rows > 1 and draw(st.booleans()):
        second = (first + draw(st.integers(1, len(sizes) - 1))) % len(sizes)
        middle = draw(st.integers(1, rows - 1))
        return member(first, 0, middle), member(second, middle, rows)
    return (member(first, 0, rows),)


def draw_plan(draw: Any, name: str, low: str | None = None) -> Plan:
    """A random placement and order of a specimen on one to four groups."""
    case, program = specimen(name), program_of(name)
    sizes = draw(st.sampled_from(GROUP_SIZES))
    dtypes = {f"g{i}": (low if low and draw(st.booleans()) else "float32") for i in range(len(sizes))}
    groups = {
        f"g{i}": {"kind": "cpu", "num_devices": n, "compute_dtype": dtypes[f"g{i}"]}
        for i, n in enumerate(sizes)
    }
    link = {"bandwidth_gb_per_s": 1.0, "latency_us": 10.0}
    cluster = Cluster.from_dict({"name": "drawn", "groups": groups, "default_link": link})
    microbatches = draw(st.sampled_from([1, 2, 4, 8]))
    rows, count = zoo.ROWS // microbatches, program.num_segments
    borders = sorted(draw(st.sets(st.integers(1, count - 1), max_size=count - 1)))
    stages = []
    equal = draw_axes(draw, min(sizes), rows, case.named) if case.equal_shards else None
    for start, stop in zip([0, *borders], [*borders, count], strict=True):
        fuse = draw(st.integers(1, stop - start))
        if equal:
            group = draw(st.integers(0, len(sizes) - 1))
            remat = (draw(st.sampled_from(["none", "full", "dots"])),) * (stop - start)
            members = (Member(f"g{group}", tuple(range(equal[1])), equal[0], (0, rows), remat),)
        else:
            members = draw_members(draw, sizes, rows, stop - start, fuse, case)
        stages.append(Stage((start, stop), members, fuse))
    kind = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    ahead = draw(st.integers(0, 3))
    return Plan(cluster, program.fingerprint, count, zoo.ROWS, microbatches, kind, tuple(stages), ahead=ahead)


def check_plan(name: str, plan: Plan, tolerance: float, *, steps: bool) -> None:
    program, case = program_of(name), specimen(name)
    start, (loss, grads), after = reference(name, plan.num_microbatches)
    trainer = hetjax.Trainer(program, Plan.from_json(plan.to_json()), TX)
    state = trainer.init(seed=0)
    assert all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(trainer.params(state)), start, strict=True)
    )
    got, got_grads = trainer.loss_and_grads(state, case.batch)
    assert abs(got - loss) <= tolerance * abs(loss)
    trained = [not f for f in program.frozen]
    pairs = zip(jax.tree.leaves(got_grads), grads, trained, strict=True)
    mine, theirs = zip(*[(a, b) for a, b, t in pairs if t], strict=True)
    assert distance(mine, theirs) < tolerance
    if steps:
        metrics = {}
        for _ in range(STEPS):
            state, metrics = trainer.step(state, case.batch)
        assert math.isfinite(metrics["loss"])
        assert distance(jax.tree.leaves(trainer.params(state)), after) < 10 * tolerance


settings = hypothesis.settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.generate],
)


@pytest.mark.parametrize("name", zoo.ZOO)
@settings
@hypothesis.given(data=st.data())
def test_any_plan_gives_the_loss_gradients_and_steps_of_one_device(name: str, data: Any) -> None:
    check_plan(name, draw_plan(data.draw, name), 1e-5, steps=True)


@pytest.mark.parametrize("name", [n for n in zoo.ZOO if n != "dropout"])
@hypothesis.settings(settings, max_examples=2)
@hypothesis.given(data=st.data())
def test_any_plan_with_bfloat16_groups_gives_the_gradients_of_one_device(name: str, data: Any) -> None:
    check_plan(name, draw_plan(data.draw, name, low="bfloat16"), 2e-2, steps=False)


@pytest.mark.smoke
@pytest.mark.parametrize("name", zoo.ZOO)
def test_two_unlike_groups_give_the_loss_gradients_and_steps_of_one_device(name: str) -> None:
    """One plan for each specimen, for quick runs and other versions of JAX."""
    case, program = specimen(name), program_of(name)
    count, rows = program.num_segments, zoo.ROWS // 2
    groups = {"one": {"kind": "cpu", "num_devices": 1}, "two": {"kind": "cpu", "num_devices": 2}}
    cluster = Cluster.from_dict(
        {"name": "pair", "groups": groups, "default_link": {"bandwidth_gb_per_s": 1.0, "latency_us": 1.0}}
    )
    stages = []
    for number, start in enumerate(range(0, count, 2)):
        stop = min(start + 2, count)
        wide = number % 2 == 1 and not case.equal_shards
        member = Member(
            "two" if number % 2 else "one",
            (0, 1) if wide else (0,),
            {"fsdp": 2} if wide else {},
            (0, rows),
            ("dots",) * (stop - start),
        )
        stages.append(Stage((start, stop), (member,)))
    check_plan(
        name, Plan(cluster, program.fingerprint, count, zoo.ROWS, 2, "1f1b", tuple(stages)), 1e-5, steps=True
    )
