"""What a run keeps: resuming, saving, stopping, samples, own rewards; and what it refuses."""

import contextlib
import datetime
import errno
import io
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
import weakref
from dataclasses import FrozenInstanceError
from pathlib import Path

import conftest
import figures
import pytest
import tokens
import torch
import tqdm
from helpers import FLAGS, ROOT, TINY, lines, read_rows, refused, run, stopped, weights
from ranks import begin
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

import eval as evaluation
import rollout
import stapo
import support.checkpoints
from rollout import Policy, load_policy, load_tokenizer
from stapo import Config
from support import decoding, distributed, files, progress, run_folder
from support import stop as stopping
from support.checkpoints import checkpoints, step_of
from support.errors import InputError, RewardError
from support.flags import Parser
from support.output import unread_output_is_dropped
from support.problems import load_problems

# ------------------------------------------------------------------------------------- resuming


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two steps, saved at the end: tests read it or continue a copy of it."""
    output = tmp_path_factory.mktemp("runs") / "finished"
    run(output, "--method full-mask --seed 3")
    return output


def test_the_directory_alone_is_enough_to_resume(finished, tmp_path, capsys):
    """Three steps in two parts, the second without a flag of the first, are three steps in one.

    The first part is by a version that has no --beta yet.
    """
    output = shutil.copytree(finished, tmp_path / "run")
    config = json.loads((output / "config.json").read_text())
    del config["beta"]
    (output / "config.json").write_text(json.dumps(config))
    # What a kill has left of a save at another step.
    (output / "checkpoints" / "step_000007.partial" / "trainer").mkdir(parents=True)
    stapo.main(f"--resume {output} --steps 3 --log_samples 2".split())
    assert "(steps 1 and 3)" in capsys.readouterr().out
    config = json.loads((output / "config.json").read_text())
    assert (config["method"], config["seed"], config["steps"]) == ("full-mask", 3, 3)
    run(tmp_path / "whole", "--method full-mask --seed 3 --steps 3")
    assert lines(output) == lines(tmp_path / "whole")
    assert weights(output) == weights(tmp_path / "whole")
    assert not list(tmp_path.glob("*/checkpoints/*.partial"))
    steps = [row["step"] for row in read_rows(output / "samples.jsonl")]
    assert steps == [1] * 8 + [2] * 8 + [3] * 2
    whole = read_rows(tmp_path / "whole" / "samples.jsonl")
    assert read_rows(output / "samples.jsonl") == whole[:18]


@pytest.mark.parametrize(
    "flags", ["--method stapo", "--seed 7", "--tau_p 0.1", "--output elsewhere", "--steps 1"]
)
def test_a_flag_that_differs_is_refused_by_name(finished, capsys, flags):
    """Fewer steps than the run has done, too."""
    name, value = flags.split()
    held = (finished / "config.json").read_bytes(), (finished / "metrics.jsonl").read_bytes()
    message = refused(capsys, f"--resume {finished} {flags}")
    assert f"{name} {value}" in message and str(finished) in message
    assert held == tuple((finished / x).read_bytes() for x in ("config.json", "metrics.jsonl"))


@pytest.mark.parametrize(
    "line, words",
    [
        ("--output runs/a#2 --lr 1e-5  # it's mine", ["--output", "runs/a#2", "--lr", "1e-5"]),
        ("# it's a comment", []),
        ("\t#comment", []),
        (r"""--a "x # \" # y" '# z' \# 1 #""", ["--a", 'x # " # y', "# z", "#", "1"]),
        (r"""--a "#5" 'a'#b  # "c""", ["--a", "#5", "a#b"]),
    ],
)
def test_a_comment_in_an_arguments_file_begins_a_word(line, words):
    assert Parser(Config, "").convert_arg_line_to_args(line) == words


def test_no_step_changes_a_flag():
    """config.json is written before the first one, and --resume takes the flags from there."""
    with pytest.raises(FrozenInstanceError):
        Config().tau_p *= 0.5


def test_what_holds_no_run_or_no_checkpoint_is_refused_and_left(finished, tmp_path, capsys):
    assert "mistyped" in refused(capsys, f"--resume {tmp_path}/mistyped")
    assert not (tmp_path / "mistyped").exists()
    output = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(output / "checkpoints")
    (output / "checkpoints" / "step_000001.partial").mkdir(parents=True)  # half of the first
    assert "no checkpoint" in refused(capsys, f"--resume {output}")
    assert not list((output / "checkpoints").iterdir())
    assert len(lines(output)) == 2
    assert "--resume" in refused(capsys, f"{FLAGS} --output {output}")


def test_a_checkpoint_of_another_run_is_not_this_runs_newest(finished, tmp_path, capsys):
    output, flags = shutil.copytree(finished, tmp_path / "run"), "--keep_last 1 --steps 3"
    other = output / "checkpoints" / "step_000005"
    shutil.copytree(output / "checkpoints" / "step_000002", other)
    assert f"{other} is of a step that" in refused(capsys, f"--resume {output} {flags}")
    shutil.move(other, tmp_path)
    save = support.checkpoints.save_checkpoint

    def while_it_is_copied(*arguments):
        shutil.copytree(tmp_path / "step_000005", other)
        save(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "save_checkpoint", while_it_is_copied)
        stapo.main(f"--resume {output} {flags}".split())
    assert [step_of(path) for path in checkpoints(output)] == [3, 5]


