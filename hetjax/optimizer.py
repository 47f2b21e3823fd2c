"""optax on placed state: every update unit (a segment's own parameters) is updated where it lives.

A transformation is traced once over the whole tree; it qualifies when the part of the trace that updates a
unit
reads nothing of other units. The global norm, which does need the whole tree, is a clip in two phases: each
unit sums its squares, all units read all sums.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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


_NEEDS_TREE = (
    "This optax transformation needs the whole parameter tree: {what}. hetjax updates each parameter on the "
    "group that owns it. Give a global-norm clip as `hetjax.Trainer(..., clip_norm=1.0)` instead of "
    "optax.clip_by_global_norm, and use transformations that treat each parameter by itself (adam, adamw, "
    "sgd, lion, ...)."
)


class Pieces:
    """An optax transformation, traced once over all trained leaves and divided by parameter.

    A leaf that a scan over layers stacks is traced as one of its slices.

    Attributes:
        program: The parameters.
        state_paths: Path of each leaf of the optimizer state, as in plain `tx.init(params)`.
        state_specs: Their shapes, for a slice where the parameter is stacked.
        state_leaf: The parameter leaf that each belongs to, by its path; None for one that belongs to none.
    """

    def __init__(self, program: Program, tx: optax.GradientTransformation) -> None:
        """Trace a transformation.

        Raises:
            UserError: The transformation needs the whole parameter tree.
        """
        self.program, self.tx = program, tx
        stacked = {p.leaf: p for p in program.pieces if p.axis is not None}
        self.leaves = [i for i, frozen in enumerate(program.frozen) if not frozen]
        specs = [program.piece_spec(stacked.get(i, Piece(i))) for i in self.leaves]
        try:
            state = jax.eval_shape(lambda a: tx.init(self._tree(a)), specs)
            with_path, treedef = jax.tree_util.tree_flatten_with_path(state)
            self.state_paths = [path_string(path) for path, _ in with_path]
            self.state_specs = [spec for _, spec in with_path]
            self._trace(specs, treedef)
        except Exception as error:  # whatever a user's transformation raises
            what = f"it fails on these parameters ({type(error).__name__}: {error})"
            raise UserError(_NEEDS_TREE.format(what=what)) from error
        by_path = {program.leaf_paths[i]: i for i in self.leaves}
        self.state_leaf = [_owner(path, by_path) for path in self.state_paths]
        kinds = [re.sub(r"\d+", "#", path) for path in program.leaf_paths]
        samples = {(program.leaf_specs[i].shape, kinds[i]): i for i in stacked}
        for leaf in samples.values():
            if not program.frozen[leaf]:
                self.update_part([stacked[leaf]])
                _try_slices(program, tx, leaf, stacked[leaf].axis or 0)

    def _tree(self, arrays: Sequence[Any]) -> Any:
        """The user's parameter tree with the trained leaves in place and optax's placeholder elsewhere."""
        placed: list[Any] = [optax.MaskedNode()] * len(self.program.leaf_specs)
        for leaf, array in zip(self.leaves, arrays, strict=True):
            placed[leaf] = array
        return self.program.tree(placed)

    def _trace(self, specs: list, treedef: Any) -> None:
        def init(params: list) -> list:
            return jax.tree.leaves(self.tx.init(self._tree(params)))

        def update(params: list, states: list, gradients: list) -> tuple[list, list]:
            tree = self._tree(params)
            updates, new = self.tx.update(self._tree(gradients), jax.tree.unflatten(treedef, states), tree)
            return jax.tree.leaves(optax.apply_updates(tree, updates)), jax.tree.leaves(new)

        self._init = _Traced(jax.make_jaxpr(init)(specs))
        closed = jaxprs.inline(jax.make_jaxpr(update)(specs, self.state_specs, specs))
        self._update = _Traced(jaxprs.without_branches(closed))

    def state_of(self, pieces: Sequence[Piece]) -> list[int]:
        """Numbers of the state leaves that belong to some pieces, or to no parameter."""
        leaves = {p.leaf for p in pieces} | {None}
        return [k for k, leaf in enumerate(self.state_leaf) if leaf in leaves]

    def init_part(self, pieces: Sequence[Piece]) -> Part:
        """The function from some pieces to their optimizer state."""
        at = {leaf: n for n, leaf in enumerate(self.leaves)}
        return self._init.part([at[p.leaf] for p in pieces], self.state_of(pieces), "its state")

    def update_part(self, pieces: Sequence[Piece]) -> Part:
        """The function from some pieces, their state and their gradients to the new pieces and state.

        Raises:
            UserError: It reads what belongs to other parameters.
        """
        at = {leaf: n for n, leaf in enumerate(self.leaves)}
        own, states = [at[p.leaf] for p in pieces], self.state_of(pieces)
        count, offset = len(self.leaves), len(self.leaves) + len(self.state_specs)
        inputs = [*own, *(count + k for k in states), *(offset + n for n in own)]
        name = self.program.piece_name(pieces[0])
        return self._update.part(inputs, [*own, *(count + k for k in states)], f"the update of {name!r}")

    def whole_specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Path and shape of every leaf of plain `tx.init(params)` over the trained leaves."""
        arrays = [self.program.leaf_specs[i] for i in self.leaves]
        state = jax.eval_shape(lambda a: self.tx.init(self._tree(a)), arrays)
        return {path_string(p): spec for p, spec in jax.tree_util.tree_flatten_with_path(state)[0]}


