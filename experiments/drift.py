"""A reward that says nothing, or a little: which methods' entropy rises after a finished run.

python experiments/drift.py --jobs 2    # the runs and the tables: three hours
python experiments/drift.py --only criterion --jobs 2    # drift-protocol.md: an hour and a half
python experiments/drift.py --table --only drift --figure docs/drift.png
"""

import hashlib
import math
from functools import partial
from pathlib import Path
from statistics import fmean

import runs
from runs import Lines, Part, by_step, rows_of, table

from reward import math_reward

FLAGS = """@tests/tiny/args --model {base}/checkpoints/step_000028 --steps 130
    --reward experiments/drift.py:nine_of_ten --save_every 0 --log_samples 0"""
BASE = "stapo.py @tests/tiny/args --seed {seed}"
HELD_OUT = "--benchmarks tests/tiny/test.jsonl --reward= --samples 4"
ROWS = {  # flags and seeds; trials had seeds 0 to 4
    "STAPO": ("--method stapo", range(5, 11)),
    "JustRL": ("--method justrl", range(5, 11)),
    "JustRL, eps_high 0.2": ("--method justrl --eps_high 0.2", range(5, 8)),
    "FullMask": ("--method full-mask", range(5, 8)),
    "random candidates": ("--method random", range(5, 8)),
}
SHORT = list(ROWS)
for _title, _flags in {
    "300 steps": "--steps 300",
    "one problem of five graded": "--reward experiments/drift.py:graded_20",
    "one problem of twenty graded": "--reward experiments/drift.py:graded_5",
    "30 % of right answers refused": "--reward experiments/drift.py:refused_30",
}.items():
    ROWS[f"STAPO, {_title}"] = (f"--method stapo {_flags}", [10])
    ROWS[f"JustRL, {_title}"] = (f"--method justrl {_flags}", [10])
CRITERION = {  # drift-protocol.md: at q = 0.5 the first and the last mask share no token
    "STAPO, q 0.5": ("--method stapo --q 0.5", range(12, 20)),
    "JustRL": ("--method justrl", range(12, 20)),
    "highest entropies, q 0.5": ("--method high-entropy --q 0.5", range(12, 20)),
}
COLUMNS = {f"entropy, {step}": ".2f" for step in (1, 40, 80)}
COLUMNS |= {"entropy, end": ".2f", "rare, %": ".2f", "no box, %": ".1f"}
COLUMNS |= {"held out at T = 1": ".1f", "held out at T = 0.7": ".1f"}