def test_runs_without_an_output_that_start_in_the_same_second_are_apart(tmp_path, monkeypatch):
    clock = types.SimpleNamespace(strftime=lambda _: "20260101-000000", monotonic=time.monotonic)
    monkeypatch.setattr(stapo, "time", clock)
    flags = [flag.replace("tests/tiny", str(TINY)) for flag in FLAGS.split()]
    monkeypatch.chdir(tmp_path)
    for process in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        stapo.main([*flags, "--model", str(TINY), "--steps", "1"])
    assert [len(lines(path)) for path in (tmp_path / "runs").iterdir()] == [1, 1]


def hold(folder: Path, name: str) -> None:
    """A process that works in folder / name until it is killed; a child of it lives on."""
    run_folder.claim(folder / name)
    if os.fork() == 0:
        time.sleep(5)
        os._exit(0)
    (folder / "held").touch()
    time.sleep(100)


def test_a_directory_has_one_process_until_that_is_killed(finished, tmp_path, monkeypatch, capfd):
    """A new run, a resumed one and an evaluation; there is nothing to clean up."""
    shutil.copytree(finished, tmp_path / "resumed")
    short = f"--model {TINY} --benchmarks {TINY}/test.jsonl --limit 1 --samples 1 --decoding 0,1"
    for name, program, flags in (
        ("resumed", stapo.main, f"--resume {tmp_path}/resumed"),
        ("new", stapo.main, f"{FLAGS} --steps 1 --output {tmp_path}/new"),
        ("eval", evaluation.main, f"{short} --max_new_tokens 4 --output {tmp_path}/eval"),
    ):
        (holder,) = begin(hold, 1, tmp_path / "log", tmp_path, name)
        while not (tmp_path / "held").exists():
            assert holder.is_alive(), (tmp_path / "log.0").read_text()
            time.sleep(0.01)
        (tmp_path / "held").unlink()
        before = sorted(path.name for path in (tmp_path / name).rglob("*"))
        with pytest.raises(SystemExit, match=f"{name}: process {holder.pid} on .* works there"):
            program(flags.split())
        assert sorted(path.name for path in (tmp_path / name).rglob("*")) == before
        holder.kill()
        holder.join()
        program(flags.split())

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    # `datasets` locks files of its own by the same function.
    monkeypatch.setattr(run_folder, "fcntl", types.SimpleNamespace(LOCK_EX=2, LOCK_NB=4))
    run_folder.fcntl.lockf = no_locks
    stapo.main(["--resume", str(tmp_path / "resumed")])
    assert "no locks (No locks available)" in capfd.readouterr().err


def test_a_run_ends_when_another_process_goes_on_with_it(tmp_path, monkeypatch):
    """Locks of its file system hold on one host only. No step is in metrics.jsonl twice.

    A second process that is refused ends nothing, and leaves a checkpoint that is being written.
    """
    output, end_step = tmp_path / "run", stapo.RunFolder.end_step
    half = output / "checkpoints" / "step_000009.partial"

    def meet_another(self, line, samples):  # a lock does not hold against its own process
        monkeypatch.setattr(run_folder.socket, "gethostname", lambda: "another host")
        if line["step"] == 2:
            half.mkdir()
            with pytest.raises(InputError, match="holds a run"):
                stapo.RunFolder(str(output), self.flags)
            assert half.exists()
        elif line["step"] == 3:
            stapo.RunFolder(str(output), self.flags | {"resume": str(output)}).begin({})
            assert not half.exists()
        end_step(self, line, samples)

    monkeypatch.setattr(stapo.RunFolder, "end_step", meet_another)
    with pytest.raises(SystemExit, match="run: process .* on another host .* works there, too"):
        run(output, "--steps 3 --save_every 1")
    assert [line["step"] for line in lines(output)] == [1, 2]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_folder_of_somebody_else_is_refused_and_left(finished, tmp_path, capsys):
    """A model's, or one with a file more; neither a run nor an evaluation writes a byte to it."""
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "alone").mkdir()
    shutil.copy(TINY / "config.json", tmp_path / "alone")
    (tmp_path / "editor").mkdir()
    (tmp_path / "editor" / "settings.json").write_text('{"tabs": 4}')  # eval.py's has this name
    notes = shutil.copytree(finished, tmp_path / "notes")
    for name in ("metrics.jsonl", "samples.jsonl", "checkpoints"):
        os.renames(notes / name, tmp_path / "away" / name)
    (notes / "notes.txt").touch()
    before = contents(tmp_path)
    for name, said in (
        ("model", "config.json"),
        ("alone", "config.json"),
        ("editor", "settings.json"),
        ("notes", "notes.txt"),
    ):
        message = refused(capsys, f"{FLAGS} --output {tmp_path}/{name}")
        assert f"--output {tmp_path}/{name}" in message and said in message
        flags = f"--model {TINY} --benchmarks {TINY}/test.jsonl --output {tmp_path}/{name}"
        with pytest.raises(SystemExit, match=f"--output {tmp_path}/{name}: holds "):
            evaluation.main(flags.split())
    assert "holds no run" in refused(capsys, f"--resume {tmp_path}/model --steps 9")
    assert contents(tmp_path) == before
    (notes / "notes.txt").unlink()
    for name in ("config.partial", ".DS_Store"):  # half of a file, and what nobody has written
        (notes / name).touch()
    run(notes, "--steps 1")  # what a run leaves that ended before its first step


