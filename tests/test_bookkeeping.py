"""What a run writes: metrics, samples, checkpoints, lines on the terminal, and to trackers."""

import json
import os
import re
import shutil
import subprocess
import sys
from unittest.mock import Mock

import pytest
from helpers import FLAGS, ROOT, TINY, lines, read_rows, run, weights, write_rows
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import stapo
from rollout import load_tokenizer
from support import installed, progress
from support.checkpoints import checkpoints
from support.data import load_problems
from support.flags import parse_flags


def test_a_run_is_lines_of_metrics_and_samples(tmp_path, capsys):
    """And a line a step in a log: no bar, no carriage return. The first has the versions."""
    run(tmp_path / "run")
    out, said = capsys.readouterr()
    first, *steps = said.split("\n")
    assert first.startswith("1 x CPU (threads: 1); Python 3.")
    assert f"transformers {installed()['transformers']}, " in first
    for step, line in enumerate(steps[:-1], start=1):
        assert re.fullmatch(rf"step {step} of 2: .* s, about \d\d:\d\d left", line)
    assert len(steps) == 3 and steps[-1] == ""
    assert "\r" not in said and "--- step 1, " in out
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["versions"] == installed() and config["changes"] == []
    answers = {p["problem"]: p["answer"] for p in load_problems(str(TINY / "test.jsonl"))}
    rows = read_rows(tmp_path / "run" / "samples.jsonl")
    assert [row["step"] for row in rows] == [1] * 8 + [2] * 8
    for row in rows:
        assert row["gold"] == answers[row["problem"]] and abs(row["reward"]) == 1
        assert row["advantage"] == 0 or (row["advantage"] > 0) == (row["reward"] > 0)
        assert (row["reward"] == 1) == (f"\\boxed{{{row['gold']}}}" in row["response"])


def test_checkpoints_every_few_steps(tmp_path, monkeypatch):
    """The newest two stay, and what a user copied. Tied weights are in them once.

    Here tied weights are two copies, as from a GPU. On a CPU transformers sees that they are one.
    """

    def copied(*args, **options):
        return {name: x.clone() for name, x in get_model_state_dict(*args, **options).items()}

    monkeypatch.setattr("support.checkpoints.get_model_state_dict", copied)
    run(tmp_path / "run", "--steps 5 --save_every 2 --keep_last 2")
    folders = checkpoints(tmp_path / "run")
    assert [folder.name for folder in folders] == ["step_000004", "step_000005"]
    assert len(weights(tmp_path / "run")) < 1.01 * (TINY / "model.safetensors").stat().st_size
    shutil.copytree(folders[0], f"{folders[0]}_best")
    stapo.main(f"--resume {tmp_path}/run --steps 7 --save_every 0".split())
    names = {path.name for path in folders[0].parent.iterdir()}
    assert names == {"step_000004_best", "step_000005", "step_000007"}


def test_an_old_checkpoint_that_cannot_be_deleted(tmp_path, monkeypatch, capsys):
    """A line says so, and the half that is left is no checkpoint. The next run deletes it."""
    real = shutil.rmtree

    def fail(folder):
        (folder / "config.json").unlink()
        raise PermissionError("a file is in use")

    monkeypatch.setattr("shutil.rmtree", fail)
    run(tmp_path / "run", "--steps 2 --save_every 1 --keep_last 1")
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step_000002"]
    assert "step_000001: cannot be deleted (a file is in use)\n" in capsys.readouterr().err
    monkeypatch.setattr("shutil.rmtree", real)
    stapo.main(f"--resume {tmp_path}/run --steps 3".split())
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_000003"]


