"""Units on submeshes as compiled functions: forward, backward, evaluation.

The rows are divided over the batch axes by hand (`jax.shard_map`), so that gradients stay unreduced from
microbatch to microbatch; the tensor axis is left to XLA. What does not follow the rows (partial sums,
residuals, gradient accumulators) carries a leading dim of one entry a shard.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from hetjax import segments
from hetjax.flat import Flat, Unit
from hetjax.rows import RowDim
from hetjax.sharding import BATCH_AXES, Submesh, activation_spec

T = TypeVar("T")


class Shared:
    """What is compiled once in a process: a moved stage boundary or another plan finds it again.

    Keys hold all that a value depends on. The least recently used values are dropped beyond `size`.
    """

    def __init__(self, size: int) -> None:
        """Start empty."""
        self._size, self._kept = size, collections.OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key, made now if need be."""
        if key not in self._kept:
            self._kept[key] = make()
            if len(self._kept) > self._size:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]


compiled = Shared(2048)


def row_dim(follows: Any) -> RowDim | None:
    """The row dim of a value that can be divided over it; None where it leads with one entry a shard."""
    return follows if isinstance(follows, RowDim) and follows.outer == 1 else None


@dataclasses.dataclass(frozen=True)
class UnitSetting:
    """What one set of executables of a unit class depends on beside the class.

    Attributes:
        submesh: Where it runs.
        remat: Policy name.
        microbatch_rows: Rows of the whole microbatch.
        flatten_dots: Whether products are rewritten for XLA:CPU.
    """

    submesh: Submesh
    remat: str
    microbatch_rows: int
    flatten_dots: bool