def test_rank_0_names_the_directory(tmp_path, monkeypatch):
    """A default name holds the time, and two ranks can see two seconds."""
    rank_0 = {f"{tmp_path}/12:00:01": f"{tmp_path}/12:00:00"}
    monkeypatch.setattr(run_folder, "broadcast", lambda value: rank_0.get(value, value))
    made = run_folder.RunFolder(f"{tmp_path}/12:00:01", {"resume": "", "steps": 1})
    assert [made.path] == list(tmp_path.iterdir()) == [tmp_path / "12:00:00"]


def test_every_weight_of_a_large_matrix_counts():
    model = torch.nn.Linear(2**12, 2**12 + 1, bias=False)  # more than is summed at a time
    before = support.checkpoints.weights_fingerprint(model)
    model.weight.data[-1, -1] += 1
    assert support.checkpoints.weights_fingerprint(model) != before


def test_a_fingerprint_sees_what_json_cannot_hold():
    """A date column of a .parquet file, but no address in memory and no order of columns."""
    values = [datetime.date(2024, 1, 1), datetime.date(2024, 1, 2), datetime.time(1), b"1", b"2"]
    assert len({files.fingerprint([value]) for value in values}) == 5
    assert files.fingerprint([object()]) == files.fingerprint([object()])
    assert files.fingerprint({"a": 1, "b": 2}) == files.fingerprint({"b": 2, "a": 1})


def test_the_model_and_the_data_may_move(finished, tmp_path, capsys):
    """The checkpoint has tokenizer and config; contents are compared, wherever they are."""
    for method, name in (("full-mask", "run"), ("grpo", "kl")):
        model = shutil.copytree(TINY, tmp_path / "model")
        data = shutil.copy(TINY / "test.jsonl", tmp_path / "data.jsonl")
        run(tmp_path / name, f"--method {method} --seed 3 --steps 1 --model {model} --data {data}")
        shutil.rmtree(model)
        os.remove(data)
    again = f"--steps 2 --data {TINY}/test.jsonl --resume {tmp_path}"
    assert "no such file" in refused(capsys, f"--steps 2 --resume {tmp_path}/run")
    assert "leave the flag out" in refused(capsys, f"{again}/run --model {TINY}")
    text = (TINY / "test.jsonl").read_text().replace('"answer": "', '"answer": "1', 1)
    (tmp_path / "other.jsonl").write_text(text)
    assert "not what" in refused(capsys, f"{again}/run --data {tmp_path}/other.jsonl")
    stapo.main(f"{again}/run".split())
    assert lines(tmp_path / "run") == lines(finished)
    assert weights(tmp_path / "run") == weights(finished)
    assert "no model there" in refused(capsys, f"{again}/kl")
    other = checkpoints(finished)[-1]
    assert "not what" in refused(capsys, f"{again}/kl --model {other}")
    stapo.main(f"{again}/kl --model {TINY}".split())
    assert len(lines(tmp_path / "kl")) == 2


@pytest.mark.parametrize(
    "file, size",
    [
        ("model.safetensors", 1000),
        ("model.safetensors", None),
        ("tokenizer.json", 100),
        ("config.json", 20),
        ("trainer/.metadata", None),
        ("trainer/.metadata", 0),
        ("trainer/.metadata", "zeros"),  # as after a power cut
        ("trainer/__0_0.distcp", 1000),
    ],
)
def test_a_damaged_checkpoint_is_named_with_the_one_before_it(
    finished, tmp_path, capsys, caplog, file, size
):
    """size: what is left of a file; None: it is missing; "zeros": its bytes are all 0."""
    output = shutil.copytree(finished, tmp_path / "run")
    newest = output / "checkpoints" / "step_000002"
    damaged = newest / file
    damaged.write_bytes(bytes(1000) if size == "zeros" else damaged.read_bytes()[:size])
    if size is None:
        damaged.unlink()
    message = refused(capsys, f"--resume {output} --steps 3")
    assert f"{newest} cannot be loaded" in message and "there is no other" in message
    shutil.copytree(newest, output / "checkpoints" / "step_000001")
    (output / "checkpoints" / "step_000000").mkdir()  # an older one
    message = refused(capsys, f"--resume {output} --steps 3")
    assert f"--resume {output} continues from step_000001" in message and "\n" not in message
    printed = [record for record in caplog.records if record.name == "root"]
    assert not printed  # DCP's tracebacks of what it cannot read


def test_samples_are_what_the_model_said(finished):
    answers = {p["problem"]: p["answer"] for p in load_problems(str(TINY / "test.jsonl"))}
    for row in read_rows(finished / "samples.jsonl"):
        assert row["gold"] == answers[row["problem"]] and abs(row["reward"]) == 1
        assert row["advantage"] == 0 or (row["advantage"] > 0) == (row["reward"] > 0)
        assert (row["reward"] == 1) == (f"\\boxed{{{row['gold']}}}" in row["response"])


# --------------------------------------------------------------------------- saving and stopping


