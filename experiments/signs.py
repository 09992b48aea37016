"""Where rare tokens are silenced: in right answers (STAPO), in wrong answers instead, or in both.

python experiments/signs.py --jobs 2    # the runs and the tables: half an hour

credit-protocol.md says what would support and what would refute. experiments/credit.py measures
tokens of the runs of STAPO and JustRL.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import runs
import torch
from runs import Lines, Part, mean_of

import stapo

SPANS = {"5 to 10": (4, 10), "10 to 20": (9, 20), "last five": (-5, None)}  # steps of a run
FLAGS = "@tests/tiny/args --save_every 4 --keep_last 7 --log_samples 0"
METHODS = {
    "STAPO": "stapo",
    "JustRL": "justrl",
    "right and wrong answers": "both",
    "wrong answers instead": "wrong",
}


def silence_as(seen: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., stapo.Choice]:
    """A method: STAPO's choice, if seen(advantages) were the advantages."""

    def choose(batch: stapo.Batch, policy: stapo.Policy | None, cfg: stapo.Config) -> stapo.Choice:
        other = replace(batch, advantages=seen(batch.advantages))
        return stapo.silence_spurious(other, policy, cfg)

    return choose


def measure(folder: Path) -> dict[str, float]:
    """Accuracy in percent by the span of steps, and the entropy of the last five steps in nats."""
    lines = runs.read_metrics(folder)
    spans = {name: 100 * mean_of(lines[a:b], "accuracy") for name, (a, b) in SPANS.items()}
    return spans | {"entropy, last five": mean_of(lines[-5:], "entropy")}


def report(lines: Lines) -> str:
    """Accuracy in percent, and in points minus STAPO's: paired, with 95 % intervals."""
    rows = runs.rows_of(lines)
    columns = dict.fromkeys(SPANS, ".1f") | {"entropy, last five": ".2f"}
    gaps = {row: runs.minus(rows[row], rows["STAPO"], columns) for row in rows}
    del gaps["STAPO"]
    signed = {key: f"95 +{form}" for key, form in columns.items()}
    return f"{runs.table(columns, rows)}\n\n{runs.table(signed, gaps)}"


ROWS = {name: (f"--method {method}", range(40, 45)) for name, method in METHODS.items()}
PROGRAM = "experiments/signs.py train"
RUNS = [run._replace(program=PROGRAM) for run in runs.list_runs(ROWS, FLAGS, "", "")]
PARTS = {"signs": Part(RUNS, report)}

if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:  # stapo.py with two more methods
        stapo.METHODS |= {"both": silence_as(torch.abs), "wrong": silence_as(torch.neg)}
        stapo.main(sys.argv[2:])
    else:
        runs.main(__doc__, measure, ["accuracy", "entropy", "candidates", "silenced"], PARTS)
