"""What programs state of their segments against what XLA says of the compiled segments.

Every segment class of small models is compiled on one CPU device, as the runtime compiles it for accelerators
(for XLA:CPU it rewrites products, which may keep a flattened copy of a value beside the value), for each
remat policy at two row counts. Against `compiled.cost_analysis()` and `memory_analysis()` are held:

- `flops`: of the forward, and of the backward (`cost.BACKWARD_PER_FORWARD` and what the policy repeats). XLA
  counts the body of a loop once, whatever its length. So the model `loop`, whose layers are a `lax.scan`
  inside ONE segment, is held against the same layers written out.
- `param`: bytes of the parameters that go in: the forward's arguments without inputs, data and row number.
- `boundary`: bytes of what leaves forward.
- `residual`: bytes that the forward leaves for the backward, with the inputs that are held for it.
- `workspace`: what the backward needs beside what goes in (temporaries, and results that take over no
  argument), against what a plan's memory reserves for it (`memory.member_memory`).

An error is |stated / compiled - 1|; where both are 0 there is none. A figure is the median over classes (with
their policies and rows), for FLOPs without the classes that have less than 1% of their model's: a table of
embeddings is looked up, and XLA counts the clamping of indices. The table has every ratio of stated to
compiled.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

import hetjax
import models
from benchmarks import common
from hetjax.cluster import Group
from hetjax.compile import UnitExecutables, UnitSetting, row_dim
from hetjax.cost import BACKWARD_PER_FORWARD, RECOMPUTE_PER_FORWARD
from hetjax.flat import Flat, Unit
from hetjax.memory import member_memory
from hetjax.program import Program, SegmentInfo
from hetjax.sharding import make_submesh

POLICIES = ("none", "dots", "full")

ROWS = (2, 4)
"""Row counts of the device."""

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "gpt": {"family": "gpt", "num_layers": 2, "embed_dim": 128, "num_heads": 4},
    "llama": {"family": "llama", "num_layers": 2, "embed_dim": 128, "num_heads": 4},
}
SEQ_LEN, VOCAB = 128, 512

LOOP_LENGTH = 6

POINTER_BYTES = 8
"""XLA counts a pointer for each result of an executable that has several."""

LEAST_SHARE = 0.01
"""Share of the model's FLOPs from which on a class counts in the figures of FLOPs."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One segment class under one policy at one row count; pairs of (stated, compiled).

    Attributes:
        model: Name.
        name: Of the segment.
        remat: Policy.
        rows: Of the device.
        share: Of the model's forward FLOPs as compiled that are in segments of the class.
        flops: Of the forward.
        backward_flops: Of the backward.
        param: Bytes.
        boundary: Bytes.
        residual: Bytes.
        workspace: Bytes.
    """

    model: str
    name: str
    remat: str
    rows: int
    share: float
    flops: tuple[float, float]
    backward_flops: tuple[float, float]
    param: tuple[float, float]
    boundary: tuple[float, float]
    residual: tuple[float, float]
    workspace: tuple[float, float]


FIGURES = ("flops", "backward_flops", "param", "boundary", "residual", "workspace")


def ratio(pair: tuple[float, float]) -> float:
    """Stated over compiled; 1 where both are 0."""
    stated, found = pair
    return stated / found if found else (math.inf if stated else 1.0)


def build(name: str, seq_len: int = SEQ_LEN, vocab: int = VOCAB, **fields: Any) -> models.Model:
    """A small model by its name in `CONFIGS`, some fields replaced."""
    config = models.parse({**CONFIGS[name], **fields}, "cost_check")
    return models.build(config, seq_len=seq_len, vocab_size=vocab)


def layers(written_out: bool, seq_len: int = SEQ_LEN, width: int = 128) -> tuple[Callable, Callable]:
    """Loss and initialisation of a stack of small MLPs that is one segment.

    Args:
        written_out: Layer by layer; otherwise as one `lax.scan`.
        seq_len: Of the batch's `x`, of shape [rows, seq_len, width].
        width: As in `seq_len`.
    """

    def init_fn(key: jax.Array) -> dict[str, jax.Array]:
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (LOOP_LENGTH, width, 4 * width)) / width**0.5,
            "down": jax.random.normal(down, (LOOP_LENGTH, 4 * width, width)) / width**0.5,
        }

    def layer(x: jax.Array, weights: Mapping[str, jax.Array]) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None

    def loss_fn(params: Mapping[str, jax.Array], batch: Mapping[str, jax.Array]) -> jax.Array:
        x = batch["x"]
        if written_out:
            for i in range(LOOP_LENGTH):
                x, _ = layer(x, {name: value[i] for name, value in params.items()})
        else:
            x, _ = jax.lax.scan(layer, x, params)
        return jnp.mean(jnp.sum(x * x, axis=(1, 2)))

    return loss_fn, init_fn


def num_bytes(values: Iterable[Any]) -> int:
    """Bytes of arrays or their specs."""
    return sum(math.prod(v.shape) * np.dtype(v.dtype).itemsize for v in values)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A unit, compiled.

    Attributes:
        forward: Executable.
        backward: Executable that adds to sums of gradients.
        kept: Specs of what the forward leaves for the backward.
        outputs: Specs of what leaves forward.
        results: Specs of partial sums.
        inputs: Specs of the boundary values that go in.
        param_bytes: Bytes of the parameters, from the forward's arguments.
    """

    forward: Any
    backward: Any
    kept: Sequence[Any]
    outputs: Sequence[Any]
    results: Sequence[Any]
    inputs: Sequence[Any]
    param_bytes: float