def test_checkpoints_by_time(tmp_path, monkeypatch):
    """A step in 25 minutes and a checkpoint an hour: after steps 3 and 6 of seven, and at the end.

    The newest two stay, tied weights are in them once, and --threads reaches torch.
    """
    threads, due, now = [], [], [0.0]
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(run_folder, "time", clock)
    real = run_folder.RunFolder.save_is_due

    def save_is_due(folder):
        now[0] += 25 * 60
        if real(folder):
            due.append(folder.step)
        return folder.step in due

    monkeypatch.setattr(run_folder.RunFolder, "save_is_due", save_is_due)
    run(tmp_path / "run", "--steps 7 --keep_last 2 --save_minutes 60 --threads 3")
    assert threads[-1] == 3 and due == [3, 6]
    again = shutil.copytree(tmp_path / "run", tmp_path / "again")
    stapo.main(f"--resume {again} --steps 8 --save_minutes 0".split())
    assert due == [3, 6]  # 0 minutes: never
    folders = checkpoints(tmp_path / "run")
    assert [step_of(folder) for folder in folders] == [6, 7]
    assert len(weights(tmp_path / "run")) < 1.01 * (TINY / "model.safetensors").stat().st_size


def test_an_evaluation_has_a_checkpoint_before_it():
    flags = {"save_minutes": 0, "save_every": 0, "eval_every": 4}
    for step, due in ((3, False), (4, True)):
        now = types.SimpleNamespace(step=step, saved_at=0.0, flags=flags)
        assert run_folder.RunFolder.save_is_due(now) == due


def test_a_checkpoint_is_on_the_disk_before_older_ones_go(tmp_path, monkeypatch):
    """So are its metrics. A user's copy of one stays; one that cannot be deleted ends nothing."""
    synced, renamed, real, delete = set(), [], Path.rename, shutil.rmtree

    def rename(path, target):
        if path.suffix == ".partial":
            renamed.append({tmp_path / "run" / "metrics.jsonl", *path.rglob("*")} <= synced)
        return real(path, target)

    def rmtree(path, **options):
        if not options and "step_000002" in str(path):
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        delete(path, **options)

    monkeypatch.setattr(support.checkpoints, "sync", synced.add)
    monkeypatch.setattr(run_folder, "sync", synced.add)
    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    flags = "--save_every 1 --keep_last 1"
    run(tmp_path / "run", f"--steps 1 {flags}")
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(folder / "step_000001", folder / "step_000001_best")
    stapo.main(f"--resume {tmp_path}/run --steps 4 {flags}".split())
    assert renamed == [True] * 4 and folder in synced
    assert {path.name for path in folder.iterdir()} == {
        "step_000001_best", "step_000002.partial", "step_000004"
    }  # fmt: skip
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step_000004"]