def test_a_checkpoint_is_sampled_elsewhere_as_in_training(tmp_path):
    """Its stop ids have the chat template's end of turn, here a brace.

    The tiny model's own settings are temperature 0.6, top_k 20, top_p 0.95 and one stop id.
    """
    model, turns = shutil.copytree(TINY, tmp_path / "model"), "{% for m in messages %}"
    tokenizer = load_tokenizer(str(TINY))
    turns += "{{ m.content + ('{' if m.role == 'assistant' else '\\n') }}{% endfor %}"
    tokenizer.add_special_tokens({"additional_special_tokens": ["{"]})
    tokenizer.chat_template = turns
    tokenizer.save_pretrained(model)
    brace = tokenizer.convert_tokens_to_ids("{")
    run(tmp_path / "run", f"--model {model} --steps 1 --save_every 1")
    stapo.main(f"--resume {tmp_path}/run --steps 2".split())
    first, second = checkpoints(tmp_path / "run")
    held, later = ((step / "generation_config.json").read_text() for step in (first, second))
    wanted = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    assert json.loads(held) == json.loads(held) | wanted | {"eos_token_id": [0, brace]}
    assert later == held


def test_the_sampler_is_suspect_where_gap_and_z_are_large(capsys):
    for gap, z, warned in ((0.01, -9, 1), (-0.01, 9, 1), (0.01, 3, 0), (0.001, 9, 0)):
        progress.check_sampler({"step": 1, "sampling_gap": gap, "sampling_z": z})
        assert capsys.readouterr().err.count("the sampler does not draw from the policy") == warned


def test_a_run_warns_if_its_sampler_is_wrong(tmp_path, monkeypatch, capsys):
    real = stapo.sample
    monkeypatch.setattr(stapo, "sample", lambda *a, **k: real(*a, **k | {"temperature": 0.5}))
    run(tmp_path / "run", f"--data {TINY}/train.jsonl --steps 1 --batch_size 16 --group_size 8")
    assert "the sampler does not draw from the policy" in capsys.readouterr().err


def test_a_file_of_flags_reads_like_a_command_line(tmp_path, monkeypatch):
    """Comments, quotes, ~ and $VAR; in --output=~/x no shell expands them. A text keeps them."""
    monkeypatch.setenv("HOME", f"{tmp_path}/home")
    monkeypatch.setenv("DISK", "/disk#2")
    text = """# don't
        --data $DISK/data.jsonl   # it's here
        --eval_benchmarks ~/a.jsonl aime24 "$DISK/b c.jsonl" --reward ~/own.py:f#
        --instruction "# $HOME ~" --model /runs/c#1 --seed 4#"""
    (tmp_path / "flags").write_text(text[:-1])
    cfg = parse_flags(stapo.Config, "", [f"@{tmp_path}/flags", "--output=~/x", "--resume="])
    benchmarks = [f"{tmp_path}/home/a.jsonl", "aime24", "/disk#2/b c.jsonl"]
    assert (cfg.data, cfg.eval_benchmarks) == ("/disk#2/data.jsonl", benchmarks)
    assert (cfg.output, cfg.reward) == (f"{tmp_path}/home/x", f"{tmp_path}/home/own.py:f#")
    assert (cfg.instruction, cfg.model, cfg.seed) == ("# $HOME ~", "/runs/c#1", 4)


# --------------------------------------------------------------------------------------- trackers


