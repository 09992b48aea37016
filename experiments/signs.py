"""Which tokens are silenced: in right or wrong answers, and at the second place or the others.

    python experiments/signs.py --jobs 2    # the runs and the tables: an hour
    python experiments/signs.py --only places --seeds 90 91 --results FILE    # other seeds

`signs` silences rare tokens of right answers (STAPO), of wrong answers instead, or of both.
`places` spares the second token of each response, or silences only that. credit-protocol.md says
what would support and what would refute.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import runs
import torch
from runs import Lines, Part, mean_of
from torch import Tensor

import stapo

SPANS = {"5 to 10": (4, 10), "10 to 20": (9, 20), "last five": (-5, None)}  # steps of a run
PLACES_SPANS = ("10 to 20", "last five", "held out at T = 1", "held out at T = 0.7")
FLAGS = "@tests/tiny/args --save_every 4 --keep_last 7 --log_samples 0"
METHODS = {
    "STAPO": "stapo",
    "JustRL": "justrl",
    "right and wrong answers": "both",
    "wrong answers instead": "wrong",
}
PLACES_FLAGS = "@tests/tiny/args --save_every 0 --log_samples 0"
HELD_OUT = "--benchmarks tests/tiny/test.jsonl --samples 4"
PLACES = {
    "places: STAPO": "stapo",
    "places: second spared": "spare-second",
    "places: only the second": "only-second",
    "places: JustRL": "justrl",
}
PAIRS = {  # the rows of `places` that are compared
    "second spared, minus STAPO": ("places: second spared", "places: STAPO"),
    "only the second, minus JustRL": ("places: only the second", "places: JustRL"),
    "JustRL, minus STAPO": ("places: JustRL", "places: STAPO"),
}
Method = Callable[[stapo.Batch, stapo.Policy | None, stapo.Config], stapo.Choice]


def silence_as(seen: Callable[[Tensor], Tensor]) -> Method:
    """A method: STAPO's choice, if seen(advantages) were the advantages."""

    def choose(batch: stapo.Batch, policy: stapo.Policy | None, cfg: stapo.Config) -> stapo.Choice:
        other = replace(batch, advantages=seen(batch.advantages))
        return stapo.silence_spurious(other, policy, cfg)

    return choose


def silence_where(holds: Callable[[Tensor], Tensor]) -> Method:
    """A method: of STAPO's choice only the tokens at places, from 1, for which holds(place)."""

    def choose(batch: stapo.Batch, policy: stapo.Policy | None, cfg: stapo.Config) -> stapo.Choice:
        choice = stapo.silence_spurious(batch, policy, cfg)
        spared = batch.mask & ~holds(batch.mask.cumsum(1))  # (B, L)
        return choice._replace(keep=choice.keep | spared)

    return choose


OWN = {
    "both": silence_as(torch.abs),
    "wrong": silence_as(torch.neg),
    "spare-second": silence_where(lambda place: place != 2),
    "only-second": silence_where(lambda place: place == 2),
}


def measure(folder: Path) -> dict[str, float]:
    """Accuracies in percent, silenced tokens of a step, and the entropy of the last five steps."""
    lines = runs.read_metrics(folder)
    spans = {name: 100 * mean_of(lines[a:b], "accuracy") for name, (a, b) in SPANS.items()}
    spans |= runs.held_out(folder) if (folder / "held-out").exists() else {}
    rest = {"silenced a step": mean_of(lines, "silenced")}
    return spans | rest | {"entropy, last five": mean_of(lines[-5:], "entropy")}


def compare(lines: Lines, columns: dict, names: dict, pairs: dict[str, tuple[str, str]]) -> str:
    rows = {name: own for name, own in runs.rows_of(lines).items() if name in names}
    gaps = {
        name: runs.minus(rows.get(a, {}), rows.get(b, {}), columns)
        for name, (a, b) in pairs.items()
    }
    signed = {key: f"95 +{form}" for key, form in columns.items()}
    return f"{runs.table(columns, rows)}\n\n{runs.table(signed, gaps)}"


def report(lines: Lines) -> str:
    """Accuracy in percent, and in points minus STAPO's: paired, with 95 % intervals over seeds."""
    columns = dict.fromkeys(SPANS, ".1f") | {"entropy, last five": ".2f"}
    return compare(lines, columns, METHODS, {row: (row, "STAPO") for row in list(METHODS)[1:]})


def report_places(lines: Lines) -> str:
    """Accuracy in percent, and differences in points: paired, with 95 % intervals over seeds."""
    columns = dict.fromkeys(PLACES_SPANS, ".1f") | {"entropy, last five": ".2f"}
    return compare(lines, columns | {"silenced a step": ".0f"}, PLACES, PAIRS)


def list_runs(methods: dict[str, str], seeds: range, flags: str, evaluation: str) -> list[runs.Run]:
    rows = {name: (f"--method {method}", seeds) for name, method in methods.items()}
    found = runs.list_runs(rows, flags, "", evaluation)
    return [run._replace(program="experiments/signs.py train") for run in found]


PARTS = {
    "signs": Part(list_runs(METHODS, range(40, 45), FLAGS, ""), report),
    "places": Part(list_runs(PLACES, range(70, 75), PLACES_FLAGS, HELD_OUT), report_places),
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:  # stapo.py with more methods
        stapo.METHODS |= OWN
        stapo.main(sys.argv[2:])
    else:
        runs.main(__doc__, measure, ["accuracy", "entropy", "candidates", "silenced"], PARTS)
