"""The evaluation: exact scores of a scripted model, interruption, ranks."""

import itertools
import json
import math
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
from helpers import BENCHMARKS, TINY, read_rows, write_rows
from ranks import launch

import eval as evaluation
import stapo
from reward import is_correct
from rollout import INSTRUCTION, Response
from support.files import read_jsonl


class Scripted:
    """In place of rollout.sample: answers as told, in another order, counts what it is asked."""

    def __init__(self, monkeypatch, script):
        self.script, self.asked, self.decoded = script, [], []
        monkeypatch.setattr(evaluation.rollout, "sample", self)

    def __call__(self, model, tokenizer, prompts, *, seed, **options):
        self.decoded.append((options["temperature"], options["top_p"]))
        for place in sorted(range(len(prompts)), key=lambda place: (place % 3, place)):
            prompt = tokenizer.decode(prompts[place])
            text, length, truncated = self.script(prompt, random.Random(seed[place]))
            self.asked.append(prompt)
            yield place, Response(prompts[place], [0] * length, truncated, text)


def lucky(prompt: str, noise: random.Random):
    """Right half of the time, by the seed: what a real sampler looks like from outside."""
    answer = 7 if noise.random() < 0.5 else noise.randint(8, 99)
    return f"∴ \\boxed{{{answer}}}", noise.randint(5, 50), noise.random() < 0.1


def write_problems(path: Path, count: int, gold: str = "7") -> str:
    return write_rows(path, *({"problem": f"problem {i}", "answer": gold} for i in range(count)))


def run(output: Path, *flags: object) -> dict:
    """main() with these flags -> {decoding: {benchmark: scores}} of scores.json."""
    own = ["--model", TINY, "--max_new_tokens", 500, "--output", os.path.relpath(output), *flags]
    evaluation.main([*map(str, own)])
    return json.loads((output / "scores.json").read_text())["scores"]


# ------------------------------------------------------------------------------------------ scores


def test_scores_of_a_scripted_model_are_exact(tmp_path, monkeypatch, capsys):
    right = {"0": iter([1, 1, 0, 0]), "2": iter([1, 1, 1, 1]), "3": iter([0, 0, 1, 0])}

    def script(prompt, noise):
        number = prompt.split("\n")[0].removeprefix("problem ")
        assert prompt == f"problem {number}\n{INSTRUCTION}\n"
        if number == "1":
            return "no idea: \\boxed{ }", 100, True
        return ("\\boxed{7}" if next(right[number]) else "\\boxed{8}"), 20, number == "0"

    Scripted(monkeypatch, script)
    file = write_problems(tmp_path / "four.jsonl", 4)
    found = run(tmp_path / "out", "--benchmarks", file, "--decoding", "training")["training"][
        "four"
    ]
    assert found["mean"] == pytest.approx((50 + 0 + 100 + 25) / 4)
    # rates 50, 0, 100, 25: squared deviations from 43.75 add up to 5468.75
    assert found["standard_error"] == pytest.approx(math.sqrt(5468.75 / 3 / 4))
    assert found["pass_at_k"] == pytest.approx(
        {"1": 43.75, "2": 100 * (5 / 6 + 0 + 1 + 1 / 2) / 4, "4": 75.0}
    )
    names, _, row = (tmp_path / "out" / "table.md").read_text().splitlines()[-3:]
    assert names.endswith("problems x samples | mean@N | pass@N | tokens | truncated | no box |")
    assert row == "| four | training | 4 x 4 | 43.75 ± 21.35 | 75.00 | 40.0 | 50.0% | 25.0% |"


def test_a_checkpoint_has_the_defaults_of_its_run(tmp_path, monkeypatch, capsys):
    """One line says so; a flag goes first. The end says where the results are."""
    Scripted(monkeypatch, lambda prompt, _: (f"\\boxed{{{'?' not in prompt}}}", 9, False))
    folder = shutil.copytree(TINY, tmp_path / "run" / "checkpoints" / "step_000003")
    stored = {"instruction": "So?", "reward": "", "max_new_tokens": 77, "seed": 5}
    (tmp_path / "run" / "config.json").write_text(json.dumps(stored))
    flags = f"--model {folder} --samples 1 --decoding 0,1 --benchmarks "
    flags += write_problems(tmp_path / "few.jsonl", 2, gold="True")
    for more, own, mean in ("", "--instruction='So?' ", 0), (" --instruction=", "", 100):
        output = tmp_path / f"out{mean}"
        evaluation.main(f"{flags}{more} --output {output}".split())
        found = json.loads((output / "scores.json").read_text())
        assert (found["flags"]["max_new_tokens"], found["flags"]["seed"]) == (77, 0)
        assert found["scores"]["0,1"]["few"]["mean"] == mean
        out, err = capsys.readouterr()
        assert err.startswith(f"eval.py: {own}--max_new_tokens=77 --reward='', as in its run")
        assert out.endswith(f"\nresults in {output}\n")


