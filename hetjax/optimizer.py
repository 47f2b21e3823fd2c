"""optax on placed state: every update unit (a segment's own parameters) is updated where it lives.

A transformation qualifies when updating the parameters piece by piece gives what updating the whole tree
gives; that is tried
out on small arrays before training. The global norm, which does need the whole tree, is a clip in two phases:
each unit sums
its squares, all units read all sums.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from hetjax import jaxprs
from hetjax.compile import compiled
from hetjax.errors import UserError
from hetjax.flat import Piece
from hetjax.program import Program, path_string
from hetjax.sharding import Submesh, stored_spec


@dataclasses.dataclass(frozen=True)
class LossScale:
    """Dynamic scaling of the loss for float16 groups.

    The scale halves, and the step is left out, when a gradient is not finite; it doubles after
    `growth_interval` good steps.

    Attributes:
        initial: First scale.
        growth_interval: Steps.
    """

    initial: float = 2.0**15
    growth_interval: int = 2000


class Pieces:
    """An optax transformation over any subset of a program's parameter pieces."""

    def __init__(self, program: Program, tx: optax.GradientTransformation) -> None:
        """Wrap a transformation.

        Raises:
            UserError: The transformation needs the whole parameter tree.
        """
        self.program, self.tx = program, tx
        check_per_parameter(program, tx)

    def tree(self, pieces: Sequence[Piece], arrays: Sequence[Any]) -> Any:
        """The user's parameter tree with the given pieces in place and optax's placeholder elsewhere."""
        leaves: list[Any] = [optax.MaskedNode()] * len(self.program.leaf_specs)
        for piece, array in zip(pieces, arrays, strict=True):
            leaves[piece.leaf] = array
        return self.program.tree(leaves)

    def init(self, pieces: Sequence[Piece], arrays: Sequence[Any]) -> list[Any]:
        """Leaves of the optimizer state of some pieces."""
        return jax.tree.leaves(self.tx.init(self.tree(pieces, arrays)))

    def state_specs(self, pieces: Sequence[Piece]) -> tuple[list[str], list[jax.ShapeDtypeStruct], Any]:
        """Paths (as in the state of the whole tree), shapes and structure of the optimizer state of some
        pieces."""
        specs = [self.program.piece_spec(p) for p in pieces]
        state = jax.eval_shape(lambda a: self.tx.init(self.tree(pieces, a)), specs)
        with_path, treedef = jax.tree_util.tree_flatten_with_path(state)
        return [path_string(path) for path, _ in with_path], [spec for _, spec in with_path], treedef

    def update(
        self, pieces: Sequence[Piece], masters: list, state: list, gradients: list, treedef: Any
    ) -> tuple:
        """One optax step on some pieces. Returns new masters and new state leaves."""
        params = self.tree(pieces, masters)
        structured = jax.tree.unflatten(treedef, state)
        updates, structured = self.tx.update(self.tree(pieces, gradients), structured, params)
        return jax.tree.leaves(optax.apply_updates(params, updates)), jax.tree.leaves(structured)

    def whole_specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Path and shape of every leaf of plain `tx.init(params)` over the trained leaves."""
        leaves = [Piece(i) for i, f in enumerate(self.program.frozen) if not f]
        arrays = [self.program.leaf_specs[p.leaf] for p in leaves]
        state = jax.eval_shape(lambda a: self.tx.init(self.tree(leaves, a)), arrays)
        return {path_string(p): spec for p, spec in jax.tree_util.tree_flatten_with_path(state)[0]}

    def piece_of(self, path: str, pieces: Sequence[Piece]) -> Piece | None:
        """The piece that a state leaf belongs to, by its path; None for one that belongs to no parameter."""
        return next((p for p in pieces if f"/{path}".endswith("/" + self.program.leaf_paths[p.leaf])), None)


_NEEDS_TREE = (
    "This optax transformation needs the whole parameter tree: {what}. hetjax updates each parameter on the "
    "group that owns it. Give a global-norm clip as `hetjax.Trainer(..., clip_norm=1.0)` instead of "
    "optax.clip_by_global_norm, and use transformations that treat each parameter by itself (adam, adamw, "
    "sgd, lion, ...)."
)


def _trace_update(program: Program, tx: optax.GradientTransformation, leaves: Sequence[int]) -> tuple:
    """The jaxpr of an update of some whole leaves: (jaxpr, input name by variable, output by name)."""

    def tree(arrays: Sequence[Any]) -> Any:
        placed: list[Any] = [optax.MaskedNode()] * len(program.leaf_specs)
        for leaf, array in zip(leaves, arrays, strict=True):
            placed[leaf] = array
        return program.tree(placed)

    specs = [program.leaf_specs[i] for i in leaves]
    state = jax.eval_shape(lambda a: tx.init(tree(a)), specs)
    with_path, treedef = jax.tree_util.tree_flatten_with_path(state)
    paths = [path_string(p) for p, _ in with_path]

    def update(gradients: list, params: list, states: list) -> tuple[list, list]:
        updates, new = tx.update(tree(gradients), jax.tree.unflatten(treedef, states), tree(params))
        return jax.tree.leaves(updates), jax.tree.leaves(new)

    closed = jaxprs.inline(jax.make_jaxpr(update)(specs, specs, [s for _, s in with_path]))
    inner, consts = jaxprs.open_jaxpr(closed)
    names = [("gradient", i) for i in leaves] + [("param", i) for i in leaves] + [("state", p) for p in paths]
    inputs = dict(zip(inner.invars, names, strict=True))
    inputs |= {
        v: ("const", jaxprs.text_key(np.asarray(c).tolist()))
        for v, c in zip(inner.constvars, consts, strict=True)
    }
    outputs = dict(zip([n for n in names if n[0] != "param"], inner.outvars, strict=True))
    return inner, inputs, outputs


def check_per_parameter(program: Program, tx: optax.GradientTransformation) -> None:
    """Hold the update of each parameter by itself against its part in the update of all, equation by
    equation.

    Leaves of one shape and path (but for numbers) are represented by two. Slices of a stacked leaf are tried
    out with numbers, too, since an equation (a mean over the leaf) may mean another thing there.

    Raises:
        UserError: They differ, or an update of a part of the tree fails.
    """
    samples: dict[tuple, list[int]] = {}
    stacked = {p.leaf: p.axis for p in program.pieces if p.axis is not None}
    for leaf, spec in enumerate(program.leaf_specs):
        if not program.frozen[leaf] and spec.size:
            kind = re.sub(r"\d+", "#", program.leaf_paths[leaf])
            samples.setdefault((spec.shape, stacked.get(leaf), kind), []).append(leaf)
    chosen = sorted(leaf for leaves in samples.values() for leaf in leaves[:2])
    try:
        whole, whole_inputs, whole_outputs = _trace_update(program, tx, chosen)
        for leaf in chosen:
            alone, inputs, outputs = _trace_update(program, tx, [leaf])
            names = list(outputs)
            keys = [
                _part_key(alone, inputs, [outputs[n] for n in names]),
                _part_key(whole, whole_inputs, [whole_outputs[n] for n in names]),
            ]
            if keys[0] != keys[1]:
                what = f"the update of {program.leaf_paths[leaf]!r} depends on others"
                raise UserError(_NEEDS_TREE.format(what=what))
            if leaf in stacked:
                _try_slices(program, tx, leaf, stacked[leaf])
    except UserError:
        raise
    except Exception as error:  # whatever a user's transformation raises on a part of its tree
        what = f"updating a part of it fails ({type(error).__name__}: {error})"
        raise UserError(_NEEDS_TREE.format(what=what)) from error


def _part_key(jaxpr: Any, inputs: dict[Any, tuple], outputs: list[Any]) -> str:
    """A key of how some outputs follow from the inputs, which are known by name."""
    eqns, free = jaxprs.prune(jaxpr.eqns, outputs)
    read = sorted(free, key=lambda v: str(inputs[v]))
    return jaxprs.equations_key(eqns, read, outputs) + str([inputs[v] for v in read])


def _try_slices(program: Program, tx: optax.GradientTransformation, leaf: int, axis: int) -> None:
    """Update a small stacked leaf whole and by slices."""
    rng = np.random.default_rng(0)
    shape = [n if n <= 8 else 130 if n >= 128 else 8 for n in program.leaf_specs[leaf].shape]
    shape[axis] = 2
    whole, *slopes = (rng.standard_normal(shape, dtype=np.float32) for _ in range(3))

    def steps(part: Any, gradients: list) -> Any:
        placed: list[Any] = [optax.MaskedNode()] * len(program.leaf_specs)

        def tree(array: Any) -> Any:
            return program.tree([array if i == leaf else p for i, p in enumerate(placed)])

        params, state = tree(part), tx.init(tree(part))
        for gradient in gradients:
            updates, state = tx.update(tree(gradient), state, params)
            params = optax.apply_updates(params, updates)
        return jax.tree.leaves(params)[0]

    steps = jax.jit(steps)
    expected = np.asarray(steps(whole, slopes))
    for i in range(2):
        got = np.asarray(steps(whole.take(i, axis), [g.take(i, axis) for g in slopes]))
        if not np.allclose(got, expected.take(i, axis), rtol=1e-4, atol=1e-6):
            path = program.leaf_paths[leaf]
            what = f"a slice of {path!r}, which a scan over layers stacks, gets another update alone"
            raise UserError(_NEEDS_TREE.format(what=what))


class UpdateUnit:
    """The parameters that one segment owns on one submesh, and their optimizer state."""

    def __init__(
        self, pieces: Sequence[Piece], optimizer: Pieces, submesh: Submesh, names: Sequence[Sequence]
    ) -> None:
        """Lay out the masters and the state.

        Args:
            pieces: Trained pieces, no two of one leaf.
            optimizer: The transformation.
            submesh: Where they live.
            names: Logical axis names of each piece's dims.
        """
        self.pieces, self.optimizer, self.submesh = list(pieces), optimizer, submesh
        self.specs = [optimizer.program.piece_spec(p) for p in pieces]
        self.shardings = [
            NamedSharding(submesh.mesh, stored_spec(s.shape, n, submesh))
            for s, n in zip(self.specs, names, strict=True)
        ]
        self.state_paths, self.state_specs, self.state_treedef = optimizer.state_specs(self.pieces)
        self.state_shardings = [
            self._state_sharding(p, s) for p, s in zip(self.state_paths, self.state_specs, strict=True)
        ]

    def _state_sharding(self, path: str, spec: jax.ShapeDtypeStruct) -> NamedSharding:
        piece = self.optimizer.piece_of(path, self.pieces)
        if piece is not None and self.specs[self.pieces.index(piece)].shape == spec.shape:
            return self.shardings[self.pieces.index(piece)]
        return self.submesh.replicated

    def init_state(self, masters: list) -> list:
        """Optimizer state of fresh masters; units of one class share the compiled function."""

        def init(arrays: list) -> list:
            return self.optimizer.init(self.pieces, arrays)

        shardings = (*self.shardings, *self.state_shardings)
        key = ("state", jaxprs.canonical_key(jax.make_jaxpr(init)(self.specs)), shardings)
        return compiled.get(key, lambda: jax.jit(init, out_shardings=self.state_shardings))(masters)

    def class_key(self) -> tuple:
        """Units with equal keys share their compiled update."""
        jaxpr = jax.make_jaxpr(self._step)(self.specs, self.state_specs, self.specs)
        return (jaxprs.canonical_key(jaxpr), self.submesh.mesh, *(s.spec for s in self.shardings))

    def _step(self, masters: list, state: list, gradients: list) -> tuple[list, list]:
        return self.optimizer.update(self.pieces, masters, state, gradients, self.state_treedef)


class UpdateFunctions:
    """The compiled reduction and update of one class of update units.

    In one phase, `fused` does both; with a clip or a loss scale, `reduce` comes first and `apply` reads every
    unit's sum of
    squares.
    """

    def __init__(self, unit: UpdateUnit, clip_norm: float | None, scaled: bool) -> None:
        """Build the functions; XLA compiles at their first call."""
        self.unit, self.clip_norm, self.scaled = unit, clip_norm, scaled
        replicated = unit.submesh.replicated
        placed = (unit.shardings, unit.state_shardings)
        self.reduce = jax.jit(self._reduce, out_shardings=(unit.shardings, replicated))
        self.apply = jax.jit(self._apply, out_shardings=placed, donate_argnums=(0, 1))
        self.fused = jax.jit(self._fused, out_shardings=(*placed, replicated), donate_argnums=(0, 1))

    def _reduce(self, own: list, foreign: list, weights: list, scale: list) -> tuple[list, Any]:
        """Sum the shards and the readers, divide by the weight of the whole batch (and the loss scale)."""
        weight = sum(weights[1:], weights[0])
        divisor = jnp.where(weight == 0, 1.0, weight) * (scale[0] if scale else 1.0)
        gradients, squares = [], jnp.zeros((), jnp.float32)
        for mine, others, spec in zip(own, foreign, self.unit.specs, strict=True):
            total = jnp.zeros(spec.shape, jnp.float32) if mine is None else mine.sum(0)
            for other in others:
                total = total + other
            gradients.append(total / divisor)
            squares = squares + jnp.sum(jnp.square(gradients[-1]))
        return gradients, squares

    def _cast(self, gradients: list) -> list:
        return [g.astype(s.dtype) for g, s in zip(gradients, self.unit.specs, strict=True)]

    def _fused(
        self, masters: list, state: list, own: list, foreign: list, weights: list
    ) -> tuple[list, list, Any]:
        gradients, squares = self._reduce(own, foreign, weights, [])
        return *self.unit._step(masters, state, self._cast(gradients)), squares

    def _apply(self, masters: list, state: list, gradients: list, squares: list) -> tuple[list, list]:
        total = sum(squares[1:], squares[0])
        if self.clip_norm is not None:
            norm = jnp.sqrt(total)
            gradients = [jnp.where(norm < self.clip_norm, g, g / norm * self.clip_norm) for g in gradients]
        new = self.unit._step(masters, state, self._cast(gradients))
        if not self.scaled:
            return new
        finite = jnp.isfinite(total)
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (masters, state))


def next_scale(scale: jax.Array, good_steps: jax.Array, squares: list, config: LossScale) -> tuple[Any, Any]:
    """The loss scale after a step whose squared gradients sum to `squares`."""
    finite = jnp.isfinite(sum(squares[1:], squares[0]))
    good = jnp.where(finite, good_steps + 1, 0)
    grown = jnp.where(good >= config.growth_interval, scale * 2, scale)
    new = jnp.where(finite, jnp.minimum(grown, 2.0**24), jnp.maximum(scale / 2, 1.0))
    return new, jnp.where(good >= config.growth_interval, 0, good)
