"""Run by test_cross_backend in a process of its own: two JAX clients side by side, as CPU and GPU would be.

Prints one line of JSON: what was found, by name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.backend
from jaxlib import xla_client

jax.extend.backend.register_backend_factory(
    "cpu2", lambda: xla_client.make_cpu_client(num_devices=4), priority=-10
)

import optax  # noqa: E402

import hetjax  # noqa: E402
import tests.conftest  # noqa: E402, F401  (its settings; it starts JAX)
from hetjax.sharding import make_submesh  # noqa: E402
from hetjax.transfer import Carrier, Layout, arrived  # noqa: E402
from tests import zoo  # noqa: E402
from tests.gate import Gate  # noqa: E402
from tests.plans import alone, cluster_of, distance, equal, member, plan_of  # noqa: E402

BOTH = {"backend": [None, "cpu2"]}


def cluster(dtypes: tuple[str, ...] = ()) -> Any:
    """Two devices on each client."""
    return cluster_of([2, 2], dtypes, **BOTH)


def stages(program: hetjax.Program) -> dict[str, Any]:
    """Plans over both clients."""
    half, rows = program.num_segments // 2, 4
    wide = [member(0, 0, rows, dp=2)]
    shared = [member(0, 0, 2, dp=2), member(1, 2, 4)]
    quarters = [1, 2, 3]
    return {
        "halves": plan_of(program, cluster(), [half], [wide, [member(1, 0, rows)]], microbatches=2),
        "shared stage": plan_of(program, cluster(), [half], [shared, 1], microbatches=2, schedule="gpipe"),
        "dealt out": plan_of(
            program, cluster(), quarters, [0, 1, 0, wide], microbatches=2, schedule="interleaved"
        ),
    }


def train(program: hetjax.Program, plan: Any, batch: Any, **options: Any) -> tuple[list[float], Any, float]:
    """Losses of three steps, the parameters after them, and the loss of an evaluation."""
    trainer = hetjax.Trainer(program, plan, optax.adamw(1e-2), **options)
    state, losses = trainer.init(seed=0), []
    for _ in range(3):
        state, metrics = trainer.step(state, batch)
        losses.append(metrics["loss"])
    state = trainer.import_(trainer.export(state))
    evaluated = trainer.evaluate(state, batch)["loss"]
    params = trainer.params(state)
    trainer.close()
    return losses, params, evaluated


def steps_agree() -> dict[str, float]:
    """How far training over two clients is from training on one device, by model and plan."""
    found = {}
    for name, options in (("tied", {}), ("skips", {"clip_norm": 0.1})):
        case = zoo.ZOO[name]()
        program = case.program()
        expected = train(program, alone(program, microbatches=2), case.batch, **options)
        for kind, plan in stages(program).items():
            got = train(program, plan, case.batch, **options)
            apart = [distance(a, b) for a, b in zip(got, expected, strict=True)]
            found[f"{name} {kind}"] = max(apart[0], apart[1] / 10, apart[2])
    return found


def half_precision() -> float:
    """How far a loss in float16 on one of the clients is from float32."""
    case = zoo.skips()
    program = case.program()
    plan = plan_of(program, cluster(("float32", "float16")), [2], [0, 1], microbatches=2)
    scale = hetjax.LossScale(initial=16.0)
    got, expected = (
        train(program, p, case.batch, loss_scale=s) for p, s in ((plan, scale), (alone(program), None))
    )
    return distance(got[0], expected[0])


def moves_do_not_wait() -> bool:
    """A move to the other client returns before its value is computed, and brings it exactly."""
    gate, carrier = Gate(), Carrier()
    source = make_submesh(jax.devices("cpu")[:4], {"dp": 4})
    to = make_submesh(jax.devices("cpu2")[:2], {"dp": 2})
    twin = make_submesh(jax.devices("cpu2")[:4], {"dp": 4})  # the same platform and ids, on the other client
    assert source.client is not to.client and source.mesh != twin.mesh
    start = Layout(source, 0, 1, ((0, 2), (2, 4), (4, 6), (6, 8)))
    end = Layout(to, 0, 1, ((0, 4), (4, 8)))
    value = jax.device_put(jax.numpy.arange(16.0).reshape(8, 2), start.sharding)
    moved = carrier.move([(gate.hold(value), start)], end, "bfloat16")
    copied = carrier.replicate(gate.hold(value), source, to, to.replicated)
    early = not moved.done() and not copied.done()
    gate.open()
    carrier_right = equal(arrived(moved), value.astype("bfloat16")) and equal(arrived(copied), value)
    placed = arrived(moved).sharding == end.sharding
    carrier.close()
    return early and carrier_right and placed


def errors_come_out() -> str:
    """The text of an error on the second client's thread, which neither hangs the first nor is lost."""
    case = zoo.tied()
    program = case.program()
    trainer = hetjax.Trainer(program, stages(program)["halves"], optax.sgd(0.1))

    def fails(*_: Any) -> None:
        raise ValueError("the second client is out of memory")

    trainer.placement.training[1, 0].units[0].functions.forward = fails
    try:
        trainer.step(trainer.init(seed=0), case.batch)
    except Exception as error:
        return f"{error} {error.__cause__ or ''}"
    return ""


CHECKS: dict[str, Callable[[], Any]] = {
    f.__name__: f for f in (steps_agree, half_precision, moves_do_not_wait, errors_come_out)
}

if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: check() for name, check in CHECKS.items()}) + "\n")