def test_a_checkpoint_is_sampled_elsewhere_as_in_training(tmp_path):
    """By plain generate: a response ends at the chat template's end of turn, here a brace.

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
    plain = AutoModelForCausalLM.from_pretrained(first)
    prompt = torch.tensor([tokenizer("Q: 12-4+20=?\n").input_ids] * 32)
    torch.manual_seed(0)
    made = plain.generate(prompt, max_new_tokens=40)[:, prompt.shape[1] :]
    ended = (made == brace).cumsum(1) > 0
    assert ended.any(1).sum() > 8
    after = ended & (made != brace)
    assert (made[after] == tokenizer.pad_token_id).all()


def test_training_its_evaluations_and_its_checkpoints_sample_alike(tmp_path, monkeypatch):
    """All take the decoding that eval.py names "training"."""
    asked, sample = [], rollout.sample

    def spy(*args, **options):
        asked.append((options["temperature"], options["top_p"]))
        return sample(*args, **options)

    for module in (rollout, stapo):
        monkeypatch.setattr(module, "sample", spy)
    monkeypatch.setitem(evaluation.DECODINGS, "training", (0.9, 0.5))
    evaluated = f"--eval_every 1 --eval_benchmarks {TINY}/test.jsonl --eval_limit 1"
    run(tmp_path / "run", f"--steps 1 {evaluated}")
    text = (checkpoints(tmp_path / "run")[-1] / "generation_config.json").read_text()
    held = json.loads(text)
    assert asked == [(0.9, 0.5)] * 3 == [(held["temperature"], held["top_p"])] * 3


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    """The disk is full after half of the text. A text is on the disk before it gets its name."""
    file, real, synced = tmp_path / "config.json", Path.write_text, []
    monkeypatch.setattr(files, "sync", lambda path: synced.append(path.read_text()))
    files.write_whole(file, "the old text")
    assert synced == ["the old text"] and not list(tmp_path.glob("*.partial"))

    def half(path, text, *args):
        real(path, text[: len(text) // 2], *args)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(InputError, match="config.json cannot be written: .*No space left"):
        files.write_whole(file, "the new text")
    assert file.read_text() == "the old text"
    # The library of the weights has an error of its own.
    with pytest.raises(InputError, match="step_000001 cannot be written: I/O error"):
        with support.checkpoints.saving(tmp_path / "step_000001"):
            raise SafetensorError("I/O error: No space left on device")


def test_repeated_signals_are_one_wish_and_a_later_ctrl_c_stops_at_once(monkeypatch):
    stop, now = stopping.stop, [100.0]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    stop.listen()
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
        os.kill(os.getpid(), number)
        assert stop.asked
    now[0] += 3
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    stop.listen()
    os.kill(os.getpid(), signal.SIGHUP)
    assert not stop.asked
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_a_time_limit_ends_the_process_that_a_reward_forks():
    """Ctrl-C, which reaches the child, too, is left to this process."""
    stopping.stop.listen()
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    os.kill(child.pid, signal.SIGINT)
    child.join(0.2)
    assert child.is_alive()
    child.terminate()
    child.join(10)
    code = child.exitcode
    child.kill()
    assert code == -signal.SIGTERM


def test_a_program_that_a_reward_executes_does_not_ignore_ctrl_c():
    """With preexec_fn, subprocess runs the hooks of a fork. An ignored signal outlives exec."""
    stopping.stop.listen()
    code = "import signal; print(*map(signal.getsignal, (signal.SIGINT, signal.SIGHUP)))"
    begun = [sys.executable, "-c", code]
    with_hooks = subprocess.check_output(begun, preexec_fn=os.setpgrp)
    assert with_hooks == subprocess.check_output(begun)


def test_a_second_ctrl_c_ends_a_process_that_a_reward_forks(capfd):
    stopping.stop.listen()
    stopping.stop.asked_at = -math.inf  # long ago
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.join(0.5)  # Python drops a signal that arrives while it forks
    os.kill(child.pid, signal.SIGINT)
    child.join(10)
    code = child.exitcode
    child.kill()
    assert code == 1 and "stopping" not in capfd.readouterr().err  # a KeyboardInterrupt


def test_a_stop_lets_go_of_the_rollouts_cache_before_it_saves(finished, tmp_path, monkeypatch):
    """On a GPU the cache takes most of the memory, which gathering the weights needs."""
    caches, alive, cache, save = [], [], decoding.SlotCache, run_folder.save_checkpoint

    def made(*args):
        caches.append(cache(*args))
        caches[-1] = weakref.ref(made_last := caches[-1])
        if len(caches) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return made_last

    monkeypatch.setattr(decoding, "SlotCache", made)
    saving = lambda *args: (alive.extend(c() for c in caches), save(*args))[1]  # noqa: E731
    monkeypatch.setattr(run_folder, "save_checkpoint", saving)
    stopped(tmp_path / "run", "")
    assert len(caches) == 2 and alive == [None, None]


def train_unread(output: Path) -> None:
    """As `stapo.py ... | head -1` once head has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1), os.dup2(writer, 2)
    stapo.main(f"{FLAGS} --steps 1000 --output {output}".split())


def test_output_that_nobody_reads_is_dropped(tmp_path):
    """The run goes on, and saves at a stop."""
    output = tmp_path / "run"
    (process,) = begin(train_unread, 1, tmp_path / "log", output)
    while not (output / "metrics.jsonl").exists() or len(lines(output)) < 2:
        assert process.is_alive()
        time.sleep(0.05)
    process.terminate()
    process.join(60)
    assert process.exitcode == 130
    assert [p.name for p in checkpoints(output)] == [f"step_{len(lines(output)):06d}"]


def test_what_is_left_to_print_at_the_end_does_not_fail():
    """Python flushes its streams at exit, and an error there would change the status."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream, contextlib.redirect_stdout(stream):
        with unread_output_is_dropped():
            print("a line")
            bar = tqdm.tqdm(total=2, file=sys.stdout)
            bar.update()
        stream.flush()


def test_what_the_terminal_cannot_show_is_escaped():
    """A response can have any character, and an error would end the run."""
    stream = io.TextIOWrapper(io.BytesIO(), "latin-1")
    with contextlib.redirect_stdout(stream), unread_output_is_dropped():
        print("5 ± 1: π")
    assert stream.buffer.getvalue() == b"5 \xb1 1: \\u03c0\n"


def test_sigterm_under_torchrun_ends_with_a_checkpoint(tmp_path):
    """Sent to every process, as schedulers do: a rank gets a second one from torchrun.

    A lost terminal ends nothing with the flags that docs/training.md gives to nohup and torchrun.
    """
    output = tmp_path / "run"
    command = f"nohup {sys.executable} -m torch.distributed.run --nproc-per-node 2".split()
    command += ["--signals-to-handle", "SIGTERM,SIGINT", "stapo.py"]
    command += f"{FLAGS} --steps 1000 --output {output}".split()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            command,
            **{"cwd": ROOT, "env": environment, "stdout": log, "stderr": log},
            start_new_session=True,
        )
        for steps, number in ((1, signal.SIGHUP), (3, signal.SIGTERM)):
            while not (output / "metrics.jsonl").exists() or len(lines(output)) < steps:
                assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
                time.sleep(0.05)
            os.killpg(process.pid, number)
        process.wait(timeout=60)
    done = len(lines(output))
    assert [p.name for p in checkpoints(output)] == [f"step_{done:06d}"]
    assert f"stopped after step {done}" in (tmp_path / "log").read_text()
    stapo.main(["--resume", str(output), "--steps", str(done + 1)])
    assert [row["step"] for row in lines(output)] == list(range(1, done + 2))


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Flags of a run of one step with evaluations of 6 x 2 responses around it, and that run."""
    folder = tmp_path_factory.mktemp("evaluated")
    problems = (TINY / "test.jsonl").read_text().splitlines(keepends=True)
    (folder / "six.jsonl").write_text("".join(problems[:8]))
    flags = f"--steps 1 --eval_every 1 --eval_benchmarks {folder}/six.jsonl --eval_limit 6"
    flags += " --eval_samples 2 --rollout_batch_size 4"
    run(folder / "run", flags)
    return flags, folder / "run"


