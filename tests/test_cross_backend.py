"""Two groups on two JAX clients of one process train as one device does, as CPU and GPU in one box would."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def found():
    """What tests/cross_backend.py finds; a second client has to be registered before JAX is first used."""
    command = [sys.executable, "-W", "error", "-m", "tests.cross_backend"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_three_steps_over_two_clients_equal_those_of_one_device(found):
    assert len(found["steps_agree"]) == 6
    assert {k: v for k, v in found["steps_agree"].items() if v > 1e-5} == {}


def test_a_client_may_compute_in_float16(found):
    assert found["half_precision"] < 2e-2


def test_a_move_to_another_client_does_not_wait_and_is_exact(found):
    assert found["moves_do_not_wait"]


def test_an_error_on_one_client_ends_the_step_and_is_told(found):
    assert "the second client is out of memory" in found["errors_come_out"]
