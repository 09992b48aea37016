"""Pages and recipes: what they name exists, what they define is written, what they show runs."""

import ast
import json
import re
import sys
import types
from dataclasses import fields, replace
from pathlib import Path

import costs
import pytest
from conftest import ROOT, TINY, example, read_rows

import eval as evaluation
import stapo
from support.bookkeeping import CHANGEABLE, parse_flags

PAGES = sorted((ROOT / "docs").glob("*.md"))
RECIPES = sorted((ROOT / "recipes").iterdir())
# Flags of torchrun, sbatch, pip and of this repository's scripts, as the pages use them.
OTHER_FLAGS = set("nproc-per-node nnodes rdzv-backend rdzv-endpoint shutdown-timeout".split())
OTHER_FLAGS |= set("signal pid help jobs sweep_seeds smooth seeds".split())
# TRL's, which tests/test_trl.py runs.
OTHER_FLAGS |= set("num_processes model_name_or_path output_dir max_steps num_generations".split())
OTHER_FLAGS |= set("per_device_train_batch_size gradient_accumulation_steps use_peft".split())
OTHER_FLAGS |= set("steps_per_generation max_completion_length use_vllm".split())
OTHER_FLAGS |= {"vllm_gpu_memory_utilization", "use_cpu", "cpu"}
OTHER_FLAGS |= {"gpus", "shm-size", "ipc"}  # Docker's


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text()


# ------------------------------------------------------------------------------------------ pages


def test_every_python_block_is_an_example_that_a_test_runs():
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    run = set(re.findall(r'example\("([a-z-]+)"\)', tests))
    for page in PAGES:
        text = page.read_text()
        blocks = text.count("```python\n")
        names = re.findall(r"<!-- example: ([a-z-]+) -->\n```python\n", text)
        assert len(names) == blocks, f"{page.name}: a block without a name"
        assert set(names) <= run, f"{page.name}: {set(names) - run} is run by no test"
        for name in names:
            ast.parse(example(name))


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        other = (page.parent / file).resolve() if file else page
        assert other.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(other), f"{page.name}: {target}"


@pytest.mark.parametrize("page", [*PAGES, *RECIPES], ids=lambda page: page.name)
def test_flags_exist(page):
    known = {field.name for config in (stapo.Config, evaluation.Config) for field in fields(config)}
    mentioned = set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", page.read_text()))
    scripts = "".join(file.read_text() for file in (ROOT / "scripts").glob("*.py"))
    known |= set(re.findall(r'add_argument\("--([\w-]+)"', scripts))
    assert mentioned <= known | OTHER_FLAGS


def test_the_readme_counts_every_departure():
    """It names the number of those that the reference lists, and no other list."""
    section = text_of("reference.md").partition("## Where this departs from the paper")[2]
    listed = re.findall(r"^(\d+)\. \*\*", section.partition("\n## ")[0], re.MULTILINE)
    assert listed == [str(number + 1) for number in range(len(listed))]
    readme = (ROOT / "README.md").read_text()
    assert f"**Where this departs**: in {len(listed)} points" in readme


def test_counted_tables_are_what_the_script_prints():
    """docs/training.md has both tables of scripts/costs.py as they are printed."""
    page = text_of("training.md")
    assert costs.memory_table() in page and costs.costs_table() in page
    assert costs.MEMORY in page and costs.COSTS in page and costs.table_costs() in page
    hours = 64 * costs.cost(*costs.load_run("paper-1.7b"), 64, costs.CARDS["H20"])["seconds"] / 3600
    assert f"On the paper's 64 H20 this makes {hours:.1f} GPU-hours a step" in page


def test_the_hours_of_a_run_hold_its_evaluations(monkeypatch):
    """At 75 rows and 20 ms a step, 376 responses take at least their tokens' share of the steps."""
    cfg, model = costs.load_run("qwen3-1.7b-one-80gb")
    kernels = costs.KERNELS[0] + costs.KERNELS[1] * 28
    monkeypatch.setattr(costs, "HOST_SECONDS", 0.020 / kernels)
    found = costs.cost(cfg, model, 1, costs.CARDS["H100"])
    assert found["evaluated"] == 4 * (30 + 64)
    lengths = costs.log_normal_lengths(376, 4096 / 5, 4096, sigma=1.0)
    least = sum(lengths) / 75 * 0.020
    assert least < found["evaluation"] < least + 4096 * 0.020
    without = costs.cost(replace(cfg, eval_every=0), model, 1, costs.CARDS["H100"])
    assert (without["evaluated"], without["evaluation"]) == (0, 0)
    extra = found["hours"] - without["hours"]
    assert extra == pytest.approx(3 * found["evaluation"] / 3600)  # before step 1, after 40 and 80


