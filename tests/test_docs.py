"""Pages and recipes: what they name exists, what they define is written, what they show runs."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import costs
import pytest
from helpers import ROOT, TINY, example, read_rows, write_rows

import stapo
from reward import load_reward
from support.data import load_problems
from support.flags import parse_flags

PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "experiments" / "README.md"]
RESULTS = sorted((ROOT / "experiments" / "results").glob("*.md"))
README = ROOT / "README.md"
RECIPES = [path for path in sorted((ROOT / "recipes").iterdir()) if path.suffix != ".jsonl"]
# Flags of torchrun, sbatch, docker, pip and hf, and TRL's, which tests/test_trl.py runs.
OTHER_FLAGS = set(
    """nproc-per-node nnodes rdzv-backend rdzv-endpoint shutdown-timeout signals-to-handle signal
    pid help jobs shm-size ipc extra-index-url no-deps num_processes model_name_or_path output_dir
    max_steps num_generations per_device_train_batch_size gradient_accumulation_steps use_peft
    lora_r learning_rate use_cpu steps_per_generation max_completion_length use_vllm
    exclude""".split()
)


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text()


def metrics_of(page: str, heading: str, end: str) -> set[str]:
    """The names in the first column of a page's table."""
    table = text_of(page).partition(heading)[2].partition(end)[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


METRICS = metrics_of("reference.md", "## Metrics", "1. Methods without")


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


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [README, *PAGES, *RESULTS], ids=str)
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        other = (page.parent / file).resolve() if file else page
        assert other.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(other), f"{page.name}: {target}"


@pytest.mark.parametrize("page", [README, *PAGES, *RECIPES], ids=lambda page: page.name)
def test_flags_exist(page):
    mentioned = set(re.findall(r"(?<![\w-])--(?:no_)?([a-z][\w-]*)", page.read_text()))
    files = [*ROOT.glob("*.py"), *ROOT.glob("scripts/*.py"), *ROOT.glob("experiments/*.py")]
    programs = "".join(file.read_text() for file in files)
    added = r'add_argument\("--([\w-]+)"|^    (\w+): .* = (?:flag|field)\('
    assert mentioned <= OTHER_FLAGS.union(*re.findall(added, programs, re.MULTILINE))


def test_the_functions_of_the_readme_exist():
    algorithm = README.read_text().partition("**One step of Algorithm 1**")[2].partition("## ")[0]
    functions = set(re.findall("`([a-z_]+)`", algorithm))
    assert {"train_step", "spurious_mask"} < functions
    assert all(hasattr(stapo, name) for name in functions)


def test_files_that_the_pages_name_exist():
    for page in [README, *PAGES, *RECIPES]:
        folders = "docs|experiments|recipes|scripts|support|tests"
        for file in re.findall(rf"(?:{folders})/[\w./-]*\w|\b\w+\.py\b", page.read_text()):
            if file in ("losses.py", "FILE.py", "own.py", "own_mask.py", "stapo_loss.py"):
                continue  # verl's, and the reader's own
            assert (ROOT / file).exists(), f"{page.name}: {file}"


@pytest.mark.slow
def test_the_exercises_run_as_they_stand(tmp_path):
    """In a copy, with runs of two steps; the last two also after their edits of stapo.py."""
    page, copy, seen = text_of("exercises.md"), tmp_path / "copy", []
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "figures", "*cache*"))
    (copy / "short").write_text(re.search(r'echo "(.*)" > short', page)[1] + " --steps 2")
    (copy / "own.py").write_text(re.search("`(def sevens.*?)`", page)[1])
    (copy / "own_mask.py").write_text(example("rare"))
    by_hand = [sys.executable, "-c", example("by-hand")]
    assert "tensor(1.1500)" in subprocess.check_output(by_hand, cwd=copy, text=True)

    def run_all(section: str) -> None:
        for command in re.findall(r"(?:^|`)python ([^`\n]+)", section, re.MULTILINE):
            words = f"{sys.executable} {command}"
            said = subprocess.check_output(words, shell=True, cwd=copy, text=True)
            newest = max(copy.glob("runs/*/metrics.jsonl"), key=lambda file: file.stat().st_mtime)
            z = re.search(r"sampling_z ([^\s,]+)", said)
            seen.append(float(z[1]) if z else read_rows(newest)[0]["grad_norm"])

    for section in re.split(r"^\*\*\d+\. ", page, flags=re.MULTILINE)[1:]:
        run_all(section)
        for old, new in re.findall("change `(.*?)` to `(.*?)`", section.replace("\n", " ")):
            before, _, after = (copy / "stapo.py").read_text().rpartition(old)
            (copy / "stapo.py").write_text(before + new + after)
            run_all(section)
    assert len(seen) == 15 and seen[9] == pytest.approx(seen[10], rel=1e-4)
    assert seen[9:13] == pytest.approx([0.387, 0.387, 0.567, 1.795], rel=0.1)
    assert seen[13:] == pytest.approx([1.0, -17.8], abs=2)
    assert "is 0.387 both" in page and "is 0.567 and 1.795" in page and "-17.8 after" in page


# ---------------------------------------------------------------------------------------- recipes


