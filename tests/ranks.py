"""Several ranks for the tests, and what they train on: canned rollouts, gradients written down.

`launch` starts processes as torchrun does, by environment variables, out of a server that has
imported torch, transformers and datasets once.
"""

import math
import multiprocessing
import os
import random
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from helpers import ROOT, read_rows

import rollout
import stapo
from rollout import Response
from stapo import clipped_loss
from support import InputError, ranks

PROMPTS, GROUP = 8, 4

# --------------------------------------------------------------------------------------- launching


def launch(worker: Callable, world: int, log: Path, *args, timeout: float = 120) -> list[int]:
    """Runs worker(*args) on `world` ranks, their output in log.0, log.1, ...: the exit codes.

    A single rank has no process group. As under torchrun, the others are ended soon after one has
    failed. Too late is an error.
    """
    os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'scripts'}:{ROOT / 'experiments'}"
    os.environ["OMP_NUM_THREADS"] = "1"
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["ranks", "datasets"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        server.Process(target=child, args=(rank, world, port, f"{log}.{rank}", worker, args))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
        if any(p.exitcode for p in processes):
            deadline = min(deadline, time.monotonic() + 5)
    hung = not any(p.exitcode for p in processes) and any(p.is_alive() for p in processes)
    for process in processes:
        process.kill()
        process.join()
    output = "".join(Path(f"{log}.{rank}").read_text()[-3000:] for rank in range(world))
    assert not hung, f"still running after {timeout} s:\n{output}"
    return [process.exitcode for process in processes]


def child(rank: int, world: int, port: int, log: str, worker: Callable, args: tuple) -> None:
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    os.chdir(ROOT)
    worker(*args)


# ---------------------------------------------------------------------------------- canned rollouts

# case: (flags, numbers of ranks)
CASES = {
    "stapo": ("--method stapo --steps 2 --save_every 1", (1, 4)),
    # two of four ranks have no response with an advantage
    "idle-ranks": ("--method random --tokens_per_micro_batch 1", (1, 4)),
    # the model has a head of its own, and its activations are computed again
    "grpo": ("--method grpo --beta 0.1 --model {folder}/untied --gradient_checkpointing", (1, 2)),
    # a quantile over all tokens: the first version of the paper, and 20-Entropy
    "version-1": ("--quantile_over all", (1, 4)),
    "20-entropy": ("--method 20-entropy", (1, 4)),
    # one rank's responses are a token or none, and in the first mini-batch its loss is NaN
    "poisoned": ("--method 20-entropy", (1, 2)),
    "moved": ("", (1, 2)),  # goes on with what `stapo` has left of its first step on four ranks
}


def canned_rollouts(case: str) -> list[list[Response]]:
    """A group of responses for each place in the batch; a response's text is its reward."""
    draw, canned = random.Random(7).randrange, []
    for place in range(PROMPTS):
        group = []
        for member in range(GROUP):
            length = draw(1, 30)
            if case == "poisoned" and place in (0, 4):
                length = member % 2
            ids = [draw(3, 92) for _ in range(length)]
            right = case == "idle-ranks" and place in (0, 1, 4, 5) or member <= place % 3
            group.append(Response([], ids, False, "1" if right else "-1"))
        canned.append(group)
    return canned


def train_on_canned_rollouts(folder: Path) -> None:
    """The cases of this number of ranks.

    The folder holds the models `tied` and `untied`, problems.jsonl and own.py. Rank 0 writes
    world<N>-<case>.pt there: the gradients of every optimiser step, the last first moments of
    AdamW, and the metrics.
    """
    with ranks.session("ranks.py"):
        for case, (_, worlds) in CASES.items():
            if ranks.world_size() in worlds:
                run(case, folder)


def run(case: str, folder: Path) -> None:
    world, rank = ranks.world_size(), ranks.rank()
    canned, seen, begun = canned_rollouts(case), {"gradients": [], "moments": []}, []
    texts = [row["problem"] for row in read_rows(folder / "problems.jsonl")]
    output = folder / f"world{world}-{case}"
    steps = iter([2] if case == "moved" else [1, 2])

    def sample(model, tokenizer, prompts, **_):
        """The response that belongs to each prompt's place in the batch."""
        order = stapo.batch_indices(next(steps), PROMPTS, PROMPTS, 0)
        numbers = [tokenizer(text + "\n").input_ids for text in texts]
        places = [order.index(numbers.index(prompt)) for prompt in prompts]
        rows = [canned[place][row % GROUP] for row, place in enumerate(places)]
        yield from ((i, Response(prompts[i], r.ids, False, r.text)) for i, r in enumerate(rows))

    class Recorder(torch.optim.AdamW):
        def zero_grad(self, **options):
            begun.append(1)
            super().zero_grad(**options)

        def step(self, **options):
            super().step(**options)
            if options:  # torch's own call, which makes room for the moments that are loaded
                return
            parameters = [p for group in self.param_groups for p in group["params"]]
            moments = [self.state[p]["exp_avg"] for p in parameters]
            seen["gradients"].append([whole(p.grad) for p in parameters])
            seen["moments"] = [whole(moment) for moment in moments]

    def poisoned(*args, **options):
        """The loss, but NaN on the last rank in the first mini-batch of `poisoned`."""
        here = case == "poisoned" and rank == world - 1 and len(begun) == 1
        return clipped_loss(*args, **options) * (math.nan if here else 1)

    flags = f"""--model {folder}/tied --data {folder}/problems.jsonl --instruction= --steps 1
        --reward {folder}/own.py:value --batch_size {PROMPTS} --mini_batch_size 4 --lr 1e-6
        --group_size {GROUP} --max_new_tokens 30 --warmup_steps 0 --save_every 0
        --gradient_checkpointing False --tokens_per_micro_batch 300 --output {output} """
    flags = (flags + CASES[case][0].format(folder=folder)).split()
    if case == "moved":
        if rank == 0:
            shutil.copytree(folder / "world4-stapo", output)
            shutil.rmtree(output / "checkpoints" / "step_000002")
        flags = ["--resume", str(output)]
    ranks.broadcast(None)  # the others wait for the copy
    patched = mock.patch.multiple(stapo, sample=sample, clipped_loss=poisoned)
    with patched, mock.patch("torch.optim.AdamW", Recorder):
        stapo.train(stapo.parse_flags(stapo.Config, "", flags))
    if rank == 0:
        torch.save(seen | {"metrics": read_rows(output / "metrics.jsonl")}, f"{output}.pt")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


# ------------------------------------------------------------------------------- a rank that fails


def fail_in(place: str, folder: Path) -> None:
    """stapo.py on two ranks, where leaving the process group waits forever, as NCCL's can.

    One rank fails in one of the places, or the flags are wrong.
    """
    errors = {"update": ConnectionError, "load_reward": SystemExit}  # sys.exit("...") of a reward

    def fail(*args, **options):
        raise errors.get(place, InputError)(f"a failure in the {place}")

    torch.distributed.destroy_process_group = lambda *_: time.sleep(1000)
    if place == "model" and os.environ["RANK"] == "0":
        rollout.load_model = fail
    if os.environ["RANK"] == "1" and place in errors:
        setattr(stapo, place, fail)
    stapo.main(
        f"""@tests/tiny/args --data tests/tiny/test.jsonl --steps 3 --batch_size 6
        --mini_batch_size {3 if place == "flags" else 2} --group_size 2 --max_new_tokens 8
        --save_every 0 --output {folder}/{place}""".split()
    )
