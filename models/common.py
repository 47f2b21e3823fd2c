"""What the model families share: the batch, attention, dropout, the loss, and the `Model` a trainer takes.

A batch is a dict of arrays with the rows first:

    tokens       int32   [rows, seq]   what the model reads
    targets      int32   [rows, seq]   what it should say at each place
    weights      float32 [rows, seq]   1 where a place counts in the loss, 0 where it is padding
    segment_ids  int32   [rows, seq]   optional; packed rows: attention stays inside equal ids
    positions    int32   [rows, seq]   optional; the place of each token in its own text (default 0, 1, ...)

Other keys are left alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pydantic

import hetjax

Batch = dict[str, jax.Array]
Metrics = dict[str, hetjax.Mean]


Size = Annotated[int, pydantic.Field(gt=0, le=1 << 24, strict=True)]


class ModelConfig(pydantic.BaseModel):
    """What every family's config has; the `[model]` section of a model file.

    Attributes:
        num_layers: Transformer blocks.
        embed_dim: Width of the residual stream.
        num_heads: Query heads; `embed_dim` is a multiple of it.
        mlp_dim: Width inside the MLP; None means the family's usual multiple of `embed_dim`.
        tied: The head reads the embedding table instead of one of its own.
        cut_every: Blocks between two cuts.
        cuts: "block" cuts between blocks; "half" also between the attention and the MLP of each.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    num_layers: Annotated[int, pydantic.Field(gt=0, le=10_000, strict=True)]
    embed_dim: Size
    num_heads: Size
    mlp_dim: Size | None = None
    tied: bool = True
    cut_every: Size = 1
    cuts: Literal["block", "half"] = "block"

    @pydantic.model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim = {self.embed_dim} is no multiple of num_heads = {self.num_heads}")
        return self

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.embed_dim // self.num_heads

    @property
    def mlp_width(self) -> int:
        """Width inside the MLP; by default `4 * embed_dim`."""
        return self.mlp_dim or 4 * self.embed_dim

    def ends_part(self, layer: int) -> bool:
        """Whether a cut follows block `layer` (counted from 0)."""
        return (layer + 1) % self.cut_every == 0 or layer + 1 == self.num_layers


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as pure functions of its parameters.

    Attributes:
        config: What it was built from.
        seq_len: Longest sequence that it takes.
        vocab_size: Token ids run from 0 to `vocab_size - 1`.
        init_fn: A PRNG key to the parameters, in float32.
        loss_fn: `(params, batch)`, or `(params, batch, rng)` for a model with dropout (None turns it off),
            to the loss in nats per token and the metric "accuracy", both as `hetjax.Mean`.
        eval_loss_fn: `(params, batch)` to the same, without dropout.
        logits_fn: `(params, batch)` to float32 `[rows, seq, vocab]`, without dropout.
    """

    config: ModelConfig
    seq_len: int
    vocab_size: int
    init_fn: Callable[[jax.Array], Any]
    loss_fn: Callable[..., tuple[hetjax.Mean, Metrics]]
    eval_loss_fn: Callable[[Any, Batch], tuple[hetjax.Mean, Metrics]]
    logits_fn: Callable[[Any, Batch], jax.Array]

    @property
    def num_params(self) -> int:
        """Parameters, a tied table counted once."""
        shapes = jax.eval_shape(self.init_fn, jax.random.key(0))
        return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))

    def batch_spec(self, global_batch: int, *, packed: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of a batch of `global_batch` rows, for `hetjax.trace`."""
        dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
        if packed:
            dtypes |= {"segment_ids": jnp.int32, "positions": jnp.int32}
        return {k: jax.ShapeDtypeStruct((global_batch, self.seq_len), dtype) for k, dtype in dtypes.items()}


def make_model(
    config: ModelConfig,
    *,
    seq_len: int,
    vocab_size: int,
    init_fn: Callable[[jax.Array], Any],
    apply: Callable[[Any, Batch, jax.Array | None], jax.Array],
    dropout: float,
) -> Model:
    """Put a family's `init` and `apply` together with the loss.

    Args:
        config: The family's config.
        seq_len: Longest sequence.
        vocab_size: Number of token ids.
        init_fn: A PRNG key to the parameters.
        apply: Parameters, batch and a PRNG key (None: no dropout) to logits `[rows, seq, vocab]`.
        dropout: Above 0 the loss takes a third argument, the PRNG key.
    """

    def stochastic_loss(params: Any, batch: Batch, rng: jax.Array | None) -> tuple[hetjax.Mean, Metrics]:
        return token_loss(apply(params, batch, rng), batch["targets"], batch["weights"])

    def plain_loss(params: Any, batch: Batch) -> tuple[hetjax.Mean, Metrics]:
        return stochastic_loss(params, batch, None)

    def logits_fn(params: Any, batch: Batch) -> jax.Array:
        return apply(params, batch, None).astype(jnp.float32)

    return Model(
        config=config,
        seq_len=seq_len,
        vocab_size=vocab_size,
        init_fn=init_fn,
        loss_fn=stochastic_loss if dropout > 0 else plain_loss,
        eval_loss_fn=plain_loss,
        logits_fn=logits_fn,
    )


