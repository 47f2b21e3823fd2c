"""Properties of the planner over drawn programs and clusters; `tests.planner_properties` says them."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planner_properties import PROPERTIES


@functools.cache
def outcomes() -> dict[str, str | None]:
    # In a process of its own: without the type checks of the test run it takes a tenth of the time.
    run = subprocess.run(
        [sys.executable, "-m", "tests.planner_properties"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-5000:]
    # The solver of the limit may print a line of its own.
    return json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))


@pytest.mark.parametrize("name", PROPERTIES)
def test_of_any_program_on_any_cluster(name: str):
    failure = outcomes()[name]
    assert failure is None, (
        f"{name}:\n{failure}\n`python -m tests.planner_properties {name} --shrink` says more."
    )
