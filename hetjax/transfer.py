"""The only code that moves an array between submeshes.

One carrier so far: between submeshes of one process. Nothing here waits for a value to be computed on the
thread that dispatches: `jax.device_put` does not block when every piece that a destination device needs
already is a piece of the source, so both sides are brought to a common grid first (pieces that lie in one
shard of the source and in one of the destination). Between two JAX clients (CPU and GPU in one process)
`device_put` always waits for the producer, so it runs on a worker thread, and the reader gets a future.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from hetjax.sharding import Submesh


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a value that follows the rows lies on a submesh.

    Attributes:
        submesh: Where.
        dim: The dim that the rows follow; None for a value without one, which leads with one entry a shard.
        inner: How many entries of that dim a row has.
        rows: Start and stop of each shard's rows in the microbatch.
    """

    submesh: Submesh
    dim: int | None
    inner: int
    rows: tuple[tuple[int, int], ...]

    @property
    def sharding(self) -> NamedSharding:
        """The array's sharding."""
        return self.submesh.stacked if self.dim is None else self.submesh.along(self.dim)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _take(x: jax.Array, start: jax.Array, size: int, dim: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, dim)


@functools.partial(jax.jit, static_argnums=1)
def _join(pieces: Sequence[jax.Array], dim: int) -> jax.Array:
    return jnp.concatenate(pieces, axis=dim)


@functools.partial(jax.jit, static_argnums=1)
def cast(x: jax.Array, dtype: str) -> jax.Array:
    """The array in another dtype, in place of the devices that it is on."""
    return x.astype(dtype)


@jax.jit
def add(x: jax.Array, y: jax.Array) -> jax.Array:
    """The sum of two arrays of one layout."""
    return x + y


@functools.lru_cache(maxsize=1024)
def relayout(sharding: NamedSharding, dtype: str | None = None) -> Callable[[jax.Array], jax.Array]:
    """A compiled function that lays an array out anew on the submesh that it is on, and maybe casts it."""
    return jax.jit(lambda x: x.astype(dtype) if dtype else x, out_shardings=sharding)


class Carrier:
    """Moves values between the submeshes of this process."""

    def __init__(self) -> None:
        """Start; threads come with the first transfers between two clients."""
        self._workers = concurrent.futures.ThreadPoolExecutor(4, thread_name_prefix="hetjax-transfer")
        self.num_bytes = 0

    def close(self) -> None:
        """Let the worker threads end."""
        self._workers.shutdown(wait=True)

    def _put(self, x: Any, target: Any, *, crosses: bool, finish: Callable[[Any], Any] | None = None) -> Any:
        """`device_put`, on a worker thread where it would block; returns an array or a future of one."""
        self.num_bytes += sum(a.nbytes for a in jax.tree.leaves(x))
        finish = finish or (lambda y: y)
        if not crosses:
            return finish(jax.device_put(x, target))
        return self._workers.submit(lambda: finish(jax.device_put(x, target)))

    def move(self, sources: Sequence[tuple[jax.Array, Layout]], to: Layout, dtype: str) -> Any:
        """Bring a value from the members that hold its rows to one member's layout.

        Returns at once; whoever reads the result waits for it. Traffic: the bytes of `to`'s rows for each
        device of `to`.

        Args:
            sources: The value's parts and their layouts; together they cover `to`'s rows.
            to: Where, and which rows.
            dtype: The dtype that the receiver computes in; a cast happens on the side where it saves bytes.

        Returns:
            The array on `to.submesh`, or a future of it between two clients.
        """
        # XLA may leave a value divided over tp; what is sent has to be whole.
        sources = [
            (x if x.sharding.is_equivalent_to(lay.sharding, x.ndim) else relayout(lay.sharding)(x), lay)
            for x, lay in sources
        ]
        target = jnp.dtype(dtype)
        sources = [(cast(x, dtype) if target.itemsize < x.dtype.itemsize else x, lay) for x, lay in sources]
        crosses = any(lay.submesh.client is not to.submesh.client for _, lay in sources)
        after = (
            (lambda y: cast(y, dtype) if y.dtype != target else y) if sources[0][0].dtype != target else None
        )
        for x, lay in sources:
            if lay.rows == to.rows:
                if lay.submesh.mesh == to.submesh.mesh:
                    return after(x) if after else x
                return self._put(x, to.sharding, crosses=crosses, finish=after)
        assert to.dim is not None, "a value without a row dim can't be divided anew"
        return self._move_pieces(sources, to, crosses, after)

    def _move_pieces(
        self, sources: Sequence[tuple[jax.Array, Layout]], to: Layout, crosses: bool, after: Any
    ) -> Any:
        dim = to.dim or 0
        shards = [{s.device: s.data for s in x.addressable_shards} for x, _ in sources]
        pieces, targets, counts = [], [], []
        for number, (start, stop) in enumerate(to.rows):
            for replica, device in enumerate(to.submesh.shard_devices[number]):
                before = len(pieces)
                for (_, lay), data in zip(sources, shards, strict=True):
                    for (low, high), holders in zip(lay.rows, lay.submesh.shard_devices, strict=True):
                        first, last = max(low, start), min(high, stop)
                        if first >= last:
                            continue
                        piece = data[holders[replica % len(holders)]]
                        if (first, last) != (low, high):
                            piece = _take(piece, (first - low) * to.inner, (last - first) * to.inner, dim)
                        pieces.append(piece)
                        targets.append(device)
                counts.append((device, len(pieces) - before))
        shape = list(sources[0][0].shape)
        shape[dim] = sum(stop - start for start, stop in to.rows) * to.inner

        def finish(moved: list[jax.Array]) -> jax.Array:
            moved, parts = list(moved), []
            for _, count in counts:
                own, moved = moved[:count], moved[count:]
                parts.append(own[0] if count == 1 else _join(own, dim))
            whole = jax.make_array_from_single_device_arrays(tuple(shape), to.sharding, parts)
            return after(whole) if after else whole

        return self._put(pieces, targets, crosses=crosses, finish=finish)

    def replicate(self, x: jax.Array, source: Submesh, to: Submesh, layout: NamedSharding) -> Any:
        """Copy an array that does not follow the rows (a parameter, a gradient, a scalar) to another submesh.

        Args:
            x: In any layout on `source`.
            source: Where it is.
            to: Where it goes.
            layout: How it lies there.

        Returns:
            The array, or a future of it between two clients.
        """
        if source.mesh == to.mesh:
            return x if x.sharding == layout else relayout(layout)(x)
        if not x.sharding.is_fully_replicated:
            x = relayout(source.replicated)(x)
        finish = None if layout.is_fully_replicated else relayout(layout)
        return self._put(x, to.replicated, crosses=source.client is not to.client, finish=finish)


def arrived(value: Any) -> Any:
    """The array of a transfer; waits for a worker thread only where two clients are joined."""
    return value.result() if isinstance(value, concurrent.futures.Future) else value
