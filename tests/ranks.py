"""Several ranks for the tests, and what they train on: canned rollouts, gradients written down.

`launch` starts processes as torchrun does, by environment variables, out of a server that has
imported torch, transformers and datasets once.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import rollout
import stapo
from rollout import Response
from support import distributed
from support.errors import InputError
from support.stop import Stopped

ROOT = Path(__file__).parent.parent
PROMPTS, GROUP = 8, 4

# --------------------------------------------------------------------------------------- launching


def begin(worker: Callable, world: int, log: Path, *args) -> list[multiprocessing.Process]:
    """Starts worker(*args) on `world` ranks, their output in log.0, log.1, ...

    A single rank has no process group.
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
    return processes


def launch(worker: Callable, world: int, log: Path, *args, timeout: float = 120) -> list[int]:
    """Runs worker(*args) on `world` ranks as `begin` does: the exit codes.

    As under torchrun, the others are ended soon after one has failed. Too late is an error.
    """
    processes = begin(worker, world, log, *args)
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

# case: (flags, places in the batch whose groups learn nothing, numbers of ranks)
CASES = {
    "stapo": ("--method stapo --steps 2", "", (1, 4)),
    "all-tokens": ("--quantile_over all --tokens_per_micro_batch 1", "", (1, 2)),
    "20-entropy": ("--method 20-entropy", "", (1, 2)),
    "grpo": ("--method grpo --beta 0.1", "", (1, 2)),
    "untied": ("--model {folder}/untied --gradient_checkpointing True", "", (1, 2)),
    "idle-ranks": ("--method stapo", "0145", (1, 4)),  # two ranks' groups all have A = 0
    "nothing-to-learn": ("--method stapo", "01234567", (1, 2)),
    "early-end": ("--method random", "", (1, 4)),  # one rank's responses are a token or none
    "poisoned": ("--method stapo", "", (1, 2)),  # one rank's loss is NaN in mini-batch 1
    "stopped": ("--method stapo --steps 2", "", (1, 4)),  # one rank's wish amid step 1's updates
    "moved": ("", "", (1, 2)),  # goes on with what `stopped` has left on four ranks
}


def canned_rollouts(case: str) -> list[list[Response]]:
    """A group of responses for each place in the batch; a response's text is its reward."""
    generator = torch.Generator().manual_seed(7)

    def draw(high: int) -> int:
        return int(torch.randint(1, high, (1,), generator=generator))

    canned = []
    for place in range(PROMPTS):
        group = []
        for member in range(GROUP):
            length = draw(30)
            if case == "early-end" and place in (0, 4):
                length = member % 2
            ids = [2 + draw(90) for _ in range(length)]
            right = str(place) in CASES[case][1] or member <= place % 3
            group.append(Response([], ids, False, "1" if right else "-1"))
        canned.append(group)
    return canned


def train_on_canned_rollouts(folder: Path) -> None:
    """The cases of this number of ranks.

    The folder holds the models `tied` and `untied`, problems.jsonl and own.py. Each rank writes
    world<N>-<case>.<rank>.pt there: the gradients of every optimiser step, the last first moments
    of AdamW, the metrics, and what each update has returned.
    """
    distributed.start()
    for case, (_, _, worlds) in CASES.items():
        if distributed.world_size() in worlds:
            run(case, folder)
    distributed.finish()


