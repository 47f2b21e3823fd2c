"""A planner change shows as a diff of tests/golden that someone reads; `python -m tests.golden` writes it."""

import json
import subprocess
import sys

from tests.golden import GOLDEN, MESHES


def test_every_cluster_file_gets_the_plan_that_somebody_read():
    # In a process of its own: without the type checks of the test run it takes a tenth of the time.
    run = subprocess.run(
        [sys.executable, "-m", "tests.golden", "--print"],
        cwd=MESHES.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(run.stdout)
    assert sorted(found) == sorted(path.stem for path in MESHES.glob("*.toml"))
    kept = {path.stem: path.read_text(encoding="utf-8") for path in GOLDEN.glob("*.txt")}
    assert found == kept
