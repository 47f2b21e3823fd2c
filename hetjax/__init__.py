"""hetjax: train any flax model over devices that are not all alike, on stock JAX.

Importing it starts no JAX backend; the names below are loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hetjax.errors import UserError
from hetjax.marks import Mean, constrain, cut

if TYPE_CHECKING:
    from hetjax.cluster import Cluster
    from hetjax.optimizer import LossScale
    from hetjax.plan import Plan
    from hetjax.planner import make_plan
    from hetjax.program import Program, trace
    from hetjax.runtime import Trainer, TrainState

_LAZY = {
    "Cluster": "hetjax.cluster",
    "LossScale": "hetjax.optimizer",
    "Plan": "hetjax.plan",
    "Program": "hetjax.program",
    "TrainState": "hetjax.runtime",
    "Trainer": "hetjax.runtime",
    "make_plan": "hetjax.planner",
    "trace": "hetjax.program",
}

__all__ = [
    "Cluster",
    "LossScale",
    "Mean",
    "Plan",
    "Program",
    "TrainState",
    "Trainer",
    "UserError",
    "constrain",
    "cut",
    "make_plan",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'hetjax' has no attribute {name!r}")
