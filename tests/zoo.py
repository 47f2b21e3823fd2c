"""Small models for the property tests, one for each thing that a user's model may do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hetjax
import models

ROWS, SEQ, DIM, VOCAB = 8, 6, 8, 16


@dataclasses.dataclass(frozen=True)
class Specimen:
    """A model of the zoo.

    Attributes:
        loss_fn: As given to `hetjax.trace`.
        init_fn: As given to `hetjax.trace`.
        batch: Host batch of `ROWS` rows.
        equal_shards: A value without rows crosses a cut, so stages need equal splits.
        named: Its parameters have logical axis names, so `tp` may be more than 1.
        follows_dtype: It computes in its parameters' dtype.
    """

    loss_fn: Callable
    init_fn: Callable
    batch: dict[str, np.ndarray]
    equal_shards: bool = False
    named: bool = False
    follows_dtype: bool = True
    trace_options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def program(self) -> hetjax.Program:
        spec = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self.batch)
        return hetjax.trace(self.loss_fn, self.init_fn, spec, **self.trace_options)

    @property
    def takes_rng(self) -> bool:
        return self.program().uses_rng


def _features(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((ROWS, DIM), dtype=np.float32),
        "y": rng.standard_normal((ROWS, DIM), dtype=np.float32),
    }


def _tokens(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "tokens": rng.integers(0, VOCAB, (ROWS, SEQ)).astype(np.int32),
        "targets": rng.integers(0, VOCAB, (ROWS, SEQ)).astype(np.int32),
        "weights": (rng.random((ROWS, SEQ)) < 0.7).astype(np.float32),
    }


def _normal(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape) / np.sqrt(shape[0])


def _dense(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))


def _token_loss(logits: jax.Array, batch: dict) -> hetjax.Mean:
    logits = jax.nn.log_softmax(logits.astype(jnp.float32))
    picked = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    return hetjax.Mean(-(picked * batch["weights"]).sum(), batch["weights"].sum())


def mlp() -> Specimen:
    """Residual blocks on features; a plain scalar loss, the mean over equal rows; a frozen scale; a
    metric."""

    def init(key: jax.Array) -> dict:
        keys = jax.random.split(key, 4)
        blocks = {
            f"w{i}": {"kernel": _normal(k, DIM, DIM), "bias": jnp.zeros((DIM,))} for i, k in enumerate(keys)
        }
        return blocks | {"scale": jnp.full((DIM,), 0.5)}

    def loss(params: dict, batch: dict) -> Any:
        x = batch["x"].astype(params["scale"].dtype)
        for i in range(4):
            w = params[f"w{i}"]
            x = hetjax.cut(x + jax.nn.gelu(_dense(x, w["kernel"]) + w["bias"][None]) * params["scale"][None])
        error = jnp.square(x.astype(jnp.float32) - batch["y"])
        return error.mean(), {"largest": hetjax.Mean(jnp.abs(error).sum(), float(batch["x"].shape[0]))}

    return Specimen(loss, init, _features(), trace_options={"frozen": lambda path: path == "scale"})


def tied() -> Specimen:
    """A small transformer: tied head, positions and mask made once at the top, padding."""

    def init(key: jax.Array) -> dict:
        e, p, *ks = jax.random.split(key, 6)
        blocks = [{"qkv": _normal(k, DIM, 3 * DIM), "out": _normal(k, DIM, DIM)} for k in ks[:3]]
        return {"embed": _normal(e, VOCAB, DIM), "pos": _normal(p, SEQ, DIM), "blocks": blocks}

    def loss(params: dict, batch: dict) -> hetjax.Mean:
        mask = jnp.tril(jnp.ones((SEQ, SEQ), bool))[None]
        x = params["embed"][batch["tokens"]] + params["pos"][jnp.arange(SEQ)][None]
        x = hetjax.cut(x)
        for block in params["blocks"]:
            q, k, v = jnp.split(_dense(x, block["qkv"]), 3, axis=-1)
            scores = jnp.where(mask, jnp.einsum("rqd,rkd->rqk", q, k), -1e9).astype(jnp.float32)
            mixed = jnp.einsum("rqk,rkd->rqd", jax.nn.softmax(scores).astype(v.dtype), v)
            x = hetjax.cut(x + _dense(mixed, block["out"]))
        return _token_loss(_dense(x, params["embed"].T), batch)

    return Specimen(loss, init, _tokens())


def skips() -> Specimen:
    """A U-net's skips across several cuts; integers and booleans cross cuts; several arrays in one cut."""

    def init(key: jax.Array) -> dict:
        return {f"w{i}": _normal(k, DIM, DIM) for i, k in enumerate(jax.random.split(key, 5))}

    def loss(params: dict, batch: dict) -> Any:
        x = jnp.tanh(_dense(batch["x"].astype(params["w0"].dtype), params["w0"]))
        sign, order = x > 0, jnp.argsort(jax.lax.stop_gradient(x), axis=-1)
        x, sign, order = hetjax.cut((x, sign, order))
        saved = [x]
        for i in (1, 2):
            x = hetjax.cut(jnp.tanh(_dense(x, params[f"w{i}"])))
            saved.append(x)
        for i in (3, 4):
            x = hetjax.cut(_dense(jnp.tanh(x + saved.pop()), params[f"w{i}"]))
        x = jnp.where(sign, x, 0.5 * x) + jnp.take_along_axis(saved[0], order, axis=-1)
        return jnp.square(x.astype(jnp.float32) - batch["y"]).mean()

    return Specimen(loss, init, _features())


