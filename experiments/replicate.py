"""How much STAPO helps on the tiny model: by method, by the share of rare tokens, by base model.

python experiments/replicate.py --only methods --jobs 2
python experiments/replicate.py --only noise --jobs 2
python experiments/replicate.py --only bases --jobs 2
"""

import math
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import runs
from runs import METHODS, Rows, Run, mean_over, table

PAIR = ("STAPO", "JustRL")
FLAGS = """@tests/tiny/args --model {base} --data {base}/train.jsonl --steps 25
    --save_every 0 --log_samples 0 --eval_every 25 --eval_benchmarks {base}/test.jsonl"""
NOISE = (0, 1, 3, 8, 12)  # % of the response tokens in the base model's pre-training
SPANS = {"5 to 10": "+.1f", "10 to 20": "+.1f", "last five": "+.1f", "held out": "+.1f"}


def on_model(noise: int, number: int, names: Iterable[str], seeds: range) -> list[Run]:
    """Runs that begin from base model `number` with this noise. tests/tiny is 0 with 8 %."""
    base = f"experiments/make_tiny.py --noise {noise / 100} --seed {number}"
    base = "" if (noise, number) == (8, 0) else base
    flags = {name: f"{FLAGS} --method {METHODS[name]}" for name in names}
    rows = {name: f"{noise} {number} {name}" for name in names}
    return [Run(rows[name], seed, flags[name], base) for seed in seeds for name in names]


def measure(folder: Path) -> dict[str, float]:
    """A run's accuracies and shares of tokens in percent, and its entropy in nats."""
    lines, scores = runs.read_metrics(folder)
    end = len(lines)
    return {
        "5 to 10": 100 * mean_over(lines, "accuracy", 5, 10),
        "10 to 20": 100 * mean_over(lines, "accuracy", 10, 20),
        "last five": 100 * mean_over(lines, "accuracy", end - 4, end),
        "held out": scores[end]["mean"],
        "entropy": mean_over(lines, "entropy", 10, 20),
        "silenced, %": 100 * mean_over(lines, "silenced_fraction", 1, end),
    }


def minus_stapo(rows: Rows, model: str, name: str) -> dict[int, dict[str, Any]]:
    """By the seed, a method's numbers minus those of STAPO's run with the same seed."""
    found, stapo = {}, rows.get(f"{model} STAPO", {})
    for seed, run in rows.get(f"{model} {name}", {}).items():
        if seed in stapo:
            other = stapo[seed]
            gap = {span: run[span] - other[span] for span in SPANS}
            odds = [each["10 to 20"] / (100 - each["10 to 20"]) for each in (run, other)]
            gap |= {"10 to 20, each": gap["10 to 20"], "log-odds": math.log(odds[0] / odds[1])}
            gap |= {"entropy, ratio": run["entropy"] / other["entropy"]}
            gap |= {"silenced, %": other["silenced, %"], "STAPO": other["10 to 20"]}
            found[seed] = gap
    return found


def report_methods(rows: Rows) -> str:
    columns = {"silenced, %": "mean .2f", "entropy": ".3f"} | dict.fromkeys(SPANS, ".1f")
    itself = table(columns, {"STAPO": rows.get("8 0 STAPO", {})})
    columns = SPANS | {"entropy, ratio": "mean .2f", "10 to 20, each": "each +.1f"}
    others = {name: minus_stapo(rows, "8 0", name) for name in METHODS if name != "STAPO"}
    return f"{itself}\n\nminus STAPO:\n\n{table(columns, others)}"


def report_noise(rows: Rows) -> str:
    columns = {"silenced, %": "mean .2f", "STAPO": ".1f", "10 to 20": "+.1f", "held out": "+.1f"}
    columns |= {"log-odds": "mean +.2f", "entropy, ratio": "mean .2f"}
    pairs = {f"{noise} % of noise": minus_stapo(rows, f"{noise} 0", "JustRL") for noise in NOISE}
    return table(columns, pairs)


def report_bases(rows: Rows) -> str:
    """JustRL minus STAPO: a base model's number is the mean over its seeds."""
    columns = SPANS | {"log-odds": "+.2f", "entropy, ratio": ".2f", "10 to 20, each": "each +.1f"}
    over = {"8 % of noise": {}, "3 % of noise": {}}
    for noise, models in over.items():
        for number in range(5):
            pairs = minus_stapo(rows, f"{noise[0]} {number}", "JustRL").values()
            if pairs:
                models[number] = {key: fmean(pair[key] for pair in pairs) for key in columns}
    return table(columns, over)


SEEDS = range(2, 7)  # 0 and 1 chose the settings of tests/tiny
MODELS = [(noise, number) for noise in (8, 3) for number in range(5)]
PARTS = {
    "methods": (on_model(8, 0, METHODS, SEEDS), report_methods),
    "noise": (sum((on_model(noise, 0, PAIR, SEEDS) for noise in NOISE), []), report_noise),
    "bases": (sum((on_model(*model, PAIR, SEEDS[:2]) for model in MODELS), []), report_bases),
}

if __name__ == "__main__":
    runs.main(__doc__, measure, PARTS)
