"""GPT in flax nnx: learned positions, pre-LayerNorm, GELU.

`form = "flat"` is how to write a transformer for XLA on CPU: dense layers on `[rows * seq, embed]`, so that a
weight gradient contracts one dim, and attention as a batched matrix product over `[rows, heads, seq,
head_dim]`. `form = "naive"` is the same function as it is often written, dense layers on `[rows, seq, embed]`
and `einsum("bqhd,bkhd->bhqk")`: slower there, and kept to measure what hetjax makes of such a model.

Everything is computed in the dtype of the parameters, except the norms' statistics, the softmax and the loss,
which are in float32.

Axis names of the parameters: "vocab", "pos", "embed", "heads" (heads * head_dim, heads major), "mlp".
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx

import hetjax
from models import common


class GPTConfig(common.ModelConfig):
    """A GPT's shape; see `common.ModelConfig` for the rest.

    Attributes:
        dropout: Share of activations zeroed in training: after the embedding and after each half block.
        form: How the layers are written, "flat" or "naive"; the values are the same.
    """

    family: Literal["gpt"] = "gpt"
    dropout: float = pydantic.Field(default=0.0, ge=0.0, lt=1.0)
    form: Literal["flat", "naive"] = "flat"


def _normal(scale: float, *names: str):
    return nnx.with_partitioning(nnx.initializers.normal(scale), names)


def _linear(num_in: int, num_out: int, names: tuple[str, str], scale: float, rngs: nnx.Rngs) -> nnx.Linear:
    bias_init = nnx.with_partitioning(nnx.initializers.zeros, names[1:])
    return nnx.Linear(num_in, num_out, kernel_init=_normal(scale, *names), bias_init=bias_init, rngs=rngs)


class LayerNorm(nnx.Module):
    """Mean 0 and variance 1 over the last dim, in float32, then scale and bias."""

    def __init__(self, num_features: int, rngs: nnx.Rngs):
        scale_init = nnx.with_partitioning(nnx.initializers.ones, ("embed",))
        bias_init = nnx.with_partitioning(nnx.initializers.zeros, ("embed",))
        self.scale = nnx.Param(scale_init(rngs.params(), (num_features,), jnp.float32))
        self.bias = nnx.Param(bias_init(rngs.params(), (num_features,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., embed]` to the same, in the dtype of `x`."""
        x32 = x.astype(jnp.float32)
        centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + 1e-5)
        shape = (1,) * (x.ndim - 1) + (-1,)
        return normed.astype(x.dtype) * self.scale[...].reshape(shape) + self.bias[...].reshape(shape)


