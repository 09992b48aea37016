"""Training, resuming, methods and evaluation on a GPU, or on one that is none (pretend_gpu.py)."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, read_rows

REAL = torch.cuda.is_available()
OLD = REAL and torch.__version__ < "2.13"  # cannot go on after a recording that failed
NEEDS = pytest.mark.skipif(
    not REAL and (torch.version.cuda is not None or not shutil.which("g++")),
    reason="needs a GPU, or g++ and a build of torch for CPUs",
)
pytestmark = [pytest.mark.gpu, NEEDS]

PROGRAM = """
import torch, credit, eval, stapo, tokens
from support import ranks
assert ranks.device().type == "cuda" and not torch.zeros(1).is_cuda
calls = []
for name in ("empty_cache", "mem_get_info"):
    def spy(real=getattr(torch.cuda, name), name=name):
        calls.append(name)
        return real()
    setattr(torch.cuda, name, spy)
for command in FLAGS.split(";"):
    program, *flags = command.split()
    {"stapo": stapo, "eval": eval, "tokens": tokens, "credit": credit}[program].main(flags)
assert eval.load("tests/tiny")[0].dtype == torch.bfloat16
assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
assert not torch.backends.cuda.cudnn_sdp_enabled()
# A run asks once how much memory there is. A rollout frees memory before it asks, and at its end.
asked = calls.count("mem_get_info") - FLAGS.count("stapo ")
assert calls.count("empty_cache") >= 2 * asked > 0
"""

# 24 responses in 17 slots, in groups of 3. Some end early, others fill the cache (10 + 22 = 32).
GRAPHS = """
import time, torch, eval
from rollout import encode_prompt, sample
from support import decoding
decoding.VISIBLE_PARTS, decoding.VISIBLE_LEAST = 4, 8
replayed = []
def replay(graph, real=torch.cuda.CUDAGraph.replay):
    replayed.append(graph)
    real(graph)
torch.cuda.CUDAGraph.replay = replay
for name in "cuda_graphs", "no_cuda_graphs":
    replayed.clear()
    eval.main([*FLAGS.split(), f"--{name}", f"--output={FOLDER}/{name}"])
    assert bool(replayed) == (name == "cuda_graphs")
model, tokenizer = eval.load("tests/tiny")
prompts = [encode_prompt(tokenizer, f"Q: {i // 3}+7-3=?", "") for i in range(24)]
def draw(cuda_graphs, **options):
    replayed.clear()
    options = {"batch_size": 17} | options | {"max_new_tokens": 22, "seed": 3}
    began = time.monotonic()
    drawn = dict(sample(model, tokenizer, prompts, cuda_graphs=cuda_graphs, **options))
    tokens = sum(len(response.ids) for response in drawn.values()) / options["batch_size"]
    print(f"graphs: {cuda_graphs}, {1e3 * (time.monotonic() - began) / tokens:.1f} ms a token")
    return drawn
more = {"temperature": 1.5, "batch_size": 4}
for options in {"temperature": 0.0}, {"top_p": 0.9}, {"temperature": 1.5}, more:
    plain = draw(False, **options)
    assert not replayed and plain == draw(True, **options)
    assert len(replayed) > 2 * len(set(replayed)) > 4
lengths = {len(response.ids) for response in plain.values()}
assert len(lengths) > 3 and 22 in lengths

# A recording that reads on the host, and a second one that is not its step. Each forward in
# Python is the first or the second step of a pair, or its recording.
calls = []
def read(_module, _args, given):
    calls.append(given["attention_mask"] is not None and given["position_ids"].sum().item())
def shift(_module, _args, given, output):
    calls.extend([0] if given["attention_mask"] is not None else [])
    output.logits = output.logits.roll(int(len(calls) == 6), -1)
hooks = [(model.register_forward_pre_hook, read, 0), (model.register_forward_hook, shift, 2)]
for register, hook, recorded in hooks[OLD:]:
    calls.clear()
    decoding.Decoder.recordings_work = True
    handle = register(hook, with_kwargs=True)
    assert draw(True, **more) == plain and len(set(replayed)) == recorded
    assert replayed[-1:] != replayed[-2:-1] or not recorded  # the last one was the wrong one's
    handle.remove()