def test_evaluations_are_lines_of_their_own_and_change_no_step(evaluated, tmp_path, capsys):
    flags, whole = evaluated
    log = read_rows(whole / "metrics.jsonl")
    assert [line["step"] for line in log] == [0, 1, 1] and set(log[0]) == {"step", "eval"}
    first, score = f"{log[0]['eval']['six']['mean']:.1f} ± ", log[2]["eval"]["six"]
    assert (score["problems"], score["samples"]) == (6, 2) and set(log[2]) == {"step", "eval"}
    run(tmp_path / "run", "--steps 1 --rollout_batch_size 4")
    assert lines(tmp_path / "run") == lines(whole)[1:2]
    capsys.readouterr()
    stapo.main(["--resume", str(whole)])  # nothing is left to do
    said = [text for text in capsys.readouterr().out.split("\n") if text.startswith("evaluation")]
    assert len(said) == 2 and f"after step 0, in percent ± standard error: six {first}" in said[0]
    assert f"six {score['mean']:.1f} ± {score['standard_error']:.1f} (6 problems)" in said[1]
    assert read_rows(whole / "metrics.jsonl") == log
    output = shutil.copytree(whole, tmp_path / "first")  # the one before step 1 needs no checkpoint
    shutil.rmtree(output / "checkpoints")
    (output / "metrics.jsonl").write_text(json.dumps(log[0]) + "\n")
    stapo.main(["--resume", str(output)])
    assert lines(output) == lines(whole)


def test_what_comes_after_the_checkpoint_is_made_again(evaluated, tmp_path, monkeypatch):
    """Its weights are made again, too: on a GPU these may differ in rounding.

    What a crash tore is cut off, and the flags of the run may be repeated. The checkpoint of a step
    is there before its evaluation begins.
    """
    flags, whole = evaluated
    output = shutil.copytree(whole, tmp_path / "run")
    saved, evaluate = [], evaluation.evaluate

    def evaluate_after_saving(*args):
        saved.append(step_of(checkpoints(output)[-1]))
        return evaluate(*args)

    monkeypatch.setattr(evaluation, "evaluate", evaluate_after_saving)
    made = read_rows(output / "evaluations" / "step_000001.jsonl")
    stale = "".join(json.dumps(row | {"response": "stale"}) + "\n" for row in made)
    for name in ("step_000002.jsonl", "step_000002.rank1.jsonl"):
        (output / "evaluations" / name).write_text(stale)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(output / name, "a") as file:
            file.writelines(json.dumps({"step": 2, **row}) + "\n" for row in ({"eval": {}}, {}))
            file.write('{"step": 1, "acc')
    stapo.main(f"{FLAGS} {flags} --resume {output} --steps 2".split())
    assert saved == [2] and [line["step"] for line in lines(output)] == [0, 1, 1, 2, 2]
    steps = [row["step"] for row in read_rows(output / "samples.jsonl")]
    assert steps == [1] * 8 + [2] * 8
    made = read_rows(output / "evaluations" / "step_000002.jsonl")
    assert len(made) == 12 and "stale" not in [row["response"] for row in made]
    names = {path.name for path in (output / "evaluations").iterdir()}
    assert names == {f"step_00000{step}.jsonl" for step in range(3)}


def test_cutting_back_keeps_every_character(tmp_path):
    """Some characters are line ends to Python but not to JSON; a tear can be inside of one."""
    kept = [{"step": step, "response": "a\u2028b\u0085c\u2029 ü"} for step in (1, 2)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in [*kept, {"step": 3}])
    (tmp_path / "rows.jsonl").write_bytes(
        text.encode() + '{"step": 1, "response": "ü'.encode()[:-1]
    )
    run_folder.cut_back(tmp_path / "rows.jsonl", 2)
    again = (tmp_path / "rows.jsonl").read_text("utf-8")
    assert [json.loads(line) for line in again.split("\n")[:-1]] == kept


# -------------------------------------------------------------------------------- own rewards


REWARDS = """
def length(response, row):
    return len(response) / row["scale"]
"""


@pytest.fixture
def own(tmp_path):
    """A reward file, and problems without answers but with a column of their own."""
    (tmp_path / "own.py").write_text(REWARDS)
    problems = [{"problem": f"Q: {i}+1=?", "scale": 10 * i} for i in range(1, 7)]
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)))
    return tmp_path


def test_a_reward_of_the_users_own_gets_the_row(own):
    run(own / "run", f"--data {own}/problems.jsonl --reward {own}/own.py:length --log_samples 16")
    samples = read_rows(own / "run" / "samples.jsonl")
    for row in samples:
        scale = 10 * int(row["problem"][3:-4])
        assert row["reward"] == pytest.approx(len(row["response"]) / scale) and row["gold"] == ""
    assert len({row["reward"] for row in samples}) > 4
    line = read_rows(own / "run" / "metrics.jsonl")[0]
    first = [row["reward"] for row in samples if row["step"] == 1]
    assert line["reward"] == pytest.approx(sum(first) / 16)


