"""What a run keeps: resuming, saving, stopping, samples, own rewards; and what it refuses."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import FLAGS, ROOT, TINY, lines, read_rows, refused, run, weights, write_rows
from ranks import begin
from support.errors import InputError
from support.problems import load_problems
from support.run_folder import checkpoints, step_of
from transformers import Qwen3Config

import eval as evaluation
import rollout
import stapo
from rollout import load_policy, load_tokenizer
from support import distributed, files, progress, run_folder, versions
from support import stop as stopping

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
    "flags", ["--method stapo", "--seed 7", "--tau_p 0.1", "--output elsewhere"]
)
def test_a_flag_that_differs_is_refused_by_name(finished, capsys, flags):
    name, value = flags.split()
    held = (finished / "config.json").read_bytes(), (finished / "metrics.jsonl").read_bytes()
    message = refused(capsys, f"--resume {finished} {flags}")
    assert f"{name} {value}" in message and str(finished) in message
    assert held == tuple((finished / x).read_bytes() for x in ("config.json", "metrics.jsonl"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_what_cannot_be_resumed_is_named_and_left(finished, tmp_path, capsys):
    no_checkpoint = shutil.copytree(finished, tmp_path / "none")
    shutil.rmtree(no_checkpoint / "checkpoints")
    before = contents(tmp_path)
    assert "mistyped: holds no run" in refused(capsys, f"--resume {tmp_path}/mistyped")
    assert "holds no run" in refused(capsys, f"--resume {TINY}")
    assert "start anew in another --output" in refused(capsys, f"--resume {no_checkpoint}")
    a_checkpoint = finished / "checkpoints" / "step_000002"
    assert f"give its run, {finished}" in refused(capsys, f"--resume {a_checkpoint}")
    after = {name: text for name, text in contents(tmp_path).items() if not name.endswith(".lock")}
    assert after == {name: text for name, text in before.items() if not name.endswith(".lock")}


def test_a_directory_with_files_is_refused_and_left(finished, tmp_path, capsys):
    """Another run, or a model. Hidden files are nobody's work."""
    for name, folder in (("run", finished), ("model", TINY)):
        shutil.copytree(folder, tmp_path / name)
        before = contents(tmp_path / name).keys()
        message = refused(capsys, f"{FLAGS} --output {tmp_path}/{name}")
        assert f"--output {tmp_path}/{name}: holds " in message and "--resume" in message
        assert contents(tmp_path / name).keys() - before <= {f"{tmp_path}/{name}/.lock"}
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".DS_Store").touch()
    run(tmp_path / "new", "--steps 1")


def hold(folder: Path, name: str) -> None:
    """A process that works in folder / name until it is killed; a child of it lives on."""
    run_folder.claim(folder / name)
    if os.fork() == 0:
        time.sleep(5)
        os._exit(0)
    (folder / "held").touch()
    time.sleep(100)


def test_a_directory_has_one_process_until_that_is_killed(finished, tmp_path):
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
        before = contents(tmp_path / name)
        with pytest.raises(SystemExit, match=f"{name}: another process works in this directory"):
            program(flags.split())
        assert contents(tmp_path / name) == before
        holder.kill()
        holder.join()
        program(flags.split())


def test_the_model_and_the_data_may_move_but_not_change(finished, tmp_path, capsys):
    """The checkpoint has tokenizer and config. GRPO needs the model for its KL term."""
    for method, name in (("full-mask", "run"), ("grpo", "kl")):
        model = shutil.copytree(TINY, tmp_path / "model")
        data = shutil.copy(TINY / "test.jsonl", tmp_path / "data.jsonl")
        run(tmp_path / name, f"--method {method} --seed 3 --steps 1 --model {model} --data {data}")
        shutil.rmtree(model)
        os.remove(data)
    again = f"--steps 2 --data {TINY}/test.jsonl --resume {tmp_path}"
    assert "no such file" in refused(capsys, f"--steps 2 --resume {tmp_path}/run")
    text = (TINY / "test.jsonl").read_text().replace('"answer": "', '"answer": "1', 1)
    (tmp_path / "other.jsonl").write_text(text)
    assert "is not the data" in refused(capsys, f"{again}/run --data {tmp_path}/other.jsonl")
    stapo.main(f"{again}/run".split())
    assert lines(tmp_path / "run") == lines(finished)
    assert weights(tmp_path / "run") == weights(finished)
    assert "no model there" in refused(capsys, f"{again}/kl")
    stapo.main(f"{again}/kl --model {TINY}".split())
    assert len(lines(tmp_path / "kl")) == 2


