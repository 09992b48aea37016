"""How much STAPO helps on the tiny model: by method, mask, rate, noise and base model.

python experiments/replicate.py --jobs 2                  # everything: three hours
python experiments/replicate.py --only methods --jobs 2   # one part
python experiments/replicate.py --table --figure docs/masks.png
"""

import math
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import runs
from runs import METHODS, Lines, Rows, Run, mean_over, resolved, rows_of, table

PAIR = ("STAPO", "JustRL")
MASKS = ("STAPO", "random candidates", "highest entropy")
ALL = METHODS | {"GRPO": "grpo", "20-Entropy": "20-entropy"}
QUANTILES = (0.25, 0.5, 0.75, 1)
THRESHOLDS = (0.0002, 0.0006, 0.002, 0.006, 0.02)  # tau_p
NOISE = (0, 1, 3, 8, 12)  # % of the response tokens in the base model's pre-training
MODELS = [(noise, number) for noise in (8, 3) for number in range(5)]
SEEDS = range(2, 7)  # 0 and 1 chose the settings of tests/tiny
SETTINGS = {"": "", "28 steps": "--steps 28", "100 steps": "--steps 100"}  # with their flags
SETTINGS |= {f"q {q}": f"--q {q}" for q in QUANTILES if q != 0.75}
SETTINGS |= {f"tau_p {tau_p}": f"--tau_p {tau_p}" for tau_p in THRESHOLDS if tau_p != 0.002}
RATES = {"half the rate": "1.5e-4", "twice the rate": "6e-4", "four times the rate": "1.2e-3"}
SETTINGS |= {rate: f"--lr {lr}" for rate, lr in RATES.items()}
FLAGS = """@tests/tiny/args --model {base} --data {base}/train.jsonl
    --steps 25 --save_every 0 --log_samples 0"""
HELD_OUT = "--benchmarks {base}/test.jsonl --samples 4"
SPANS = ("5 to 10", "10 to 20", "last five", "held out at T = 1", "held out at T = 0.7")
CURVES = ("accuracy", "entropy", "silenced_fraction", "reward", "response_length", "sampling_gap")


def row(name: str, setting: str = "", noise: int = 8, number: int = 0) -> str:
    """The name of a row: base model `number` with this noise, a method, a setting."""
    setting = "" if setting in ("q 0.75", "tau_p 0.002") else setting
    return f"{noise} {number} {name} {setting}".strip()


def some_runs(
    names: Iterable[str],
    seeds: Iterable[int],
    setting: str = "",
    noise: int = 8,
    number: int = 0,
) -> list[Run]:
    base = f"experiments/make_tiny.py --noise {noise / 100} --seed {number}"
    base = "" if (noise, number) == (8, 0) else base  # tests/tiny
    found = []
    for seed in seeds:
        for name in names:
            flags = f"{FLAGS} --method {ALL[name]} {SETTINGS[setting]}"
            found.append(Run(row(name, setting, noise, number), seed, flags, base, HELD_OUT))
    return found


def measure(folder: Path) -> dict[str, float]:
    """A run's accuracies and shares of tokens in percent, and its entropy in nats."""
    lines = runs.read_metrics(folder)
    end = len(lines)
    return {
        "5 to 10": 100 * mean_over(lines, "accuracy", 5, 10),
        "10 to 20": 100 * mean_over(lines, "accuracy", 10, 20),
        "last five": 100 * mean_over(lines, "accuracy", end - 4, end),
        **runs.held_out(folder),
        "entropy": mean_over(lines, "entropy", 10, 20),
        "silenced, %": 100 * mean_over(lines, "silenced_fraction", 1, end),
    }


def compare(rows: Rows, name: str, other: str) -> dict[int, dict[str, float]]:
    """By the seed: the numbers of a row minus those of another row."""
    found = runs.minus(rows.get(name, {}), rows.get(other, {}), SPANS)
    for seed, gap in found.items():
        mine, its = rows[name][seed], rows[other][seed]
        odds = [each["10 to 20"] / (100 - each["10 to 20"]) for each in (mine, its)]
        gap["10 to 20, each"] = gap["10 to 20"]
        gap["log-odds"] = math.log(odds[0] / odds[1])
        gap["entropy, ratio"] = mine["entropy"] / its["entropy"]
        gap["silenced, %"] = its["silenced, %"]
    return found


def differences(gaps: Rows, more: dict[str, str]) -> str:
    """A table of paired differences in points, and which of them are resolved."""
    columns = dict.fromkeys(SPANS, "+.1f") | more
    return f"{table(columns, gaps)}\n\n{resolved(SPANS, gaps)}"


def own_numbers(lines: Lines, settings: Iterable[str]) -> str:
    """A table of STAPO's and JustRL's own numbers."""
    columns = {"silenced, %": "mean .2f", "entropy": ".3f"} | dict.fromkeys(SPANS, ".1f")
    rows = {}
    for setting in settings:
        for name in PAIR:
            title = f"{name}, {setting}" if setting else name
            rows[title] = rows_of(lines).get(row(name, setting), {})
    return table(columns, rows)


