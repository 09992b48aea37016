"""One rank or many: the process group, and reductions over ranks. Nothing about models.

Every function also works without a process group: a single process on a CPU has none.
"""

import contextlib
import os
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from support import InputError

# How long a collective may take. FSDP2's collectives run on NCCL and last milliseconds: after half
# an hour NCCL's watchdog ends the job. The collectives of this file run on a gloo group whose limit
# is never reached, because a rank waits in them for another's rollout, download or checkpoint.
LIMIT, PATIENCE = timedelta(minutes=30), timedelta(days=30)

patient: dist.ProcessGroup | None = None  # the gloo group of this file's collectives


def device() -> torch.device:
    """The GPU of this process, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def peak_memory_gb() -> float:
    """Return the peak of memory since the start, in 1e9 bytes: of the GPU, or of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return peak * unit / 1e9


def start() -> None:
    """Join torchrun's process group. Without torchrun: a group of one on CUDA, none on a CPU."""
    global patient
    cuda = device().type == "cuda"
    if cuda:
        torch.cuda.set_device(device())
        # cuDNN's attention makes a plan for each shape, and each decoded token has a new shape.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # If a product of bfloat16 matrices is cut into parts, the sums of the parts stay float32.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    options = {"backend": "cpu:gloo,cuda:nccl" if cuda else "gloo", "timeout": LIMIT}
    if "RANK" in os.environ:
        dist.init_process_group(**options)
    elif cuda:
        dist.init_process_group(**options, store=dist.HashStore(), rank=0, world_size=1)
    if dist.is_initialized():
        patient = dist.new_group(backend="gloo", timeout=PATIENCE)


@contextlib.contextmanager
def session(program: str) -> Iterator[None]:
    """Run a program within the process group. An InputError ends the program with one line."""
    try:
        start()
        yield
    except BaseException as error:
        if world_size() > 1:
            end_process(program, error)
        if isinstance(error, InputError):
            sys.exit(f"{program}: {error}")
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def end_process(program: str, error: BaseException) -> NoReturn:
    """Print what has failed on this rank and end its process; torchrun then ends the other ranks.

    Destroying the process group would hang: NCCL waits for ranks that wait for this rank.
    """
    code = error.code if isinstance(error, SystemExit) else 1
    if isinstance(error, InputError) or isinstance(code, str):  # sys.exit("a text"), of a reward
        print(f"{program}: {error} (rank {rank()})", file=sys.stderr)
        code = 1
    elif not isinstance(error, SystemExit):  # the parser or a stop has said why
        print(f"{program}: rank {rank()} has failed", file=sys.stderr)
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_sum(values: dict[str, Any]) -> dict[str, float]:
    """Sums over ranks of numbers or 0-dim tensors, in float64, which keeps counts exact."""
    of_ranks = all_list({name: float(value) for name, value in values.items()})
    return {name: sum(each[name] for each in of_ranks) for name in values}


def all_cat(values: torch.Tensor) -> torch.Tensor:
    """Concatenate every rank's 1-D tensor, of any length, on the CPU, in rank order."""
    return torch.cat(all_list(values))


def broadcast(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, group=patient)
    return values[0]


def all_list(value: Any) -> list:
    """Every rank's value, in rank order, on every rank."""
    values = [value]
    if dist.is_initialized():
        values = [None] * world_size()
        dist.all_gather_object(values, value, group=patient)
    return values


def on_rank_0(function: Callable[[], Any]) -> Any:
    """Call a function on rank 0 alone. Every rank gets its result, its InputError or its exit.

    Every rank must call it. The other ranks wait, however long rank 0 takes.
    """
    result = error = None
    if rank() == 0:
        try:
            result = function()
        except (InputError, SystemExit) as caught:  # the parser exits, also after --help
            error = caught
    result, error = broadcast((result, error))
    if error:
        raise error
    return result


def together(function: Callable[[], Any]) -> Any:
    """Call a function on every rank. An InputError of one rank is every rank's, after all calls."""
    result = error = None
    try:
        result = function()
    except InputError as caught:
        error = caught
    if errors := [each for each in all_list(error) if each]:
        raise error or errors[0]
    return result


def even_out(batches: list[list[int]]) -> list[list[int]]:
    """Add empty batches until every rank has equally many: each forward has collectives."""
    return batches + [[]] * (max(all_list(len(batches))) - len(batches))
