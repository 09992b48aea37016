"""Pages and recipes: what they name exists, what they define is written, what they show runs."""

import ast
import json
import re
import sys
import types
from dataclasses import fields
from pathlib import Path

import costs
import pytest
from conftest import ROOT, TINY, example

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
OTHER_FLAGS |= {"vllm_gpu_memory_utilization"}


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


def test_counted_tables_are_what_the_script_prints():
    """docs/training.md has both tables of scripts/costs.py as they are printed."""
    page = text_of("training.md")
    assert costs.memory_table() in page and costs.costs_table() in page


def test_files_that_the_pages_name_exist():
    for page in [*PAGES, *RECIPES]:
        folders = "docs|recipes|scripts|support|tests"
        for file in re.findall(rf"(?:{folders})/[\w./-]*\w|\b\w+\.py", page.read_text()):
            if file in ("losses.py", "FILE.py", "stapo_loss.py"):  # verl's, and the reader's own
                continue
            assert (ROOT / file).exists(), f"{page.name}: {file}"


def test_the_flags_that_may_differ_beside_resume():
    listed = text_of("training.md").partition("A flag beside")[2].partition("Any other")[0]
    assert set(re.findall(r"`--(\w+)`", listed)) - {"resume"} == CHANGEABLE


def test_the_size_of_the_evaluation():
    """17,968 responses, 960 of them AIME24's under one decoding; 70 steps of a recipe's."""
    problems = {"aime24": 30, "aime25": 30, "amc23": 40, "math500": 500, "minerva": 272}
    problems["olympiadbench"] = 674
    samples = {b.key: b.samples for b in evaluation.BENCHMARKS}
    each = {key: count * samples[key] for key, count in problems.items()}
    assert f"{len(evaluation.DECODINGS) * sum(each.values()):,}" == "17,968"
    assert "17,968 responses" in text_of("training.md").replace("\n", " ")
    assert each["aime24"] == 960
    recipe = read_recipe(ROOT / "recipes" / "qwen3-1.7b-one-80gb")
    assert 17_968 // (recipe.batch_size * recipe.group_size) == 70


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


@pytest.fixture(scope="module", params=RECIPES, ids=lambda path: path.name)
def recipe_run(request, tmp_path_factory):
    """(flags, directory) of one step of a recipe on the tiny model, with evaluation and dump."""
    folder = tmp_path_factory.mktemp("recipe")
    rows = (TINY / "test.jsonl").read_text().splitlines()[:2]
    (folder / "bench.jsonl").write_text("\n".join(rows))
    cfg = read_recipe(request.param)
    small = f"""--model {TINY} --data {TINY}/test.jsonl --instruction= --steps 1 --batch_size 4
        --mini_batch_size 2 --max_new_tokens 40 --rollout_batch_size 16 --threads 1 --lr 1e-4
        --eval_benchmarks {folder}/bench.jsonl --save_every {min(cfg.save_every, 1)}
        --eval_every {min(cfg.eval_every, 1)} --dump_every {min(cfg.dump_every, 1)}
        --output {folder}/run"""
    stapo.main([f"@{request.param}", *small.split()])
    return cfg, folder / "run"


def test_a_recipe_runs(recipe_run):
    cfg, run = recipe_run
    line = json.loads((run / "metrics.jsonl").read_text())
    assert line["step"] == 1 and line["tokens"] > 0 and line["skipped_updates"] == 0
    assert (run / "checkpoints" / "step_000001" / "model.safetensors").exists()
    assert ("eval" in line) == (cfg.eval_every > 0)
    assert (run / "dumps" / "step_000001.json").exists() == (cfg.dump_every > 0)


# ---------------------------------------------------------------------------------- reference.md


def defined_metrics() -> set[str]:
    table = text_of("reference.md").partition("## Metrics")[2].partition("1. Methods without")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_every_metric_is_defined_and_every_definition_is_written(recipe_run):
    cfg, run = recipe_run
    line = json.loads((run / "metrics.jsonl").read_text())
    assert set(line) | {"eval"} == defined_metrics()
    for scores in line.get("eval", {}).values():
        assert all(f"`{name}`" in text_of("reference.md") for name in scores)


def test_the_run_directory_is_described(recipe_run):
    _, run = recipe_run
    page = text_of("reference.md")
    assert {path.name for path in run.iterdir()} <= set(re.findall(r"[\w.]+", page))
    row = json.loads((run / "samples.jsonl").read_text().splitlines()[0])
    assert all(f"`{name}`" in page for name in row)


def stub(monkeypatch, name: str, **members) -> None:
    """A module that is not installed, or is and should not be used."""
    module = types.ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


LINES = [{"step": 1, "reward": -0.5, "loss": None}, {"step": 2, "reward": 0.5, "eval": {"a": 1.0}}]


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """RUN, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN").mkdir()
    (tmp_path / "RUN" / "config.json").write_text('{"seed": 3}')
    (tmp_path / "RUN" / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in LINES))


class Recorded:
    """Stands for TensorBoard's writer and for a run of Weights & Biases."""

    def __init__(self, *args, **options) -> None:
        self.made, self.calls = (args, options), []

    def __enter__(self) -> "Recorded":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def add_scalar(self, *args) -> None:
        self.calls.append(args)

    def log(self, values, step) -> None:
        self.calls.append((values, step))


def test_tensorboard_example(run_folder, monkeypatch):
    stub(monkeypatch, "torch.utils.tensorboard", SummaryWriter=Recorded)
    names: dict = {}
    exec(example("tensorboard"), names)
    expected = [("step", 1, 1), ("reward", -0.5, 1), ("step", 2, 2), ("reward", 0.5, 2)]
    assert names["writer"].calls == expected


def test_wandb_example(run_folder, monkeypatch):
    stub(monkeypatch, "wandb", init=Recorded)
    names: dict = {}
    exec(example("wandb"), names)
    assert names["run"].made[1]["config"] == {"seed": 3}
    assert names["run"].calls == [({"step": 1, "reward": -0.5}, 1), (LINES[1], 2)]
