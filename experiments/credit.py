"""What tokens are worth: Q - V of rare tokens, on the tiny model and on SmolLM2-135M.

    python experiments/credit.py --model FOLDER --jobs 2    # three hours of two cores
    python experiments/credit.py --table --figure docs/credit.png

credit-protocol.md says what is run, and which result would support or refute the paper's premise.
scripts/credit.py measures the tokens of a state. The code in experiments/README.md makes FOLDER.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median, stdev
from typing import NamedTuple

import runs
import signs
from runs import Lines, Part

sys.path.insert(0, str(runs.ROOT / "scripts"))
from credit import estimate  # noqa: E402

TINY = "--q 0.5 --continuations 24 --batches 200"
SMOLLM2 = """--q 0.5 --continuations 16 --batch_size 64 --batches 8 --tokens 10000 --controls 60
    --answered scripts/rewards.py:has_answer"""
RECIPE = "@recipes/smollm2-135m-cpu --eval_every 0 --log_samples 0 --steps 3 --model {model}"
ROWS = {"SmolLM2 JustRL": ("--method justrl", range(303, 309))}
SMOLLM2_RUNS = runs.list_runs(ROWS, RECIPE, "", "")
KEPT = ("kind", "problem", "response", "t", "token", "p", "H", "A", "rank", "rare_p", "answered")
KEPT += ("V", "Q", "placebo")
FEWEST = 40  # tokens of a seed, for Student's interval over seeds
MARGIN = 0.05


class State(NamedTuple):
    """A model, and what scripts/credit.py does with it."""

    row: str
    seed: int  # of the training; before training that of the sampling
    flags: str

    def folder(self, output: Path) -> Path:
        return runs.named(f"{self.row}-{self.seed}", output)


def states(output: Path, model: str) -> list[State]:
    """All states, in the order of the protocol."""
    before = f"{TINY} --tokens 300 --controls 150 --seed 400"
    found = [State("tiny, before training", 400, f"@tests/tiny/args {before}")]
    for noise in (1, 12):
        base = output / f"noise-{noise}"
        flags = f"@tests/tiny/args --model {base} --data {base}/train.jsonl {before}"
        found.append(State(f"tiny, {noise} % of noise, before training", 400, flags))
    for step in (8, 28):
        for run in signs.RUNS:
            folder = f"{run.folder(signs_output())}/checkpoints/step_{step:06}"
            flags = f"{folder} {TINY} --tokens 60 --controls 30"
            if run.row in ("STAPO", "JustRL"):
                found.append(State(f"tiny, step {step} of {run.row}", run.seed, flags))
    flags = f"@recipes/smollm2-135m-cpu --model {model} {SMOLLM2} --seed 309"
    found.append(State("SmolLM2, before training", 309, flags))
    for run in SMOLLM2_RUNS:
        flags = f"{run.folder(output)}/checkpoints/step_000003 {SMOLLM2}"
        found.append(State("SmolLM2, step 3 of JustRL", run.seed, flags))
    return found