def test_training_from_a_checkpoint_has_the_defaults_of_its_run_too(tmp_path, capsys):
    """Flags that are given win, also those of a file."""
    folder = shutil.copytree(TINY, tmp_path / "run" / "checkpoints" / "step_000003")
    (tmp_path / "best").symlink_to(folder)
    stored = {"instruction": "So?", "reward": "scripts/rewards.py:dapo", "max_new_tokens": 77}
    (tmp_path / "run" / "config.json").write_text(json.dumps(stored | {"lr": 9, "tau_p": 0.5}))
    (tmp_path / "flags").write_text("--max_new_tokens 5 --batch_size 1 --mini_batch_size 1\n")
    own = f"@{tmp_path}/flags --data {TINY}/test.jsonl --model {tmp_path}/best/"
    stapo.main(f"{own} --steps 0 --output {tmp_path}/new".split())
    found = json.loads((tmp_path / "new" / "config.json").read_text())
    names = ("instruction", "reward", "max_new_tokens", "lr", "tau_p")
    assert [found[name] for name in names] == ["So?", stored["reward"], 5, 1e-6, 0.002]
    said = capsys.readouterr().err
    assert "stapo.py: --instruction='So?' --reward='scripts/rewards.py:dapo', as in its run" in said


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    for n in range(1, 8):
        for right in range(n + 1):
            marks = [True] * right + [False] * (n - right)
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(marks, k))
                share = sum(map(any, subsets)) / len(subsets)
                assert evaluation.pass_at_k(n, right, k) == pytest.approx(100 * share, abs=1e-10)
    six = evaluation.accuracy([[i == 0 for i in range(6)]])
    assert list(six["pass_at_k"]) == [1, 2, 4, 6]
    assert six["pass_at_k"][6] == 100 and six["standard_error"] is None


def test_tables_show_the_paper_s_layout(tmp_path, monkeypatch):
    """A file with the name of a benchmark is that benchmark."""
    Scripted(monkeypatch, lucky)
    keys = [benchmark.key for benchmark in evaluation.BENCHMARKS]
    files = [write_problems(tmp_path / f"{key}.jsonl", 2) for key in keys]
    scores = run(tmp_path / "out", "--benchmarks", *files)
    header, _, row = (tmp_path / "out" / "table.md").read_text().splitlines()[:3]
    titles = "AIME24 | AIME25 | AMC23 | MATH500 | Minerva | OlympiadBench | mean"
    assert header == f"| model | decoding | graded by | {titles} |"
    means = [[found["mean"] for found in part.values()] for part in scores.values()]
    cells = [f"{first:.2f} ({second:.2f})" for first, second in zip(*means)]
    cells.append(f"{sum(means[0]) / 6:.2f} ({sum(means[1]) / 6:.2f})")
    assert row == f"| {TINY} | training (justrl) | rule | {' | '.join(cells)} |"
    counts = [found["samples"] for found in scores["training"].values()]
    assert counts == [32] * 3 + [4] * 3


# ------------------------------------------------------ several ranks, and what was interrupted


def run_and_read(output: Path, flags: list) -> tuple[dict, bytes]:
    return run(output, *flags), (output / "samples.jsonl").read_bytes()


def scripted_rank(output: Path, flags: list, killed_at: int) -> None:
    """main() on a rank with a scripted model; the last of three is killed before a response."""

    def script(prompt, noise):
        if rank == "2" and len(fake.asked) == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return lucky(prompt, noise)

    rank = os.environ.get("RANK", "0")
    fake = Scripted(pytest.MonkeyPatch(), script)
    own = f"--model {TINY} --max_new_tokens 500 --output {output}"
    evaluation.main([*own.split(), *flags])  # rank 0 may write its last files after others end
    output.with_name(f"asked-{rank}").write_text(str(len(fake.asked)))


