"""Several ranks for the tests, and what they train on: canned rollouts, gradients written down.

`launch` starts processes as torchrun does, by environment variables, out of a server that has
imported torch, transformers and datasets once.
"""

import contextlib
import fcntl
import itertools
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

import rollout
import stapo
from rollout import Response
from support import checkpoints, distributed, run_folder
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

# case: (flags, rewards of the groups that learn nothing, response lengths)
CASES = {
    "stapo": ("--method stapo --steps 2", "", "ragged"),
    "all-tokens": ("--quantile_over all --tokens_per_micro_batch 1", "", "ragged"),
    "20-entropy": ("--method 20-entropy", "", "ragged"),
    "grpo": ("--method grpo --beta 0.1", "", "ragged"),
    "untied": ("--model {folder}/untied --gradient_checkpointing True", "", "ragged"),
    "idle-ranks": ("--method stapo", "0145", "ragged"),  # ranks whose every group has A = 0
    "nothing-to-learn": ("--method stapo", "01234567", "ragged"),
    "early-end": ("--method random", "", "early"),  # one rank's responses are a token or none
    "poisoned": ("--method stapo", "", "ragged"),  # one rank's loss is NaN, once
    "stopped": ("--method stapo --steps 2", "", "ragged"),  # one rank's wish amid step 1's updates
}


# On four ranks: two ranks of four idle, one with nothing, sums and slices over more than two.
# The others run on two.
ON_FOUR = ("stapo", "idle-ranks", "early-end", "stopped")


def canned_rollouts(case: str) -> dict:
    """prompt -> (responses of its group); the same for every number of ranks."""
    _, idle, lengths = CASES[case]
    generator = torch.Generator().manual_seed(7)

    def draw(high: int) -> int:
        return int(torch.randint(1, high, (1,), generator=generator))

    canned = {}
    for place in range(PROMPTS):
        group = []
        for member in range(GROUP):
            length = draw(30)
            if lengths == "early" and place in (0, 4):
                length = member % 2
            ids = [2 + draw(90) for _ in range(length)]
            reward = "1" if str(place) in idle else "1" if member <= place % 3 else "-1"
            group.append(Response([], ids, False, reward))
        canned[place] = group
    return canned


def train_on_canned_rollouts(folder: Path) -> None:
    """The cases of this number of ranks; a single one has them all.

    The folder holds the models `tied` and `untied` and problems.jsonl. Rank 0 writes
    world<N>-<case>.pt there: the gradients of every optimiser step, the metrics.
    """
    distributed.start()
    world = distributed.world_size()
    for case in CASES:
        if world == 1 or (case in ON_FOUR) == (world == 4):
            run(case, folder)
    distributed.finish()


def run(case: str, folder: Path) -> None:
    flags = CASES[case][0].format(folder=folder)
    canned, gradients, calls = canned_rollouts(case), [], []
    is_last = distributed.rank() == distributed.world_size() - 1

    def sample(model, tokenizer, prompts, **_):
        """The response that belongs to each prompt's place in the batch."""
        step = len(calls) // len(prompts) + 1
        order = stapo.batch_indices(step, PROMPTS, PROMPTS, 0)
        calls.extend(prompts)
        responses = []
        for row, prompt in enumerate(prompts):
            number = next(i for i, p in enumerate(texts) if tokenizer(p + "\n").input_ids == prompt)
            canned_one = canned[order.index(number)][row % GROUP]
            responses.append((row, Response(prompt, canned_one.ids, False, canned_one.text)))
        yield responses

    class Recorder(torch.optim.AdamW):
        def step(self, **options):
            if options:  # torch's own call, which makes room for the moments that are loaded
                return super().step(**options)
            whole = [p.grad for group in self.param_groups for p in group["params"]]
            gradients.append([g.full_tensor() if hasattr(g, "full_tensor") else g for g in whole])
            gradients[-1] = [g.clone() for g in gradients[-1]]
            super().step()
            if case == "stopped" and len(gradients) == 1 and is_last:
                os.kill(os.getpid(), signal.SIGTERM)

    def patient(collective):
        """DCP's own group has a limit of half an hour, which a slow disk can take."""

        def checked(*args, process_group, **options):
            assert process_group is distributed.patient
            return collective(*args, process_group=process_group, **options)

        return checked

    dcp = checkpoints.dcp
    checkpoints.dcp = types.SimpleNamespace(
        save=patient(dcp.save), load=patient(dcp.load), api=dcp.api
    )
    texts = [json.loads(line)["problem"] for line in open(folder / "problems.jsonl")]
    real = stapo.sample, stapo.load_reward, torch.optim.AdamW, stapo.objective, stapo.load_policy
    policies = []
    save = stapo.RunFolder.save
    if case != "stopped":  # the others are not continued
        stapo.RunFolder.save = lambda *_: None
    stapo.sample, torch.optim.AdamW = sample, Recorder
    stapo.load_policy = lambda *args: (policies.append(real[4](*args)), policies[-1])[1]
    stapo.load_reward = lambda spec: lambda text, problem: float(text)
    if case == "poisoned":
        poison = [is_last]

        def objective(*args):
            loss, sums = real[3](*args)
            return (loss * float("nan") if poison and poison.pop() else loss), sums

        stapo.objective = objective
    output = folder / f"world{distributed.world_size()}-{case}"
    argv = f"""--model {folder}/tied --data {folder}/problems.jsonl --instruction= --steps 1
        --batch_size {PROMPTS} --mini_batch_size 4 --group_size {GROUP} --max_new_tokens 30
        --lr 1e-6 --warmup_steps 0 --tau_p 0.002 --save_every 0 --gradient_checkpointing False
        --tokens_per_micro_batch 300 --output {output} {flags}"""
    try:
        with contextlib.suppress(Stopped):
            stapo.train(stapo.parse_flags(stapo.Config, "", argv.split()))
        for reference in policies[1:] if distributed.world_size() > 1 else []:
            # What FSDP2 keeps of each forward until a backward: the reference has none.
            kept = reference._get_fsdp_state()._comm_ctx
            assert not getattr(kept, "post_forward_order", [])
        if case == "stopped":  # after step 1, whose second update was finished
            assert len(gradients) == 2
            stapo.train(stapo.parse_flags(stapo.Config, "", ["--resume", str(output)]))
    finally:
        stapo.sample, stapo.load_reward, torch.optim.AdamW, stapo.objective = real[:4]
        stapo.load_policy = real[4]
        stapo.RunFolder.save = save
        checkpoints.dcp = dcp
    if distributed.rank() == 0:
        lines = [json.loads(line) for line in open(output / "metrics.jsonl")]
        torch.save({"gradients": gradients, "metrics": lines}, f"{output}.pt")


