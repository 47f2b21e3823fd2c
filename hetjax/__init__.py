"""hetjax: train any flax model over devices that are not all alike, on stock JAX."""

from hetjax.errors import UserError
from hetjax.marks import Mean, constrain, cut

__all__ = ["Mean", "UserError", "constrain", "cut"]