def test_the_readmes_map_names_what_there_is():
    """The functions in its table of the paper's sections, and the tests."""
    table = (ROOT / "README.md").read_text().partition("## The paper, and where")[2]
    named = re.findall(r"`(?:stapo\.)?([a-z_0-9]+)`", table.partition("\n\n**")[0])
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    functions = [name for name in named if not name.startswith("test_")]
    assert all(callable(getattr(stapo, name)) for name in set(functions) - {"random"})
    assert all(f"def {name}(" in tests for name in set(named) - set(functions))
    assert len(functions) > 8 and len(named) - len(functions) == 2


def test_files_that_the_pages_name_exist():
    for page in [*PAGES, *RECIPES]:
        folders = "docs|recipes|scripts|support|tests"
        for file in re.findall(rf"(?:{folders})/[\w./-]*\w|\b\w+\.py", page.read_text()):
            if file in ("losses.py", "FILE.py", "own.py", "own_mask.py", "stapo_loss.py"):
                continue  # verl's, and the reader's own
            assert (ROOT / file).exists(), f"{page.name}: {file}"


def test_the_flags_that_may_differ_beside_resume():
    listed = text_of("training.md").partition("A flag beside")[2].partition("Any other")[0]
    assert set(re.findall(r"`--(\w+)`", listed)) - {"resume"} == CHANGEABLE


def test_the_size_of_the_evaluation():
    """17,968 responses, 960 of them AIME24's under one decoding; the recipes' take minutes."""
    problems = {"aime24": 30, "aime25": 30, "amc23": 40, "math500": 500, "minerva": 272}
    problems["olympiadbench"] = 674
    samples = {b.key: b.samples for b in evaluation.BENCHMARKS}
    each = {key: count * samples[key] for key, count in problems.items()}
    assert f"{len(evaluation.DECODINGS) * sum(each.values()):,}" == "17,968"
    page = text_of("training.md").replace("\n", " ")
    assert "17,968 responses" in page and costs.PROBLEMS == problems and each["aime24"] == 960
    hours = [costs.table_hours("1.7B", gpus) for gpus in (1, 8)]
    assert f"{hours[0]:.0f} hours at 1.7B on one H100 and {hours[1]:.1f} on eight" in page
    found = costs.cost(*costs.load_run("qwen3-1.7b-one-80gb"), 1, costs.CARDS["H100"])
    minutes = found["evaluation"] / 60
    takes = f"takes the recipe for one 80 GB GPU {minutes:.1f} minutes (counted, on an H100)"
    assert f"are {found['evaluated']}, which {takes}" in page


def test_the_minutes_of_a_quick_evaluation():
    page, model, card = text_of("training.md"), costs.empty_model("1.7B"), costs.CARDS["H100"]
    flags = "--benchmarks math500 --samples 1 --decoding training --max_new_tokens 4096"
    assert f"quick=({flags})" in page
    free = 1e9 * card.gb - 2 * costs.parameters(model)
    rows = costs.rows_that_fit(model.config, 1024 + 4096, free)
    lengths = costs.response_lengths(costs.evaluation_size(["math500"], samples=1), 4096)
    seconds = costs.sampling_seconds(model, card, lengths, rows, gpus=1)
    minutes = f"500 problems, {seconds / 60:.1f} minutes each on one H100 (counted"
    assert minutes in " ".join(page.split())


# ---------------------------------------------------------------------------------------- recipes


def read_recipe(path: Path) -> stapo.Config:
    return parse_flags(stapo.Config, "", [f"@{path}"])