def compile_unit(program: Program, flat: Flat, unit: Unit, remat: str) -> Compiled:
    """Compile a unit for one CPU device as the runtime does for an accelerator; nothing is run."""
    submesh = make_submesh(jax.devices("cpu")[:1], {"dp": 1})
    trainable = [program.trainable(p) for p in unit.params]
    functions: Any = UnitExecutables(flat, unit, trainable, UnitSetting(submesh, remat, flat.rows, False))
    params, inputs, data, _ = functions.function.specs
    opened = [row_dim(flat.values[i].follows) for i in unit.inputs]
    inputs = [
        jax.ShapeDtypeStruct((1, *s.shape), s.dtype) if d is None else s
        for s, d in zip(inputs, opened, strict=True)
    ]
    given = params, inputs, data, jax.ShapeDtypeStruct((1,), jnp.int32)
    outputs, results, kept = jax.eval_shape(functions.forward, *given)
    cotangents = [outputs[i] for i in functions.function.moving_outputs]
    seed = [jax.ShapeDtypeStruct((), jnp.float32)] if functions.function.makes_loss else []
    sums = [jax.ShapeDtypeStruct(s, jnp.float32) for s in functions.gradient_specs()]
    forward = functions.forward.lower(*given).compile()
    backward = functions.backward.lower(*given, kept, cotangents, seed, sums).compile()
    beside = num_bytes([*inputs, *jax.tree.leaves(data)]) + 4
    param_bytes = forward.memory_analysis().argument_size_in_bytes - beside
    return Compiled(forward, backward, kept, outputs, results, inputs, param_bytes)


def compiled_flops(executable: Any) -> float:
    """FLOPs by XLA's count, a loop's body once; a transcendental counts as one."""
    analysis = executable.cost_analysis()
    return float(analysis.get("flops", 0.0)) + float(analysis.get("transcendentals", 0.0))


def checks(name: str, program: Program, rows: Sequence[int] = ROWS) -> Iterator[Check]:
    """Check every segment class of a model, in model order.

    Args:
        name: For the table.
        program: The model, traced.
        rows: Row counts.
    """
    classes: dict[str, list[SegmentInfo]] = {}
    for segment in program.segments():
        classes.setdefault(segment.segment_class, []).append(segment)
    for count in rows:
        flat = program.flat(count)
        for remat in POLICIES:
            found = [
                (same[0], len(same), compile_unit(program, flat, _unit(flat, same[0]), remat))
                for same in classes.values()
            ]
            total = sum(n * compiled_flops(one.forward) for _, n, one in found)
            for segment, n, one in found:
                yield _check(name, segment, remat, count, one, n / total, one)


