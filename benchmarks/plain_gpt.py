"""A GPT's loss in plain JAX, as fast as we can write it by hand for a CPU: the peer of hetjax's step.

The function is that of models/gpt.py with a tied head and without dropout. Run as a command it measures the
forms in which the layers can follow each other; `make` gives the fastest of them to other benchmarks.

Tried and not here, step times by CPU seconds on two cores with jax 0.10.2: one fused query-key-value product
(1.00 of the three), the loss over four chunks of the tokens (1.07 of the whole), the target's logit by a
one-hot product (1.02 of a gather), variance as mean square less squared mean (1.00), unrolled layers with
everything recomputed (1.17 of those with nothing).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer

from benchmarks import common

Params = dict[str, Any]
FORMS = ("scan dots", "scan full", "scan none", "loop none")
"""How the layers follow each other, and what is recomputed: all but matrix products, everything, nothing."""


def make(
    *,
    num_layers: int = 8,
    embed_dim: int = 256,
    num_heads: int = 8,
    vocab_size: int = 8192,
    seq_len: int = 256,
    form: str = "scan dots",
) -> tuple[Callable[[jax.Array], Params], Callable[[Params, Any], jax.Array]]:
    """The two functions of a training step.

    Args:
        num_layers: Blocks.
        embed_dim: Width of the residual stream.
        num_heads: Attention heads.
        vocab_size: Number of token ids.
        seq_len: Longest sequence.
        form: One of `FORMS`.

    Returns:
        `init_fn(key)` to the parameters, those of the blocks stacked along a first dim, and
        `loss_fn(params, batch)` to the mean loss in nats per token; the batch holds `tokens` and `targets`,
        int32 `[rows, seq]`.
    """
    layers, remat = form.split()
    block = partial(_block, num_heads)
    if remat == "dots":
        block = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    elif remat == "full":
        block = jax.checkpoint(block)

    def run_blocks(x: jax.Array, blocks: Params) -> jax.Array:
        if layers == "scan":
            return jax.lax.scan(lambda x, p: (block(x, p), None), x, blocks)[0]
        for i in range(num_layers):
            x = block(x, jax.tree.map(lambda leaf, i=i: leaf[i], blocks))
        return x

    def loss_fn(params: Params, batch: Any) -> jax.Array:
        x = params["tokens"][batch["tokens"]] + params["positions"][: batch["tokens"].shape[1]]
        x = _norm(run_blocks(x, params["blocks"]), params["norm"])
        logits = x.reshape(-1, embed_dim) @ params["tokens"].T
        top = jax.lax.stop_gradient(logits.max(-1))
        log_normalizer = top + jnp.log(jnp.exp(logits - top[:, None]).sum(-1))
        chosen = jnp.take_along_axis(logits, batch["targets"].reshape(-1, 1), axis=1)[:, 0]
        return (log_normalizer - chosen).mean()

    return partial(_init, num_layers, embed_dim, vocab_size, seq_len), loss_fn


def _init(num_layers: int, embed_dim: int, vocab_size: int, seq_len: int, key: jax.Array) -> Params:
    keys = iter(jax.random.split(key, 8))

    def normal(*dims: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), dims)

    def dense(num_in: int, num_out: int) -> Params:
        return {"kernel": normal(num_layers, num_in, num_out), "bias": jnp.zeros((num_layers, num_out))}

    def norm(*dims: int) -> Params:
        return {"scale": jnp.ones((*dims, embed_dim)), "bias": jnp.zeros((*dims, embed_dim))}

    blocks = {
        "attention": {name: dense(embed_dim, embed_dim) for name in ("query", "key", "value", "out")},
        "attention_norm": norm(num_layers),
        "mlp": {"up": dense(embed_dim, 4 * embed_dim), "down": dense(4 * embed_dim, embed_dim)},
        "mlp_norm": norm(num_layers),
    }
    tables = {"tokens": normal(vocab_size, embed_dim), "positions": normal(seq_len, embed_dim)}
    return {"blocks": blocks, "norm": norm(), **tables}


def _norm(x: jax.Array, p: Params) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return (
        centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]
    )


def _dense(x: jax.Array, p: Params) -> jax.Array:
    return x @ p["kernel"] + p["bias"]


def _attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    seq, halves = query.shape[2], []
    bias = np.where(np.tril(np.ones((seq, seq), bool)), 0.0, -1e30).astype(np.float32)
    for start, stop in ((0, seq // 2), (seq // 2, seq)):  # the first half can't see the second half's keys
        scores = query[:, :, start:stop] @ key[:, :, :stop].transpose(0, 1, 3, 2) + bias[start:stop, :stop]
        grown = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
        halves.append(grown @ value[:, :, :stop] / grown.sum(-1, keepdims=True))
    return jnp.concatenate(halves, axis=2)


def _block(num_heads: int, x: jax.Array, p: Params) -> jax.Array:
    """One block, `[rows, seq, embed]` to the same; its dense layers see `[rows * seq, embed]`."""
    rows, seq, embed_dim = x.shape
    flat, attention = x.reshape(rows * seq, embed_dim), p["attention"]
    normed = _norm(flat, p["attention_norm"])

    def heads(name: str) -> jax.Array:
        return _dense(normed, attention[name]).reshape(rows, seq, num_heads, -1).transpose(0, 2, 1, 3)

    query = heads("query") * (embed_dim // num_heads) ** -0.5
    mixed = _attend(query, heads("key"), heads("value")).transpose(0, 2, 1, 3).reshape(flat.shape)
    flat = flat + _dense(mixed, attention["out"])
    hidden = jax.nn.gelu(_dense(_norm(flat, p["mlp_norm"]), p["mlp"]["up"]))
    return (flat + _dense(hidden, p["mlp"]["down"])).reshape(x.shape)


def main(
    global_batch: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 8,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each form in a round.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: only whether it works.")] = False,
) -> None:
    """Measure the hand-written forms of the GPT's step against each other, on one CPU device."""
    sizes = {"num_layers": 8, "embed_dim": 256, "num_heads": 8, "vocab_size": 8192, "seq_len": 256}
    if quick:
        sizes = {"num_layers": 2, "embed_dim": 32, "num_heads": 2, "vocab_size": 64, "seq_len": 16}
        rounds, steps = 2, 1
    common.start_cpu()
    named = ", ".join(f"{name} {size}" for name, size in sizes.items())
    common.introduce(
        f"GPT in plain JAX, {named}, batch {global_batch}, AdamW; {rounds} rounds of {steps} steps each"
    )
    rng, dims = np.random.default_rng(0), (global_batch, sizes["seq_len"])
    batch = {name: rng.integers(0, sizes["vocab_size"], dims, np.int32) for name in ("tokens", "targets")}
    forms = {form: common.plain_step(*make(**sizes, form=form), optax.adamw(1e-3), batch) for form in FORMS}
    common.say("First losses: " + ", ".join(f"{form} {step().loss:.6f}" for form, step in forms.items()))
    times = common.interleave(forms, num_rounds=rounds, num_steps=steps)
    tokens = global_batch * sizes["seq_len"]
    rates = {form: tokens / statistics.median(seconds) for form, seconds in times.items()}
    common.finish({f"{form.replace(' ', '_')}_tokens_per_s": rate for form, rate in rates.items()})


if __name__ == "__main__":
    typer.run(main)
