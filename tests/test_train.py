"""train.py: what a run leaves behind, however it ends."""

import dataclasses
import io
import json
import math
import os
import signal
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from hetjax import train
from hetjax.checkpoint import CheckpointError, finished_steps
from hetjax.config import TrainConfig
from hetjax.errors import UserError
from hetjax.metrics import read_metrics
from hetjax.report import Display, duration, show_summary
from hetjax.train import Job, Loop, NonFiniteError, StopSignals


@dataclasses.dataclass
class State:
    params: dict
    momentum: dict
    step: int


@dataclasses.dataclass
class Metrics:
    values: dict
    fetched: list
    step: int
    busy: dict = dataclasses.field(default_factory=lambda: {"fast": 0.5, "slow": 1.0})

    def weight(self, name):
        return 8.0

    def fetch(self):
        self.fetched.append(self.step)
        return {name: float(value) for name, value in self.values.items()}


class FakeTrainer:
    """The contract of hetjax.Trainer on one device: momentum descent, donated state, dropout by step."""

    def __init__(self, on_step=lambda step: None, poison_at=None, overflow_at=()):
        self.on_step, self.poison_at, self.overflow_at = on_step, poison_at, overflow_at
        self.events = []

    @staticmethod
    @partial(jax.jit, donate_argnums=(0, 1))
    def _update(params, momentum, key, x, y):
        def loss_fn(p):
            keep = jax.random.bernoulli(key, 0.9, x.shape)
            return jnp.mean((jnp.where(keep, x, 0.0) @ p["w"] + p["b"][None] - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda p, m: p - 0.01 * m, params, momentum), momentum, loss, norm

    def init(self, seed=0):
        params = {"w": jax.random.normal(jax.random.key(seed), (4, 2)), "b": jnp.zeros(2)}
        return State(params, jax.tree.map(jnp.zeros_like, params), 0)

    def step(self, state, batch, *, timeline=False):
        self.on_step(state.step + 1)
        key = jax.random.fold_in(jax.random.key(7), state.step)
        params, momentum, loss, norm = self._update(state.params, state.momentum, key, batch["x"], batch["y"])
        if state.step + 1 == self.poison_at:
            loss = loss * jnp.nan
        if state.step + 1 in self.overflow_at:
            norm = norm * jnp.inf
        metrics = Metrics({"loss": loss, "grad_norm": norm}, self.events, state.step + 1)
        self.events.append(f"dispatch {state.step + 1}")
        return State(params, momentum, state.step + 1), metrics

    def evaluate(self, state, batch):
        loss = jnp.mean((batch["x"] @ state.params["w"] + state.params["b"][None] - batch["y"]) ** 2)
        return Metrics({"loss": loss}, [], state.step)

    def export(self, state):
        flat = {"params": state.params, "opt_state": state.momentum}
        return jax.tree.map(np.array, flat) | {"step": state.step, "seed": 0, "loss_scale": None}

    def import_(self, exported):
        place = partial(jax.tree.map, jnp.asarray)
        return State(place(exported["params"]), place(exported["opt_state"]), exported["step"])

    def canonical_spec(self):
        spec = {"w": jax.ShapeDtypeStruct((4, 2), np.float32), "b": jax.ShapeDtypeStruct((2,), np.float32)}
        return {"params": spec, "opt_state": spec}


class FakeData:
    """Batches by step number."""

    def __init__(self):
        self.position = 0

    def __next__(self):
        self.position += 1
        return self.at(self.position)

    @staticmethod
    def at(step):
        rng = np.random.default_rng(step)
        x = rng.normal(size=(8, 4)).astype(np.float32)
        return {"x": x, "y": x[:, :2] * 2}

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def run(tmp_path, *, trainer=None, resume=False, learning_rate=None, loss_scaled=False, **settings):
    """Run a loop and return its summary and what it printed."""
    trainer, data, stream = trainer or FakeTrainer(), FakeData(), io.StringIO()
    fast = {"num_steps": 10, "eval_every": None, "checkpoint_every": None, "tensorboard": False}
    job = Job(
        trainer=trainer,
        batches=data,
        validation=lambda: [FakeData.at(1001), FakeData.at(1002)],
        settings=TrainConfig.model_validate(fast | settings),
        num_tokens_per_step=8,
        validation_bytes=32,
        learning_rate=learning_rate,
        loss_scaled=loss_scaled,
        predicted_step_time_s=0.5,
    )
    console = Console(file=stream, width=200)
    with StopSignals() as stop, Display(console, num_steps=job.settings.num_steps, log_every=1) as display:
        state = train.restore(trainer, data, tmp_path) if resume else trainer.init()
        summary = Loop(job, tmp_path, display, stop).run(state)
    show_summary(console, summary)
    return summary, stream.getvalue()


def losses(path):
    return {r["step"]: r["loss"] for r in read_metrics(path / "metrics.jsonl")}


def test_a_resumed_run_has_the_losses_of_the_uninterrupted_one_bit_for_bit(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    run(tmp_path / "a", num_steps=12)
    run(tmp_path / "b", num_steps=7, checkpoint_every=5)
    # what a crash leaves: records and files beyond the last checkpoint
    assert finished_steps(tmp_path / "b" / "checkpoints") == [5, 7]
    for file in sorted((tmp_path / "b" / "checkpoints" / "7").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    (tmp_path / "b" / "checkpoints" / "7").rmdir()
    summary, _ = run(tmp_path / "b", num_steps=12, resume=True)
    assert (summary.first_step, summary.last_step) == (5, 12)
    assert losses(tmp_path / "b") == losses(tmp_path / "a")
    assert [r["step"] for r in read_metrics(tmp_path / "b" / "metrics.jsonl")] == list(range(1, 13))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(tmp_path, number):
    def at_step_4(step):
        if step == 4:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    summary, text = run(tmp_path, trainer=FakeTrainer(at_step_4))
    assert signal.getsignal(number) is before
    assert (summary.stopped_by, summary.last_step) == (number.name, 4)
    assert finished_steps(tmp_path / "checkpoints") == [4]
    assert list(losses(tmp_path)) == [1, 2, 3, 4]
    assert f"stopped by                    {number.name}" in text
    assert "validation" not in text
    run(tmp_path, resume=True)
    assert list(losses(tmp_path)) == list(range(1, 11))


def test_a_second_interrupt_ends_at_once(tmp_path):
    def twice(step):
        if step == 4:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, trainer=FakeTrainer(twice))
    assert finished_steps(tmp_path / "checkpoints") == []


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_last_good_checkpoint(tmp_path):
    message = "The loss is nan at step 8. The checkpoint of step 6 is kept. Lower optimizer.learning_rate"
    with pytest.raises(NonFiniteError, match=message):
        run(tmp_path, trainer=FakeTrainer(poison_at=8), checkpoint_every=3)
    assert finished_steps(tmp_path / "checkpoints") == [3, 6]
    assert losses(tmp_path)[8] is None
    run(tmp_path, resume=True)
    assert all(math.isfinite(v) for v in losses(tmp_path).values())


def test_overflowing_gradients_end_a_run_unless_a_loss_scale_meets_them(tmp_path, monkeypatch):
    with pytest.raises(NonFiniteError, match="The norm of the gradients is inf at step 2. No checkpoint"):
        run(tmp_path, trainer=FakeTrainer(overflow_at=[2]))
    (tmp_path / "scaled").mkdir()
    run(tmp_path / "scaled", trainer=FakeTrainer(overflow_at=[2, 3]), loss_scaled=True)
    assert len(losses(tmp_path / "scaled")) == 10
    monkeypatch.setattr(train, "_MAX_SKIPPED_STEPS", 3)
    with pytest.raises(NonFiniteError, match="The norm of the gradients is inf at step 6. No checkpoint"):
        (tmp_path / "stuck").mkdir()
        run(tmp_path / "stuck", trainer=FakeTrainer(overflow_at=range(4, 9)), loss_scaled=True)


def test_a_loss_that_is_not_finite_right_before_a_checkpoint_is_never_saved(tmp_path):
    with pytest.raises(NonFiniteError, match=r"nan at step 3. No checkpoint had been written"):
        run(tmp_path, trainer=FakeTrainer(poison_at=3), checkpoint_every=3)
    assert finished_steps(tmp_path / "checkpoints") == []


def test_parameters_that_are_not_finite_are_never_saved(tmp_path):
    class Broken(FakeTrainer):
        def export(self, state):
            exported = super().export(state)
            exported["params"]["b"][0] = np.inf
            return exported

    with pytest.raises(NonFiniteError, match="A parameter is not finite after step 3, though the loss was"):
        run(tmp_path, trainer=Broken(), checkpoint_every=3)
    assert finished_steps(tmp_path / "checkpoints") == []


def test_metrics_are_fetched_behind_the_dispatch(tmp_path):
    trainer = FakeTrainer()
    run(tmp_path, trainer=trainer, num_steps=6, timeline_every=None)
    one_in_one_out = [event for step in (4, 5, 6) for event in (f"dispatch {step}", step - 2)]
    first = ["dispatch 1", 1]  # alone: it compiles
    assert trainer.events == [*first, "dispatch 2", "dispatch 3", *one_in_one_out, 5, 6]


def test_validation_stands_in_the_record_of_its_step(tmp_path):
    summary, text = run(
        tmp_path, num_steps=10, eval_every=4, learning_rate=lambda step: 0.5 - 0.01 * jnp.float32(step)
    )
    records = {r["step"]: r for r in read_metrics(tmp_path / "metrics.jsonl")}
    assert [step for step, r in records.items() if "validation_loss" in r] == [4, 8, 10]
    assert summary.validation_loss == records[10]["validation_loss"]
    # 16 rows of 32 bytes: half an item a byte
    per_byte = records[10]["validation_loss"] / math.log(2) / 2
    assert records[10]["validation_bits_per_byte"] == pytest.approx(per_byte)
    assert f"validation bits per byte      {per_byte:.4f}" in text
    assert records[3]["learning_rate"] == pytest.approx(0.48)
    assert records[1]["grad_norm"] > 0


def test_the_summary_gives_busy_shares_and_predicted_against_measured(tmp_path):
    summary, text = run(tmp_path, timeline_every=5)
    assert summary.busy_share == {"fast": 0.5, "slow": 1.0}
    assert "busy, fast                    50%" in text
    assert "measured, 500.0 ms predicted (" in text
    assert "10 of 10" in text and "tokens/s" in text
    assert str(tmp_path / "checkpoints" / "10") in text


def test_only_the_last_checkpoint_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    def full(self, step, exported, data_state=None):
        if step != 6:
            raise CheckpointError(f"The checkpoint of step {step} could not be written: no space left.")
        return save(self, step, exported, data_state)

    save = train.Checkpointer.save
    monkeypatch.setattr(train.Checkpointer, "save", full)
    with pytest.raises(CheckpointError, match="step 9 could not be written"):
        run(tmp_path, num_steps=9, checkpoint_every=3)
    assert finished_steps(tmp_path / "checkpoints") == [6]
    summary, text = run(tmp_path, num_steps=6, checkpoint_every=3, trainer=FakeTrainer(), resume=True)
    assert (summary.first_step, summary.last_step) == (6, 6)


def test_resuming_without_a_checkpoint_or_with_another_model_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no finished checkpoint"):
        run(tmp_path, resume=True)
    run(tmp_path)

    class Wider(FakeTrainer):
        def canonical_spec(self):
            spec = super().canonical_spec()
            return {k: v | {"b": jax.ShapeDtypeStruct((3,), np.float32)} for k, v in spec.items()}

    with pytest.raises(UserError, match=r"params/b has shape \(2,\), and the model needs \(3,\)"):
        run(tmp_path, trainer=Wider(), resume=True)


def test_a_terminal_gets_a_bar_and_a_table(tmp_path):
    stream = io.StringIO()
    console = Console(file=stream, width=120, force_terminal=True)
    with Display(console, num_steps=5, log_every=1) as display:
        display.step(2, {"loss": 3.0}, 1234.5, 60.0)
        display.say("step 2: validation")
    text = stream.getvalue()
    assert "step 2/5" in text and "loss 3.0000" in text and "1,234 tokens/s" in text and "3:00 left" in text


def test_durations_read_like_a_clock():
    assert [duration(s) for s in (7.0, 123.0, 3723.0, math.inf)] == ["0:07", "2:03", "1:02:03", "?"]


def test_metrics_are_on_disk_before_the_checkpoint_that_counts_on_them(tmp_path, monkeypatch):
    seen = []

    def spy(self, step, exported, data_state=None):
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        seen.append((step, json.loads(lines[-1])["step"]))
        return save(self, step, exported, data_state)

    save = train.Checkpointer.save
    monkeypatch.setattr(train.Checkpointer, "save", spy)
    run(tmp_path, num_steps=6, checkpoint_every=3)
    assert seen == [(3, 3), (6, 6)]
