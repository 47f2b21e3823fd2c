"""Checkpoints on orbax: written in the background, atomic, independent of the plan.

A checkpoint is a directory `<step>/` with two parts: `state`, an orbax tree {"params": ..., "opt_state": ...}
nested by parameter path, so that plain flax and optax can read it on one device, and `meta`, JSON with the
step, the seed, the place in the data and the shape, dtype and checksum of every array.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import sys
import threading
import zlib
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.errors import UserError
from hetjax.program import path_string

FORMAT_VERSION = 1
ARRAY_PARTS = ("params", "opt_state")
_SHOWN = 5


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; what was there before is intact."""


class Checkpointer:
    """Writes and reads the checkpoints of one run."""

    def __init__(self, directory: Path, *, max_to_keep: int | None = 3) -> None:
        """Open a directory of checkpoints, creating it and removing what an interrupted write left.

        Args:
            directory: Where `<step>/` directories lie.
            max_to_keep: How many of the latest to keep; None keeps all.
        """
        import orbax.checkpoint as ocp  # half a second to import

        self.directory = directory.absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=max_to_keep, cleanup_tmp_directories=True, enable_async_checkpointing=True
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def save(self, step: int, exported: Mapping[str, Any], data_state: Any = None) -> None:
        """Copy the state and write it in the background.

        Args:
            step: Number of steps that the state has behind it.
            exported: What `Trainer.export` returns: flat dicts of host arrays under "params" and "opt_state",
                plain values under every other name.
            data_state: JSON-able place of the data iterator.

        Raises:
            CheckpointError: This write cannot begin, or the one before failed. What was there is intact.
        """
        import orbax.checkpoint as ocp

        self.wait()
        arrays = {
            f"{part}/{path}": np.asarray(value)
            for part in ARRAY_PARTS
            for path, value in exported[part].items()
        }
        meta = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "data": data_state,
            "values": {k: _plain(v) for k, v in exported.items() if k not in ARRAY_PARTS},
            "arrays": {
                path: {"shape": list(a.shape), "dtype": str(a.dtype), "crc32": _checksum(a)}
                for path, a in arrays.items()
            },
        }
        # orbax refuses arrays without elements; their shape and dtype in `meta` say all there is to know
        tree = nest({path: a for path, a in arrays.items() if a.size})
        items = ocp.args.Composite(state=ocp.args.StandardSave(tree), meta=ocp.args.JsonSave(meta))
        with self._reporting(f"checkpoint of step {step}"):
            self._manager.save(step, args=items, force=True)

    def wait(self) -> None:
        """Return when the last write has reached the disk.

        Raises:
            CheckpointError: It failed. Earlier checkpoints are intact.
        """
        with self._reporting("checkpoint in the background"):
            self._manager.wait_until_finished()

    def steps(self) -> list[int]:
        """List the steps that have a finished checkpoint, in rising order."""
        return sorted(self._manager.all_steps())

    def close(self) -> None:
        """Finish the last write and let go of the directory.

        Raises:
            CheckpointError: The last write failed. Earlier checkpoints are intact.
        """
        try:
            self.wait()
        finally:
            with self._reporting("checkpoint in the background"):  # orbax raises here what it raised before
                self._manager.close()

    def __enter__(self) -> Checkpointer:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; an exception under way goes first."""
        with contextlib.suppress(*([CheckpointError] if kind else [])):
            self.close()

    @contextlib.contextmanager
    def _reporting(self, what: str) -> Generator[None]:
        try:
            yield
        except Exception as error:  # orbax and tensorstore raise several kinds for a full disk
            steps = self.steps()
            intact = (
                f"The checkpoint of step {steps[-1]} is intact."
                if steps
                else "There is no earlier checkpoint."
            )
            raise CheckpointError(
                f"The {what} could not be written to {self.directory}: {_first_line(error)}. {intact}"
            ) from error


def quiet_background_errors() -> None:
    """Keep orbax's threads from printing tracebacks: `Checkpointer` reports their errors in a sentence."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    shown, told = threading.excepthook, sys.unraisablehook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not type(args.thread).__module__.startswith("orbax"):
            shown(args)

    def late(unraisable: sys.UnraisableHookArgs) -> None:
        # the storage layer's threads report to an event loop that a failed write has closed
        if str(unraisable.exc_value) != "Event loop is closed":
            told(unraisable)

    threading.excepthook, sys.unraisablehook = hook, late


def finished_steps(directory: Path) -> list[int]:
    """List the finished checkpoints of a directory without touching it, in rising order."""
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if p.is_dir() and p.name.isdecimal())


