"""One rank or many: process group, reductions over ranks, FSDP2 sharding; nothing about files.

Every function except `shard` also works without a process group (a single process on a CPU). On
CUDA the model is always sharded, also on one GPU: FSDP2's mixed precision keeps float32 weights and
computes in bfloat16.
"""

import contextlib
import itertools
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM
from transformers import PreTrainedModel as Model

from support.errors import InputError
from support.models import empty_model, load_config

# How long a collective may take. FSDP2's collectives run on NCCL and last milliseconds: after half
# an hour NCCL's watchdog ends the job. The collectives of this file run on a gloo group whose limit
# is never reached, because a rank waits in them for another's rollout, download or checkpoint.
LIMIT, PATIENCE = timedelta(minutes=30), timedelta(days=30)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # support/stop.py answers them

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


def check_memory(name: str) -> None:
    """Raise InputError if a GPU cannot hold its part of a trained model; warn of slow CPUs."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(name))
    size = sum(parameter.numel() for parameter in model.parameters())
    if device().type == "cuda":
        needed = 16 * size / world_size()  # float32 weights, gradients and AdamW's two moments
        free = torch.cuda.mem_get_info()[0]
        if needed > free:
            what = f"its weights, gradients and moments take {needed / 1e9:.1f} GB of each GPU"
            what += f", and {free / 1e9:.1f} GB are free"
            raise InputError(f"{name}: {what}; take more GPUs or a smaller model")
    elif size > 1e9 and rank() == 0:
        what = f"no GPU was found, and a CPU trains {size / 1e9:.1f} billion parameters very slowly"
        print(f"{name}: {what}; @recipes/smollm2-135m-cpu is for a CPU", file=sys.stderr)


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
    """Run a program within the process group. An InputError ends the program with one line.

    At the end the signals mean what they meant before: a notebook goes on.
    """
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with contextlib.suppress(OSError, AttributeError):  # a closed pipe; the stdout of a notebook
        sys.stdout.reconfigure(errors="replace")  # for characters that the terminal does not have
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
        finish()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        drop_unread_output()


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
    drop_unread_output()
    os._exit(code or 0)


def drop_unread_output() -> None:
    """Flush the output. If nobody reads it, Python's own flush at exit would change the status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def finish() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_sum(values: dict[str, Any]) -> dict[str, float]:
    """Sums over ranks of numbers or 0-dim tensors, in float64, which keeps counts exact."""
    ranks = all_list({name: float(value) for name, value in values.items()})
    return {name: sum(each[name] for each in ranks) for name in values}


def all_max(value: int) -> int:
    """The largest of the ranks' integers."""
    return max(all_list(value))


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


@contextlib.contextmanager
def raised_on_all() -> Iterator[None]:
    """Raise an InputError of any rank on every rank. Every rank must call it.

    Otherwise the other ranks would wait for the failed rank in their next collective.
    """
    error = None
    try:
        yield
    except InputError as caught:
        error = caught
    errors = [each for each in all_list(error) if each]
    if errors:
        raise errors[0]


def on_rank_0(function: Callable[[], Any]) -> Any:
    """Call a function on rank 0 alone, and return its result or raise its InputError on every rank.

    Every rank must call it. The other ranks wait, however long rank 0 takes.
    """
    with raised_on_all():
        result = function() if rank() == 0 else None
    return broadcast(result)


def even_out(batches: list[list[int]]) -> list[list[int]]:
    """Add empty batches until every rank has equally many: each forward has collectives."""
    return batches + [[]] * (all_max(len(batches)) - len(batches))


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier(group=patient)


def shard(policy: torch.nn.Module) -> None:
    """Apply FSDP2 to a policy: its parameters become shards.

    Each decoder layer of `policy.model` is a group. The policy itself is the root group, with the
    embedding, the last norm and the head.
    """
    options = {"mesh": init_device_mesh(device().type, (world_size(),))}
    if device().type == "cuda":
        # Inputs of layers stay as they are: OLMo's and ERNIE's rotary cosines are float32. The
        # model that samples is not sharded, so nothing would cast them there.
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        options["mp_policy"] = precision
    for layer in policy.model.base_model.layers:
        fully_shard(layer, **options)
    fully_shard(policy, **options)


def reshard(policy: torch.nn.Module) -> None:
    """Turn parameters into shards again, after a forward without a backward."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextlib.contextmanager
def gathered(policy: torch.nn.Module) -> Iterator[Model]:
    """A policy's model with all weights on every rank (bfloat16 on CUDA), to sample from.

    FSDP2 would gather the weights at every token. So they are gathered once: a twin of the model,
    which is not sharded, holds the gathered tensors themselves. Without sharding it is the model.
    """
    model = policy.model
    groups = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    if not groups:
        yield model
        return
    twin = empty_model(model.config).eval()
    twin.generation_config = model.generation_config
    for group in groups:
        group.unshard()
    try:
        named = {"remove_duplicate": False}  # tied weights have two names
        tensors = itertools.chain(model.named_parameters(**named), model.named_buffers(**named))
        for name, tensor in tensors:
            module, _, attribute = name.rpartition(".")
            setattr(twin.get_submodule(module), attribute, tensor)
        yield twin
    finally:
        reshard(policy)