def report_settings(lines: Lines, settings: Iterable[str]) -> str:
    """STAPO and JustRL in these settings, and their differences."""
    rows, gaps = rows_of(lines), {}
    for setting in settings:
        gaps[f"JustRL, {setting}"] = compare(rows, row("JustRL", setting), row("STAPO", setting))
    more = {"entropy, ratio": "mean .2f"}
    return f"{own_numbers(lines, settings)}\n\n{differences(gaps, more)}"


def report_methods(lines: Lines) -> str:
    rows = rows_of(lines)
    gaps = {name: compare(rows, row(name), row("STAPO")) for name in ALL if name != "STAPO"}
    more = {"entropy, ratio": "mean .2f", "10 to 20, each": "each +.1f"}
    return f"{own_numbers(lines, [''])}\n\n{differences(gaps, more)}"


def report_masks(lines: Lines) -> str:
    """Other masks minus the lowest entropies (STAPO) at the same q; other tau_p minus 0.002."""
    rows, gaps = rows_of(lines), {}
    for q in QUANTILES:
        for name in MASKS[1:]:
            lowest = row("STAPO", f"q {q}")
            gaps[f"{name}, q = {q}"] = compare(rows, row(name, f"q {q}"), lowest)
    for name in SETTINGS:
        if name.startswith(("q", "tau_p")):
            gaps[f"STAPO, {name}"] = compare(rows, row("STAPO", name), row("STAPO"))
    return differences(gaps, {"entropy, ratio": "mean .2f"})


def report_noise(lines: Lines) -> str:
    gaps = {}
    for noise in NOISE:
        justrl, stapo = row("JustRL", noise=noise), row("STAPO", noise=noise)
        gaps[f"{noise} % of noise"] = compare(rows_of(lines), justrl, stapo)
    more = {"silenced, %": "mean .2f", "log-odds": "mean +.2f", "entropy, ratio": "mean .2f"}
    return differences(gaps, more)


def report_bases(lines: Lines) -> str:
    """JustRL minus STAPO: a base model's number is the mean over its seeds."""
    over: Rows = {}
    for noise, number in MODELS:
        justrl, stapo = (row(name, noise=noise, number=number) for name in reversed(PAIR))
        gaps = list(compare(rows_of(lines), justrl, stapo).values())[:2]
        if gaps:
            means = {key: fmean(gap[key] for gap in gaps) for key in gaps[0]}
            over.setdefault(f"{noise} % of noise", {})[number] = means
    more = {"log-odds": "+.2f", "entropy, ratio": ".2f", "10 to 20, each": "each +.1f"}
    return differences(over, more)


def figure(lines: Lines, file: Path) -> None:
    """Accuracies by q for three masks, and in a second file by tau_p for STAPO."""
    rows = rows_of(lines)
    by_q, by_threshold = {}, {}
    for key in ("10 to 20", "held out at T = 1", "held out at T = 0.7"):
        title = f"right, %: {key}"
        by_q[title] = {
            name: {q: [run[key] for run in rows[row(name, f"q {q}")].values()] for q in QUANTILES}
            for name in MASKS
        }
        stapo = {t: rows[row("STAPO", f"tau_p {t}")].values() for t in THRESHOLDS}
        by_threshold[title] = {"STAPO": {t: [run[key] for run in stapo[t]] for t in THRESHOLDS}}
    runs.draw(file, by_q, "q")
    runs.draw(file.with_stem(f"{file.stem}-tau-p"), by_threshold, "tau_p", "log")


METHOD_RUNS = some_runs(METHODS, SEEDS) + some_runs(["GRPO", "20-Entropy"], SEEDS[:3])
MASK_RUNS = some_runs(MASKS, SEEDS, "q 0.5")
for _setting in ("q 0.25", "q 1"):
    MASK_RUNS += some_runs(MASKS, SEEDS[:3], _setting)
for _setting in SETTINGS:
    MASK_RUNS += some_runs(["STAPO"], SEEDS[:3], _setting) if "tau_p" in _setting else []
PARTS = {
    "methods": (METHOD_RUNS, report_methods),
    "masks": (MASK_RUNS, report_masks),
    "rates": (
        sum((some_runs(PAIR, SEEDS, rate) for rate in RATES), []),
        lambda lines: report_settings(lines, RATES),
    ),
    "lengths": (
        some_runs(PAIR, range(5), "28 steps") + some_runs(PAIR, SEEDS[:3], "100 steps"),
        lambda lines: report_settings(lines, ["28 steps", "100 steps"]),
    ),
    "noise": (sum((some_runs(PAIR, SEEDS, "", noise) for noise in NOISE), []), report_noise),
    "bases": (sum((some_runs(PAIR, SEEDS[:2], "", *m) for m in MODELS), []), report_bases),
}

if __name__ == "__main__":
    runs.main(__doc__, measure, CURVES, PARTS, figure)
