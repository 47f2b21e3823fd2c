"""Leaves of a parameter tree that are no parameters: what a flax model changes as it runs.

hetjax carries none of it from step to step. Such leaves are kept as they are, and a model that relies on a
change is refused.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.errors import UserError

Kind = Literal["param", "statistics", "key", "state"]


def leaf_kinds(params_spec: Any, paths: Sequence[str]) -> list[Kind]:
    """What every leaf is, from the types of nnx variables and the names of linen collections.

    Args:
        params_spec: What `init_fn` returns, as shapes.
        paths: Path of each leaf.
    """
    kinds: list[Kind] = []
    for variable in jax.tree.leaves(params_spec, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        kind: Kind = "param"
        if isinstance(variable, nnx.BatchStat):
            kind = "statistics"
        elif isinstance(variable, nnx.Cache | nnx.Intermediate | nnx.RngState):
            kind = "state"
        for leaf in jax.tree.leaves(variable):
            kinds.append("key" if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else kind)
    return ["statistics" if "batch_stats" in p.split("/") else k for p, k in zip(paths, kinds, strict=True)]


def check(paths: Sequence[str], kinds: Sequence[Kind], read: Container[int]) -> None:
    """Refuse a model that relies on state that changes.

    Args:
        paths: Path of each leaf.
        kinds: What each leaf is.
        read: The leaves that the training loss depends on.

    Raises:
        UserError: Running statistics that training does not read, so that it would update them; a key that
            training draws from.
    """
    for leaf, (path, kind) in enumerate(zip(paths, kinds, strict=True)):
        if kind == "statistics" and leaf not in read:
            raise UserError(
                f"Training normalises by the statistics of the batch and would update the running ones at "
                f"{path!r}. hetjax doesn't carry state that a model changes, so they would stay as they were "
                "initialised. Use GroupNorm or LayerNorm, or run BatchNorm with use_running_average=True "
                "(nnx: model.eval()), which keeps its statistics as they are."
            )
        if kind == "key" and leaf in read:
            raise UserError(
                f"Training draws random numbers from the key that the model holds at {path!r}. hetjax "
                "doesn't carry the count of its draws from step to step, so every step would draw the same. "
                "Give loss_fn a third argument, `loss_fn(params, batch, rng)`, and hand it to the model: "
                "nnx.reseed(model, dropout=rng) after nnx.merge."
            )
