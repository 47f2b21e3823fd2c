"""Where in the user's code an equation comes from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

# Functions compiled by these keep the trace of whoever called them first.
CACHED = frozenset(("jit", "pjit"))
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
JAX = os.path.dirname(os.path.abspath(jax.__file__))


def describe(stack: Sequence[JaxprEqn]) -> str:
    """File, line and function of the user's code that made the innermost equation of a nest.

    Args:
        stack: Equations, each inside the one before.

    Returns:
        Such as `models/net.py:12 in Net.__call__ (BatchNorm)`; the primitive where nothing is known.
    """
    eqn = next((e for e in stack if e.primitive.name in CACHED), stack[-1])
    traceback = getattr(eqn.source_info, "traceback", None)
    frames = [f for f in getattr(traceback, "frames", ()) if not f.file_name.startswith((JAX, OURS))]
    layers = [part for part in str(getattr(eqn.source_info, "name_stack", "")).split("/") if part]
    if not frames:
        return "/".join(layers) or f"primitive {eqn.primitive.name}"
    own = next((i for i, f in enumerate(frames) if "site-packages" not in f.file_name), len(frames) - 1)
    calls = [f.function_name for f in frames[:own] if f.function_name.endswith(".__call__")]
    layer = calls[-1].removesuffix(".__call__") if calls else layers[-1] if layers else ""
    at = frames[own]
    return f"{_shorter(at.file_name)}:{at.line_num} in {at.function_name}" + (f" ({layer})" if layer else "")


def _shorter(path: Any) -> str:
    near = os.path.relpath(path)
    return near if not near.startswith("..") else path