def token_loss(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[hetjax.Mean, Metrics]:
    """Cross entropy of next-token prediction in float32, as sums over tokens.

    Args:
        logits: `[rows, seq, vocab]`, any float dtype.
        targets: `[rows, seq]` token ids.
        weights: `[rows, seq]`; 0 leaves a token out.

    Returns:
        The loss in nats per token, and "accuracy": the share of tokens whose target has the largest logit (a
        tie counts; the maximum is cheap where an argmax over the vocabulary is not).
    """
    logits = logits.reshape(-1, logits.shape[-1]).astype(jnp.float32)
    targets, weights = targets.reshape(-1), weights.reshape(-1).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    log_normalizer = top + jnp.log(jnp.sum(jnp.exp(logits - top[:, None]), axis=-1))
    weight = jnp.sum(weights)
    right = jnp.sum(weights * (chosen >= top).astype(jnp.float32))
    loss = hetjax.Mean(jnp.sum(weights * (log_normalizer - chosen)), weight)
    return loss, {"accuracy": hetjax.Mean(right, weight)}


def attention_bias(batch: Batch) -> jax.Array:
    """What is added to the scores: 0 where query i may look at key j, else a very negative number.

    Causal, and inside one text where the rows are packed. Float32, `[1 or rows, 1, seq, seq]`.
    """
    seq = batch["tokens"].shape[1]
    place = jnp.arange(seq)
    allowed = (place[:, None] >= place[None, :])[None, None]
    if "segment_ids" in batch:
        ids = batch["segment_ids"]
        allowed = allowed & (ids[:, None, :, None] == ids[:, None, None, :])
    return jnp.where(allowed, 0.0, -1e30)


def token_positions(batch: Batch) -> jax.Array:
    """The place of each token in its text: `[1 or rows, seq]`."""
    if "positions" in batch:
        return batch["positions"]
    return jnp.arange(batch["tokens"].shape[1], dtype=jnp.int32)[None]


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array) -> jax.Array:
    """Softmax attention as batched matrix products, the softmax in float32.

    The first half of the queries skips the second half of the keys, which it may not see, and the division by
    the softmax's sum comes after the product with the values, on fewer numbers: together 11% of a GPT's step
    on two CPU cores.

    Args:
        query: `[rows, heads, seq, head_dim]`, already scaled.
        key: `[rows, kv_heads, seq, head_dim]`; query head h reads key head `h // (heads // kv_heads)`.
        value: The shape of `key`.
        bias: Float32 `[1 or rows, 1, seq, seq]`; causal, see `attention_bias`.

    Returns:
        The shape and dtype of `query`.
    """
    rows, heads, seq, head_dim = query.shape
    kv_heads, middle = key.shape[1], (seq + 1) // 2
    halves = []
    for start, stop in ((0, middle), (middle, seq)):
        # Query heads that share a key head stand behind each other along the sequence: keys are not repeated.
        queries = query[:, :, start:stop].reshape(rows, kv_heads, -1, head_dim)
        keys, values = key[:, :, :stop].transpose(0, 1, 3, 2), value[:, :, :stop]
        scores = jnp.matmul(queries, keys, preferred_element_type=jnp.float32)
        scores = scores.reshape(rows, heads, stop - start, stop) + bias[:, :, start:stop, :stop]
        grown = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
        shares = grown.astype(value.dtype).reshape(rows, kv_heads, -1, stop)
        mixed = jnp.matmul(shares, values, preferred_element_type=jnp.float32)
        mixed = mixed.reshape(rows, heads, stop - start, head_dim) / jnp.sum(grown, axis=-1, keepdims=True)
        halves.append(mixed.astype(query.dtype))
    return jnp.concatenate(halves, axis=2)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero a share `rate` of `x` and scale the rest up; nothing where `key` is None."""
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))
