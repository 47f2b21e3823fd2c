"""metrics.py: what stands in metrics.jsonl and how steps are timed."""

import json
import math

import pytest

from hetjax.errors import UserError
from hetjax.metrics import MetricsWriter, Smoother, StepClock, bits_per_byte, keep_up_to, read_metrics


def test_a_resumed_run_has_every_step_once(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(1, 6):
            writer.write(step, {"loss": float(step)})
    with MetricsWriter(tmp_path, resumed_step=3, tensorboard=False) as writer:
        for step in range(4, 7):
            writer.write(step, {"loss": 10.0 * step})
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert [r["loss"] for r in records] == [1.0, 2.0, 3.0, 40.0, 50.0, 60.0]


def test_a_line_cut_short_by_a_crash_is_dropped_and_one_in_the_middle_is_reported(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert [r["step"] for r in read_metrics(path)] == [1, 2]
    keep_up_to(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    path.write_text('{"step": 1}\ngarbage\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"line 2 is not a record of a step: 'garbage'. Remove that line"):
        read_metrics(path)


def test_every_line_is_strict_json_even_when_a_value_is_not_finite(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"loss": math.nan, "grad_norm": math.inf, "learning_rate": 0.1, "none": None})

    def refuse(name):
        raise AssertionError(name)

    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse) == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
        "learning_rate": 0.1,
        "none": None,
    }


def test_a_step_cannot_be_written_twice(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(2, {"loss": 1.0})
        with pytest.raises(AssertionError, match="step 2 after 2 would stand twice"):
            writer.write(2, {"loss": 1.0})


def test_tensorboard_gets_the_same_scalars(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss": 2.5, "validation_loss": 2.0})
    events = b"".join(p.read_bytes() for p in (tmp_path / "tensorboard").iterdir())
    assert b"loss" in events and b"validation/loss" in events


def test_the_smoothed_value_is_unbiased_from_the_first_on():
    smoother = Smoother(0.9)
    assert math.isnan(smoother.value)
    assert smoother.add(3.0) == pytest.approx(3.0)
    assert smoother.add(3.0) == pytest.approx(3.0)
    assert smoother.add(math.nan) == pytest.approx(3.0)
    assert 3.0 < smoother.add(4.0) < 4.0


def test_the_clock_keeps_compilation_and_validation_out_of_the_step_time():
    clock = StepClock()
    clock.restart(0.0, warm=False)
    clock.tick(10.0)
    clock.tick(16.0)
    clock.tick(18.0)
    clock.tick(20.0)
    clock.tick(20.0, steady=False)
    clock.tick(20.0, steady=False)
    clock.restart(50.0)
    assert clock.first_step_s == 10.0
    clock.tick(60.0, counted=False)
    assert clock.recent_s == clock.mean_s == 2.0


def test_bits_per_byte_of_a_uniform_guess_over_bytes_is_eight():
    assert bits_per_byte(math.log(256), 100, 100) == pytest.approx(8.0)
    assert bits_per_byte(math.log(256), 100, 400) == pytest.approx(2.0)


def test_a_file_of_metrics_that_is_damaged_or_is_a_folder_is_reported(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'\xff\xfe\n{"step": 1}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl, line 1 is not a record of a step"):
        MetricsWriter(tmp_path, resumed_step=1, tensorboard=False)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics.jsonl can't be written to \(Is a directory\). Remove it."):
        MetricsWriter(tmp_path, resumed_step=1, tensorboard=False)
