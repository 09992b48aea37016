"""STAPO and JustRL on SmolLM2-135M: the recipe, and a verifier that errs.

    python experiments/real_model.py --model FOLDER --only errs    # 40 to 115 minutes a run
    python experiments/real_model.py --table --only errs

"recipe": `stapo.py @recipes/smollm2-135m-cpu` over seeds. "errs": the reward is turned over for a
share of the responses, and all runs of a seed begin from the same ten steps of JustRL. The code in
experiments/README.md makes FOLDER without the Hub.
"""

import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import runs
from drift import chance
from rewards import one_sentence
from runs import Lines, Part, Run, mean_of, rows_of, table

RECIPE = "@recipes/smollm2-135m-cpu --eval_every 0 --log_samples 128"
HELD_OUT = """--benchmarks recipes/smollm2-135m-cpu.test.jsonl
    --reward scripts/rewards.py:one_sentence"""
PAIR = ("STAPO", "JustRL")
ARMS = {"STAPO": "stapo --q 0.5", "JustRL": "justrl", "highest entropy": "high-entropy --q 0.5"}
COLUMNS = {"entropy, first three": ".2f", "entropy, last ten": ".2f", "rise": ".2f"}
COLUMNS |= {"rare, %": ".2f", "silenced, %": ".3f", "clip_high, %": ".2f", "cut off, %": ".1f"}
COLUMNS |= {"right, %": ".1f", "held out at T = 1": ".1f", "held out at T = 0.7": ".1f"}


def turned_over(response: str, row: dict, share: float) -> float:
    """one_sentence, but with the wrong sign for a share of the texts."""
    reward = one_sentence(response, row)
    return -reward if chance(row["problem"], response) < share else reward


turned_20 = partial(turned_over, share=0.20)
turned_35 = partial(turned_over, share=0.35)
turned_50 = partial(turned_over, share=0.50)


def list_errs(arms: dict[str, str], share: int, seeds: Sequence[int]) -> list[Run]:
    """Runs under a reward that is turned over for `share` % of the texts.

    Two updates a step, so the second one has ratios. The runs of a seed follow each other: a seed
    that is not finished can be left out without a choice.
    """
    flags = f"""{RECIPE} --model {{base}}/checkpoints/step_000010 --steps 30 --save_every 10
        --batch_size 16 --mini_batch_size 8 --reward experiments/real_model.py:turned_{share}"""
    base = f"stapo.py {RECIPE} --model {{model}} --method justrl --seed {{seed}}"
    rows = {f"{share} % turned over, {name}": (f"--method {arms[name]}", seeds) for name in arms}
    return runs.list_runs(rows, flags, base, f"{HELD_OUT} --samples 4")


def measure(folder: Path) -> dict[str, float]:
    """Entropies in nats, the rest in percent; means over all steps but the first, or as named.

    "rare": tokens with p < 0.002 in responses that the reward took for right. "right": by
    one_sentence, over the last ten steps, whatever the reward pays. "far is far": held-out
    responses that count as right with one word on both sides, as in "The opposite of far is far".
    """
    lines = runs.read_metrics(folder)
    samples = runs.read_rows(folder / "samples.jsonl")
    last = [row for row in samples if row["step"] > len(lines) - 10]
    right = [one_sentence(row["response"], {"answer": row["gold"]}) > 0 for row in last]
    both_sides = re.compile(r"\b(\w+) is (the |a )?\1\b", re.I)
    gamed: dict[str, list[bool]] = {"training": [], "justrl": []}  # by the decoding
    for row in runs.read_rows(folder / "held-out" / "samples.jsonl"):
        gamed[row["decoding"]].append(bool(row["correct"] and both_sides.search(row["response"])))
    first_three, last_ten = mean_of(lines[:3], "entropy"), mean_of(lines[-10:], "entropy")
    return {
        "entropy": mean_of(lines[1:], "entropy"),
        "entropy, first three": first_three,
        "entropy, last ten": last_ten,
        "rise": last_ten / first_three,
        "rare, %": 100 * mean_of(lines[1:], "low_prob_fraction"),
        "silenced, %": 100 * mean_of(lines[1:], "silenced_fraction"),
        "clip_high, %": 100 * mean_of(lines[1:], "clip_high"),
        "cut off, %": 100 * lines[-1]["truncated_fraction"],
        "right, %": 100 * fmean(right),
        "far is far at T = 1": 100 * fmean(gamed["training"]),
        "far is far at T = 0.7": 100 * fmean(gamed["justrl"]),
        "seconds a step": fmean(line["rollout_seconds"] + line["update_seconds"] for line in lines),
        "memory, GB": lines[-1]["peak_memory_gb"],
        **runs.held_out(folder),
    }


