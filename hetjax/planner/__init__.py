"""From a program and a cluster to a plan, and how far it is from what the devices could do at all."""

from hetjax.planner.limit import Limit, compute_limit
from hetjax.planner.search import make_plan, predict

__all__ = ["Limit", "compute_limit", "make_plan", "predict"]