def test_a_run_goes_on_with_the_data_and_the_reward_that_it_began_with(own, capsys):
    run(own / "run", f"--data {own}/problems.jsonl --reward {own}/own.py:length --steps 1")
    held = (own / "run" / "config.json").read_bytes()
    assert json.loads(held)["data_fingerprint"].startswith("6 problems, ")
    for name, change in (
        ("problems.jsonl", lambda text: "\n".join(reversed(text.split("\n")))),
        ("problems.jsonl", lambda text: text.replace('"scale": 60', '"scale": 61')),
        ("problems.jsonl", lambda text: text + "\n" + text.replace("+1", "+2")),
        ("own.py", lambda text: text.replace('row["scale"]', 'row["scale"] + 1')),
    ):
        text = (own / name).read_text()
        (own / name).write_text(change(text))
        message = refused(capsys, f"--resume {own}/run --steps 2")
        flag = "--reward" if name == "own.py" else "--data"
        assert f"{flag} {own}/{name}" in message and f"{own}/run began with" in message
        (own / name).write_text(text)
    assert (own / "run" / "config.json").read_bytes() == held
    (own / "moved").mkdir()
    (own / "own.py").rename(own / "moved" / "own.py")
    for reward in ("own.py:none", "own.py"):  # not the function of before
        message = refused(capsys, f"--resume {own}/run --reward {own}/moved/{reward}")
        assert f"{own}/run began with --reward {own}/own.py:length" in message
    stapo.main(f"--resume {own}/run --steps 2 --reward {own}/moved/own.py:length".split())
    assert len(lines(own / "run")) == 2


def test_a_run_with_a_flag_of_another_program_is_refused(tmp_path, capsys):
    """Without the flag it would go on as another run, and config.json would lose the flag."""
    held = json.dumps(vars(Config()) | {"no_std": True, "model_fingerprint": "a"})
    (tmp_path / "config.json").write_text(held)
    assert "its run has --no_std True, which this" in refused(capsys, f"--resume {tmp_path}")
    with pytest.raises(InputError, match="^RUN .* has --no_std True, which this program"):
        tokens.parse([str(tmp_path)])
    assert (tmp_path / "config.json").read_text() == held


def test_an_error_of_one_rank_is_every_ranks(monkeypatch):
    """Rank 0's reward works, rank 1's failed: rank 0 raises what rank 1 says."""
    monkeypatch.setattr(distributed, "all_list", lambda error: [error, RewardError("rank 1's")])
    with pytest.raises(RewardError, match="rank 1's"):
        stapo.grade(lambda text, problem: 1.0, [], [])


def test_a_reward_that_fails_at_once_leaves_nothing_to_resume(own, capsys):
    (own / "bad.py").write_text("def bad(response, row):\n    return 1 / 0\n")
    flags = f"--data {own}/problems.jsonl --reward {own}/bad.py:bad"
    with pytest.raises(SystemExit, match="ZeroDivisionError"):
        run(own / "run", flags)
    assert "--resume" not in capsys.readouterr().out
    (own / "bad.py").write_text("def bad(response, row):\n    return 1\n")
    assert len(run(own / "run", flags)) == 2  # the same command


def test_a_reward_whose_processes_end_at_a_stop_has_not_failed(own, capsys):
    """SIGTERM to all processes of a job ends those of the reward before the program leaves."""
    code = "import os, signal\ndef ended(*_):\n    os.kill(os.getpid(), signal.SIGTERM)\n    1/0\n"
    (own / "bad.py").write_text(code)
    with pytest.raises(stopping.Stopped):
        run(own / "run", f"--data {own}/problems.jsonl --reward {own}/bad.py:ended")
    assert f"--resume {own}/run" in capsys.readouterr().out


# ---------------------------------------------------------------------------- what is refused


def test_a_head_that_does_more_is_refused(random_model, monkeypatch):
    """A scale, a bias or a soft cap, whatever its name: the model's own logits are compared."""
    model = random_model(spread=0.5)
    monkeypatch.setattr(rollout, "load_model", lambda name: model)
    load_policy("a model")
    for change in (
        lambda logits: 0.5 * logits,
        lambda logits: logits + torch.linspace(0, 1, logits.shape[-1]),
        lambda logits: 2 * torch.tanh(logits / 2),
    ):
        hook = model.lm_head.register_forward_hook(lambda *args, change=change: change(args[-1]))
        with pytest.raises(InputError, match="output head"):
            load_policy("a model")
        hook.remove()
    model.model.norm.weight.data[0] = math.nan
    with pytest.raises(InputError, match="its logits are not finite"):
        load_policy("a model")


def test_a_model_without_layers_cannot_be_sharded():
    model = torch.nn.Module()
    model.base_model = torch.nn.Linear(2, 2)
    with pytest.raises(InputError, match="Linear has no `.layers`"):
        distributed.shard(Policy(model))


# ------------------------------------------------------------------------------------- progress


