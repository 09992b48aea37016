"""Where rare tokens are silenced: in right answers (STAPO), in wrong answers instead, or in both.

python experiments/signs.py --jobs 2    # the runs and the tables: an hour of one core

credit-protocol.md says what would support and what would refute. experiments/credit.py looks at the
checkpoints of STAPO and JustRL.
"""

import sys
from dataclasses import replace
from pathlib import Path

import runs
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


def silence_both(batch: stapo.Batch, policy: stapo.Policy | None, cfg: stapo.Config):
    """S2T with |A| for A: rare tokens of right and of wrong answers are candidates."""
    return silence_as(batch.advantages.abs(), batch, policy, cfg)


def silence_wrong(batch: stapo.Batch, policy: stapo.Policy | None, cfg: stapo.Config):
    """S2T with -A for A: rare tokens of wrong answers are candidates."""
    return silence_as(-batch.advantages, batch, policy, cfg)


def silence_as(seen, batch: stapo.Batch, policy: stapo.Policy | None, cfg: stapo.Config):
    """STAPO's choice, if `seen` (B,) were the advantages."""
    return stapo.silence_spurious(replace(batch, advantages=seen), policy, cfg)


def measure(folder: Path) -> dict[str, float]:
    """Accuracy in percent by the span of steps, and the entropy of the last five steps in nats."""
    lines = runs.read_metrics(folder)
    spans = {name: 100 * mean_of(lines[a:b], "accuracy") for name, (a, b) in SPANS.items()}
    return spans | {"entropy, last five": mean_of(lines[-5:], "entropy")}


def report(lines: Lines) -> str:
    """Accuracy in percent, and in points minus STAPO's: paired, with 95 % intervals."""
    rows = runs.rows_of(lines)
    columns = dict.fromkeys(SPANS, ".1f") | {"entropy, last five": ".2f"}
    stapo_runs = rows["STAPO"]
    gaps = {row: runs.minus(rows[row], stapo_runs, columns) for row in rows if row != "STAPO"}
    signed = {key: f"95 +{form}" for key, form in columns.items()}
    return f"{runs.table(columns, rows)}\n\n{runs.table(signed, gaps)}"


ROWS = {name: (f"--method {method}", range(40, 45)) for name, method in METHODS.items()}
RUNS = [
    run._replace(program="experiments/signs.py train")
    for run in runs.list_runs(ROWS, FLAGS, "", "")
]
PARTS = {"signs": Part(RUNS, report)}

if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:  # stapo.py with two more methods
        stapo.METHODS |= {"both": silence_both, "wrong": silence_wrong}
        stapo.main(sys.argv[2:])
    else:
        runs.main(__doc__, measure, ["accuracy", "entropy", "candidates", "silenced"], PARTS)