draw(True)
assert not replayed
"""


def run(flags: str, folder: Path, text: str = PROGRAM) -> str:
    program, names = folder / "program.py", {"FLAGS": flags, "FOLDER": str(folder), "OLD": OLD}
    lines = [f"{name} = {value!r}\n" for name, value in names.items()]
    program.write_text("".join(lines) + text)
    command = [sys.executable, *([] if REAL else ["tests/pretend_gpu.py"]), str(program)]
    path = f"{ROOT}:{ROOT}/scripts:{ROOT}/experiments:{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    options = {"capture_output": True, "text": True, "cwd": ROOT, "env": environment}
    done = subprocess.run(command, timeout=240, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def test_everything_runs_on_a_gpu(tmp_path):
    """A run that is resumed, looked at, and evaluated. Responses to a prompt share its prefill."""
    own = "def letters(response, row):\n    return sum(map(ord, response))\n"
    (tmp_path / "own.py").write_text(own)  # groups that differ
    output = tmp_path / "run"
    run(
        f"""stapo --model tests/tiny --data tests/tiny/test.jsonl --instruction= --steps 1
        --batch_size 2 --mini_batch_size 1 --group_size 2 --max_new_tokens 9 --rollout_batch_size 6
        --lr 1e-4 --reward {tmp_path}/own.py:letters --save_every 1 --eval_every 2 --eval_limit 1
        --eval_benchmarks tests/tiny/test.jsonl --eval_samples 2 --output {output};
        stapo --steps 2 --resume {output};
        tokens {output} --output {tmp_path}/tokens;
        credit {output} --tau_p 0.5 --tokens 2 --controls 2 --continuations 2 --batches 2
        --output {tmp_path}/credit;
        eval --model {output}/checkpoints/step_000002 --benchmarks tests/tiny/test.jsonl --limit 1
        --samples 2 --reward= --max_new_tokens 6 --output {tmp_path}/eval""",
        tmp_path,
    )
    assert "<article>" in (tmp_path / "tokens" / "responses.html").read_text()
    assert len(read_rows(tmp_path / "credit" / "credit.jsonl")) > 4
    lines = read_rows(output / "metrics.jsonl")
    found = [(line["step"], "eval" in line) for line in lines]
    assert found == [(0, True), (1, False), (2, False), (2, True)]
    steps = [line for line in lines if "eval" not in line]
    assert all(line["grad_norm"] > 0 == line["skipped_updates"] for line in steps)
    assert (tmp_path / "eval" / "scores.json").exists()


def test_a_recorded_step_draws_what_the_step_draws(tmp_path):
    """Sampled, with top-p, greedy, in an evaluation. If no recording works, all goes on."""
    flags = "--model tests/tiny --benchmarks tests/tiny/test.jsonl --limit 2 --samples 2"
    said = run(f"{flags} --instruction= --max_new_tokens 12", tmp_path, GRAPHS)
    print("".join(re.findall(".* ms a token\n", said)))
    whys = re.findall("decoding goes on without CUDA graphs: (.*)", said)
    expected = ["stream is capturing", "a replay differs from its step"][OLD:]
    assert [why in line for why, line in zip(expected, whys, strict=True)] == [True] * len(whys)
    files = tmp_path.glob("*/samples.jsonl")
    assert len(texts := [file.read_text() for file in files]) == 2 and len(set(texts)) == 1


@pytest.mark.skipif(not REAL, reason="needs a CUDA GPU: a pretended one is too slow")
def test_the_main_job_on_a_gpu(tmp_path):
    """Two steps of 512 responses each: what samples is what scores, and weights move."""
    run(f"stapo @tests/tiny/args --steps 2 --output {tmp_path}/run", tmp_path)
    for line in read_rows(tmp_path / "run" / "metrics.jsonl"):
        print(f"\n{line}")
        assert abs(line["sampling_z"]) < 6 and line["grad_norm"] > 0
        assert abs(line["ratio_mean"] - 1) < 0.05 and line["skipped_updates"] == 0
