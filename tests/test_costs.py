"""What costs.py estimates, and what the pages say of it."""

import re
import runpy

import costs
from helpers import ROOT


def test_pages_and_recipes_have_what_the_program_estimates(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["costs.py"])
    runpy.run_path(f"{ROOT}/experiments/costs.py", run_name="__main__")
    assert capsys.readouterr().out.strip() in (ROOT / "docs" / "training.md").read_text()
    for run, places in costs.RUNS.items():
        if run.startswith("@"):
            text = (ROOT / run[1:]).read_text()
            rows = [costs.cost(run, *place) for place in places]
            lines = [
                f"{row['GPUs']}: {row['GB of a GPU']} GB; {row['hours']} hours" for row in rows
            ]
            assert re.findall(r"^#   (\d+ x \w.*hours)$", text, re.MULTILINE) == lines
            assert f"disk: {rows[0]['GB of disk']} GB" in text
