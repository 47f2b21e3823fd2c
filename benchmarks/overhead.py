"""What hetjax costs on one device: its step against a plain jit step of the same model, side by side.

`throughput_ratio`: hetjax on the GPT of models/ (form flat) over the fastest hand-written step.
`naive_ratio`: hetjax on the naively written GPT (form naive) over plain jit of that very model.
Both above 1 where hetjax is faster; medians over rounds in which all forms take turns.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Annotated

import optax
import typer

import hetjax
from benchmarks import common, plain_gpt
from models import Model


def main(
    num_layers: Annotated[int, typer.Option(min=1)] = 8,
    embed_dim: Annotated[int, typer.Option(min=1)] = 256,
    num_heads: Annotated[int, typer.Option(min=1)] = 8,
    vocab_size: Annotated[int, typer.Option(min=2)] = 8192,
    seq_len: Annotated[int, typer.Option(min=1)] = 256,
    global_batch: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 8,
    remat: Annotated[str | None, typer.Option(help="Remat policy; default: the planner's choice.")] = None,
    fuse: Annotated[int, typer.Option(min=1, help="Neighbouring segments compiled as one program.")] = 2,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each form in a round.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: only whether it works.")] = False,
) -> None:
    """Measure hetjax's step against a plain jit step of the same GPT, on one CPU device."""
    if quick:
        num_layers, embed_dim, num_heads, vocab_size, seq_len, global_batch = 1, 32, 2, 64, 16, 4
        rounds, steps = 2, 1
    common.start_cpu()
    common.introduce(
        f"GPT, {num_layers} layers, d {embed_dim}, vocabulary {vocab_size}, sequence {seq_len}, batch "
        f"{global_batch}, AdamW, one CPU device; {rounds} rounds of {steps} steps each"
    )
    sizes = {"num_layers": num_layers, "embed_dim": embed_dim, "num_heads": num_heads}
    flat = common.gpt(vocab_size, seq_len, form="flat", **sizes)
    naive = common.gpt(vocab_size, seq_len, form="naive", **sizes)
    batch, tx = common.random_batch(flat, global_batch), optax.adamw(1e-3)

    def by_hetjax(model: Model) -> common.Step:
        program = common.trace(model, global_batch)
        plan = hetjax.make_plan(program, common.cpu_groups(1), num_microbatches=1, remat=remat)
        stages = tuple(dataclasses.replace(stage, fuse=fuse) for stage in plan.stages)
        plan = dataclasses.replace(plan, stages=stages)
        policies = ", ".join(dict.fromkeys(stages[0].members[0].remat))
        common.say(f"hetjax: {model.config}, remat {policies}, fuse {fuse}")
        return common.hetjax_step(hetjax.Trainer(program, plan, tx), batch)

    def by_jit(model: Model) -> common.Step:
        return common.plain_step(model.init_fn, lambda p, b: model.loss_fn(p, b)[0].value, tx, batch)

    init_fn, loss_fn = plain_gpt.make(seq_len=seq_len, vocab_size=vocab_size, **sizes)
    forms = {
        "hetjax_flat": by_hetjax(flat),
        "plain_gpt": common.plain_step(init_fn, loss_fn, tx, batch),
        "jit_flat": by_jit(flat),
        "hetjax_naive": by_hetjax(naive),
        "jit_naive": by_jit(naive),
    }
    losses = {name: step().loss for name, step in forms.items()}  # compiles
    common.say("First losses: " + ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items()))
    for step in forms.values():
        step().wait()
    times = common.interleave(forms, num_rounds=rounds, num_steps=steps)
    losses = {name: step().loss for name, step in forms.items()}
    common.say("Last losses: " + ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items()))
    tokens = global_batch * seq_len
    rates = {name: tokens / statistics.median(seconds) for name, seconds in times.items()}
    best = max(("plain_gpt", "jit_flat"), key=lambda name: rates[name])
    for name, rate in rates.items():
        low, high = (tokens / pick(times[name]) for pick in (max, min))
        common.say(f"{name:>13}: {rate:8.1f} tokens/s ({low:.1f} to {high:.1f})")
    common.say(f"The best hand-written form is {best}.")
    common.finish(
        {
            "throughput_ratio": common.ratio(times[best], times["hetjax_flat"]),
            "naive_ratio": common.ratio(times["jit_naive"], times["hetjax_naive"]),
            **{f"{name}_tokens_per_s": rate for name, rate in rates.items()},
            "best_plain_form": best,
            "naive_loss_difference": abs(losses["hetjax_naive"] / losses["jit_naive"] - 1),
        }
    )


if __name__ == "__main__":
    typer.run(main)
