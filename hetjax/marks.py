"""What a model's author writes: identities outside hetjax, meaningful inside it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

CUT = "hetjax.cut"
CONSTRAIN = "hetjax.constrain:"


def cut(x: Any) -> Any:
    """Mark a place where the model may be divided between devices.

    An identity: a model with cuts runs, differentiates and compiles anywhere. Marks that follow each other
    with nothing computed between them count as one cut.

    Args:
        x: An array or a pytree of arrays of any dtype; what later blocks read.

    Returns:
        The same values.
    """
    return jax.tree.map(lambda a: checkpoint_name(a, CUT), x)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Name the dims of an activation so that each group can lay it out by its own rules.

    An identity outside hetjax. Inside, a dim whose name a group's rules map to a tensor axis is sharded
    over it.

    Args:
        x: An array.
        *names: One logical axis name (`"batch"`, `"embed"`, `"mlp"`, `"heads"`, ...) or None for each dim of
            `x`.

    Returns:
        The same values.

    Raises:
        ValueError: The number of names is not the number of dims.
    """
    if len(names) != x.ndim:
        raise ValueError(
            f"hetjax.constrain got {len(names)} names {names} for an array of shape {x.shape}. "
            "Give one name, or None, for each dim."
        )
    bad = [n for n in names if n is not None and ("," in n or ":" in n)]
    if bad:
        raise ValueError(
            f"hetjax.constrain got the axis name {bad[0]!r}. A name may hold neither ',' nor ':'."
        )
    return checkpoint_name(x, CONSTRAIN + ",".join(n or "" for n in names))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean given as its two sums, so that uneven rows, padding and microbatches stay exact.

    hetjax adds the totals and the weights of all parts and divides once.

    Attributes:
        total: Scalar; the sum over the examples (or tokens) of a part.
        weight: Scalar; how many there were. Must not depend on the parameters.
    """

    total: Any
    weight: Any

    @property
    def value(self) -> jax.Array:
        """The mean, float32; 0 where the weight is 0."""
        total, weight = jnp.asarray(self.total, jnp.float32), jnp.asarray(self.weight, jnp.float32)
        return jnp.where(weight == 0, 0.0, total / jnp.where(weight == 0, 1.0, weight))