def load(directory: Path, step: int | None = None) -> tuple[dict[str, Any], Any]:
    """Read a checkpoint, whatever plan it was written under, and check every array against its checksum.

    Args:
        directory: Where `<step>/` directories lie.
        step: Which one; None takes the latest.

    Returns:
        What was given to `Checkpointer.save`: the exported dict, numpy arrays by path, and the data state.

    Raises:
        UserError: There is none, it was cut short or damaged, or its format is newer than this version reads.
    """
    import orbax.checkpoint as ocp

    steps = finished_steps(directory)
    if not steps:
        raise UserError(f"{directory} holds no finished checkpoint. Leave out --resume to begin a new run.")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise UserError(
            f"{directory} holds no checkpoint of step {step}. It has {', '.join(map(str, steps))}."
        )
    path = directory.absolute() / str(step)
    try:
        meta = _read_meta(path)
        with ocp.StandardCheckpointer() as reader:
            tree = reader.restore(path / "state") if any(_size(s) for s in meta["arrays"].values()) else {}
    except UserError:
        raise
    except Exception as error:  # orbax raises whatever its storage layers raise
        raise _damaged(path, steps, _first_line(error)) from error
    arrays = flatten(tree)
    exported: dict[str, Any] = {part: {} for part in ARRAY_PARTS}
    for name, spec in meta["arrays"].items():
        value = arrays.get(name)
        if value is None:
            if _size(spec):
                raise _damaged(path, steps, f"{name} is missing")
            value = np.zeros(spec["shape"], spec["dtype"])
        value = np.asarray(value)
        if _checksum(value) != spec["crc32"]:
            raise _damaged(path, steps, f"the checksum of {name} does not match")
        part, _, rest = name.partition("/")
        exported[part][rest] = value
    exported.update(meta["values"])
    return exported, meta["data"]


def check_layout(exported: Mapping[str, Any], spec: Mapping[str, Any], where: Path | str) -> None:
    """Check names, shapes and dtypes of a checkpoint against what the model and the optimizer need.

    Args:
        exported: As `load` returns it.
        spec: As `Trainer.canonical_spec` returns it: `jax.ShapeDtypeStruct` by path, in the same two parts.
        where: The checkpoint's path, for the message.

    Raises:
        UserError: Something is missing, left over, or of another shape or dtype.
    """
    problems: list[str] = []
    for part in ARRAY_PARTS:
        have, need = exported[part], spec[part]
        missing, extra = sorted(set(need) - set(have)), sorted(set(have) - set(need))
        problems += [f"{part}/{name} is missing from it" for name in missing]
        for name in extra:
            close = difflib.get_close_matches(name, missing, n=1)
            problems.append(f"{part}/{name} is left over" + (f" (renamed to {close[0]}?)" if close else ""))
        for name in sorted(set(have) & set(need)):
            a, b = have[name], need[name]
            if tuple(a.shape) != tuple(b.shape):
                problems.append(
                    f"{part}/{name} has shape {tuple(a.shape)}, and the model needs {tuple(b.shape)}"
                )
            elif np.dtype(a.dtype) != np.dtype(b.dtype):
                problems.append(f"{part}/{name} is {a.dtype}, and the model needs {np.dtype(b.dtype)}")
    if problems:
        shown = "; ".join(problems[:_SHOWN]) + (
            f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        )
        raise UserError(
            f"The checkpoint {where} does not fit this model and optimizer: {shown}. "
            "Resume with the [model] and [optimizer] sections that it was written with, or begin a new run."
        )


def fill(target: Any, flat: Mapping[str, Any], where: Path | str = "given") -> Any:
    """Put the arrays of a checkpoint into a pytree of plain flax or optax.

    Args:
        target: What `model.init(...)` or `tx.init(params)` returns. Shapes are checked, values ignored.
        flat: One part of what `load` returns, arrays by path.
        where: The checkpoint's path, for the message.

    Returns:
        A pytree of the structure of `target` with the checkpoint's arrays.

    Raises:
        UserError: A leaf of `target` is not in the checkpoint or has another shape.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(target)
    leaves = []
    for keys, leaf in paths:
        name = path_string(keys)
        if name not in flat:
            known = ", ".join(sorted(flat)[:_SHOWN])
            raise UserError(f"The checkpoint {where} has no array {name!r}. It has {known}, ...")
        have, need = np.shape(flat[name]), np.shape(leaf)
        if have != need:
            raise UserError(f"The checkpoint {where} has {name} of shape {have}, and {need} is needed.")
        leaves.append(flat[name])
    return jax.tree_util.tree_unflatten(treedef, leaves)


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a dict keyed by "a/b/c" into nested dicts."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
            assert isinstance(node, dict), f"{path} lies below an array"
        assert last not in node, f"{path} stands twice"
        node[last] = value
    return tree


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested dicts into one dict keyed by "a/b/c"."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}/"))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def all_finite(exported: Mapping[str, Any]) -> bool:
    """Tell whether no parameter is nan or infinite."""
    # a sum is not finite if any addend is not; it overflows only for values that no model trains with
    arrays = (np.asarray(a) for a in exported["params"].values())
    return all(np.isfinite(a.sum(dtype=np.float32)) for a in arrays if jnp.issubdtype(a.dtype, jnp.floating))


def _read_meta(path: Path) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
        meta = reader.restore(path / "meta")
    version = meta["format_version"]
    if version > FORMAT_VERSION:
        raise UserError(
            f"{path} is in format {version}, and this hetjax reads up to {FORMAT_VERSION}. Update hetjax."
        )
    return meta


def _damaged(path: Path, steps: list[int], reason: str) -> UserError:
    earlier = [s for s in steps if s < int(path.name)]
    way_out = (
        f"to resume from step {earlier[-1]}" if earlier else "and begin a new run; there is no earlier one"
    )
    return UserError(
        f"The checkpoint {path} is damaged or was cut short ({reason}). Remove that directory {way_out}."
    )


def _checksum(a: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(a).reshape(-1).view(np.uint8).data) if a.size else 0


def _size(spec: Mapping[str, Any]) -> int:
    return int(np.prod(spec["shape"], dtype=np.int64))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
