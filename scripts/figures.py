"""The paper's figures, tables and claims, drawn from run directories of stapo.py alone.

    python scripts/figures.py runs/tiny                              # into runs/tiny/figures
    python scripts/figures.py runs/stapo-* runs/justrl-* --smooth 20 # several runs, into figures/

Runs whose flags differ in the seed alone become one line, with a band from the smallest run to the
largest. From metrics.jsonl: training.png, quantiles.png, evaluation.png. From the dumps that
stapo.py --dump_every writes: responses.html, gradients.png, quadrants.md, tokens.png. The numbers
behind each figure stand beside it under the same stem, as .csv or .json.
"""

import argparse
import csv
import json
import math
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.font_manager import findfont, get_font
from responses import visible, write_page

matplotlib.use("Agg")  # files only, no display
plt.rcParams |= {"axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True, "savefig.dpi": 150}

METHODS = {  # fixed colours, Okabe and Ito's: colour-blind readers tell them apart
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
    "reward": "mean reward (−1 to +1)",
    "silenced_fraction": "silenced share of all tokens",
    "sampling_gap": "sampling gap (nats)",
}
QUANTILES = {f"entropy_p{p}": f"token entropy, p{p} (nats)" for p in (50, 80, 95, 99)}
INCIDENTAL = set(  # flags that say where and how fast a run goes, not what it computes; the seed
    "seed output resume steps save_every save_minutes keep_last eval_every eval_benchmarks "
    "eval_limit eval_samples dump_every log_samples rollout_batch_size tokens_per_micro_batch "
    "gradient_checkpointing threads".split()
)
TOKEN_KEYS = ("p", "entropy", "collision", "advantage", "silenced", "weight")
KINDS = {True: ("spurious", "silenced", "#D55E00"), False: ("exploratory", "kept", "#0072B2")}
MAX_DRAWN = 10_000  # points on either side of tau_p


@dataclass
class Group:
    """Runs with the same flags but the seed: one line in every panel, one set of token figures."""

    label: str
    suffix: str  # of its file names
    line: dict  # how its lines look, as matplotlib's keywords
    series: list[dict]  # for each run: metric -> {step: value}
    dumps: list[dict]  # of all its runs


def read_metrics(log: Path, window: int) -> dict[str, dict[int, float]]:
    """metrics.jsonl -> metric -> {step: mean of the last `window` values}, nulls left out.

    The score of an evaluation, step 0 being the model before the first, becomes the metric
    eval/BENCHMARK, which is not smoothed.
    """
    series: dict[str, dict[int, float]] = defaultdict(dict)
    lines = log.read_text("utf-8").splitlines() if log.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            scores = row.pop("eval", None) or {}
            row |= {f"eval/{name}": score["mean"] for name, score in scores.items()}
            for key, value in row.items():
                if isinstance(value, int | float):
                    series[key][row["step"]] = value
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number < len(lines):
                raise ValueError(f"{log} line {number} is no metrics line: {error!r}") from error
            print(f"{log}: the last line ({number}) is torn and skipped", file=sys.stderr)
    if not series:
        raise ValueError(f"{log} holds no step and no evaluation: wait for the first")
    for key, by_step in series.items():
        if not key.startswith("eval/"):
            steps = sorted(by_step)
            values = [by_step[step] for step in steps]
            for i, step in enumerate(steps):
                by_step[step] = fmean(values[max(0, i + 1 - window) : i + 1])
    return series


def read_dump(path: Path) -> dict:
    """A dump with its tokens as float64 arrays (N,), gradient norms and quadrants added.

    Sec. 3.2, Lemma, at rho = 1: ||dJ/da|| = |A| sqrt(1 - 2 p + sum_v pi(v)^2), no backward.
    H is low below the tau_h (nats) of the token's own mini-batch; a mini-batch without candidates
    has none, and takes the mean of the others. Where no mini-batch has one, and for the methods
    that do not rank candidates by entropy, H is low below the dump's 0.8-quantile of entropy.
    """
    try:
        dump = json.loads(path.read_text("utf-8"))
        rows = dump["tokens"]
        if not rows:
            return dump  # of a step without a right answer: `draw` leaves it out
        t = {key: np.array([row[key] for row in rows], dtype=float) for key in TOKEN_KEYS}
        squared = np.maximum(1 - 2 * t["p"] + t["collision"], 0)  # rounding can go below 0
        t["norm"] = np.abs(t["advantage"]) * np.sqrt(squared)
        tau_h = np.array([row["tau_h"] for row in rows], dtype=float)  # null becomes NaN
        known = np.unique(tau_h[np.isfinite(tau_h)])
        ranked = dump["method"] == "stapo" and len(known) > 0
        dump["split"] = "the τ_h of its mini-batch" if ranked else "the 0.8-quantile of H"
        quantile = {"weights": t["weight"], "method": "inverted_cdf"}
        other = known.mean() if ranked else np.quantile(t["entropy"], 0.8, **quantile)
        t["threshold"] = np.where(np.isfinite(tau_h) & ranked, tau_h, other)
        for response in dump["responses"]:
            own = response["tau_h"] is not None and ranked
            response["threshold"] = response["tau_h"] if own else other
            response["name"] = "τ_h" if own else "mean τ_h" if ranked else "0.8-quantile"
        t["low_p"], t["low_h"] = t["p"] < dump["tau_p"], t["entropy"] < t["threshold"]
        t["step"] = np.full(len(rows), dump["step"])
        dump["frequent"] = {silenced: Counter() for silenced in KINDS}
        for row in rows:
            if row["p"] < dump["tau_p"]:
                dump["frequent"][row["silenced"]][row["token"]] += row["weight"]
        if not math.isclose(t["weight"].sum(), dump["positive_tokens"], rel_tol=0.01):
            print(f"{path}: the weights do not add up to positive_tokens", file=sys.stderr)
        return dump | {"tokens": t, "all_tokens": int(dump["all_tokens"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is torn or no dump of stapo.py: {error!r}") from error


def short(value: Any, others: list) -> str:
    """A path without its folders, unless that makes two of the others look alike."""
    names = {Path(str(other)).name for other in others}
    alike = len(names) < len({str(other) for other in others})
    return str(value) if alike else Path(str(value)).name


def group_runs(paths: list[Path], window: int) -> list[Group]:
    """Reads the runs and puts seeds together; a label names the flags in which groups differ."""
    by_flags: dict[str, list[Path]] = {}
    for path in paths:
        try:
            config = json.loads((path / "config.json").read_text("utf-8"))
            flags = {key: value for key, value in config.items() if key not in INCIDENTAL}
            by_flags.setdefault(json.dumps({"method": config["method"]} | flags), []).append(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no run directory of stapo.py: {error!r}") from error
    groups, all_flags = [], [json.loads(key) for key in by_flags]
    names = [*METHODS, *(flags["method"] for flags in all_flags)]  # the legend's order
    runs = zip(all_flags, by_flags.values())
    for flags, members in sorted(runs, key=lambda run: names.index(run[0]["method"])):
        name, colour = METHODS.get(flags["method"], (flags["method"], "#8C8C8C"))
        rivals = [other for other in all_flags if other["method"] == flags["method"]]
        differ = [key for key in flags if any(o.get(key) != flags[key] for o in rivals)]
        settings = [f"{key} {short(flags[key], [o.get(key) for o in rivals])}" for key in differ]
        label, rank = ", ".join([name, *settings]), rivals.index(flags)
        line = {"color": colour, "linestyle": ("-", "--", "-.", ":")[rank % 4]}
        line["alpha"] = 1 - 0.6 * rank / len(rivals)  # a sweep keeps the hue of its method
        suffix = "_" + re.sub(r"[^a-z0-9.]+", "_", label.lower()) if len(by_flags) > 1 else ""
        label += f" ({len(members)} runs)" if len(members) > 1 else ""
        series = [read_metrics(path / "metrics.jsonl", window) for path in members]
        dumps = [read_dump(file) for p in members for file in sorted(p.glob("dumps/step_*.json"))]
        groups.append(Group(label, suffix, line, series, dumps))
    return groups


def write_csv(path: Path, rows: list[dict]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def save(fig: plt.Figure, path: Path) -> None:
    fig.savefig(path)
    plt.close(fig)


def percent(share: float, _position: int | None = None) -> str:
    return f"{100 * share:.3g} %"


def draw_curves(stem: str, panels: dict, groups: list[Group], window: int, out: Path) -> None:
    """A panel for each metric, a line for each group: the mean of its runs, a band min to max."""
    rows = []
    for metric in panels:
        for group in groups:
            runs = [run[metric] for run in group.series if metric in run]
            for step in sorted(set().union(*runs)):
                values = [run[step] for run in runs if step in run]
                row = {"metric": metric, "group": group.label, "step": step}
                row |= {"mean": np.mean(values), "min": min(values), "max": max(values)}
                rows.append(row | {"runs": len(values)})
    recorded = [metric for metric in panels if any(row["metric"] == metric for row in rows)]
    if not recorded:
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
        if metric == "silenced_fraction" and positive:  # log scale with a place for 0 below it
            ax.set_yscale("symlog", linthresh=10 ** math.floor(math.log10(min(positive))))
        if metric in ("accuracy", "silenced_fraction"):
            ax.yaxis.set_major_formatter(percent)
    handles = [plt.Line2D([], [], label=group.label, **group.line) for group in groups]
    fits = 120 // max(len(group.label) for group in groups)  # labels side by side
    ncols = max(1, min(4, len(groups), fits))
    fig.legend(handles=handles, loc="outside lower center", ncols=ncols)
    save(fig, out / f"{stem}.png")


def quadrant_rows(tokens: dict[str, np.ndarray], all_tokens: int) -> list[dict]:
    """The taxonomy of Sec. 3.2 over tokens with A > 0; each counts by its weight."""
    weight, rows = tokens["weight"], []
    for p in ("low", "high"):
        for h in ("low", "high"):
            here = weight * (tokens["low_p"] == (p == "low")) * (tokens["low_h"] == (h == "low"))
            row = {"quadrant": f"{p} p, {h} H", "tokens": here.sum()}
            row |= {"share": here.sum() / weight.sum(), "share_of_all": here.sum() / all_tokens}
            row["mean_gradient_norm"] = here @ tokens["norm"] / (here.sum() or math.nan)
            rows.append(row | {"silenced": here @ tokens["silenced"]})
    return rows


def write_quadrants(group: Group, tokens: dict[str, np.ndarray], out: Path) -> None:
    """quadrants.csv for every dump and for all of them; the latter as markdown, printed too."""
    each = [(dump["step"], dump["tokens"], dump["all_tokens"]) for dump in group.dumps]
    each.append(("all", tokens, sum(dump["all_tokens"] for dump in group.dumps)))
    rows = [{"step": step} | row for step, *of in each for row in quadrant_rows(*of)]
    write_csv(out / f"quadrants{group.suffix}.csv", rows)
    steps = [dump["step"] for dump in group.dumps]
    text = f"### {group.label}: {len(steps)} dumps, steps {min(steps)} to {max(steps)}\n\n"
    text += "| tokens with A > 0 | count | share | share of all responses' tokens "
    text += "| mean gradient norm | silenced |\n" + "| --- " * 6 + "|\n"
    for row in rows[-4:]:
        bold = "**" if row["quadrant"] == "low p, low H" else ""
        shares = [f"{bold}{percent(row[key])}{bold}" for key in ("share", "share_of_all")]
        text += f"| {row['quadrant']} | {row['tokens']:.0f} | {' | '.join(shares)} "
        text += f"| {row['mean_gradient_norm']:.3f} | {row['silenced']:.0f} |\n"
    splits = " or ".join(sorted({dump["split"] for dump in group.dumps}))
    low, high = min(tokens["threshold"]), max(tokens["threshold"])
    text += f"\nLow p: below {group.dumps[0]['tau_p']:g}. "
    text += f"Low H: below {splits}, {low:.3g} to {high:.3g} nats.\n"
    (out / f"quadrants{group.suffix}.md").write_text(text, "utf-8")
    print(text)


def draw_gradients(group: Group, t: dict[str, np.ndarray], out: Path) -> None:
    """The gradient norm over the probability, coloured by entropy."""
    parts = np.flatnonzero(~t["low_p"]), np.flatnonzero(t["low_p"])  # the rare ones on top
    index = np.concatenate([part[:: math.ceil(len(part) / MAX_DRAWN) or 1] for part in parts])
    t = {key: values[index] for key, values in t.items()}
    points = [dict(zip(t, row)) for row in zip(*t.values())]
    write_csv(out / f"gradients{group.suffix}.csv", points)
    fig, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
    p, tau_p, spurious = np.maximum(t["p"], 1e-12), group.dumps[0]["tau_p"], t["low_p"] & t["low_h"]
    halo = {"color": "#D55E00", "s": 26, "linewidths": 0, "label": "S2T's region: p < τp, H < τh"}
    ax.scatter(p[spurious], t["norm"][spurious], **halo)
    dots = ax.scatter(p, t["norm"], c=t["entropy"], s=9, linewidths=0, cmap="viridis")
    fig.colorbar(dots, ax=ax, label="entropy H (nats)")
    ax.axvline(max(tau_p, 1e-12), color="#D55E00", linestyle="--", label=f"τp = {tau_p:g}")
    ax.set(xscale="log", xlabel="token probability p", ylabel="gradient norm |A| √(1 − 2p + Σπ²)")
    ax.set_title(f"{group.label}: tokens with A > 0")
    fig.legend(loc="outside lower left", ncols=2)
    save(fig, out / f"gradients{group.suffix}.png")


def draw_frequent(group: Group, out: Path) -> None:
    """The most frequent low-probability tokens of right answers, silenced and kept, as bars."""
    counts = {k: sum((dump["frequent"][k] for dump in group.dumps), Counter()) for k in KINDS}
    ordered = {KINDS[k][0]: dict(counter.most_common()) for k, counter in counts.items()}
    (out / f"tokens{group.suffix}.json").write_text(json.dumps(ordered, indent=1))
    font = get_font(findfont("DejaVu Sans")).get_charmap()
    fig, axes = plt.subplots(1, 2, figsize=(9.6, 4.6), layout="constrained")
    for ax, (silenced, (kind, treated, colour)) in zip(axes, KINDS.items()):
        top = counts[silenced].most_common(20)[::-1]
        names = [visible(token, font) for token, _ in top]
        ax.barh(range(len(top)), [count for _, count in top], color=colour)
        ax.set_yticks(range(len(top)), names, parse_math=False)
        ax.set(xlabel="tokens in the dumps", title=f"low p, {treated} ({kind} under S2T)")
        ax.grid(axis="y", visible=False)
    fig.suptitle(group.label)
    save(fig, out / f"tokens{group.suffix}.png")


def draw(paths: list[Path], out: Path, window: int) -> None:
    """Everything that the runs hold the numbers for; raises ValueError and OSError."""
    groups = group_runs(paths, window)
    out.mkdir(parents=True, exist_ok=True)
    names = sorted({key for group in groups for run in group.series for key in run})
    scores = {name: f"{name[5:]} (mean accuracy, %)" for name in names if name.startswith("eval/")}
    for stem, panels in (("training", TRAINING), ("quantiles", QUANTILES), ("evaluation", scores)):
        draw_curves(stem, panels, groups, window, out)
    for group in groups:
        group.dumps = [dump for dump in group.dumps if dump["tokens"]]
        if not group.dumps:
            why = "no dumps with a token of A > 0, so curves alone; stapo.py --dump_every N dumps"
            print(f"{group.label}: {why}")
            continue
        keys = group.dumps[0]["tokens"]
        tokens = {key: np.concatenate([d["tokens"][key] for d in group.dumps]) for key in keys}
        write_quadrants(group, tokens, out)
        draw_gradients(group, tokens, out)
        draw_frequent(group, out)
        write_page(out / f"responses{group.suffix}.html", group.label, group.dumps)
    print(f"figures in {out}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run directories of stapo.py")
    parser.add_argument("--output", type=Path, help="default: RUN/figures; of several, figures")
    parser.add_argument("--smooth", type=int, default=1, help="curves: mean of the last N values")
    args = parser.parse_args(argv)
    runs = list(dict.fromkeys(args.runs))
    try:
        if args.smooth < 1:
            raise ValueError(f"--smooth {args.smooth}: a mean is of at least 1 value")
        out = args.output or (runs[0] / "figures" if len(runs) == 1 else Path("figures"))
        draw(runs, out, args.smooth)
    except (OSError, ValueError) as error:
        sys.exit(f"figures.py: {error}")


if __name__ == "__main__":
    main()
