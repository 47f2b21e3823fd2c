"""Train state on the host, as no plan shows through: whole parameters and plain optax state, by path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.errors import UserError
from hetjax.flat import Piece
from hetjax.optimizer import Pieces, UpdateUnit
from hetjax.placement import Placement
from hetjax.program import Program


def is_key(spec: Any) -> bool:
    """Whether an array holds PRNG keys, which go through files and numpy as their numbers."""
    return jnp.issubdtype(spec.dtype, jax.dtypes.prng_key)


def saved_spec(spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a leaf on the host."""
    return jax.eval_shape(jax.random.key_data, spec) if is_key(spec) else spec


def as_keys(numbers: Any, spec: jax.ShapeDtypeStruct) -> jax.Array:
    """Keys from their numbers, of the kind of `spec`."""
    kinds: list[Any] = []
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), spec)
    return jax.random.wrap_key_data(jnp.asarray(numbers), impl=kinds[0])


def on_host(array: jax.Array) -> np.ndarray:
    """An array on the host, keys as numbers."""
    return np.asarray(jax.random.key_data(array) if is_key(array) else array)


def host_leaves(program: Program, masters: Mapping[Piece, jax.Array]) -> list[np.ndarray]:
    """Every parameter leaf on the host, stacked leaves whole, keys as numbers."""
    return program.assemble({p: on_host(a) for p, a in masters.items()})


def host_tree(program: Program, masters: Mapping[Piece, jax.Array]) -> Any:
    """Every parameter on the host in the user's structure."""
    leaves = zip(host_leaves(program, masters), program.leaf_specs, strict=True)
    return program.tree([as_keys(a, spec) if is_key(spec) else a for a, spec in leaves])


def export_params(program: Program, masters: Mapping[Piece, jax.Array]) -> dict[str, np.ndarray]:
    """Every parameter leaf by path, stacked leaves whole."""
    return dict(zip(program.leaf_paths, host_leaves(program, masters), strict=True))


def export_optimizer(
    optimizer: Pieces, units: list[UpdateUnit], states: list[list[jax.Array]]
) -> dict[str, np.ndarray]:
    """Every leaf of the optimizer state by its path in plain `tx.init(params)`."""
    parts: dict[str, dict[int, Any]] = {}
    for unit, state in zip(units, states, strict=True):
        for path, piece, array in zip(unit.state_paths, unit.state_pieces, state, strict=True):
            parts.setdefault(path, {})[piece.position if piece else 0] = (piece, array)
    out = {}
    for path, spec in optimizer.whole_specs().items():
        found = parts[path]
        piece, array = next(iter(found.values()))
        if piece is not None and piece.axis is not None and array.shape != spec.shape:
            stack = [on_host(found[i][1]) for i in range(len(found))]
            out[path] = np.stack(stack, axis=_stack_axis(spec.shape, array.shape, piece.axis))
        else:
            out[path] = on_host(array)
    return out


def _stack_axis(whole: tuple[int, ...], part: tuple[int, ...], axis: int) -> int:
    """Where slices join: the parameter's own axis if the shapes agree there, else the first that fits."""
    fits = [a for a in range(len(whole)) if whole[:a] + whole[a + 1 :] == part]
    assert fits, f"optimizer state of shape {part} is no slice of one of shape {whole}"
    return axis if axis in fits else fits[0]


def _check(kind: str, given: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    missing, extra = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    changed = [k for k in expected.keys() & given.keys() if tuple(given[k].shape) != tuple(expected[k].shape)]
    if missing or extra or changed:
        detail = [f"missing {missing[:3]}"] * bool(missing) + [f"not known here {extra[:3]}"] * bool(extra)
        detail += [
            f"{k} has shape {tuple(given[k].shape)}, here {tuple(expected[k].shape)}"
            for k in sorted(changed)[:3]
        ]
        raise UserError(
            f"The saved {kind} are not those of this program: {'; '.join(detail)}. Restore with the model "
            "and optimizer that the state was saved with."
        )


def import_params(program: Program, placement: Placement, saved: Mapping[str, Any]) -> dict[Piece, jax.Array]:
    """Place saved parameters.

    Raises:
        UserError: Names or shapes differ from the program's.
    """
    specs = map(saved_spec, program.leaf_specs)
    _check("parameters", saved, dict(zip(program.leaf_paths, specs, strict=True)))
    masters = {}
    for piece in program.pieces:
        whole, spec = np.asarray(saved[program.leaf_paths[piece.leaf]]), program.piece_spec(piece)
        part = whole if piece.axis is None else whole.take(piece.position, axis=piece.axis)
        part = as_keys(part, spec) if is_key(spec) else part.astype(spec.dtype)
        masters[piece] = jax.device_put(part, placement.stored_sharding(piece))
    return masters


def import_optimizer(
    optimizer: Pieces, units: list[UpdateUnit], saved: Mapping[str, Any]
) -> list[list[jax.Array]]:
    """Place saved optimizer state.

    Raises:
        UserError: Names or shapes differ from what the optimizer keeps for the program.
    """
    _check("optimizer states", saved, {k: saved_spec(v) for k, v in optimizer.whole_specs().items()})
    out = []
    for unit in units:
        state = []
        leaves = zip(unit.state_paths, unit.state_pieces, unit.state_specs, unit.state_shardings, strict=True)
        for path, piece, spec, sharding in leaves:
            array = np.asarray(saved[path])
            if array.shape != saved_spec(spec).shape:
                assert piece is not None and piece.axis is not None, (
                    f"{path} changes shape without being a slice"
                )
                array = array.take(piece.position, axis=_stack_axis(array.shape, spec.shape, piece.axis))
            array = as_keys(array, spec) if is_key(spec) else array.astype(spec.dtype)
            state.append(jax.device_put(array, sharding))
        out.append(state)
    return out
