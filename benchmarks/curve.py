"""The training curve of a job under a two-group plan, beside the same job in plain JAX, step by step.

Plain JAX is one jit of value_and_grad and optax (clip, schedule and all) on one device; both start from the
same seed and read the same batches. `max_relative_difference` is the largest of |hetjax / plain - 1| over the
losses of all steps; the bits per byte are of the validation text after the last step.

Two computations that add the same numbers in another order drift apart while they train. `--control` shows by
how much: a second plain run whose gradients are summed over microbatches.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import typer

import hetjax
import models
from benchmarks import common
from hetjax import data
from hetjax.config import Config, build_optimizer, load_config
from hetjax.metrics import bits_per_byte

MESH = common.ROOT / "meshes" / "cpu_2x.toml"

Form = tuple[Callable[[Any], float], Callable[[Iterable[Any]], tuple[float, float]]]
"""A step on a batch, giving the loss; and the validation, giving the summed loss in nats and the tokens."""


def main(
    model: Annotated[str, typer.Argument(help="A job file, or the name of one in models/.")] = "gpt_small",
    mesh: Annotated[Path, typer.Option(help="Cluster file of CPU groups.")] = MESH,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="Use this plan; default: one is made.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after so many of the job's steps.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="SECTION.KEY=VALUE of the job.")] = None,
    losses: Annotated[
        Path | None, typer.Option(help="File for the losses; default: a temporary one.")
    ] = None,
    control: Annotated[bool, typer.Option("--control", help="Also a second plain run, see above.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny job, few steps.")] = False,
) -> None:
    """Train a job under a plan and in plain JAX, and compare the losses at every step."""
    settings = list(settings or ())
    if quick:
        model, steps = "gpt_tiny", 3
        settings += ["model.num_layers=1", "model.embed_dim=16"]
        settings += ["data.seq_len=16", "data.max_validation_batches=2"]
    config = load_config(models.path(model), settings)
    steps = min(steps or config.train.num_steps, config.train.num_steps)
    cluster = hetjax.Cluster.load(mesh)
    common.start_cpu(cluster.num_cpu_devices())
    common.introduce(f"{model}: {steps} steps under a plan for {cluster.name} and in plain JAX")
    text = data.load(config.data)
    network = models.build(
        models.parse(config.model), seq_len=config.data.seq_len, vocab_size=config.data.resolved_vocab_size
    )
    trainer = place(config, network, hetjax.Plan.load(plan_file) if plan_file else None, cluster)
    common.say(f"{text}\n{trainer.plan}")
    forms = {"hetjax": by_hetjax(trainer, config), "plain": by_jit(network, config, 1)}
    if control:
        forms["control"] = by_jit(network, config, trainer.plan.num_microbatches)
    losses = losses or Path(tempfile.gettempdir()) / f"hetjax_curve_{Path(model).stem}.jsonl"
    worst = compare(forms, text, steps, losses)
    per_byte = {}
    for name, (_, validate) in forms.items():
        nats, tokens = validate(text.validation_batches())
        per_byte[f"{name}_bits_per_byte"] = bits_per_byte(nats / tokens, tokens, text.validation_bytes)
        common.say(f"  {name}: {per_byte[f'{name}_bits_per_byte']:.5f} bits per byte of the validation text")
    difference, step = worst["hetjax"]
    figures = {"max_relative_difference": difference, "at_step": step, "steps": steps, **per_byte}
    if control:
        figures["control_max_relative_difference"] = worst["control"][0]
    common.finish(figures)


def place(
    config: Config, model: models.Model, plan: hetjax.Plan | None, cluster: hetjax.Cluster
) -> hetjax.Trainer:
    """Place the job by the given plan, else by the planner's; by hand where that uses one group only."""
    spec = data.batch_spec(config.data)
    program = hetjax.trace(model.loss_fn, model.init_fn, spec, eval_loss_fn=model.eval_loss_fn)
    choices = config.plan
    plan = plan or hetjax.make_plan(
        program,
        cluster,
        num_microbatches=choices.num_microbatches,
        schedule=choices.schedule,
        remat=choices.remat,
        allow_row_split=choices.row_split == "allowed",
    )
    if len({member.group for stage in plan.stages for member in stage.members}) < 2:
        common.say("The plan uses one group only; taken instead: equal runs of segments on each group.")
        count = next(n for n in (4, 2, 1) if program.global_batch % n == 0)
        plan = common.plan_by_hand(program, cluster, num_microbatches=count)
    optimizer, _ = build_optimizer(config.optimizer, config.train.num_steps)
    return hetjax.Trainer(program, plan, optimizer, clip_norm=config.optimizer.clip_norm)


