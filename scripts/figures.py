"""Draw the curves of one run, or of several runs to compare them. Only matplotlib is needed.

    python scripts/figures.py runs/tiny                              # into runs/tiny/figures
    python scripts/figures.py runs/stapo-* runs/justrl-* --smooth 20 # several runs, into figures/

1. Runs whose flags differ in the seed alone become one line: the mean of the runs. A band shows the
   smallest and the largest run.
2. metrics.jsonl gives training.png, quantiles.png, updates.png and evaluation.png. A .csv file
   beside each picture has its numbers.
3. The script prints how far a run's score has moved from its first evaluation to its last.
4. If methods have runs with the same seeds, it prints the difference of their accuracies, over the
   steps that all of these runs have. A seed that has several runs of one method is left out.
5. It names the runs of a seed that counts several times in a line, such as a run and its copy.

scripts/tokens.py draws a model's tokens.
"""

import argparse
import contextlib
import csv
import itertools
import json
import math
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import matplotlib
import matplotlib.pyplot as plt

matplotlib.use("Agg")  # files only, no display
plt.rcParams |= {"axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True, "savefig.dpi": 150}

METHODS = {  # name and colour; colour-blind readers can tell Okabe and Ito's colours apart
    "stapo": ("STAPO", "#D55E00"),
    "justrl": ("JustRL", "#0072B2"),
    "grpo": ("GRPO", "#009E73"),
    "20-entropy": ("20-Entropy", "#E69F00"),
    "full-mask": ("FullMask", "#CC79A7"),
    "high-entropy": ("High-entropy", "#56B4E9"),
    "random": ("Random", "#444444"),
}
TRAINING = {
    "accuracy": "accuracy of the rollouts",
    "response_length": "response length (tokens)",
    "entropy": "policy entropy (nats)",
    "reward": "mean reward",
    "silenced_fraction": "silenced share of all tokens",
    "sampling_gap": "sampling gap (nats)",
}
QUANTILES = {f"entropy_p{p}": f"token entropy, p{p} (nats)" for p in (50, 80, 95, 99)}
UPDATES = {
    "approx_kl": "approximate KL(π_old‖π_θ) (nats)",
    "grad_norm": "gradient norm before clipping",
    "clip_low": "share clipped at 1 − ε_low",
    "clip_high": "share clipped at 1 + ε_high",
}
COLUMNS = "metric", "group", "step", "mean", "min", "max", "runs"  # of every .csv file
INCIDENTAL = set(  # the seed, and flags that do not change what a run computes
    "seed output resume steps save_every save_minutes keep_last eval_every eval_benchmarks "
    "eval_limit eval_samples log_samples rollout_batch_size tokens_per_micro_batch "
    "gradient_checkpointing threads".split()
)


@dataclass
class Group:
    """Runs with the same flags except the seed: one line in every panel."""

    label: str
    line: dict  # matplotlib's keywords for the line: colour, style, alpha
    series: list[dict]  # for each run: metric -> {step: value}
    flags: dict  # without the seed and those of INCIDENTAL
    runs: dict[int, list[Path]]  # by seed


def read_lines(file: Path) -> list[dict]:
    """Return the rows of a .jsonl file, without torn lines. The file may be missing.

    A text within a row may hold characters at which `splitlines` would cut.
    """
    rows = []
    for line in file.read_bytes().split(b"\n") if file.exists() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def read_metrics(log: Path, window: int) -> dict[str, dict[int, float]]:
    """Return metric -> {step: mean of the last `window` values} of a metrics.jsonl, without nulls.

    The scores of evaluations are the metrics "eval/BENCHMARK, N problems #HASH", which are not
    smoothed. Their step 0 is the model before training. Scores over other problems are no part of
    the same curve or mean. An older version wrote no hash. Raises ValueError if there is no number
    yet.
    """
    series: dict[str, dict[int, float]] = defaultdict(dict)
    for row in read_lines(log):
        scores = row.pop("eval", None) or {}
        for name, score in scores.items():
            mark = score.get("problems_fingerprint", "")[:6]
            key = f"eval/{name}, {score['problems']} problems"
            row[key + (f" #{mark}" if mark else "")] = score["mean"]
        for key, value in row.items():
            if isinstance(value, int | float):
                series[key][row["step"]] = value
    if not series:
        raise ValueError(f"{log} holds no step and no evaluation: wait for the first")
    for key, by_step in series.items():
        if not key.startswith("eval/"):
            steps = sorted(by_step)
            values = [by_step[step] for step in steps]
            for i, step in enumerate(steps):
                by_step[step] = fmean(values[max(0, i + 1 - window) : i + 1])
    return series


def without_paths(flags: dict) -> dict:
    """Return the flags without paths of files that have a hash: --resume may give a new path."""
    paths = {name for name in flags if f"{name}_fingerprint" in flags}
    rest = {name: value for name, value in flags.items() if name not in paths}
    # One file can hold several rewards.
    return rest | ({"reward": flags["reward"].rpartition(":")[2]} if "reward" in paths else {})


def group_runs(paths: list[Path], window: int) -> list[Group]:
    """Read runs and group those that differ in the seed alone. Raises ValueError.

    The label of a group has the flags in which it differs from other groups of its method.
    """
    by_flags: dict[str, list[tuple[int, Path]]] = {}
    shown: dict[str, dict] = {}  # the flags of each group's first run
    for path in paths:
        try:
            config = json.loads((path / "config.json").read_text("utf-8"))
            flags = {key: value for key, value in config.items() if key not in INCIDENTAL}
            key = json.dumps({"method": config["method"]} | without_paths(flags), sort_keys=True)
            by_flags.setdefault(key, []).append((config["seed"], path))
            shown.setdefault(key, dict(sorted(flags.items())))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no run directory of stapo.py: {error!r}") from error
    groups, all_flags = [], list(shown.values())
    names = [*METHODS, *(flags["method"] for flags in all_flags)]  # the legend's order
    runs = zip(all_flags, by_flags.values())
    for flags, members in sorted(runs, key=lambda run: names.index(run[0]["method"])):
        name, colour = METHODS.get(flags["method"], (flags["method"], "#8C8C8C"))
        rivals = [other for other in all_flags if other["method"] == flags["method"]]
        differ = [key for key in flags if any(o.get(key) != flags[key] for o in rivals)]
        settings = [f"{key} {flags[key]}" for key in differ]
        if flags["method"] not in METHODS:  # all of these share one colour
            rivals = [other for other in all_flags if other["method"] not in METHODS]
        label, rank = ", ".join([name, *settings]), rivals.index(flags)
        line = {"color": colour, "linestyle": ("-", "--", "-.", ":")[rank % 4]}
        line["alpha"] = 1 - 0.6 * rank / len(rivals)  # a sweep keeps the hue of its method
        label += f" ({len(members)} runs)" if len(members) > 1 else ""
        series = [read_metrics(path / "metrics.jsonl", window) for _, path in members]
        by_seed = {seed: [path for other, path in members if other == seed] for seed, _ in members}
        groups.append(Group(label, line, series, flags, by_seed))
    return groups


def write_csv(path: Path, rows: list[dict]) -> None:
    """Write a table. A crash leaves no half of one: without its header it would be a stranger."""
    partial = path.with_suffix(".partial")
    with open(partial, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(path)


def refuse_strangers(out: Path, stem: str) -> None:
    """Raise ValueError if a file in `out` has a figure's name and was not written by this script.

    The header of the .csv file shows who wrote it and the picture beside it.
    """
    table, picture = out / f"{stem}.csv", out / f"{stem}.png"
    header = table.read_text("utf-8", "replace").split("\n")[0] if table.exists() else ""
    for file in (table, picture):
        if file.exists() and header != ",".join(COLUMNS):
            raise ValueError(f"{file}: was not written by this script; name another --output")


def save(fig: plt.Figure, path: Path) -> None:
    fig.savefig(path)
    plt.close(fig)


def percent(share: float, _position: int | None = None) -> str:
    return f"{100 * share:.3g} %"


def draw_curves(stem: str, panels: dict, groups: list[Group], window: int, out: Path) -> None:
    """Draw a panel for each metric that the runs have, with a line and a band for each group."""
    rows = []
    for metric in panels:
        for group in groups:
            runs = [run[metric] for run in group.series if metric in run]
            for step in sorted(set().union(*runs)):
                values = [run[step] for run in runs if step in run]
                row = {"metric": metric, "group": group.label, "step": step}
                row |= {"mean": fmean(values), "min": min(values), "max": max(values)}
                rows.append(row | {"runs": len(values)})
    recorded = [metric for metric in panels if any(row["metric"] == metric for row in rows)]
    if not recorded:  # pictures of other runs must not stay beside the new ones
        for old in (out / f"{stem}.png", out / f"{stem}.csv"):
            old.unlink(missing_ok=True)
        return
    write_csv(out / f"{stem}.csv", rows)
    columns = 3 if len(recorded) > 4 else min(2, len(recorded))
    lines = math.ceil(len(recorded) / columns)
    size = (10.2, 2.8 * lines + 0.6)
    fig, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for ax in axes.flat[len(recorded) :]:
        ax.set_visible(False)
    for ax, metric in zip(axes.flat, recorded):
        for group in groups:
            mine = [r for r in rows if (r["metric"], r["group"]) == (metric, group.label)]
            x, mean, low, high = ([r[k] for r in mine] for k in ("step", "mean", "min", "max"))
            ax.plot(x, mean, marker="o" if len(x) <= 40 else "", markersize=3, **group.line)
            ax.fill_between(x, low, high, color=group.line["color"], alpha=0.2, linewidth=0)
        smooth = f" (mean of the last {window} values)" if stem != "evaluation" else ""
        ax.set(xlabel="step" + (smooth if window > 1 else ""), ylabel=panels[metric])
        ax.xaxis.get_major_locator().set_params(integer=True)
        positive = [r["mean"] for r in rows if r["metric"] == metric and r["mean"] > 0]
        if metric == "silenced_fraction" and positive:  # a log scale that has 0, too
            ax.set_yscale("symlog", linthresh=10 ** math.floor(math.log10(min(positive))))
        if metric in ("accuracy", "silenced_fraction"):
            ax.yaxis.set_major_formatter(percent)
    handles = [plt.Line2D([], [], label=group.label, **group.line) for group in groups]
    fits = 120 // max(len(group.label) for group in groups)  # labels side by side
    ncols = max(1, min(4, len(groups), fits))
    fig.legend(handles=handles, loc="outside lower center", ncols=ncols)
    save(fig, out / f"{stem}.png")


def read_rates(file: Path, scores: dict[str, dict]) -> dict[str, dict[tuple, float]]:
    """Return benchmark -> {problem: right responses in percent} of an evaluation's file.

    Rows of a stopped evaluation with more problems or samples are not in the scores: they are left
    out. A problem is its number and its fingerprint.
    """
    correct: dict[str, dict[tuple, list]] = defaultdict(lambda: defaultdict(list))
    for row in read_lines(file):
        score = scores.get(row["benchmark"], {"problems": 0, "samples": 0})
        if row["problem"] < score["problems"] and row["sample"] < score["samples"]:
            correct[row["benchmark"]][row["problem"], row["fingerprint"]].append(row["correct"])
    return {name: {n: 100 * fmean(of) for n, of in by.items()} for name, by in correct.items()}


def changes(run: Path) -> list[str]:
    """Return a line for each benchmark: how far its score moved from first to last evaluation.

    Only the problems of both evaluations count, and the line has their number: --resume may change
    --eval_limit. The standard error is that of the mean change of a problem. How much harder one
    problem is than another does not matter.
    """
    rows = read_lines(run / "metrics.jsonl")
    scores = {row["step"]: row["eval"] for row in rows if row.get("eval")}
    steps = sorted(scores)
    files = [run / "evaluations" / f"step_{step:06d}.jsonl" for step in steps]
    if len(files) < 2 or not (files[0].exists() and files[-1].exists()):
        return []
    before, after = (read_rates(files[i], scores[steps[i]]) for i in (0, -1))
    lines = []
    for name in before.keys() & after.keys():
        problems = before[name].keys() & after[name].keys()
        if not problems:  # another file of the same name
            continue
        moved = [after[name][problem] - before[name][problem] for problem in problems]
        error = f" ± {stdev(moved) / len(moved) ** 0.5:.2f}" if len(moved) > 1 else ""
        when = f"from step {steps[0]} to step {steps[-1]}"
        change = f"{fmean(moved):+.2f}{error} points ({len(moved)} problems)"
        lines.append(f"{run}: {name} {change} {when}")
    return sorted(lines)


def differences(groups: list[Group]) -> list[str]:
    """Return a line for each group after the first: its accuracy minus the first group's.

    The two runs of a seed train on the same problems, unless the line names a flag that decides
    them. So the standard error is that of the mean of the seeds' differences. The steps are those
    that all of these runs have. A line names each seed that a group has in several runs: it is left
    out.
    """
    first, *others = groups
    lines = []
    for group in others:
        name, gaps = f"{group.label} minus {first.label}", {}
        for seed in sorted(first.runs.keys() & group.runs.keys()):
            pair = first.runs[seed] + group.runs[seed]
            if len(pair) > 2:
                lines.append(f"{name}: without seed {seed}, which has several runs of one method")
            elif gap := points_between(*pair):
                gaps[seed] = gap
        steps = sorted(set.intersection(*map(set, gaps.values()))) if gaps else []
        if not steps:
            continue
        texts = []
        for span in [steps, steps[-10:]] if len(steps) > 10 else [steps]:
            points = [fmean(gap[step] for step in span) for gap in gaps.values()]
            error = f" ± {stdev(points) / len(points) ** 0.5:.1f}" if len(points) > 1 else ""
            texts.append(f"{fmean(points):+.1f}{error} points over steps {span[0]} to {span[-1]}")
        name += f", seeds {', '.join(map(str, gaps))}{other_flags(group, first)}"
        lines.append(f"{name}: accuracy {', '.join(texts)}")
    return lines


def points_between(first: Path, second: Path) -> dict[int, float]:
    """Return {step: accuracy of the second run minus the first run's, in points}."""
    one, other = (
        read_metrics(run / "metrics.jsonl", 1).get("accuracy", {}) for run in (first, second)
    )
    return {step: 100 * (other[step] - one[step]) for step in one.keys() & other.keys()}


def other_flags(group: Group, first: Group) -> str:
    """Name the flags in which groups of two methods differ. The labels of one method name them."""
    if group.flags["method"] == first.flags["method"]:
        return ""
    mine, firsts = without_paths(group.flags), without_paths(first.flags)
    names = sorted((mine.keys() | firsts.keys()) - {"method"})
    pairs = [(name, mine.get(name), firsts.get(name)) for name in names]
    return "".join(f", {name} {its} and not {other}" for name, its, other in pairs if its != other)


def repeated(groups: list[Group]) -> list[str]:
    """Return a line for each seed that a group has in several runs, such as a run and its copy."""
    seeds = [(group.label, *item) for group in groups for item in group.runs.items()]
    return [
        f"{label}: seed {seed} counts {len(runs)} times in the curves: {', '.join(map(str, runs))}"
        for label, seed, runs in seeds
        if len(runs) > 1
    ]


def draw(paths: list[Path], out: Path, window: int) -> None:
    """Draw all figures, and print differences of accuracies. Raises ValueError and OSError."""
    groups = group_runs(paths, window)
    out.mkdir(parents=True, exist_ok=True)
    names = sorted({key for group in groups for run in group.series for key in run})
    names = [name for name in names if name.startswith("eval/")]
    brief = [name.split(" #")[0] for name in names]  # enough for a panel if it has no twin
    shown = [name if brief.count(short) > 1 else short for name, short in zip(names, brief)]
    scores = {name: f"{text[5:]}\n(mean accuracy, %)" for name, text in zip(names, shown)}
    figures = {"training": TRAINING, "quantiles": QUANTILES, "updates": UPDATES}
    figures["evaluation"] = scores
    for stem in figures:
        refuse_strangers(out, stem)
    for stem, panels in figures.items():
        draw_curves(stem, panels, groups, window, out)
    moved = itertools.chain.from_iterable(map(changes, paths))
    for words in [*moved, *differences(groups), *repeated(groups)]:
        print(words)
    print(f"figures in {out}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run directories of stapo.py")
    parser.add_argument("--output", type=Path, help="default: RUN/figures, or figures for several")
    parser.add_argument("--smooth", type=int, default=1, help="draw the mean of the last N values")
    args = parser.parse_args(argv)
    runs = list({run.resolve(): run for run in args.runs}.values())  # a link counts as its run
    try:
        if args.smooth < 1:
            raise ValueError(f"--smooth {args.smooth}: must be at least 1")
        out = args.output or (runs[0] / "figures" if len(runs) == 1 else Path("figures"))
        draw(runs, out, args.smooth)
    except (OSError, ValueError) as error:
        sys.exit(f"figures.py: {error}")


if __name__ == "__main__":
    main()
