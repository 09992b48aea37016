"""A reward that says nothing: which methods' entropy rises after a finished run.

python experiments/drift.py --jobs 2    # the table of docs/experiments.md
"""

import hashlib
from functools import partial
from pathlib import Path
from statistics import fmean

import runs
from runs import Run

from reward import is_correct

STEPS = 130
FLAGS = f"""@tests/tiny/args --model {{base}}/checkpoints/step_000028
    --reward experiments/drift.py:nine_of_ten --steps {STEPS} --save_every 0 --log_samples 0
    --eval_every {STEPS} --eval_benchmarks tests/tiny/test.jsonl"""
FIVE = {"STAPO": "stapo", "JustRL": "justrl"}  # seeds
THREE = {"JustRL, eps_high 0.2": "justrl --eps_high 0.2"}
THREE |= {"FullMask": "full-mask", "random candidates": "random"}
COLUMNS = {f"entropy, {step}": ".2f" for step in (1, 40, 80, STEPS)}
COLUMNS |= {"rare, %": ".2f", "no box, %": ".1f", "right, %": ".1f"}


def nine_of_ten(response: str, row: dict) -> float:
    """+1 for nine of ten responses and -1 for the tenth, by a hash: the same for the same text."""
    digest = hashlib.sha256(f"{row['problem']}\n{response}".encode()).digest()
    return 1.0 if int.from_bytes(digest[:8], "big") / 2**64 < 0.9 else -1.0


def list_runs() -> list[Run]:
    """Seeds 5 and up, because trials had seeds 0 to 4."""
    return [
        Run(row, seed, f"{FLAGS} --method {method}", f"stapo.py @tests/tiny/args --seed {seed}")
        for seed in range(5, 10)
        for row, method in (FIVE | THREE if seed < 8 else FIVE).items()
    ]


def measure(folder: Path) -> dict[str, float]:
    """Entropy in nats; "rare": of the tokens of responses with +1; the rest at the end, held out.

    "right" is the share of right answers, whatever the reward pays.
    """
    lines, scores = runs.read_metrics(folder)
    answers = runs.read_rows(folder / f"evaluations/step_{STEPS:06}.jsonl")
    return {f"entropy, {step}": lines[step - 1]["entropy"] for step in (1, 40, 80, STEPS)} | {
        "rare, %": 100 * lines[-1]["low_prob_fraction"],
        "no box, %": 100 * scores[STEPS]["no_box_fraction"],
        "right, %": 100 * fmean(is_correct(row["response"], row["gold"]) for row in answers),
    }


if __name__ == "__main__":
    runs.main(__doc__, measure, {"drift": (list_runs(), partial(runs.table, COLUMNS))})