def test_a_log_has_a_line_a_step_and_a_line_a_minute(tmp_path, monkeypatch, capsys):
    """No bar, no carriage return: the device, two steps' lines; of a phase of 150 s, two."""
    run(tmp_path / "run")
    out, said = capsys.readouterr()
    device, *steps = said.split("\n")
    assert device.startswith("1 x CPU (threads: 1): float32 weights, computation in float32")
    assert [line.split(":")[0] for line in steps] == ["step 1 of 2", "step 2 of 2", ""]
    assert "\r" not in said and "--- step 1, " in out
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    for _ in progress.track(list(range(15)), "scoring"):
        now[0] += 10
    said = capsys.readouterr().err.splitlines()
    assert said == ["scoring: 6 of 15 after 1 min", "scoring: 12 of 15 after 2 min"]


@pytest.mark.parametrize(
    "cuda, visible, message",
    [
        (None, None, "PyTorch .* is a build without CUDA, install another$"),
        ("13.0", "", "CUDA_VISIBLE_DEVICES= may hide it, unset that$"),
        ("13.0", None, "a driver that is new enough for CUDA 13.0, and start containers with "),
    ],
)
def test_a_gpu_that_is_not_used_is_spoken_of(tmp_path, monkeypatch, cuda, visible, message):
    """With the line of the device; and in pytest's summary, where -m gpu skips and stays green."""
    summary, report = [], types.SimpleNamespace(write_line=lambda text: summary.append(text))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(progress, "GPU_SIGNS", (str(tmp_path / "driver"),))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for sign, pattern in ((None, "computation in float32$"), ("driver", message)):
        if sign:
            (tmp_path / sign).touch()
        assert re.search(pattern, progress.device_in_words(["CPU"], "float32", "float32"))
        for asked in ("not slow", "not gpu", "gpu"):
            option = types.SimpleNamespace(markexpr=asked)
            conftest.pytest_terminal_summary(report, types.SimpleNamespace(option=option))
    assert len(summary) == 2 and re.search(f"^PyTorch has no CUDA GPU: .*{message}", summary[1])


# ------------------------------------------------------------------------------- small things


def test_figures_compare_runs_by_the_flags_that_resuming_keeps():
    assert figures.INCIDENTAL == stapo.CHANGEABLE | {"seed", "output", "resume"}


def test_grpo_loads_its_reference_where_there_is_a_kl_term(tmp_path, monkeypatch):
    """The starting model, also when the run goes on from a checkpoint."""
    loaded, load = [], stapo.load_policy
    monkeypatch.setattr(stapo, "load_policy", lambda *a: (loaded.append(a), load(*a))[1])
    run(tmp_path / "none", "--method grpo --beta 0 --steps 1")
    assert len(loaded) == 1
    run(tmp_path / "some", "--method grpo --beta 1e-9 --steps 1")
    assert len(loaded) == 3
    one, other = (read_rows(tmp_path / name / "metrics.jsonl")[0] for name in ("none", "some"))
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
    assert math.isfinite(one["loss"])
    stapo.main(f"--resume {tmp_path}/some --steps 2".split())
    assert [Path(name).name for name, *_ in loaded[3:]] == ["step_000001", "tiny"]


@pytest.mark.parametrize(
    "gap, z, warned", [(0.01, -9, 1), (-0.01, 9, 1), (0.01, 3, 0), (0.001, 9, 0)]
)
def test_the_sampler_is_suspect_where_gap_and_z_are_large(gap, z, warned, monkeypatch, capsys):
    """Few tokens move the gap, and very many the z."""
    monkeypatch.setattr(progress, "said", set())
    for step in (1, 2):
        progress.check_sampler({"step": step, "sampling_gap": gap, "sampling_z": z})
    assert capsys.readouterr().err.count("the sampler does not draw from the policy") == warned


@pytest.mark.parametrize("reward, verdict", [(0.1, "right"), (0.0, "wrong"), (-1.0, "wrong")])
def test_a_response_is_shown_with_its_verdict(reward, verdict):
    """Also where all of a group are right, so that A = 0; a long one by its two ends."""
    sample = {"problem": "1+1", "gold": "2", "response": "a" * 400 + "b" * 400}
    shown = progress.response_in_words(sample | {"reward": reward, "advantage": 0.0}, 4)
    assert shown == f"--- step 4, {verdict} (the answer is 2): 1+1\n{'a' * 300} [...] {'b' * 300}"


def test_the_end_of_a_run_names_problems_and_what_is_missing(capsys):
    """Step 0 had 256 problems, then --eval_limit changed; the last evaluation was cut off."""
    first = {"mean": 10.0, "standard_error": 2.0, "problems": 256, "samples": 4}
    later = first | {"mean": 40.0, "problems": 64}
    numbers = {"accuracy": 0.5, "response_length": 9.0, "silenced": 1, "tokens": 9}
    lines = [{"step": 0, "eval": {"t": first}}, {"step": 1} | numbers]
    lines += [{"step": 1, "eval": {"t": later}}, {"step": 2} | numbers]
    progress.report_run(lines, 2, "RUN", unevaluated=True)
    said = capsys.readouterr().out
    assert "after step 0, in percent ± standard error: t 10.0 ± 2.0 (256 problems)\n" in said
    assert "after step 1, in percent ± standard error: t 40.0 ± 2.0 (64 problems)\n" in said
    assert "stopped after step 2 of 2; continue with:" in said