def chance(problem: str, response: str) -> float:
    """A number between 0 and 1, the same for the same text."""
    digest = hashlib.sha256(f"{problem}\n{response}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def nine_of_ten(response: str, row: dict) -> float:
    """+1 for nine of ten responses and -1 for the tenth, by chance."""
    return 1.0 if chance(row["problem"], response) < 0.9 else -1.0


def graded(response: str, row: dict, share: float) -> float:
    """The usual reward for a share of the problems, and nine_of_ten for the others."""
    if chance(row["problem"], "") < share:
        return math_reward(response, row["answer"])
    return nine_of_ten(response, row)


graded_5 = partial(graded, share=0.05)
graded_20 = partial(graded, share=0.20)


def refused_30(response: str, row: dict) -> float:
    """The usual reward, but -1 for 30 % of the right answers, by chance."""
    refused = chance(row["problem"], response) < 0.3
    return -1.0 if refused else math_reward(response, row["answer"])


def measure(folder: Path) -> dict[str, float | None]:
    """Entropy in nats; "rare": of the tokens of responses with +1; the rest at the end, held out.

    "held out" is the share of right answers, whatever the reward pays.
    """
    lines = runs.read_metrics(folder)
    rows = runs.read_rows(folder / "held-out" / "samples.jsonl")
    boxes = [row["answer"] for row in rows if row["decoding"] == "training"]
    entropy = {line["step"]: line["entropy"] for line in lines}
    return {
        **{f"entropy, {step}": entropy.get(step) for step in (1, 40, 80)},
        "entropy, end": lines[-1]["entropy"],
        "rare, %": 100 * lines[-1]["low_prob_fraction"],
        "no box, %": 100 * boxes.count(None) / len(boxes),
        **runs.held_out(folder),
    }


def split(lines: Lines) -> list[Lines]:
    """The lines of both parts. Both have JustRL, each with the seeds of its own STAPO."""
    parts = []
    for rows, own in ((ROWS, "STAPO"), (CRITERION, "STAPO, q 0.5")):
        seeds = {line["seed"] for line in lines if line["row"] == own}
        mine = [line for line in lines if line["row"] in rows]
        parts.append([line for line in mine if line["row"] != "JustRL" or line["seed"] in seeds])
    return parts


def report(lines: Lines) -> str:
    """Entropy in nats at steps 1, 40, 80 and at the end, and the end divided by step 1.

    Then JustRL minus STAPO held out, paired over the seeds that both have.
    """
    rows = rows_of(split(lines)[0])
    for numbers in [numbers for its in rows.values() for numbers in its.values()]:
        numbers["end / start"] = numbers["entropy, end"] / numbers["entropy, 1"]
    held_out = dict.fromkeys(("held out at T = 1", "held out at T = 0.7"), "95 +.1f")
    pair = (rows.get(row, {}) for row in ("JustRL", "STAPO"))
    gaps = {"JustRL, minus STAPO": runs.minus(*pair, held_out)}
    own = table(COLUMNS | {"end / start": "95 .2f"}, rows)
    return f"{own}\n\n{table(held_out, gaps)}"


def report_criterion(lines: Lines) -> str:
    """Both endpoints of experiments/drift-protocol.md, and responses without a box.

    Intervals are 95 % intervals over the seeds.
    """
    rows: runs.Rows = {row: {} for row in CRITERION}
    for line in split(lines)[1]:
        numbers = line["numbers"]
        entropy, no_box = fmean(line["steps"]["entropy"][-10:]), numbers["no box, %"]
        numbers["entropy, last ten steps"] = entropy
        numbers["end / start"] = numbers["entropy, end"] / numbers["entropy, 1"]
        numbers["entropy, ratio"] = math.log(entropy)
        numbers["no box, ratio"] = math.log(no_box) if no_box else None
        rows[line["row"]][line["seed"]] = numbers
    held_out = ["held out at T = 1", "held out at T = 0.7"]
    own = {"entropy, last ten steps": ".2f", "end / start": "95 .2f", "no box, %": ".1f"}
    arms = table(own | dict.fromkeys(held_out, ".1f"), rows)
    first = rows.pop("STAPO, q 0.5")
    tested = {"entropy, ratio": "ratio .2f", "no box, ratio": "ratio .1f"}
    tested |= dict.fromkeys(held_out, "95 +.1f")
    gaps = {f"{row} against STAPO": runs.minus(rows[row], first, tested) for row in rows}
    return f"{arms}\n\n{table(tested, gaps)}"


def figure(lines: Lines, file: Path) -> None:
    """Entropy by the step, of the runs of 130 steps and of the long ones."""
    lines = split(lines)[0]
    short = {row: by_step(lines, row, "entropy") for row in SHORT}
    long = {row: by_step(lines, f"{row}, 300 steps", "entropy") for row in ("STAPO", "JustRL")}
    runs.draw(file, {"entropy, nats": short, "entropy, nats: seed 10": long}, "step")


PARTS = {
    "drift": Part(runs.list_runs(ROWS, FLAGS, BASE, HELD_OUT), report, figure),
    "criterion": Part(runs.list_runs(CRITERION, FLAGS, BASE, HELD_OUT), report_criterion),
}

if __name__ == "__main__":
    runs.main(__doc__, measure, ["entropy", "low_prob_fraction"], PARTS)