def run(case: str, folder: Path) -> None:
    world, rank = distributed.world_size(), distributed.rank()
    canned, seen = canned_rollouts(case), {"gradients": [], "moments": [], "updates": []}
    texts = [json.loads(line)["problem"] for line in open(folder / "problems.jsonl")]
    output = folder / f"world{world}-{case}"
    steps = iter([2] if case == "moved" else [1, 2])

    def sample(model, tokenizer, prompts, **_):
        """The response that belongs to each prompt's place in the batch."""
        order = stapo.batch_indices(next(steps), PROMPTS, PROMPTS, 0)
        numbers = [tokenizer(text + "\n").input_ids for text in texts]
        places = [order.index(numbers.index(prompt)) for prompt in prompts]
        rows = [canned[place][row % GROUP] for row, place in enumerate(places)]
        yield [(i, Response(prompts[i], r.ids, False, r.text)) for i, r in enumerate(rows)]

    class Recorder(torch.optim.AdamW):
        def step(self, **options):
            super().step(**options)
            if options:  # torch's own call, which makes room for the moments that are loaded
                return
            parameters = [p for group in self.param_groups for p in group["params"]]
            moments = [self.state[p]["exp_avg"] for p in parameters]
            seen["gradients"].append([whole(p.grad) for p in parameters])
            seen["moments"] = [whole(moment) for moment in moments]
            if case == "stopped" and len(seen["gradients"]) == 1 and rank == world - 1:
                os.kill(os.getpid(), signal.SIGTERM)

    def update(*args):
        """With NaN in the last rank's loss in the first mini-batch of `poisoned`."""
        if case == "poisoned" and rank == world - 1 and not seen["updates"]:
            stapo.clipped_loss = lambda *tensors, **_: clipped_loss(*tensors) * float("nan")
        seen["updates"].append(real_update(*args))
        stapo.clipped_loss = clipped_loss
        return seen["updates"][-1]

    flags = f"""--model {folder}/tied --data {folder}/problems.jsonl --instruction= --steps 1
        --reward {folder}/own.py:value --batch_size {PROMPTS} --mini_batch_size 4 --lr 1e-6
        --group_size {GROUP} --max_new_tokens 30 --warmup_steps 0 --save_every 0
        --gradient_checkpointing False --tokens_per_micro_batch 300 --output {output} """
    again = ["--resume", str(output)]
    flags = (flags + CASES[case][0].format(folder=folder)).split()
    if case == "moved":
        if rank == 0:
            shutil.copytree(folder / "left-by-four", output)
        flags = again
    distributed.barrier()
    cfg = stapo.parse_flags(stapo.Config, "", flags)
    clipped_loss, real_update = stapo.clipped_loss, stapo.update
    adamw, sampler = torch.optim.AdamW, stapo.sample
    stapo.update, torch.optim.AdamW, stapo.sample = update, Recorder, sample
    with contextlib.suppress(Stopped):
        stapo.train(cfg)
    if case == "stopped":  # after step 1, whose second update was finished
        assert len(seen["gradients"]) == 2
        if world == 4 and rank == 0:
            shutil.copytree(output, folder / "left-by-four")
        distributed.barrier()
        stapo.train(stapo.parse_flags(stapo.Config, "", again))
    stapo.update, torch.optim.AdamW, stapo.sample = real_update, adamw, sampler
    seen["metrics"] = [json.loads(line) for line in open(output / "metrics.jsonl")]
    torch.save(seen, f"{output}.{rank}.pt")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, or of all ranks' shards of one."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


# ------------------------------------------------------------------------------- a rank that fails


def fail_in(place: str, folder: Path) -> None:
    """stapo.py on two ranks, where leaving the process group waits forever, as NCCL's can.

    One rank fails in one of the places, or the flags are wrong.
    """

    errors = {"update": ConnectionError, "reward_all": SystemExit}  # sys.exit("...") of a reward

    def fail(*args, **options):
        raise errors.get(place, InputError)(f"a failure in the {place}")

    torch.distributed.destroy_process_group = lambda *_: time.sleep(1000)
    if place == "model" and os.environ["RANK"] == "0":
        rollout.load_model = fail
    if os.environ["RANK"] == "1" and place in ("update", "load_reward", "reward_all"):
        setattr(stapo, place, fail)
    stapo.main(
        f"""@tests/tiny/args --data tests/tiny/test.jsonl --steps 3 --batch_size 6
        --mini_batch_size {3 if place == "flags" else 2} --group_size 2 --max_new_tokens 8
        --save_every 0 --output {folder}/{place}""".split()
    )