def test_tensorboard_has_each_step_once_also_of_a_resumed_run(tmp_path):
    """Step 2 is made again, because its checkpoint is lost."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    more = "--save_every 1 --report_to tensorboard --eval_every 3 --eval_limit 2 --eval_samples 1"
    run(tmp_path / "run", f"{more} --eval_benchmarks {TINY}/test.jsonl")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000002")
    stapo.main(f"--resume {tmp_path}/run --steps 3".split())
    written = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    found = lines(tmp_path / "run")
    steps = {line["step"]: line for line in found if "loss" in line}
    for name in ("loss", "entropy", "silenced_fraction"):
        scalars = {each.step: each.value for each in written.Scalars(name)}
        assert scalars == pytest.approx({step: line[name] for step, line in steps.items()})
        assert len(written.Scalars(name)) == len(steps) == 3
    means = {line["step"]: line["eval"]["test"]["mean"] for line in found if "eval" in line}
    assert {each.step: each.value for each in written.Scalars("eval/test")} == means
    assert list(means) == [0, 3]


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_trackers_go_on_under_the_name_of_the_run(tmp_path, monkeypatch, kind):
    tracker = Mock(__spec__="any")
    monkeypatch.setitem(sys.modules, kind, tracker)
    run(tmp_path / "run", f"--steps 1 --report_to {kind}")
    stapo.main(f"--resume {tmp_path}/run --steps 2".split())
    own = json.loads((tmp_path / "run" / "config.json").read_text())
    expected = {"project": "stapo", "name": own["id"], "resume": "allow"}
    expected |= {"id": own["id"]} if kind == "wandb" else {}
    for steps, call in enumerate(tracker.init.call_args_list, start=1):
        assert call.kwargs.pop("config")["steps"] == steps and call.kwargs == expected
    assert own["id"].startswith("run-")
    variables = {"PROJECT": "mine", "NAME": "night", "RUN_ID": "r1", "RESUME": "must"}
    for name, value in variables.items():  # the user's own win; trackio has no id
        monkeypatch.setenv(f"{kind.upper()}_{name}", value)
    sent = tracker.init.return_value
    progress.Tracker(kind, tmp_path, "run", 0, {})
    expected = {"project": "mine", "name": "night", "resume": "must", "config": {}}
    expected |= {"id": "r1"} if kind == "wandb" else {}
    assert tracker.init.call_args_list.pop().kwargs == expected and tracker.init.call_count == 3
    assert sent.finish.call_count == 2
    for call, line in zip(sent.log.call_args_list, lines(tmp_path / "run"), strict=True):
        (numbers,) = call.args
        known = {name: value for name, value in line.items() if value is not None}
        assert numbers | known == numbers and None not in numbers.values()
        assert call.kwargs == {"step": line["step"]}


def test_a_package_that_is_not_installed(tmp_path, monkeypatch):
    """Nor is a folder with its name, which wandb leaves where it ran."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    (tmp_path / "trackio").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for kind in ("wandb", "trackio"):
        message = f"^stapo.py: --report_to {kind}: not installed; pip install {kind}$"
        with pytest.raises(SystemExit, match=message):
            run(tmp_path / "run", f"--report_to {kind}")


def test_a_tracker_without_its_key_ends_a_run_before_anything_is_written(tmp_path, monkeypatch):
    """So the same command works after `wandb login`."""
    tracker = Mock(__spec__="any", init=Mock(side_effect=[OSError("no key"), Mock()]))
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    with pytest.raises(OSError, match="no key"):
        run(tmp_path / "run", "--steps 1 --report_to wandb")
    assert len(run(tmp_path / "run", "--steps 1 --report_to wandb")) == 1


# ---------------------------------------------------------------------------------- the terminal


def test_characters_that_a_terminal_lacks_end_no_program(tmp_path):
    """A problem in Chinese, a table with ±, curves of a run whose name is no ASCII."""
    row = {"problem": "计算 1+1", "answer": "2", "source": "é"}
    data = write_rows(tmp_path / "data.jsonl", row)
    run_, more = tmp_path / "läuft", "--samples 2 --decoding training --max_new_tokens 4"
    train = f"{FLAGS} --steps 1 --batch_size 2 --data {data}".split()
    commands = {
        "stapo.py": [*train, "--output", run_],
        "eval.py": [*f"--model {TINY} --benchmarks {data} {more} --output {tmp_path}/e".split()],
        "scripts/figures.py": [run_],
    }
    for program, argv in commands.items():
        environment = os.environ | {"PYTHONIOENCODING": "ascii", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, ROOT / program, *argv]
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        assert "?" in ended.stdout
