"""The library, used wrongly: each mistake is a sentence at the call that made it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax.plan import Member, Plan, Stage

SPEC = {"x": jax.ShapeDtypeStruct((4, 4), jnp.float32), "y": jax.ShapeDtypeStruct((4,), jnp.float32)}
BATCH = {"x": np.ones((4, 4), np.float32), "y": np.zeros(4, np.float32)}


def init(key):
    return {"w": jax.random.normal(key, (4, 4)), "v": jnp.ones(4)}


def loss(params, batch):
    hidden = hetjax.cut(jnp.tanh(batch["x"] @ params["w"]))
    return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


def trainer(init_fn=init, **options):
    program = hetjax.trace(loss, init_fn, SPEC)
    groups = {name: {"kind": "cpu", "num_devices": 1} for name in "ab"}
    cluster = hetjax.Cluster.from_dict(
        {"name": "two", "groups": groups, "default_link": {"bandwidth_gb_per_s": 5}}
    )
    stages = tuple(Stage((i, i + 1), (Member("ab"[i], (0,), {}, (0, 2), ("none",)),)) for i in range(2))
    plan = Plan(cluster, program.fingerprint, 2, 4, 2, "1f1b", stages)
    return hetjax.Trainer(program, plan, optax.adam(0.1), **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_spec": {"x": (4, 4)}}, "batch_spec holds 4. Each of its leaves has to be a jax.ShapeDtype"),
        ({"batch_spec": {"x": jax.ShapeDtypeStruct((0, 4), jnp.float32)}}, r"lead with \[0\] rows"),
        (
            {"init_fn": lambda key: {"c": jnp.complex64(1j)}},
            "Parameter 'c' is complex64, which hetjax does not",
        ),
    ],
)
def test_specs_that_cannot_be_trained_are_named(arguments, message):
    with pytest.raises(hetjax.UserError, match=message):
        hetjax.trace(**({"loss_fn": loss, "init_fn": init, "batch_spec": SPEC} | arguments))


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, float("nan"), float("inf")])
def test_a_norm_that_nothing_can_be_clipped_to_is_refused(clip_norm):
    with pytest.raises(
        hetjax.UserError, match="clip_norm is .*. Give a positive number, or None not to clip."
    ):
        trainer(clip_norm=clip_norm)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}])
def test_a_state_that_a_step_has_used_up_is_told_apart_from_the_newest(options):
    mine = trainer(**options)
    for use in (mine.export, mine.params, lambda s: mine.step(s, BATCH), lambda s: mine.evaluate(s, BATCH)):
        old = mine.init(0)
        new, _ = mine.step(old, BATCH)
        with pytest.raises(
            hetjax.UserError, match="The state after 0 steps was used up by the step that follow"
        ):
            use(old)
        use(new)


def test_a_state_of_another_program_is_refused():
    other = trainer(lambda key: init(key) | {"unused": jnp.ones(3)})
    with pytest.raises(hetjax.UserError, match="not of this program. Give one of this trainer's init, step"):
        trainer().step(other.init(0), BATCH)