def test_samples_are_what_the_model_said(finished):
    answers = {p["problem"]: p["answer"] for p in load_problems(str(TINY / "test.jsonl"))}
    for row in read_rows(finished / "samples.jsonl"):
        assert row["gold"] == answers[row["problem"]] and abs(row["reward"]) == 1
        assert row["advantage"] == 0 or (row["advantage"] > 0) == (row["reward"] > 0)
        assert (row["reward"] == 1) == (f"\\boxed{{{row['gold']}}}" in row["response"])


def test_help_has_the_flags_in_sections(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        stapo.main(["--help"])
    about, _, flags = capsys.readouterr().out.partition("options:")
    assert "@FILE" in about and "--resume DIR" in about
    found = dict(re.findall(r"^([a-z ]+):\n  --(\w+)", flags, re.MULTILINE))
    assert found["objective"] == "method" and found["one step"] == "steps" and len(found) == 5


# --------------------------------------------------------------------------- saving and stopping


def test_checkpoints_every_few_steps(tmp_path):
    """The newest two stay, and what a user copied. Tied weights are in them once."""
    run(tmp_path / "run", "--steps 5 --save_every 2 --keep_last 2")
    folders = checkpoints(tmp_path / "run")
    assert [step_of(folder) for folder in folders] == [4, 5]
    assert len(weights(tmp_path / "run")) < 1.01 * (TINY / "model.safetensors").stat().st_size
    shutil.copytree(folders[0], f"{folders[0]}_best")
    stapo.main(f"--resume {tmp_path}/run --steps 7 --save_every 0".split())
    names = {path.name for path in folders[0].parent.iterdir()}
    assert names == {"step_000004_best", "step_000005", "step_000007"}


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


def test_repeated_signals_are_one_wish():
    stop = stopping.stop
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    stop.listen()
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
        os.kill(os.getpid(), number)
        assert stop.asked
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    stop.listen()
    os.kill(os.getpid(), signal.SIGHUP)
    assert not stop.asked


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


def test_characters_that_the_terminal_does_not_have_are_replaced(tmp_path, monkeypatch):
    """The run goes on, and its files have them."""
    monkeypatch.setattr(rollout, "to_text", lambda *_, **__: "\u4e2d\u6587")
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, "ascii"))
    run(tmp_path / "run", "--steps 1")
    assert b"\n??\n" in output.getvalue() and len(checkpoints(tmp_path / "run")) == 1
    assert read_rows(tmp_path / "run" / "samples.jsonl")[0]["response"] == "\u4e2d\u6587"


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


def test_evaluations_are_lines_of_their_own_and_change_no_step(evaluated, tmp_path):
    flags, whole = evaluated
    log = read_rows(whole / "metrics.jsonl")
    assert [line["step"] for line in log] == [0, 1, 1] and set(log[0]) == {"step", "eval"}
    score = log[2]["eval"]["six"]
    assert (score["problems"], score["samples"]) == (6, 2) and set(log[2]) == {"step", "eval"}
    run(tmp_path / "run", "--steps 1 --rollout_batch_size 4")
    assert lines(tmp_path / "run") == lines(whole)[1:2]
    stapo.main(["--resume", str(whole)])  # nothing is left to do
    assert read_rows(whole / "metrics.jsonl") == log
    output = shutil.copytree(whole, tmp_path / "first")  # the one before step 1 needs no checkpoint
    shutil.rmtree(output / "checkpoints")
    (output / "metrics.jsonl").write_text(json.dumps(log[0]) + "\n")
    stapo.main(["--resume", str(output)])
    assert lines(output) == lines(whole)


def test_what_comes_after_the_checkpoint_is_made_again(evaluated, tmp_path):
    """Its weights are made again, too: on a GPU these may differ in rounding.

    What a crash tore is cut off, and the flags of the run may be repeated. Lines before that stay,
    whatever characters they have.
    """
    flags, whole = evaluated
    output = shutil.copytree(whole, tmp_path / "run")
    made = read_rows(output / "evaluations" / "step_000001.jsonl")
    stale = "".join(json.dumps(row | {"response": "stale"}) + "\n" for row in made)
    for name in ("step_000002.jsonl", "step_000002.rank1.jsonl"):
        (output / "evaluations" / name).write_text(stale)
    samples = output / "samples.jsonl"
    odd = [row | {"response": "a\u2028b"} for row in read_rows(samples)]  # not the end of a line
    samples.unlink()
    files.append_rows(samples, odd)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(output / name, "a") as file:
            file.writelines(json.dumps({"step": 2, **row}) + "\n" for row in ({"eval": {}}, {}))
            file.write('{"step": 1, "acc')
    stapo.main(f"{FLAGS} {flags} --resume {output} --steps 2".split())
    assert [line["step"] for line in lines(output)] == [0, 1, 1, 2, 2]
    rows = [json.loads(line) for line in samples.read_text("utf-8").split("\n")[:-1]]
    assert rows[:8] == odd and [row["step"] for row in rows[8:]] == [2] * 8
    made = read_rows(output / "evaluations" / "step_000002.jsonl")
    assert len(made) == 12 and "stale" not in [row["response"] for row in made]
    names = {path.name for path in (output / "evaluations").iterdir()}
    assert names == {f"step_00000{step}.jsonl" for step in range(3)}