def loop_checks(seq_len: int = SEQ_LEN, width: int = 128, rows: Sequence[int] = ROWS) -> Iterator[Check]:
    """Check one segment that is a loop, its FLOPs against the same layers written out.

    Args:
        seq_len: Of its rows.
        width: Of its layers.
        rows: Row counts.
    """
    spec = {"x": jax.ShapeDtypeStruct((4 * max(rows), seq_len, width), jnp.float32)}
    looped, plain = (hetjax.trace(*layers(out, seq_len, width), spec) for out in (False, True))
    (segment,) = looped.segments()
    for count in rows:
        for remat in POLICIES:
            flats = [program.flat(count) for program in (looped, plain)]
            loop, written = (
                compile_unit(program, flat, flat.unit(0, 1), remat)
                for program, flat in zip((looped, plain), flats, strict=True)
            )
            share = 1 / compiled_flops(written.forward)
            yield _check("loop", segment, remat, count, loop, share, written)


def _unit(flat: Flat, segment: SegmentInfo) -> Unit:
    return flat.unit(segment.index, segment.index + 1)


def _check(
    model: str, segment: SegmentInfo, remat: str, rows: int, found: Compiled, part: float, counted: Compiled
) -> Check:
    """Compare one segment; `part` is its class's share per FLOP, `counted` has FLOPs that can be counted."""
    group = Group(name="one", kind="cpu", num_devices=1)
    memory = member_memory([segment], group, rows=rows, axes={}, remat=(remat,), in_flight=1)
    flops = segment.forward_flops_per_row * rows
    leaves = [*found.outputs, *found.results, *found.kept]
    left = found.forward.memory_analysis().output_size_in_bytes - num_bytes([*found.outputs, *found.results])
    left -= POINTER_BYTES * len(leaves) if len(leaves) > 1 else 0
    analysis = found.backward.memory_analysis()
    beside = analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    forward_flops = compiled_flops(counted.forward)
    return Check(
        model=model,
        name=segment.name,
        remat=remat,
        rows=rows,
        share=part * forward_flops,
        flops=(flops, forward_flops),
        backward_flops=(
            flops * (BACKWARD_PER_FORWARD + RECOMPUTE_PER_FORWARD[remat]),
            compiled_flops(counted.backward),
        ),
        param=(segment.param_bytes, found.param_bytes),
        boundary=(segment.boundary_bytes_per_row * rows, num_bytes(found.outputs)),
        residual=(segment.activation_bytes_per_row[remat] * rows, left + num_bytes(found.inputs)),
        workspace=(memory.workspace_bytes, beside),
    )


def counts(check: Check, figure: str) -> bool:
    """Whether a class is large enough for a figure."""
    return "flops" not in figure or check.share >= LEAST_SHARE


def errors(some: Sequence[Check]) -> dict[str, float]:
    """`flops_error`, `residual_error` and so on: medians; and the worst of all but the workspace."""
    found = {f: [abs(ratio(getattr(c, f)) - 1) for c in some if counts(c, f)] for f in FIGURES}
    return {f"{f}_error": float(np.median(values)) for f, values in found.items()} | {
        f"worst_{f}_error": max(values) for f, values in found.items() if f != "workspace"
    }


def main(
    seq_len: Annotated[int, typer.Option(min=1)] = SEQ_LEN,
    embed_dim: Annotated[int, typer.Option(min=1)] = 128,
    vocab_size: Annotated[int, typer.Option(min=2)] = VOCAB,
) -> None:
    """Hold stated costs of small models against the compiled segments."""
    common.start_cpu()
    common.introduce(
        f"Stated over compiled; sequences of {seq_len}, width {embed_dim}, vocabulary {vocab_size}"
    )
    common.say(f"{'':<26}{'rows':>5} {'remat':<6}{'share':>7}" + "".join(f"{f:>15}" for f in FIGURES))
    programs = {
        name: common.trace(build(name, seq_len, vocab_size, embed_dim=embed_dim), 4 * max(ROWS))
        for name in CONFIGS
    }
    rows = [checks(name, program) for name, program in programs.items()]
    found = []
    for check in itertools.chain(*rows, loop_checks(seq_len, embed_dim)):
        found.append(check)
        columns = "".join(f"{ratio(getattr(check, f)):>15.3f}" for f in FIGURES)
        common.say(
            f"{check.model:<6}{check.name:<20}{check.rows:>5} {check.remat:<6}{check.share:>7.1%}{columns}"
        )
    common.finish(errors(found))


if __name__ == "__main__":
    typer.run(main)