def test_the_papers_recipe_is_the_defaults():
    assert read_recipe(ROOT / "recipes" / "paper-1.7b") == stapo.Config()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_says_what_it_does(path):
    """Its comments name its own command, steps, responses and checkpoints."""
    text, cfg = path.read_text(), read_recipe(path)
    assert f"stapo.py @recipes/{path.name}" in text and path.name in text_of("training.md")
    responses = f"{cfg.batch_size * cfg.group_size:,} responses"
    assert f"# {responses} a step" in text and responses in text_of("training.md")
    assert f"{cfg.steps:,} steps of" in text
    assert cfg.batch_size == 4 * cfg.mini_batch_size
    stapo.check_flags(cfg)
    for ranks in map(int, re.findall(r"--nproc-per-node (\d+)", text)):
        assert cfg.mini_batch_size % ranks == 0
    for step in map(int, re.findall(r"step_(\d{6})", text)):
        assert step == cfg.steps
    if cfg.eval_every:
        count = costs.cost(*costs.load_run(path.name), 8, costs.CARDS["H200"])["evaluated"]
        numbers = {2: "two", 3: "three", 4: "four", 5: "five"}
        evaluations = f"{numbers[cfg.steps // cfg.eval_every + 1]} evaluations of {count}:"
        assert evaluations in text and f"{count} responses" in text
        assert cfg.eval_limit == 64 and cfg.steps % cfg.eval_every == 0
    assert "--method justrl --output" in " ".join(text.replace("#", " ").split())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_runs_and_the_reference_defines_what_it_writes(path, tmp_path):
    """One step on the tiny model, with evaluation and dump where the recipe has them."""
    rows = (TINY / "test.jsonl").read_text().splitlines()[:2]
    (tmp_path / "bench.jsonl").write_text("\n".join(rows))
    cfg, run = read_recipe(path), tmp_path / "run"
    small = f"""--model {TINY} --data {TINY}/test.jsonl --instruction= --steps 1 --batch_size 4
        --mini_batch_size 2 --max_new_tokens 40 --rollout_batch_size 16 --threads 1 --lr 1e-4
        --eval_benchmarks {tmp_path}/bench.jsonl --save_every {min(cfg.save_every, 1)}
        --eval_every {min(cfg.eval_every, 1)} --dump_every {min(cfg.dump_every, 1)}
        --output {run}"""
    stapo.main([f"@{path}", *small.split()])
    lines = read_rows(run / "metrics.jsonl")
    (line,) = [line for line in lines if "eval" not in line]
    evaluations = [line for line in lines if "eval" in line]
    assert line["step"] == 1 and line["tokens"] > 0 and line["skipped_updates"] == 0
    assert (run / "checkpoints" / "step_000001" / "model.safetensors").exists()
    assert [e["step"] for e in evaluations] == ([0, 1] if cfg.eval_every > 0 else [])
    dumped = (run / "dumps" / "step_000001.json").exists()
    assert dumped == (cfg.dump_every > 0) == (path.name != "paper-1.7b")  # as training.md says

    page = text_of("reference.md")
    assert set(line) | {"eval"} == defined_metrics()
    assert {path.name for path in run.iterdir()} <= set(re.findall(r"[\w.]+", page))
    written = [scores for e in evaluations for scores in e["eval"].values()]
    files = [run / "samples.jsonl", *run.glob("evaluations/*.jsonl")]
    written += [read_rows(file)[0] for file in files]
    config = json.loads((run / "config.json").read_text())
    names = set().union(*written) | config.keys() - vars(stapo.Config()).keys()
    assert all(f"`{name}`" in page for name in names)


def defined_metrics() -> set[str]:
    table = text_of("reference.md").partition("## Metrics")[2].partition("1. Methods without")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_tensorboard_example(tmp_path, monkeypatch):
    """It sends numbers and scores, and no null."""
    lines = [{"step": 0, "eval": {"a": {"mean": 3.5}}}, {"step": 1, "reward": -0.5, "loss": None}]
    (tmp_path / "RUN").mkdir()
    (tmp_path / "RUN" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.chdir(tmp_path)
    writer, sent = types.SimpleNamespace(close=lambda: sent.append("closed")), []
    writer.add_scalar = lambda *scalar: sent.append(scalar)
    tensorboard = types.SimpleNamespace(SummaryWriter=lambda folder: writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    exec(example("tensorboard"), {})
    expected = [("step", 0, 0), ("eval/a", 3.5, 0), ("step", 1, 1), ("reward", -0.5, 1), "closed"]
    assert sent == expected