def test_a_kill_costs_no_response_but_a_torn_one(tmp_path, monkeypatch):
    """In the second decoding, on the last of three ranks; then two ranks go on."""
    fake = Scripted(monkeypatch, lucky)
    many = ["--benchmarks", write_problems(tmp_path / "many.jsonl", 7)]  # 2 x 28 responses
    parts, whole = tmp_path / "parts", run_and_read(tmp_path / "whole", many)
    codes = launch(scripted_rank, 3, tmp_path / "log", parts, many, 12)
    assert codes[2] == -9 and all(codes) and not (parts / "samples.jsonl").exists()
    files = sorted(parts.glob("responses.rank*.jsonl"))
    assert [file.name for file in files] == [f"responses.rank{rank}.jsonl" for rank in range(3)]
    shares = [{row["problem"] for row in read_jsonl(file)} for file in files]
    assert shares == [{0, 3, 6}, {1, 4}, {2, 5}]  # the samples of a problem share its prefill
    assert len(list(read_jsonl(files[2]))) == 12
    files[0].write_bytes(files[0].read_bytes()[:-9])  # ranks append here again
    there = [line for file in files for line in file.read_text().split("\n") if line[-1:] == "}"]
    assert launch(scripted_rank, 2, tmp_path / "log", parts, many, -1) == [0, 0]
    assert (parts / "samples.jsonl").read_bytes() == whole[1]
    assert json.loads((parts / "scores.json").read_text())["scores"] == whole[0]
    said = [(tmp_path / f"log.{rank}").read_text() for rank in (0, 1)]
    assert ["| model | decoding |" in text for text in said] == [True, False]
    asked = [int((tmp_path / f"asked-{rank}").read_text()) for rank in (0, 1)]
    assert sum(asked) == 56 - len(there), "no response is sampled twice"
    assert run_and_read(parts, many) == whole and len(fake.asked) == 56, "all are there"


def test_ctrl_c_is_one_line_and_130(tmp_path, monkeypatch, capsys):
    def script(prompt, noise):
        raise KeyboardInterrupt

    Scripted(monkeypatch, script)
    with pytest.raises(SystemExit, match="^130$"):
        run(tmp_path / "out", "--benchmarks", write_problems(tmp_path / "one.jsonl", 1))
    said = "interrupted; the same command goes on with what it has\n"
    assert capsys.readouterr().err.endswith(said)


# ------------------------------------------------------------------------- what a rerun may change


def test_more_samples_decodings_and_benchmarks_join(tmp_path, monkeypatch):
    """What is there is kept, and graded anew."""
    fake, file = Scripted(monkeypatch, lucky), write_problems(tmp_path / "few.jsonl", 3)
    flags, several = ["--benchmarks", file], ["training", "0.6,0.95", "0,1"]
    with pytest.raises(SystemExit, match="positions"):  # a refused command binds no later one
        run(tmp_path / "out", *flags, "--max_new_tokens", 9999)
    run(tmp_path / "out", *flags, "--decoding", "training", "--samples", 2)
    found = run(tmp_path / "out", *flags, "--decoding", *several)
    assert list(found) == several and fake.decoded[-2:] == [(0.6, 0.95), (0, 1)]
    assert [found[name]["few"]["samples"] for name in several] == [4, 4, 1], "greedy takes one"
    assert len(fake.asked) == 12 + 12 + 3
    training = run(tmp_path / "whole", *flags, "--decoding", "training")["training"]
    assert training == found["training"]
    write_problems(tmp_path / "few.jsonl", 3, gold="8")  # a mended answer
    flags += [write_problems(tmp_path / "more.jsonl", 2), "--decoding", "training"]
    found = run(tmp_path / "out", *flags, "--limit", 1, "--samples", 2)["training"]
    assert len(fake.asked) == 2 * 12 + 3 + 12 + 2
    found = found["few"]
    assert (found["problems"], found["samples"]) == (1, 2), "the rest stays, and is not scored"
    found = run(tmp_path / "out", *flags[:2], "--decoding", "training")["training"]
    assert found["few"]["mean"] != training["few"]["mean"]


