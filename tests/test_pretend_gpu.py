"""Training, resuming, methods and evaluation on a GPU, or on one that is none (pretend_gpu.py)."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).parent.parent
REAL = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(
    not REAL and (torch.version.cuda is not None or not shutil.which("g++")),
    reason="needs a GPU, or g++ and a build of torch for CPUs",
)

PROGRAM = """
import torch, eval, rollout, stapo
from support import distributed
assert distributed.device().type == "cuda" and not torch.zeros(1).is_cuda
try:
    torch.zeros(2, device="cuda") + torch.zeros(2)
    raise SystemExit("cuda and cpu tensors were added")
except RuntimeError:
    pass
with distributed.session("waits"):  # of a micro-batch
    model = rollout.load_policy("tests/tiny")
    responses = [rollout.Response([5, 6], [7] * length, True, "") for length in (9, 4)]
    ids, attention, mask = rollout.pad_batch(responses)
    lengths = attention.sum(1)
    ones = torch.ones(2)
    old = rollout.response_stats(model, ids, mask, lengths, 100)
    batch = stapo.Batch(ids, mask, lengths, old, None, ones, ones, ones > 1, lengths)
    waits = lambda: getattr(torch.cuda, "waits", 0)  # a real GPU does not count them
    for _ in "12":  # the first makes what stays
        before = waits()
        micro = batch.rows(torch.tensor([0, 1]))
        logp = rollout.batch_stats(model, micro.ids, micro.mask, logp_only=True).logp
        stapo.objective(micro, micro.mask, logp, 1.0, stapo.Config())[0].backward()
    # transformers waits once: it looks for rows that are packed
    assert waits() - before <= 1, waits() - before
for line in FLAGS.strip().splitlines():
    program, *flags = line.split()
    {"stapo": stapo, "eval": eval}[program].main(flags)
"""
TINY = """--data tests/tiny/test.jsonl --instruction= --batch_size 2 --mini_batch_size 1
    --group_size 2 --max_new_tokens 9 --rollout_batch_size 6 --lr 1e-4"""


def run(flags: str, folder: Path) -> None:
    program = folder / "program.py"
    program.write_text(f"FLAGS = '''{flags}'''\n{PROGRAM}")
    command = [sys.executable, *([] if REAL else ["tests/pretend_gpu.py"]), str(program)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = {"capture_output": True, "text": True, "cwd": ROOT, "env": environment}
    done = subprocess.run(command, timeout=240, **options)
    assert done.returncode == 0, done.stderr[-4000:]


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def qwen2(tmp_path):
    """A family whose configuration has no head_dim."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tests" / "tiny")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": len(tokenizer)}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    folder = tmp_path / "qwen2"
    Qwen2ForCausalLM(Qwen2Config(**sizes, **ids, bos_token_id=None)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


METHODS = ("grpo", "random")


def test_everything_runs_on_cuda(tmp_path, qwen2):
    """A run that is resumed, evaluated with a verifier; two more methods on the other family."""
    (tmp_path / "own.py").write_text(
        "def letters(response, row):\n    return sum(map(ord, response))\n"
    )
    common = " ".join(f"{TINY} --reward {tmp_path}/own.py:letters".split())  # groups that differ
    output = tmp_path / "run"
    train = f"stapo {common} --model tests/tiny --save_every 1 --dump_every 1 --output {output}"
    train += (
        " --eval_every 2 --eval_benchmarks tests/tiny/test.jsonl --eval_limit 2 --eval_samples 1"
    )
    judge = f"--verifier {qwen2} --limit 1 --samples 2 --instruction= --max_new_tokens 6"
    other = f"stapo {common} --model {qwen2} --steps 1 --save_every 0 --output {tmp_path}"
    lines = [
        f"{train} --steps 1",
        f"stapo --steps 2 --resume {output}",
        f"eval --model {output}/checkpoints/step_000002 --benchmarks tests/tiny/test.jsonl {judge} "
        f"--output {tmp_path}/eval",
        *(f"{other}/{method} --method {method}" for method in METHODS),
    ]
    run("\n".join(lines), tmp_path)
    lines = metrics(output)
    assert [(line["step"], "eval" in line) for line in lines] == [
        (0, True),
        (1, False),
        (2, False),
        (2, True),
    ]
    dumps = [json.loads(path.read_text()) for path in (output / "dumps").iterdir()]
    assert len(dumps) == 2 and all(dump["tokens"] for dump in dumps)
    assert all(line["grad_norm"] > 0 for line in lines if "eval" not in line)
    (verdicts,) = (tmp_path / "eval").glob("verdicts-*.jsonl")
    assert verdicts.read_text() and (tmp_path / "eval" / "scores.json").exists()
    for method in METHODS:
        (line,) = metrics(tmp_path / method)
        assert line["entropy"] > 0 and line["skipped_updates"] == 0


@pytest.mark.skipif(not REAL, reason="needs a CUDA GPU: a pretended one is too slow")
def test_the_main_job_on_cuda(tmp_path):
    """Two steps of 512 responses each: what samples is what scores, and weights move."""
    run(f"stapo @tests/tiny/args --steps 2 --output {tmp_path}/run", tmp_path)
    for line in metrics(tmp_path / "run"):
        print(f"\n{line}")
        assert abs(line["sampling_z"]) < 6 and line["grad_norm"] > 0
        assert abs(line["ratio_mean"] - 1) < 0.05 and line["skipped_updates"] == 0
