"""How much STAPO helps on the tiny model: by method, mask, rate, noise and base model.

python experiments/replicate.py --jobs 2                  # everything: three hours
python experiments/replicate.py --only methods --jobs 2   # one part
python experiments/replicate.py --table --only methods --figure docs/training.png
python experiments/replicate.py --table --only masks --figure docs/masks.png
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

import runs
from runs import METHODS, Lines, Part, Rows, Run, by_step, mean_of, rows_of, table

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
    names: Iterable[str], seeds: Sequence[int], setting: str = "", noise: int = 8, number: int = 0
) -> list[Run]:
    base = f"experiments/make_tiny.py --noise {noise / 100} --seed {number}"
    base = "" if (noise, number) == (8, 0) else base  # tests/tiny
    rows = {}
    for name in names:
        flags = f"--method {ALL[name]} {SETTINGS[setting]}"
        rows[row(name, setting, noise, number)] = (flags, seeds)
    return runs.list_runs(rows, FLAGS, base, HELD_OUT)


def measure(folder: Path) -> dict[str, float]:
    """A run's accuracies and shares of tokens in percent, and its entropy in nats."""
    lines = runs.read_metrics(folder)
    return {
        "5 to 10": 100 * mean_of(lines[4:10], "accuracy"),
        "10 to 20": 100 * mean_of(lines[9:20], "accuracy"),
        "last five": 100 * mean_of(lines[-5:], "accuracy"),
        **runs.held_out(folder),
        "entropy": mean_of(lines[9:20], "entropy"),
        "silenced, %": 100 * mean_of(lines, "silenced_fraction"),
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
    return runs.differences(dict.fromkeys(SPANS, "95 +.1f") | more, gaps, SPANS)


def report_settings(lines: Lines, settings: Iterable[str]) -> str:
    """STAPO and JustRL in these settings, and JustRL minus STAPO."""
    rows, own, gaps = rows_of(lines), {}, {}
    for setting in settings:
        title = f", {setting}" if setting else ""
        own |= {f"{name}{title}": rows.get(row(name, setting), {}) for name in PAIR}
        gaps[f"JustRL{title}"] = compare(rows, row("JustRL", setting), row("STAPO", setting))
    columns = {"silenced, %": "mean .2f", "entropy": ".3f"} | dict.fromkeys(SPANS, ".1f")
    return f"{table(columns, own)}\n\n{differences(gaps, {'entropy, ratio': 'mean .2f'})}"


def report_methods(lines: Lines) -> str:
    """STAPO and JustRL; then the other methods minus STAPO."""
    rows = rows_of(lines)
    own = report_settings(lines, [""]).partition("\n\n")[0]
    gaps = {name: compare(rows, row(name), row("STAPO")) for name in ALL if name != "STAPO"}
    more = {"entropy, ratio": "mean .2f", "10 to 20, each": "each +.1f"}
    return f"{own}\n\n{differences(gaps, more)}"


def report_lengths(lines: Lines) -> str:
    """STAPO and JustRL with more steps, and JustRL minus STAPO."""
    return report_settings(lines, ["28 steps", "100 steps"])


def report_rates(lines: Lines) -> str:
    """STAPO and JustRL at other learning rates, and JustRL minus STAPO."""
    return report_settings(lines, RATES)


def report_masks(lines: Lines) -> str:
    """Masks at q = 0.5 minus JustRL; masks minus STAPO's at the same q, and STAPO minus STAPO.

    At q = 0.5 the lowest and the highest entropies share no token. The last rows are STAPO with
    another q or tau_p minus STAPO with q = 0.75 and tau_p = 0.002.
    """
    rows, over_justrl, gaps = rows_of(lines), {}, {}
    for name in MASKS:
        over_justrl[f"{name}, q = 0.5"] = compare(rows, row(name, "q 0.5"), row("JustRL"))
    for q in QUANTILES:
        for name in MASKS[1:]:
            lowest = row("STAPO", f"q {q}")
            gaps[f"{name}, q = {q}"] = compare(rows, row(name, f"q {q}"), lowest)
    for name in SETTINGS:
        if name.startswith(("q", "tau_p")):
            gaps[f"STAPO, {name}"] = compare(rows, row("STAPO", name), row("STAPO"))
    ratio = {"entropy, ratio": "mean .2f"}
    return f"{differences(over_justrl, ratio)}\n\n{differences(gaps, ratio)}"


def report_noise(lines: Lines) -> str:
    """JustRL minus STAPO, by the share of noise in the base model's pre-training."""
    gaps = {}
    for noise in NOISE:
        justrl, stapo = row("JustRL", noise=noise), row("STAPO", noise=noise)
        gaps[f"{noise} % of noise"] = compare(rows_of(lines), justrl, stapo)
    more = {"silenced, %": "mean .2f", "log-odds": "mean +.2f", "entropy, ratio": "mean .2f"}
    return differences(gaps, more)


def report_bases(lines: Lines) -> str:
    """JustRL minus STAPO over base models: a base model's number is the mean over its seeds."""
    over: Rows = {}
    for noise, number in MODELS:
        justrl, stapo = (row(name, noise=noise, number=number) for name in reversed(PAIR))
        gaps = list(compare(rows_of(lines), justrl, stapo).values())[:2]
        if gaps:
            means = {key: fmean(gap[key] for gap in gaps) for key in gaps[0]}
            over.setdefault(f"{noise} % of noise", {})[number] = means
    more = {"log-odds": "95 +.2f", "entropy, ratio": "95 .2f", "10 to 20, each": "each +.1f"}
    return differences(over, more)


def draw_methods(lines: Lines, file: Path) -> None:
    """The README's curves of STAPO and JustRL."""
    metrics = {"right, %": ("accuracy", 100), "entropy, nats": ("entropy", 1)}
    metrics["silenced, %"] = ("silenced_fraction", 100)
    panels = {}
    for title, metric in metrics.items():
        panels[title] = {name: by_step(lines, row(name), *metric) for name in PAIR}
    runs.draw(file, panels, "step")


def draw_masks(lines: Lines, file: Path) -> None:
    """Accuracies by q for three masks."""
    rows, panels = rows_of(lines), {}
    for key in ("10 to 20", "held out at T = 1", "held out at T = 0.7"):
        panels[f"{key}, %"] = {
            name: {q: [run[key] for run in rows[row(name, f"q {q}")].values()] for q in QUANTILES}
            for name in MASKS
        }
    runs.draw(file, panels, "q")


METHOD_RUNS = some_runs(METHODS, SEEDS) + some_runs(["GRPO", "20-Entropy"], SEEDS[:3])
MASK_RUNS = some_runs(MASKS, SEEDS, "q 0.5")
MASK_RUNS += some_runs(MASKS, SEEDS[:3], "q 0.25") + some_runs(MASKS, SEEDS[:3], "q 1")
for _setting in SETTINGS:
    MASK_RUNS += some_runs(["STAPO"], SEEDS[:3], _setting) if "tau_p" in _setting else []
LENGTH_RUNS = some_runs(PAIR, range(5), "28 steps") + some_runs(PAIR, SEEDS[:3], "100 steps")
RATE_RUNS = sum((some_runs(PAIR, SEEDS, rate) for rate in RATES), [])
NOISE_RUNS = sum((some_runs(PAIR, SEEDS, "", noise) for noise in NOISE), [])
BASE_RUNS = sum((some_runs(PAIR, SEEDS[:2], "", *model) for model in MODELS), [])
PARTS = {
    "methods": Part(METHOD_RUNS, report_methods, draw_methods),
    "masks": Part(MASK_RUNS, report_masks, draw_masks),
    "rates": Part(RATE_RUNS, report_rates),
    "lengths": Part(LENGTH_RUNS, report_lengths),
    "noise": Part(NOISE_RUNS, report_noise),
    "bases": Part(BASE_RUNS, report_bases),
}

if __name__ == "__main__":
    runs.main(__doc__, measure, CURVES, PARTS)
