"""What costs.py estimates, and what the pages say of it."""

import re
import subprocess
import sys

import costs
from helpers import ROOT


def page(name: str) -> str:
    return (ROOT / name).read_text()


def test_pages_and_recipes_have_what_the_program_estimates():
    program = [sys.executable, "experiments/costs.py"]
    table = subprocess.check_output(program, cwd=ROOT, text=True)
    assert table.strip() in page("docs/training.md")
    for run, places in costs.RUNS.items():
        rows = [costs.cost(run, *place) for place in places]
        if run.startswith("@"):
            text = page(run[1:])
            lines = [
                f"{row['GPUs']}: {row['GB of a GPU']} GB; {row['hours']} hours" for row in rows
            ]
            found = re.findall(r"^#   (\d+ x \w.*hours)$", text, re.MULTILINE)
            assert found == lines and f"disk: {rows[0]['GB of disk']} GB" in text