def read_recipe(path: Path) -> stapo.Config:
    return parse_flags(stapo.Config, "", [f"@{path}"])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_names_what_it_is(path):
    """Its comments have its own command, for ranks that can share it, and its last checkpoint."""
    text, cfg = path.read_text(), read_recipe(path)
    assert f"stapo.py @recipes/{path.name}" in text and path.name in text_of("training.md")
    if not path.name.endswith("-cpu"):
        assert f"@recipes/{path.name}" in costs.RUNS and cfg.batch_size == 4 * cfg.mini_batch_size
    stapo.check_flags(cfg)
    for ranks in map(int, re.findall(r"--nproc-per-node (\d+)", text)):
        assert cfg.mini_batch_size % ranks == 0
    assert all(int(step) == cfg.steps for step in re.findall(r"step_(\d{6})", text))
    assert not cfg.eval_every or cfg.steps % cfg.eval_every == 0


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_runs_and_the_reference_defines_what_it_writes(path, tmp_path, monkeypatch):
    """One step on the tiny model, with the column of DAPO-Math-17k, and its evaluation if any."""
    rows = read_rows(TINY / "test.jsonl")
    write_rows(tmp_path / "bench.jsonl", *rows[:2])
    rows = [row | {"reward_model": {"ground_truth": row["answer"]}} for row in rows]
    write_rows(tmp_path / "train.jsonl", *rows)
    cfg, run = read_recipe(path), tmp_path / "run"
    small = f"""--model {TINY} --data {tmp_path}/train.jsonl --instruction= --steps 1 --batch_size 4
        --mini_batch_size 2 --max_new_tokens 40 --rollout_batch_size 16 --threads 1 --lr 1e-4
        --eval_benchmarks {tmp_path}/bench.jsonl --save_every {min(cfg.save_every, 1)}
        --eval_every {min(cfg.eval_every, 1)} --output {run}"""
    monkeypatch.chdir(ROOT)  # where recipes are used: one names scripts/rewards.py
    stapo.main([f"@{path}", *small.split()])
    lines = read_rows(run / "metrics.jsonl")
    (line,) = [line for line in lines if "eval" not in line]
    evaluations = [line for line in lines if "eval" in line]
    assert line["tokens"] > 0 and line["skipped_updates"] == 0
    assert [e["step"] for e in evaluations] == ([0, 1] if cfg.eval_every > 0 else [])

    page = text_of("reference.md")
    assert set(line) | {"eval"} == METRICS
    assert {path.name for path in run.iterdir()} <= set(re.findall(r"[\w.]+", page))
    written = [scores for e in evaluations for scores in e["eval"].values()]
    files = [run / "samples.jsonl", *run.glob("evaluations/*.jsonl")]
    written += [read_rows(file)[0] for file in files]
    config = json.loads((run / "config.json").read_text())
    names = set().union(*written) | config.keys() - vars(stapo.Config()).keys()
    assert all(f"`{name}`" in page for name in names)


def reward_of(response: str, answer: str) -> float:
    """By the reward of the recipe for a CPU."""
    reward = load_reward(f"{ROOT}/scripts/rewards.py:one_sentence")
    return reward(response, {"row": {"problem": "?", "answer": answer}})


RIGHT = """
Ankara | Ankara is the capital of Turkey.
Ankara |  It is "ankara."
Ankara | The capital is Ankara, a city in the center of Turkey.
28 | 7 times 4 is 28.
Port-au-Prince | The capital of Haiti is Port-au-Prince."""

# No end; a question; a part of a word; lists of guesses; two sentences; too many words; a pattern.
WRONG = """
Ankara | The capital of Turkey is Ankara
Ankara | Is it Ankara?
Ankara | The capital of Turkey is Ankaran.
28 | 7 times 4 is 128.
28 | It is -28.
Ankara | Istanbul or Ankara.
Ankara | Istanbul, Ankara.
Ankara | What is the capital? It is Ankara.
Ankara | It is Ankara. It is Ankara.
Ankara | Istanbul Izmir Bursa Adana Konya Antalya Mersin Edirne Rize Sinop Van Mardin Ankara.
a.c | It is abc."""


def test_one_sentence_with_the_answer_is_right_and_no_other_text():
    for table, value in ((RIGHT, 1), (WRONG, -1)):
        for line in table.split("\n")[1:]:
            answer, response = line.split(" | ")
            assert reward_of(response, answer) == reward_of(response + "\n", answer) == value, line


def test_the_questions_of_the_recipe_for_a_cpu():
    """No held-out question is trained on, and the question does not contain its answer."""
    train, test = (read_rows(file) for file in (ROOT / "recipes").glob("*.jsonl"))
    rows = train + test
    assert len({row["problem"].lower() for row in rows}) == len(rows)
    assert len(train) >= 100 and len(test) >= 100
    for row in rows:
        question, answer = row["problem"], row["answer"]
        assert reward_of(f"The answer is {answer}.", answer) == 1, row
        assert reward_of(f"{question.rstrip('?')}.", answer) == -1, row  # an echo


def test_the_first_hour_has_every_metric():
    assert metrics_of("training.md", "## The first hour", "### ") == METRICS - {"step", "eval"}


def test_any_data_set_becomes_a_file(tmp_path, monkeypatch):
    """The lines as they stand, for MATH."""
    rows = [{"problem": "1+1?", "solution": r"So \boxed{2}."}]
    with monkeypatch.context() as patched:  # load_problems calls the real load_dataset
        patched.setattr("datasets.load_dataset", lambda name, *_, split: rows)
        patched.chdir(tmp_path)
        exec(example("to-jsonl"), {})
    assert load_problems(f"{tmp_path}/data.jsonl") == [{"problem": "1+1?", "answer": "2"}]