def by_hetjax(trainer: hetjax.Trainer, config: Config) -> Form:
    """The job under a plan."""
    state = trainer.init(config.train.seed)

    def step(batch: Any) -> float:
        nonlocal state
        state, metrics = trainer.step(state, batch)
        return metrics["loss"]

    def validate(batches: Iterable[Any]) -> tuple[float, float]:
        found = [trainer.evaluate(state, batch) for batch in batches]
        return sum(m["loss"] * m.weight("loss") for m in found), sum(m.weight("loss") for m in found)

    return step, validate


def by_jit(model: models.Model, config: Config, num_microbatches: int) -> Form:
    """The job in plain JAX, on one device.

    Args:
        model: Without dropout.
        config: Of the job.
        num_microbatches: The gradients of so many parts of each batch are computed one by one and summed.
    """
    tx, _ = build_optimizer(config.optimizer, config.train.num_steps)
    if config.optimizer.clip_norm is not None:
        tx = optax.chain(optax.clip_by_global_norm(config.optimizer.clip_norm), tx)

    def total(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        loss, _ = model.loss_fn(params, batch)
        return loss.total, loss.weight

    def update(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        parts = jax.tree.map(lambda a: a.reshape(num_microbatches, -1, *a.shape[1:]), batch)
        loss = weight = jnp.zeros(())
        gradients = jax.tree.map(jnp.zeros_like, params)
        for i in range(num_microbatches):
            part = jax.tree.map(lambda a, i=i: a[i], parts)
            (value, count), slopes = jax.value_and_grad(total, has_aux=True)(params, part)
            loss, weight = loss + value, weight + count
            gradients = jax.tree.map(jnp.add, gradients, slopes)
        gradients = jax.tree.map(lambda g: g / weight, gradients)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss / weight

    params = jax.jit(model.init_fn)(jax.random.key(config.train.seed))
    opt_state = tx.init(params)
    jitted, evaluate = jax.jit(update, donate_argnums=(0, 1)), jax.jit(total)

    def step(batch: Any) -> float:
        nonlocal params, opt_state
        params, opt_state, loss = jitted(params, opt_state, batch)
        return float(loss)

    def validate(batches: Iterable[Any]) -> tuple[float, float]:
        sums = [evaluate(params, batch) for batch in batches]
        return sum(float(nats) for nats, _ in sums), sum(float(tokens) for _, tokens in sums)

    return step, validate


def compare(
    forms: dict[str, Form], text: data.TextData, num_steps: int, file: Path
) -> dict[str, tuple[float, int]]:
    """Train all forms side by side and write their losses to a file, a JSON line a step.

    Returns:
        By form, the largest relative difference from "plain", and the step (from 1) where it was.
    """
    worst = {name: (0.0, 0) for name in forms if name != "plain"}
    common.say(f"Losses of every step: {file}")
    with file.open("w", encoding="utf-8") as out:
        for number in range(1, num_steps + 1):
            batch = text.train_batch(number - 1)
            losses = {name: step(batch) for name, (step, _) in forms.items()}
            for name in worst:
                worst[name] = max(worst[name], (abs(losses[name] / losses["plain"] - 1), number))
            out.write(json.dumps({"step": number, **losses}) + "\n")
            out.flush()
            if number % 10 == 0 or number in (1, num_steps):
                said = ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items())
                gaps = ", ".join(f"{name} {gap:.1e}" for name, (gap, _) in worst.items())
                common.say(f"  step {number}: {said}; largest difference so far: {gaps}")
    return worst


if __name__ == "__main__":
    typer.run(main)