# ------------------------------------------------------- evaluations, and clocks that are not equal


def train_with_clocks_apart(output: Path) -> None:
    """Two steps with an evaluation before and after them, and a checkpoint an hour.

    On the second rank an hour goes by whenever the clock is looked at.
    """
    if os.environ.get("RANK") == "1":
        hours = itertools.count()
        run_folder.time = types.SimpleNamespace(monotonic=lambda: 3600.0 * next(hours))
    stapo.main(
        f"""@tests/tiny/args --data tests/tiny/test.jsonl --steps 2 --batch_size 4
        --mini_batch_size 2 --group_size 4 --max_new_tokens 16 --save_every 0 --save_minutes 60
        --eval_every 2 --eval_benchmarks tests/tiny/test.jsonl --eval_limit 5 --eval_samples 3
        --output {output}""".split()
    )


def work_on_hosts_apart(program: Callable, folder: Path, flags: list[str], *more: str) -> None:
    """Under the names `run` and `data.jsonl` each rank has its own. Rank 1 has more flags."""
    os.chdir(folder / os.environ["RANK"])
    program(flags if os.environ["RANK"] == "0" else [*flags, *more])


def work_where_missing_names_are_remembered(program: Callable, flags: list[str]) -> None:
    """Once a name is missing on rank 1, it stays missing there, with all that it holds later."""
    missing, exists = set(), Path.exists

    def remembered(path: Path) -> bool:
        here = [path, *path.parents]
        if missing.isdisjoint(here) and not exists(path):
            missing.update(name for name in here if not exists(name))
        return missing.isdisjoint(here)

    if os.environ["RANK"] == "1":
        Path.exists = remembered
    program(flags)


# ------------------------------------------------------------------------------- a rank that fails


def fail_beside_a_process(lock: Path) -> None:
    """Each rank and a process that its reward has started hold a lock together."""
    file = lock.open("w")
    fcntl.flock(file, fcntl.LOCK_SH)
    with distributed.session("stapo.py"):
        fork = multiprocessing.get_context("fork")
        fork.Process(target=time.sleep, args=(30,), daemon=True).start()
        raise stapo.InputError("a failure beside a process")


# place: (the function that fails, whose it is, on which rank, with what)
FAILURES = {
    "update": ("update", stapo, 1, ConnectionError),  # an OSError that is no failed write
    "writing": ("end_step", stapo.RunFolder, 0, ZeroDivisionError),
    "input": ("load_reward", stapo, 1, stapo.InputError),
    "model": ("load_model", rollout, 0, stapo.InputError),
    "records": ("append_rows", run_folder, 0, stapo.InputError),
    "checkpoint": ("save_pretrained", PreTrainedModel, 0, OSError),
}


def fail_in(place: str, folder: Path) -> None:
    """stapo.py on two ranks, where leaving the process group waits forever, as NCCL's can.

    One rank fails in one of the places; or it alone has a flag that does not exist.
    """
    torch.distributed.destroy_process_group = lambda *_: time.sleep(1000)
    own = int(os.environ["RANK"])
    flags = f"""@tests/tiny/args --data tests/tiny/test.jsonl --steps 3 --batch_size 4
        --mini_batch_size 2 --group_size 2 --max_new_tokens 8 --save_every 0
        --output {folder}/{place}"""
    if place == "flags":
        flags += " --a_failure_in_the_flags 1" if own == 1 else ""
    else:
        name, owner, failing, kind = FAILURES[place]
        real = getattr(owner, name)

        def fail_on_one(*args, **options):
            if own == failing:
                raise kind(f"a failure in the {place}")
            return real(*args, **options)

        setattr(owner, name, fail_on_one)
    stapo.main(flags.split())
