"""How long the first step takes, and how that grows with depth: `ratio` = many layers / few layers.

Counted from a loaded process on: building the model, tracing, placing, initialising, and the first step, in
which the stages are compiled. Each measurement is a fresh process without a compilation cache, in turns.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated

import jax
import optax
import typer

import hetjax
from benchmarks import common


def main(
    few: Annotated[int, typer.Option(min=1, help="Layers of the shallow model.")] = 6,
    many: Annotated[int, typer.Option(min=1, help="Layers of the deep model.")] = 24,
    embed_dim: Annotated[int, typer.Option(min=1)] = 64,
    num_heads: Annotated[int, typer.Option(min=1)] = 4,
    vocab_size: Annotated[int, typer.Option(min=2)] = 512,
    seq_len: Annotated[int, typer.Option(min=1)] = 64,
    global_batch: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 4,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    plain: Annotated[bool, typer.Option("--plain", help="Also measure one plain jit step of each.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: only whether it works.")] = False,
    one: Annotated[int | None, typer.Option(hidden=True)] = None,
    form: Annotated[str, typer.Option(hidden=True)] = "hetjax",
) -> None:
    """Measure the first step (compiling and running it) of a deep GPT against that of a shallow one.

    `ratio` is of the first step alone, `start_ratio` of the whole start, tracing and placing included.
    """
    if quick:
        few, many, embed_dim, num_heads, vocab_size, seq_len, rounds = 1, 2, 16, 2, 32, 8, 1
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "vocab_size": vocab_size, "seq_len": seq_len}
    if one is not None:
        common.finish(measure(form, global_batch, num_layers=one, **sizes))
        return
    common.introduce(
        f"Time to the first step of a GPT of {many} layers against {few}, d {embed_dim}, batch "
        f"{global_batch} x {seq_len}; {rounds} rounds, each measurement in a fresh process"
    )
    options = [f"--{k.replace('_', '-')}={v}" for k, v in {**sizes, "global_batch": global_batch}.items()]
    forms = ["hetjax", "plain"] if plain else ["hetjax"]
    cases = [(f, depth) for f in forms for depth in (few, many)]
    times: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    steps: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for number in range(rounds):
        for (name, depth), seconds in times.items():
            arguments = [*options, f"--one={depth}", f"--form={name}"]
            parts = common.in_fresh_process("benchmarks.compile_time", arguments)
            seconds.append(sum(parts.values()))
            steps[name, depth].append(parts["step"])
            said = ", ".join(f"{what} {s:.2f}" for what, s in parts.items())
            common.say(f"  round {number + 1}, {name}, {depth} layers: {seconds[-1]:.2f} s ({said})")
    figures = {}
    for name in forms:
        prefix = "" if name == "hetjax" else "plain_"
        figures[f"{prefix}ratio"] = common.ratio(steps[name, many], steps[name, few])
        figures[f"{prefix}start_ratio"] = common.ratio(times[name, many], times[name, few])
    for (name, depth), seconds in times.items():
        figures[f"{name}_{depth}_layers_s"] = statistics.median(seconds)
    common.finish(figures)


def measure(
    form: str, global_batch: int, *, vocab_size: int, seq_len: int, **fields: int
) -> dict[str, float]:
    """Seconds of each part of the way to the end of the first step, in this process.

    Args:
        form: `hetjax`, or `plain` for one jit of value_and_grad and optax.
        global_batch: Rows.
        vocab_size: Token ids.
        seq_len: Tokens of a row.
        **fields: Of the GPT's config.
    """
    common.start_cpu()
    jax.block_until_ready(jax.numpy.zeros(()))  # the backend starts
    parts, begin = {}, time.perf_counter()

    def done(what: str) -> None:
        parts[what] = time.perf_counter() - begin - sum(parts.values())

    tx = optax.adamw(1e-3)
    model = common.gpt(vocab_size, seq_len, **fields)
    batch = common.random_batch(model, global_batch)
    if form == "plain":
        step = common.plain_step(
            model.init_fn, lambda params, b: model.loss_fn(params, b)[0].value, tx, batch
        )
        done("init")
    else:
        program = common.trace(model, global_batch)
        done("trace")
        trainer = hetjax.Trainer(program, common.plan_by_hand(program, common.cpu_groups(1)), tx)
        done("place")
        step = common.hetjax_step(trainer, batch)
        done("init")
    result = step()
    result.wait()
    done("step")
    return parts


if __name__ == "__main__":
    typer.run(main)
