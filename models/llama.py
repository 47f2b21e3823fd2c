"""Llama in flax linen: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Written as XLA on CPU likes it (see `models/gpt.py`): dense layers on `[rows * seq, embed]`, attention as
batched matrix products. Everything is computed in the dtype of the parameters, except the norms'
statistics, the rotation, the softmax and the loss, which are in float32.

Axis names of the parameters: "vocab", "embed", "heads" (query heads * head_dim), "kv" (key/value heads *
head_dim), "mlp", and "layers" in front where the layers are scanned.
"""

from __future__ import annotations

from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import pydantic

import hetjax
from models import common

Tables = tuple[jax.Array, jax.Array]


class LlamaConfig(common.ModelConfig):
    """A Llama's shape; see `common.ModelConfig` for the rest.

    Attributes:
        num_kv_heads: Key/value heads, a divisor of `num_heads`; None means `num_heads`.
        rope_theta: Base of the rotary wavelengths.
        norm_eps: Added to the mean square in RMSNorm.
        layers: "unrolled": each block has parameters of its own; "scanned": one stacked set and `nn.scan`.
    """

    family: Literal["llama"] = "llama"
    num_kv_heads: common.Size | None = None
    rope_theta: pydantic.PositiveFloat = 10_000.0
    norm_eps: pydantic.PositiveFloat = 1e-5
    layers: Literal["unrolled", "scanned"] = "unrolled"

    @pydantic.model_validator(mode="after")
    def _shape_fits(self) -> LlamaConfig:
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads = {self.num_heads} is no multiple of num_kv_heads = {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"embed_dim / num_heads = {self.head_dim} is odd; rotary positions turn pairs")
        if self.layers == "scanned" and self.cut_every != 1:
            raise ValueError(f"cut_every = {self.cut_every} needs layers = 'unrolled': a scan cuts each")
        return self

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def mlp_width(self) -> int:
        """Width inside the MLP; by default two thirds of `4 * embed_dim`, rounded up to a multiple of 32."""
        return self.mlp_dim or -(-8 * self.embed_dim // 3 // 32) * 32


def rotary_tables(positions: jax.Array, head_dim: int, theta: float) -> Tables:
    """Cosines and sines of the angles, float32 `[1 or rows, 1, seq, head_dim / 2]`."""
    rates = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions[:, None, :, None].astype(jnp.float32) * rates[None, None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, tables: Tables) -> jax.Array:
    """Turn each pair (i, i + head_dim / 2) of `[rows, heads, seq, head_dim]` by its place's angle."""
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _dense(num_out: int, names: tuple[str, str], name: str) -> nn.Dense:
    kernel_init = nn.with_logical_partitioning(nn.initializers.normal(0.02), names)
    return nn.Dense(num_out, use_bias=False, kernel_init=kernel_init, name=name)


class RMSNorm(nn.Module):
    """Mean square 1 over the last dim, in float32, then a scale."""

    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., embed]` to the same, in the dtype of `x`."""
        scale_init = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
        scale: Any = self.param("scale", scale_init, (x.shape[-1],))
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.epsilon)
        return normed.astype(x.dtype) * scale.reshape((1,) * (x.ndim - 1) + (-1,))


class Attention(nn.Module):
    """Causal grouped-query attention."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array, tables: Tables) -> jax.Array:
        """Mix the tokens of each row; `[rows, seq, embed]` to the same, `bias` `[1 or rows, 1, seq, seq]`."""
        config, (rows, seq, embed) = self.config, x.shape
        head_dim, kv_heads = config.head_dim, config.kv_heads
        x = x.reshape(rows * seq, embed)

        def split_heads(y: jax.Array, num_heads: int, name: str) -> jax.Array:
            y = y.reshape(rows, seq, num_heads, head_dim).transpose(0, 2, 1, 3)
            return hetjax.constrain(y, "batch", name, None, None)

        query = _dense(embed, ("embed", "heads"), "query")(x)
        key = _dense(kv_heads * head_dim, ("embed", "kv"), "key")(x)
        value = _dense(kv_heads * head_dim, ("embed", "kv"), "value")(x)
        query = split_heads(query, config.num_heads, "heads")
        key, value = split_heads(key, kv_heads, "kv"), split_heads(value, kv_heads, "kv")
        query, key = rotate(query * head_dim**-0.5, tables), rotate(key, tables)
        mixed = common.causal_attention(query, key, value, bias)
        mixed = mixed.transpose(0, 2, 1, 3).reshape(rows * seq, embed)
        return _dense(embed, ("heads", "embed"), "out")(mixed).reshape(rows, seq, embed)


class MLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[rows, seq, embed]` to the same."""
        flat, width = x.reshape(-1, x.shape[-1]), self.config.mlp_width
        gate = _dense(width, ("embed", "mlp"), "gate")(flat)
        hidden = nn.silu(gate) * _dense(width, ("embed", "mlp"), "up")(flat)
        hidden = hetjax.constrain(hidden, "batch", "mlp")
        return _dense(x.shape[-1], ("mlp", "embed"), "down")(hidden).reshape(x.shape)


class Block(nn.Module):
    """Attention and MLP, each behind an RMSNorm and added to the residual stream."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array, tables: Tables) -> jax.Array:
        """`[rows, seq, embed]` to the same."""
        normed = RMSNorm(self.config.norm_eps, name="attention_norm")(x)
        x = x + Attention(self.config, name="attention")(normed, bias, tables)
        if self.config.cuts == "half":
            x = hetjax.cut(x)
        x = x + MLP(self.config, name="mlp")(RMSNorm(self.config.norm_eps, name="mlp_norm")(x))
        return hetjax.constrain(x, "batch", None, "embed")


