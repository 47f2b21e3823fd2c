"""The examples, run as a reader runs them."""

import pathlib
import re
import subprocess
import sys

FOLDER = pathlib.Path(__file__).parent.parent / "examples"


def test_the_custom_model_learns_its_digits_over_two_groups_in_under_sixty_lines():
    script = FOLDER / "custom_model.py"
    assert len(script.read_text().splitlines()) < 60
    run = subprocess.run(
        [sys.executable, str(script)], cwd=FOLDER.parent, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r" left .*\n.* right ", run.stdout), "the plan shows a stage on each group"
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", run.stdout)]
    assert losses[-1] < 0.3 * losses[0]
    accuracy = re.search(r"test: .* accuracy ([\d.]+)%", run.stdout)
    assert accuracy and float(accuracy[1]) > 93
