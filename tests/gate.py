"""Arrays that are not computed before a test says so: what goes on meanwhile does not wait for them."""

from __future__ import annotations

import threading

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class Gate:
    """Holds back the computation of arrays until it is opened."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def open(self) -> None:
        self._event.set()

    def _wait(self, x: jax.Array) -> np.ndarray:
        assert self._event.wait(60), "something waited for an array that was held back"
        return np.asarray(x)

    def hold(self, x: jax.Array) -> jax.Array:
        """The same values in the same layout, not ready before `open`.

        A program on one device with a callback runs within the call that dispatches it, so there a second
        device takes part.
        """
        assert isinstance(x.sharding, NamedSharding)
        mesh, spec = x.sharding.mesh, x.sharding.spec
        alone, own = mesh.size == 1, mesh.devices.flat[0]
        if alone:
            other = next(d for d in own.client.local_devices() if d != own)
            mesh, spec = Mesh(np.array([own, other]), ("both",)), P()
        spread = jax.device_put(np.asarray(x), NamedSharding(mesh, spec))

        def wait(a: jax.Array) -> jax.Array:
            return jax.pure_callback(self._wait, jax.ShapeDtypeStruct(a.shape, a.dtype), a)

        gated = jax.jit(jax.shard_map(wait, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(
            spread
        )
        if not alone:
            return gated
        (part,) = [s.data for s in gated.addressable_shards if s.device == own]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [part])