class ScannedBlock(nn.Module):
    """A block as the body of a scan, with the cut in it."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array, tables: Tables) -> tuple[jax.Array, None]:
        """`[rows, seq, embed]` to the same, and nothing stacked."""
        return hetjax.cut(Block(self.config, name="block")(x, bias, tables)), None


class Llama(nn.Module):
    """Token ids to logits."""

    config: LlamaConfig
    vocab_size: int

    @nn.compact
    def __call__(self, batch: common.Batch) -> jax.Array:
        """Score every next token of a batch (see `models.common`): `[rows, seq, vocab]`."""
        config = self.config
        bias = common.attention_bias(batch)
        tables = rotary_tables(common.token_positions(batch), config.head_dim, config.rope_theta)
        embedding_init = nn.with_logical_partitioning(nn.initializers.normal(0.02), ("vocab", "embed"))
        embedding = nn.Embed(self.vocab_size, config.embed_dim, embedding_init=embedding_init, name="tokens")
        x = hetjax.cut(embedding(batch["tokens"]))
        if config.layers == "scanned":
            scan = nn.scan(
                ScannedBlock,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=config.num_layers,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            x, _ = scan(config, name="blocks")(x, bias, tables)
        else:
            for i in range(config.num_layers):
                x = Block(config, name=f"block_{i}")(x, bias, tables)
                if config.ends_part(i):
                    x = hetjax.cut(x)
        x = RMSNorm(config.norm_eps, name="norm")(x).reshape(-1, config.embed_dim)
        head = embedding.attend if config.tied else _dense(self.vocab_size, ("embed", "vocab"), "head")
        logits = head(x)
        logits = hetjax.constrain(logits, "batch", "vocab")
        return logits.reshape(*batch["tokens"].shape, self.vocab_size)


def build(config: LlamaConfig, *, seq_len: int, vocab_size: int) -> common.Model:
    """Make the pure functions of a Llama; its parameters are linen variables, `{"params": ...}`."""
    module = Llama(config, vocab_size)

    def init_fn(key: jax.Array) -> Any:
        return module.init(key, {"tokens": jnp.zeros((1, 1), jnp.int32)})

    def apply(params: Any, batch: common.Batch, rng: jax.Array | None) -> Any:
        del rng
        return module.apply(params, batch)

    return common.make_model(
        config, seq_len=seq_len, vocab_size=vocab_size, init_fn=init_fn, apply=apply, dropout=0.0
    )