# -------------------------------------------------------------------------------- own rewards


REWARD = "def length(response, row):\n    return len(response) / row['scale']\n"


def test_a_run_goes_on_with_a_reward_that_was_mended(tmp_path, capsys):
    """The reward fails in step 2: step 1 is saved, and nothing that was trained is lost.

    Problems without answers, but with a column that the reward reads.
    """
    problems = [{"problem": f"Q: {i}+1=?", "scale": 10 * i} for i in range(1, 7)]
    data, own = write_rows(tmp_path / "problems.jsonl", *problems), tmp_path / "own.py"
    failing = REWARD.replace("return", "calls.append(1)\n    return 1 / (len(calls) <= 16) *")
    own.write_text(f"calls = []\n{failing}")
    with pytest.raises(SystemExit, match=r"ZeroDivisionError.*own.py, line 4"):
        run(tmp_path / "run", f"--data {data} --reward {own}:length")
    assert f"--resume {tmp_path}/run" in capsys.readouterr().out
    own.write_text(REWARD)
    stapo.main(f"--resume {tmp_path}/run".split())
    (tmp_path / "moved").mkdir()
    moved = shutil.move(own, tmp_path / "moved" / "own.py")
    stapo.main(f"--resume {tmp_path}/run --steps 3 --reward {moved}:length".split())
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3]
    for row in read_rows(tmp_path / "run" / "samples.jsonl"):
        scale = 10 * int(row["problem"][3:-4])
        assert row["reward"] == pytest.approx(len(row["response"]) / scale) and row["gold"] == ""


# ----------------------------------------------------------------- what is refused, what is said


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(tmp_path, monkeypatch, capfd):
    """Qwen3-1.7B, without its weights; a CPU takes it, and a line says what that means."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    Qwen3Config(**sizes, **heads, tie_word_embeddings=True).save_pretrained(tmp_path)
    distributed.check_memory(str(tmp_path))
    assert "a CPU trains 1.7 billion parameters very slowly" in capfd.readouterr().err
    monkeypatch.setattr(distributed, "device", lambda: torch.device("cuda"))
    layer = 2 * (16 + 8) * 128 * 2048 + 3 * 2048 * 6144 + 2 * 2048 + 2 * 128
    free = [16 * (28 * layer + 151936 * 2048 + 2048), 80e9]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: free)
    distributed.check_memory(str(tmp_path))
    free[0] -= 1
    with pytest.raises(InputError, match="27.5 GB of each GPU, and 27.5 GB are free"):
        distributed.check_memory(str(tmp_path))


def test_windows_is_refused_in_one_line():
    code = "import sys; sys.platform = 'win32'; import support"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=-1, text=True)
    assert re.fullmatch("STAPO runs on Linux and .*\n", done.stderr)


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


def test_a_log_has_a_line_a_step_and_a_line_a_minute(tmp_path, monkeypatch, capsys):
    """No bar, no carriage return. The first line has versions and devices."""
    run(tmp_path / "run")
    out, said = capsys.readouterr()
    first, *steps = said.split("\n")
    assert first.startswith("1 x CPU (threads: 1); Python 3.")
    assert f"transformers {versions.installed()['transformers']}, " in first
    for step, line in enumerate(steps[:-1], start=1):
        assert re.fullmatch(rf"step {step} of 2: .* s, about \d\d:\d\d left", line)
    assert len(steps) == 3 and steps[-1] == ""
    assert "\r" not in said and "--- step 1, " in out
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["versions"] == versions.installed()
    now = [0.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    for _ in progress.track(iter(range(15)), "scoring", total=15):
        now[0] += 10
    said = [line for line in capsys.readouterr().err.split("\n") if line]
    assert [line.split(" after ")[0] for line in said] == ["scoring: 6 of 15", "scoring: 12 of 15"]


@pytest.mark.parametrize(
    "gap, z, warned", [(0.01, -9, 1), (-0.01, 9, 1), (0.01, 3, 0), (0.001, 9, 0)]
)
def test_the_sampler_is_suspect_where_gap_and_z_are_large(gap, z, warned, capsys):
    """Few tokens move the gap, and very many the z."""
    progress.check_sampler({"step": 1, "sampling_gap": gap, "sampling_z": z})
    assert capsys.readouterr().err.count("the sampler does not draw from the policy") == warned