class Table(nnx.Module):
    """One vector for each id. (`nnx.Embed` keeps the dtype it was made with, whatever its parameter has.)"""

    def __init__(self, num_ids: int, num_features: int, name: str, rngs: nnx.Rngs):
        init = _normal(0.02, name, "embed")
        self.embedding = nnx.Param(init(rngs.params(), (num_ids, num_features), jnp.float32))

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Look up ids of any shape; `[..., embed]`."""
        return jnp.take(self.embedding[...], ids, axis=0)

    def scores(self, x: jax.Array) -> jax.Array:
        """The product of `[..., embed]` with every vector: `[..., num_ids]`."""
        return jnp.dot(x, self.embedding[...].T)


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        embed, residual_scale = config.embed_dim, 0.02 / math.sqrt(2 * config.num_layers)
        self.config = config
        self.query = _linear(embed, embed, ("embed", "heads"), 0.02, rngs)
        self.key = _linear(embed, embed, ("embed", "heads"), 0.02, rngs)
        self.value = _linear(embed, embed, ("embed", "heads"), 0.02, rngs)
        self.out = _linear(embed, embed, ("heads", "embed"), residual_scale, rngs)

    def __call__(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        """Mix the tokens of each row; `[rows, seq, embed]` to the same, `bias` `[1 or rows, 1, seq, seq]`."""
        return (self._flat if self.config.form == "flat" else self._naive)(x, bias)

    def _flat(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        rows, seq, embed = x.shape
        x = x.reshape(rows * seq, embed)

        def split_heads(y: jax.Array) -> jax.Array:
            y = y.reshape(rows, seq, self.config.num_heads, self.config.head_dim).transpose(0, 2, 1, 3)
            return hetjax.constrain(y, "batch", "heads", None, None)

        query, key, value = (split_heads(layer(x)) for layer in (self.query, self.key, self.value))
        mixed = common.causal_attention(query * self.config.head_dim**-0.5, key, value, bias)
        mixed = mixed.transpose(0, 2, 1, 3).reshape(rows * seq, embed)
        return self.out(mixed).reshape(rows, seq, embed)

    def _naive(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        rows, seq, embed = x.shape
        shape = (rows, seq, self.config.num_heads, self.config.head_dim)
        query, key, value = (
            hetjax.constrain(layer(x).reshape(shape), "batch", None, "heads", None)
            for layer in (self.query, self.key, self.value)
        )
        query = query * self.config.head_dim**-0.5
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) + bias
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(rows, seq, embed))


class MLP(nnx.Module):
    """Two dense layers with a GELU between."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        residual_scale = 0.02 / math.sqrt(2 * config.num_layers)
        self.config = config
        self.up = _linear(config.embed_dim, config.mlp_width, ("embed", "mlp"), 0.02, rngs)
        self.down = _linear(config.mlp_width, config.embed_dim, ("mlp", "embed"), residual_scale, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[rows, seq, embed]` to the same."""
        if self.config.form == "naive":
            return self.down(nnx.gelu(hetjax.constrain(self.up(x), "batch", None, "mlp")))
        hidden = hetjax.constrain(self.up(x.reshape(-1, x.shape[-1])), "batch", "mlp")
        return self.down(nnx.gelu(hidden)).reshape(x.shape)


class Block(nnx.Module):
    """Attention and MLP, each behind a LayerNorm and added to the residual stream."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        self.config = config
        self.attention_norm = LayerNorm(config.embed_dim, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = LayerNorm(config.embed_dim, rngs)
        self.mlp = MLP(config, rngs)

    def __call__(self, x: jax.Array, bias: jax.Array, rng: jax.Array | None) -> jax.Array:
        """`[rows, seq, embed]` to the same; `rng` None turns dropout off."""
        rngs = (None, None) if rng is None else jax.random.split(rng)
        x = x + common.dropout(self.attention(self.attention_norm(x), bias), self.config.dropout, rngs[0])
        if self.config.cuts == "half":
            x = hetjax.cut(x)
        x = x + common.dropout(self.mlp(self.mlp_norm(x)), self.config.dropout, rngs[1])
        return hetjax.constrain(x, "batch", None, "embed")


class GPT(nnx.Module):
    """Token ids to logits."""

    def __init__(self, config: GPTConfig, seq_len: int, vocab_size: int, rngs: nnx.Rngs):
        self.config = config
        embed = config.embed_dim
        self.tokens = Table(vocab_size, embed, "vocab", rngs)
        self.positions = Table(seq_len, embed, "pos", rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.num_layers)])
        self.norm = LayerNorm(embed, rngs)
        if not config.tied:
            kernel_init = _normal(0.02, "embed", "vocab")
            self.head = nnx.Linear(embed, vocab_size, use_bias=False, kernel_init=kernel_init, rngs=rngs)

    def __call__(self, batch: common.Batch, rng: jax.Array | None = None) -> jax.Array:
        """Score every next token.

        Args:
            batch: See `models.common`.
            rng: Key of the dropout; None turns it off.

        Returns:
            `[rows, seq, vocab]` in the parameters' dtype.
        """
        bias, positions = common.attention_bias(batch), common.token_positions(batch)
        num_keys = self.config.num_layers + 1
        rngs = [None if rng is None else jax.random.fold_in(rng, i) for i in range(num_keys)]
        x = self.tokens(batch["tokens"]) + self.positions(positions)
        x = hetjax.cut(common.dropout(x, self.config.dropout, rngs[-1]))
        for i, block in enumerate(self.blocks):
            x = block(x, bias, rngs[i])
            if self.config.ends_part(i):
                x = hetjax.cut(x)
        return self._logits(self.norm(x))

    def _logits(self, x: jax.Array) -> jax.Array:
        project = self.tokens.scores if self.config.tied else self.head
        if self.config.form == "naive":
            return hetjax.constrain(project(x), "batch", None, "vocab")
        logits = hetjax.constrain(project(x.reshape(-1, x.shape[-1])), "batch", "vocab")
        return logits.reshape(*x.shape[:2], -1)


def build(config: GPTConfig, *, seq_len: int, vocab_size: int) -> common.Model:
    """Make the pure functions of a GPT; its parameters are an `nnx.State`."""

    def make(key: jax.Array) -> GPT:
        with nnx.use_eager_sharding(False):  # names only: this model knows no mesh
            return GPT(config, seq_len, vocab_size, nnx.Rngs(params=key))

    graphdef, _ = nnx.split(nnx.eval_shape(lambda: make(jax.random.key(0))))

    def init_fn(key: jax.Array) -> nnx.State:
        return nnx.split(make(key))[1]

    def apply(params: nnx.State, batch: common.Batch, rng: jax.Array | None) -> jax.Array:
        return nnx.merge(graphdef, params)(batch, rng)

    return common.make_model(
        config, seq_len=seq_len, vocab_size=vocab_size, init_fn=init_fn, apply=apply, dropout=config.dropout
    )