def report_recipe(lines: Lines) -> str:
    """Both methods, and JustRL minus STAPO, paired over seeds."""
    columns = {"held out at T = 1": ".1f", "held out at T = 0.7": ".1f", "entropy": ".3f"}
    columns |= {"rare, %": ".2f", "silenced, %": ".3f", "cut off, %": ".1f"}
    own = columns | {"seconds a step": "mean .0f", "memory, GB": "mean .1f"}
    names = ("before training", *PAIR)
    rows = {name: rows_of(lines).get(f"recipe, {name}", {}) for name in names}
    gaps = {"JustRL": runs.minus(rows["JustRL"], rows["STAPO"], columns)}
    tested = ("held out at T = 1", "held out at T = 0.7", "entropy")
    signed = {key: f"95 +{form}" for key, form in columns.items()}
    return f"{table(own, rows)}\n\n{runs.differences(signed, gaps, tested)}"


def report_pilots(lines: Lines) -> str:
    """JustRL with seed 200, by the share of rewards that are turned over."""
    return table(COLUMNS, {row: runs for row, runs in rows_of(lines).items() if "pilot" in row})


def report_errs(lines: Lines) -> str:
    """Each run of the arms, and the two endpoints: paired over seeds, with 95 % intervals."""
    rows = {name: rows_of(lines).get(f"{SHARE} % turned over, {name}", {}) for name in ARMS}
    every = {f"{name}, {seed}": {seed: rows[name][seed]} for name in ARMS for seed in rows[name]}
    for numbers in [numbers for its in rows.values() for numbers in its.values()]:
        numbers["entropy, ratio"] = math.log(numbers["entropy, last ten"])
    tested = {"entropy, ratio": "ratio .2f", "held out at T = 0.7": "95 +.1f"}
    stapo, *others = rows
    gaps = {f"{row} against STAPO": runs.minus(rows[row], rows[stapo], tested) for row in others}
    own = COLUMNS | dict.fromkeys(("far is far at T = 1", "far is far at T = 0.7"), ".1f")
    return f"{table(own, every)}\n\n{table(tested, gaps)}"


SHARE = 35  # % of the rewards: no pilot rises
STILL = {"recipe, before training": ("--lr 0 --steps 2", [0])}
ROWS = {f"recipe, {name}": (f"--method {runs.METHODS[name]}", range(5)) for name in PAIR}
FLAGS = f"{RECIPE} --model {{model}}"
RECIPE_RUNS = runs.list_runs(STILL, FLAGS, "", f"{HELD_OUT} --samples 8")
RECIPE_RUNS += runs.list_runs(ROWS, FLAGS, "", f"{HELD_OUT} --samples 2")
PILOT = {"JustRL, pilot": "justrl"}
PILOT_RUNS = sum((list_errs(PILOT, share, [200]) for share in (20, 35, 50)), [])
PARTS = {
    "pilots": Part(PILOT_RUNS, report_pilots),
    "errs": Part(list_errs(ARMS, SHARE, range(10, 13)), report_errs),
    "recipe": Part(RECIPE_RUNS, report_recipe),
}
CURVES = ("entropy", "entropy_p80", "entropy_p99", "accuracy", "low_prob_fraction", "candidates")
CURVES += ("silenced", "clip_high", "ratio_mean", "truncated_fraction")

if __name__ == "__main__":
    runs.main(__doc__, measure, CURVES, PARTS)