class Part(NamedTuple):
    """Some outputs of a traced function as a function of some of its inputs.

    Attributes:
        run: From a list of inputs to the list of outputs.
        key: Parts with equal keys compute the same.
    """

    run: Callable[[Sequence[Any]], list[Any]]
    key: str


class _Traced:
    """A jaxpr that parts are taken from."""

    def __init__(self, closed: Any) -> None:
        self._jaxpr, consts = jaxprs.open_jaxpr(closed)
        self._consts = dict(zip(self._jaxpr.constvars, consts, strict=True))
        self._slice = jaxprs.Slicer(self._jaxpr.eqns)

    def part(self, inputs: Sequence[int], outputs: Sequence[int], what: str) -> Part:
        invars = [self._jaxpr.invars[i] for i in inputs]
        outvars = [self._jaxpr.outvars[i] for i in outputs]
        eqns, free = self._slice(outvars)
        consts = {v: self._consts[v] for v in free if v in self._consts}
        if not set(free) <= {*invars, *consts}:
            raise UserError(_NEEDS_TREE.format(what=f"{what} depends on other parameters"))

        def run(values: Sequence[Any]) -> list[Any]:
            env = consts | dict(zip(invars, values, strict=True))
            return [jnp.asarray(v) for v in jaxprs.evaluate(eqns, env, outvars)]

        key = jaxprs.equations_key(eqns, [*invars, *consts], outvars)
        return Part(run, jaxprs.text_key(key, [np.asarray(c).tobytes() for c in consts.values()]))


def _owner(path: str, by_path: Mapping[str, int]) -> int | None:
    """The leaf whose path a state leaf's path ends in, the longest one."""
    parts = path.split("/")
    found = (by_path.get("/".join(parts[i:])) for i in range(len(parts)))
    return next((leaf for leaf in found if leaf is not None), None)


def _try_slices(program: Program, tx: optax.GradientTransformation, leaf: int, axis: int) -> None:
    """Compare the updates of a small stacked leaf with those of its slices."""
    rng = np.random.default_rng(0)
    shape = [n if n <= 8 else 130 if n >= 128 else 8 for n in program.leaf_specs[leaf].shape]
    shape[axis] = 2
    whole, *slopes = (rng.standard_normal(shape, dtype=np.float32) for _ in range(3))

    def steps(part: Any, gradients: list) -> Any:
        placed: list[Any] = [optax.MaskedNode()] * len(program.leaf_specs)

        def tree(array: Any) -> Any:
            return program.tree([array if i == leaf else p for i, p in enumerate(placed)])

        params, state, taken = tree(part), tx.init(tree(part)), []
        for gradient in gradients:
            updates, state = tx.update(tree(gradient), state, params)
            params = optax.apply_updates(params, updates)
            taken.append(jax.tree.leaves(updates)[0])
        return jnp.stack(taken)

    steps = jax.jit(steps)
    expected = np.asarray(steps(whole, slopes))
    for i in range(2):
        got = np.asarray(steps(whole.take(i, axis), [g.take(i, axis) for g in slopes]))
        if np.abs(got - expected.take(i, axis + 1)).max() > 2e-5 * np.abs(expected).max():
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

        Raises:
            UserError: Updating them needs other parameters.
        """
        self.pieces, self.submesh = list(pieces), submesh
        self.specs = [optimizer.program.piece_spec(p) for p in pieces]
        self.shardings = [
            NamedSharding(submesh.mesh, stored_spec(s.shape, n, submesh))
            for s, n in zip(self.specs, names, strict=True)
        ]
        numbers = optimizer.state_of(pieces)
        self.state_paths = [optimizer.state_paths[k] for k in numbers]
        self.state_specs = [optimizer.state_specs[k] for k in numbers]
        by_leaf: dict[int | None, Piece] = {p.leaf: p for p in pieces}
        self.state_pieces = [by_leaf.get(optimizer.state_leaf[k]) for k in numbers]
        self.state_shardings = [
            self._state_sharding(p, s) for p, s in zip(self.state_pieces, self.state_specs, strict=True)
        ]
        self._init, self._update = optimizer.init_part(pieces), optimizer.update_part(pieces)

    def _state_sharding(self, piece: Piece | None, spec: jax.ShapeDtypeStruct) -> NamedSharding:
        if piece is not None and self.specs[self.pieces.index(piece)].shape == spec.shape:
            return self.shardings[self.pieces.index(piece)]
        return self.submesh.replicated

    def init_state(self, masters: list) -> list:
        """Optimizer state of fresh masters; units of one class share the compiled function."""
        shardings = (*self.shardings, *self.state_shardings)
        run, out_shardings = self._init.run, self.state_shardings
        function = compiled.get(
            ("state", self._init.key, shardings), lambda: jax.jit(run, out_shardings=out_shardings)
        )
        return function(masters)

    def class_key(self) -> tuple:
        """Units with equal keys share their compiled update."""
        return (self._update.key, self.submesh.mesh, *(s.spec for s in self.shardings))

    def step(self, masters: list, state: list, gradients: list) -> tuple[list, list]:
        """One optax step. Returns new masters and new state leaves."""
        out = self._update.run([*masters, *state, *gradients])
        return out[: len(masters)], out[len(masters) :]


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
        return *self.unit.step(masters, state, self._cast(gradients)), squares

    def _apply(self, masters: list, state: list, gradients: list, squares: list) -> tuple[list, list]:
        total = sum(squares[1:], squares[0])
        if self.clip_norm is not None:
            norm = jnp.sqrt(total)
            gradients = [jnp.where(norm < self.clip_norm, g, g / norm * self.clip_norm) for g in gradients]
        new = self.unit.step(masters, state, self._cast(gradients))
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