def _constrainer(submesh: Submesh) -> Callable | None:
    if submesh.tp == 1:
        return None

    def constrain(x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
        spec = activation_spec(x.shape, names, submesh)
        return x if spec == P(*[None] * x.ndim) else jax.lax.with_sharding_constraint(x, spec)

    return constrain


class UnitExecutables:
    """The compiled functions of one unit class on one submesh.

    All take `(params, inputs, data, offset, ...)`: parameters in compute layout, boundary values, batch
    leaves and keys, and the index of each shard's first row, int32 `[num_shards]`.
    """

    def __init__(self, flat: Flat, unit: Unit, trainable: Sequence[bool], setting: UnitSetting) -> None:
        """Prepare; XLA compiles at the first call of each function.

        Args:
            flat: The trace, at the rows of one shard.
            unit: A unit of the class.
            trainable: For each of its parameters, whether it gets a gradient.
            setting: See `UnitSetting`.
        """
        self.setting, self.submesh = setting, setting.submesh
        self.function = segments.UnitFunction(
            flat,
            unit,
            segments.Setting(
                remat=setting.remat,
                flatten_dots=setting.flatten_dots,
                microbatch_rows=setting.microbatch_rows,
                constrain=_constrainer(setting.submesh),
            ),
            trainable,
        )
        self._inputs = [row_dim(flat.values[i].follows) for i in unit.inputs]
        self._outputs = [row_dim(flat.values[i].follows) for i in unit.outputs]
        self._data = [
            d.kind == "batch" and v.aval.ndim > 0 for d, v in zip(unit.data, unit.data_vars, strict=True)
        ]
        self._num_results = len(unit.results)
        moving_in = [self._inputs[i] for i in self.function.moving_inputs]
        moving_out = [self._outputs[i] for i in self.function.moving_outputs]
        seeds = [P()] if self.function.makes_loss else []
        kept = P(BATCH_AXES)
        given = (P(), self._specs(self._inputs), [P(BATCH_AXES) if d else P() for d in self._data], kept)
        outputs = (self._specs(self._outputs), kept)
        pulled = self._specs(moving_in)
        self.forward = self._compile(self._forward, given, (*outputs, kept))
        self.evaluate = self._compile(self._evaluate, given, outputs)
        backward_in = (*given, kept, self._specs(moving_out), seeds)
        self.first_backward = self._compile(self._first_backward, backward_in, (kept, pulled, kept))
        self.backward = self._compile(self._backward, (*backward_in, kept), (kept, pulled, kept), donate=(7,))
        self._moving_in, self._moving_out = moving_in, moving_out

    def _specs(self, dims: Sequence[RowDim | None]) -> list[P]:
        return [P(BATCH_AXES) if d is None else P(*[None] * d.dim, BATCH_AXES) for d in dims]

    def _compile(
        self, function: Callable, in_specs: Any, out_specs: Any, donate: tuple[int, ...] = ()
    ) -> Callable:
        mesh = self.submesh.mesh
        if self.submesh.num_shards > 1:
            function = jax.shard_map(
                function,
                mesh=mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                axis_names=set(BATCH_AXES),
                check_vma=False,
            )
            return jax.jit(function, donate_argnums=donate)
        if self.submesh.tp == 1:
            return jax.jit(function, donate_argnums=donate)

        def under_mesh(*args: Any) -> Any:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return function(*args)

        return jax.jit(under_mesh, donate_argnums=donate)

    # The functions of one shard: what has no row dim comes and goes with a leading dim of 1.

    @staticmethod
    def _open(values: Sequence[Any], dims: Sequence[RowDim | None]) -> list[Any]:
        return [v[0] if d is None else v for v, d in zip(values, dims, strict=True)]

    @staticmethod
    def _shut(values: Sequence[Any], dims: Sequence[RowDim | None]) -> list[Any]:
        return [v[None] if d is None else v for v, d in zip(values, dims, strict=True)]

    def _forward(self, params: list, inputs: list, data: list, offset: Any) -> tuple[list, list, list]:
        outputs, results, kept = self.function.forward(
            params, self._open(inputs, self._inputs), data, offset[0]
        )
        return self._shut(outputs, self._outputs), [r[None] for r in results], [k[None] for k in kept]

    def _evaluate(self, params: list, inputs: list, data: list, offset: Any) -> tuple[list, list]:
        outputs, results = self.function.run(params, self._open(inputs, self._inputs), data, offset[0])
        return self._shut(outputs, self._outputs), [r[None] for r in results]

    def _first_backward(
        self, params: list, inputs: list, data: list, offset: Any, kept: list, cotangents: list, seed: list
    ) -> tuple[list, list, list]:
        inputs = self._open(inputs, self._inputs)
        cotangents = [*self._open(cotangents, self._moving_out), *seed]
        gradients, pulled = self.function.backward(
            params, inputs, data, offset[0], [k[0] for k in kept], cotangents
        )
        done = [] if pulled else [jnp.zeros((1,), jnp.int8)]
        return [g.astype(jnp.float32)[None] for g in gradients], self._shut(pulled, self._moving_in), done

    def _backward(
        self,
        params: list,
        inputs: list,
        data: list,
        offset: Any,
        kept: list,
        cotangents: list,
        seed: list,
        sums: list,
    ) -> tuple[list, list, list]:
        gradients, pulled, done = self._first_backward(params, inputs, data, offset, kept, cotangents, seed)
        return [s + g for s, g in zip(sums, gradients, strict=True)], pulled, done

    def gradient_specs(self) -> list[tuple[int, ...]]:
        """Shapes of the gradient sums of the moving parameters, with the leading dim of shards."""
        specs = self.function.specs[0]
        return [(self.submesh.num_shards, *specs[i].shape) for i in self.function.moving_params]


def offsets(submesh: Submesh, start: int, rows: int) -> jax.Array:
    """Index of each shard's first row in the microbatch, int32 `[num_shards]`.

    Args:
        submesh: Where.
        start: The member's first row.
        rows: Rows of a shard.
    """
    values = start + rows * np.arange(submesh.num_shards, dtype=np.int32)
    return jax.device_put(values, submesh.stacked)


def place_batch(arrays: Sequence[np.ndarray], submesh: Submesh) -> list[jax.Array]:
    """Put a member's rows of batch leaves on its submesh, divided over the shards; scalars everywhere."""
    return jax.device_put(arrays, [submesh.stacked if a.ndim else submesh.replicated for a in arrays])
