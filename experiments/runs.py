"""What the experiments share: a list of runs of stapo.py becomes the rows of a table.

`main` makes the runs that are not there yet, and prints the tables of those that are there. So the
same command goes on with what is left. To make a run again, delete its folder.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "tests" / "tiny"
sys.path.insert(0, str(ROOT))  # for experiments that import reward.py
METHODS = {  # the names in the tables
    "STAPO": "stapo",
    "JustRL": "justrl",
    "FullMask": "full-mask",
    "random candidates": "random",
    "highest entropy": "high-entropy",
}


class Run(NamedTuple):
    """A run of stapo.py."""

    row: str  # of the table: the runs of a row differ in their seed alone
    seed: int
    flags: str  # without --seed and --output; {base} stands for the folder of `base`
    base: str = ""  # the program and flags that make what the run begins from; "": tests/tiny

    def folder(self, output: Path) -> Path:
        return named(f"{self.row}-{self.seed}", output)


def named(text: str, output: Path) -> Path:
    return output / re.sub(r"[^\w.]+", "-", text)


def make(program: str, folder: Path) -> None:
    """Run a program of this project, with one thread, unless the folder for its --output is there.

    The folder gets its name when the program has ended.
    """
    if folder.exists():
        return
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = [sys.executable, *shlex.split(program), "--output", str(partial)]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=one_thread, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} has failed:\n{done.stderr[-2000:]}")
    partial.rename(folder)


def make_all(runs: Sequence[Run], output: Path, jobs: int) -> None:
    """Make what is not there yet, `jobs` at a time: first what runs begin from, then the runs."""
    bases = {run.base: named(run.base, output) if run.base else TINY for run in runs}
    programs = {}
    for run in runs:
        flags = run.flags.replace("{base}", shlex.quote(str(bases[run.base])))
        programs[run.folder(output)] = f"stapo.py {flags} --seed {run.seed}"
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(make, bases, bases.values()))
        made = pool.map(make, programs.values(), programs)
        list(tqdm(made, total=len(runs), unit="run"))


def read_rows(file: Path) -> list[dict]:
    """The lines of a .jsonl file."""
    return [json.loads(line) for line in file.open()]


def read_metrics(folder: Path) -> tuple[list[dict], dict[int, dict]]:
    """A run's metrics of each step, and by the step the scores of the held-out problems."""
    lines = read_rows(folder / "metrics.jsonl")
    scores = {line["step"]: next(iter(line["eval"].values())) for line in lines if "eval" in line}
    return [line for line in lines if "accuracy" in line], scores


def mean_over(lines: list[dict], key: str, first: int, last: int) -> float:
    """The mean of a metric over these steps, both ends included."""
    return fmean(line[key] for line in lines if first <= line["step"] <= last)


Rows = dict[str, dict[Any, dict[str, Any]]]  # row -> seed -> numbers of the run, by their column


def markdown(heading: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (heading, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(heading)}", *lines[1:]])


def cell(values: list[float], form: str) -> str:
    """`7.0 ± 0.3`: the mean and its standard error. `mean .1f` is the mean, `each .1f` all values.

    `form` is a format such as `.1f`. With `+.1f` the mean has a sign.
    """
    *show, form = form.split()
    if show == ["each"]:
        return " ".join(f"{value:{form}}" for value in values)
    text = f"{fmean(values):{form}}"
    if show or len(values) == 1:
        return text
    return f"{text} ± {stdev(values) / len(values) ** 0.5:{form.removeprefix('+')}}"


def table(columns: dict[str, str], rows: Rows) -> str:
    """`columns` are the numbers to show of each run, and how `cell` shows them.

    A number that is None in some runs is taken over the others.
    """
    shown = []
    for name, runs in [(name, runs) for name, runs in rows.items() if runs]:
        shown.append([name, len(runs)])
        for key, form in columns.items():
            values = [runs[seed][key] for seed in sorted(runs) if runs[seed][key] is not None]
            some = f" ({len(values)} of {len(runs)})" if 0 < len(values) < len(runs) else ""
            shown[-1].append(cell(values, form) + some if values else "never")
    return markdown(["", "n", *columns], shown)


def main(
    doc: str,
    measure: Callable[[Path], dict[str, Any]],
    parts: dict[str, tuple[list[Run], Callable[[Rows], str]]],
) -> None:
    """Make the runs, and print the tables of those that are there.

    measure: from a run's folder to its numbers. parts: by the name for --only, the runs, and the
    function that makes their tables.
    """
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs", Path(sys.argv[0]).stem))
    parser.add_argument("--only", choices=parts, help="one of these parts")
    parser.add_argument("--limit", type=int, help="only the first so many runs of each part")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a core each")
    args = parser.parse_args()
    output = args.output.resolve()
    for runs, report in [parts[args.only]] if args.only else parts.values():
        make_all(runs[: args.limit], output, args.jobs)
        rows: Rows = {}
        for run in runs:
            if run.folder(output).exists():
                rows.setdefault(run.row, {})[run.seed] = measure(run.folder(output))
        print(report(rows))