def test_responses_of_others_are_refused_by_name(tmp_path, monkeypatch):
    """Old responses never score other weights or problems."""
    fake, file = Scripted(monkeypatch, lucky), write_problems(tmp_path / "few.jsonl", 3)
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    weights = shutil.copytree(TINY, tmp_path / "trained") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    (tmp_path / "other").mkdir()
    text = Path(file).read_text().replace("problem 1", "problem 11")
    (tmp_path / "other" / "few.jsonl").write_text(text)
    own = ["--benchmarks", file, "--samples", 1, "--decoding", "training"]
    first = run_and_read(tmp_path / "out", own)
    more = write_problems(tmp_path / "more.jsonl", 1)
    run(tmp_path / "out", "--benchmarks", more, *own[2:])  # few is not among them
    others = {"--seed": 5, "--max_new_tokens": 9, "--instruction": "So?"}
    others |= {"--chat_template": tmp_path / "own.jinja", "--model": tmp_path / "trained"}
    others["--benchmarks"] = tmp_path / "other" / "few.jsonl"
    for flag, value in others.items():
        name = flag.replace("--benchmarks", "benchmark few")
        with pytest.raises(SystemExit, match=f"^eval.py: {name}: .*; name another --output$"):
            run(tmp_path / "out", *own, flag, value)
    with monkeypatch.context() as changed:  # in the code: flags that name other numbers differ
        changed.setitem(evaluation.DECODINGS, "training", (0.6, 0.95))
        with pytest.raises(SystemExit, match="^eval.py: --decoding training: "):
            run(tmp_path / "out", *own)
    assert run_and_read(tmp_path / "out", own) == first and len(fake.asked) == 3 + 1


def test_samples_depend_on_the_seed_and_on_nothing_else_in_the_run(tmp_path, monkeypatch):
    Scripted(monkeypatch, lucky)
    flags = ["--benchmarks", write_problems(tmp_path / "a.jsonl", 5)]
    other = write_problems(tmp_path / "b.jsonl", 5)
    run(tmp_path / "one", *flags)
    run(tmp_path / "two", "--benchmarks", other, *flags[1:])
    run(tmp_path / "three", *flags, "--seed", 1)
    names = "one", "two", "three"
    one, two, three = (read_rows(tmp_path / name / "samples.jsonl") for name in names)
    assert one == [row for row in two if row["benchmark"] == "a"] and one != three
    texts = [row["response"] for row in two]
    parts = [tuple(texts[start : start + 20]) for start in range(0, 80, 20)]
    assert len({*parts}) == 4, "each benchmark and each decoding has seeds of its own"
    assert texts[::4] != texts[1::4], "each sample of a problem has a seed of its own"


# ----------------------------------------------------------------------- a reward of the user's own


def test_a_reward_grades_benchmarks_that_are_files(tmp_path, monkeypatch):
    """The six keep the grader; a reward that was changed grades stored responses again."""
    monkeypatch.chdir(tmp_path)  # the reward changes the directory, and --output is relative
    fake, own = Scripted(monkeypatch, lambda *_: ("\\boxed{7}", 9, False)), tmp_path / "own.py"
    rows = ({"question": f"problem {i}", "level": i} for i in range(6))  # and no answer
    files = write_problems(tmp_path / "aime24.jsonl", 3), write_rows(tmp_path / "task.jsonl", *rows)
    flags = ["--samples", 1, "--decoding", "training", "--reward", f"{own}:level"]
    start = "import os\ndef level(response, row):\n    os.chdir('/')\n"
    for text, mean in (("0.5 if row['level'] < 1 else 1 - row['level']", "16.67"), ("1", "100.00")):
        own.write_text(f"{start}    return {text}\n")
        run(tmp_path / "out", "--benchmarks", *files, *flags)
        line = f"| {TINY} | training | {own}:level (the six: rule) | 100.00 | {mean} |"
        assert line in (tmp_path / "out/table.md").read_text()
    assert len(fake.asked) == 6 + 3


# ------------------------------------------------------------------------- real files, tiny model


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="STAPO_BENCHMARKS names no folder")
def test_the_real_benchmarks_load_with_their_row_counts():
    keys = [benchmark.key for benchmark in evaluation.BENCHMARKS]
    suite = evaluation.load_benchmarks([f"{BENCHMARKS}/{key}.jsonl" for key in keys])
    assert [len(problems) for problems in suite.values()] == [30, 30, 40, 500, 272, 674]
    assert [benchmark.samples for benchmark in suite] == [32, 32, 32, 4, 4, 4]
    for problems in suite.values():
        golds = [f"\\boxed{{{problem['answer']}}}" for problem in problems]
        assert all(is_correct(gold, p["answer"]) for gold, p in zip(golds, problems, strict=True))
