"""Train an image classifier, a residual network on scikit-learn's digits, over two groups of devices."""

import pathlib
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hetjax

ROWS, STEPS = 64, 150


class Classifier(nn.Module):
    """Images of 8 x 8 to ten scores."""

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        """`[rows, 8, 8, 1]` to `[rows, 10]`."""
        x = nn.Conv(32, (3, 3))(image)
        for strides in (1, 1, 2, 1):
            x = hetjax.cut(x)  # the model may be divided here
            y = nn.Conv(32, (3, 3), strides)(nn.relu(nn.GroupNorm(8)(x)))
            y = nn.Conv(32, (3, 3))(nn.relu(nn.GroupNorm(8)(y)))
            x = nn.avg_pool(x, (strides, strides), (strides, strides)) + y
        return nn.Dense(10)(nn.relu(x).mean((1, 2)))


def loss_fn(params, batch):
    """Mean cross entropy over the rows, and the share of them that is classified right."""
    logits: Any = Classifier().apply(params, batch["image"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}


cluster = hetjax.Cluster.load(pathlib.Path(__file__).parent.parent / "meshes" / "cpu_2x.toml")
jax.config.update("jax_num_cpu_devices", cluster.num_cpu_devices())  # before JAX is used
pixels, labels = (np.asarray(part) for part in load_digits(return_X_y=True))
images, labels = (pixels.reshape(-1, 8, 8, 1) / 16).astype(np.float32), labels.astype(np.int32)
train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=4 * ROWS, random_state=0)
batch_spec = {"image": jax.ShapeDtypeStruct((ROWS, 8, 8, 1), np.float32)}
batch_spec["label"] = jax.ShapeDtypeStruct((ROWS,), np.int32)
program = hetjax.trace(loss_fn, lambda key: Classifier().init(key, images[:1]), batch_spec)
plan = hetjax.make_plan(program, cluster)
print(plan)
trainer = hetjax.Trainer(program, plan, optax.adamw(3e-3))
state, rng = trainer.init(seed=0), np.random.default_rng(0)
for step in range(STEPS + 1):
    pick = rng.integers(0, len(train_x), ROWS)
    state, metrics = trainer.step(state, {"image": train_x[pick], "label": train_y[pick]})
    if step % 25 == 0:
        print(f"step {step}: loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.1%}")
test = trainer.evaluate(state, {"image": test_x, "label": test_y})
print(f"test: loss {test['loss']:.3f}, accuracy {test['accuracy']:.1%}")
