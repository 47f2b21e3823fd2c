"""Every test runs on eight CPU devices, under strict promotion, with hetjax's annotations checked.

The checks of annotations (jaxtyping, beartype) are hooked in by `--jaxtyping-packages` in pyproject.toml.
"""

import functools

import jax
import optax
import optax.schedules._schedule

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.devices()  # now, before a test of the command line asks for another number of devices


def _leave_lenient(module, name):
    """Run one function of optax, and the function it returns, under JAX's usual promotion."""
    original = getattr(module, name)

    @functools.wraps(original)
    def lenient(*args, **kwargs):
        with jax.numpy_dtype_promotion("standard"):
            result = original(*args, **kwargs)
        if not callable(result):
            return result

        def schedule(count):
            with jax.numpy_dtype_promotion("standard"):
                return result(count)

        return schedule

    setattr(module, name, lenient)


# optax itself mixes its integer step count with floats in these two.
_leave_lenient(optax.tree, "bias_correction")
_leave_lenient(optax.schedules._schedule, "cosine_decay_schedule")
optax.cosine_decay_schedule = optax.schedules._schedule.cosine_decay_schedule