def scanned() -> Specimen:
    """Stacked layers under `lax.scan` with a cut in the body, beside an unstacked head."""

    def init(key: jax.Array) -> dict:
        e, s, h = jax.random.split(key, 3)
        layers = {"w": jax.random.normal(s, (4, DIM, DIM)) / 3, "b": jnp.zeros((4, DIM))}
        return {"embed": _normal(e, VOCAB, DIM), "layers": layers, "head": _normal(h, DIM, VOCAB)}

    def loss(params: dict, batch: dict) -> hetjax.Mean:
        def body(x: jax.Array, layer: dict) -> tuple[jax.Array, None]:
            return hetjax.cut(x + jnp.tanh(_dense(x, layer["w"]) + layer["b"][None, None])), None

        x, _ = jax.lax.scan(body, params["embed"][batch["tokens"]], params["layers"])
        return _token_loss(_dense(x, params["head"]), batch)

    return Specimen(loss, init, _tokens())


def partial_sums() -> Specimen:
    """`[rows * seq, d]` crosses cuts, and so does a scalar penalty that every block adds to."""

    def init(key: jax.Array) -> dict:
        e, *ks = jax.random.split(key, 4)
        return {"embed": _normal(e, VOCAB, DIM), "blocks": [_normal(k, DIM, DIM) for k in ks]}

    def loss(params: dict, batch: dict) -> hetjax.Mean:
        x = params["embed"][batch["tokens"].reshape(-1)]
        penalty = jnp.zeros((), jnp.float32)
        for block in params["blocks"]:
            x = x + jax.nn.relu(_dense(x, block))
            penalty = penalty + 1e-3 * jnp.square(x.astype(jnp.float32)).sum()
            x, penalty = hetjax.cut((x, penalty))
        logits = _dense(x, params["embed"].T).reshape(*batch["tokens"].shape, VOCAB)
        mean = _token_loss(logits, batch)
        return hetjax.Mean(mean.total + penalty, mean.weight)

    return Specimen(loss, init, _tokens(), equal_shards=True)


def dropout() -> Specimen:
    """Random draws by row, with keys folded by layer."""

    def init(key: jax.Array) -> dict:
        return {f"w{i}": _normal(k, DIM, DIM) for i, k in enumerate(jax.random.split(key, 4))}

    def loss(params: dict, batch: dict, rng: jax.Array | None) -> Any:
        x = batch["x"].astype(params["w0"].dtype)
        for i in range(4):
            x = x + jnp.tanh(_dense(x, params[f"w{i}"]))
            if rng is not None:
                keep = jax.random.bernoulli(jax.random.fold_in(rng, i), 0.8, x.shape)
                x = jnp.where(keep, x / 0.8, jnp.zeros((), x.dtype))
            x = hetjax.cut(x)
        return jnp.square(x.astype(jnp.float32) - batch["y"]).mean()

    return Specimen(loss, init, _features())


@jax.custom_vjp
def _half_gradient(x: jax.Array) -> jax.Array:
    return x


_half_gradient.defvjp(lambda x: (x, None), lambda _, g: (g * 0.5,))


def nested() -> Specimen:
    """Cuts inside jit and remat; a custom derivative between them."""

    def init(key: jax.Array) -> dict:
        return {f"w{i}": _normal(k, DIM, DIM) for i, k in enumerate(jax.random.split(key, 4))}

    def loss(params: dict, batch: dict) -> Any:
        def layer(x: jax.Array, w: jax.Array) -> jax.Array:
            return hetjax.cut(jax.nn.relu(_dense(x, w)) + x)

        x = batch["x"].astype(params["w0"].dtype)
        x = jax.jit(layer)(x, params["w0"])
        x = jax.checkpoint(layer)(x, params["w1"])
        x = _half_gradient(x)
        x = jax.jit(lambda x: jax.checkpoint(layer)(layer(x, params["w2"]), params["w3"]))(x)
        return jnp.square(x.astype(jnp.float32) - batch["y"]).mean()

    return Specimen(loss, init, _features())


def _shipped(name: str, **overrides: Any) -> Specimen:
    config = models.load(name, {"num_layers": 2, "embed_dim": 16, "num_heads": 2, **overrides})
    model = models.build(config, seq_len=SEQ, vocab_size=VOCAB)
    return Specimen(model.loss_fn, model.init_fn, _tokens(), named=True)


def gpt() -> Specimen:
    """The nnx GPT, as a user writes it, cut between attention and MLP too."""
    return _shipped("gpt_tiny", form="naive")


def llama() -> Specimen:
    """The linen Llama under `nn.scan`."""
    return _shipped("llama_tiny_scan")


ZOO: dict[str, Callable[[], Specimen]] = {
    f.__name__: f for f in (mlp, tied, skips, scanned, partial_sums, dropout, nested, gpt, llama)
}
