"""One rank or many: process group, reductions over ranks, FSDP2 sharding; nothing about files.

Every function works without a process group too (a single process on a CPU), so that stapo.py
reads the same for one rank and for sixty-four. On CUDA the model is always sharded, also on one
GPU: FSDP2's mixed precision is what keeps float32 master weights beside bfloat16 compute.
"""

import contextlib
import os
import shlex
import sys
import types
import warnings
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser

from rollout import Model, check_head, likeliest, load_model, token_stats
from support.errors import InputError, RewardError

# The name that older transformers have works in newer ones.
warnings.filterwarnings("ignore", message="`gradient_checkpointing_enable` is deprecated")

# ------------------------------------------------------------------------------------------ ranks


def device() -> torch.device:
    """The GPU that is this process's own, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def start() -> None:
    """Join torchrun's process group (nccl or gloo); alone on CUDA, a group of one; else none."""
    cuda = device().type == "cuda"
    if cuda:
        torch.cuda.set_device(device())
        # cuDNN's attention plans anew for every shape, and decoding has a new one at each token.
        torch.backends.cuda.enable_cudnn_sdp(False)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if "RANK" in os.environ:
        # Ranks wait for each other's rollouts and evaluations, however long these take. For a rank
        # that has failed nobody waits, as torchrun ends the others.
        patience = timedelta(days=30)
        dist.init_process_group(backend, timeout=patience)
    elif cuda:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


@contextlib.contextmanager
def session(program: str) -> Iterator[None]:
    """The process group around a program; an error that is the user's ends it with one line."""
    start()
    try:
        yield
    except (InputError, RewardError) as error:  # the same on every rank
        sys.exit(f"{program}: {error}" if rank() == 0 else 1)
    except OSError as error:  # a full disk, say, which can be one rank's
        sys.exit(f"{program}: {error}" + f" (rank {rank()})" * (world_size() > 1))
    finally:
        finish()


class Parser(HfArgumentParser):
    """Reads @file as a command line: many flags to a line, quotes, comments. Errors come once."""

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        return shlex.split(arg_line, comments=True)

    def error(self, message: str) -> NoReturn:
        if rank() > 0:  # rank 0 says it
            sys.exit(2)
        super().error(message)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def finish() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def all_sum(values: dict[str, Any]) -> dict[str, float]:
    """Sums over ranks of numbers or 0-dim tensors, in float64 so that counts stay exact."""
    sums = torch.tensor([float(value) for value in values.values()], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(sums)
    return dict(zip(values, sums.tolist(), strict=True))


def all_max(value: int) -> int:
    """The largest of the ranks' integers."""
    if not dist.is_initialized():
        return value
    largest = torch.tensor(value)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def all_cat(values: torch.Tensor) -> torch.Tensor:
    """1-D tensors of any length from every rank, concatenated in rank order."""
    if not dist.is_initialized():
        return values
    counts = [torch.zeros((), dtype=torch.long) for _ in range(world_size())]
    dist.all_gather(counts, torch.tensor(len(values)))
    padded = torch.zeros(int(max(counts)), dtype=values.dtype, device=values.device)
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def broadcast(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def gather(value: Any) -> list:
    """Every rank's value, in rank order, on every rank."""
    values = [value]
    if dist.is_initialized():
        values = [None] * world_size()
        dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def progress(items: list, name: str) -> Iterable:
    """The items, with a bar on rank 0 that leaves no trace."""
    return tqdm(items, desc=name, leave=False, disable=rank() > 0)


# --------------------------------------------------------------------------------------- sharding


def load_policy(name: str) -> Model:
    """A model with float32 weights, sharded where there is a process group.

    Its methods token_stats and likeliest are rollout.py's functions.
    """
    whole = load_model(name) if rank() == 0 else None
    if rank() == 0:
        check_head(whole)
    if not dist.is_initialized():
        model = whole
        model.token_stats = types.MethodType(token_stats, model)
        model.likeliest = types.MethodType(likeliest, model)
        return model
    # Rank 0 alone reads the weights, on the CPU; every rank builds an empty model, cuts it into
    # shards, and receives its own: no GPU ever holds the whole float32 model.
    config = AutoConfig.from_pretrained(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shard(model)
    model.to_empty(device=device())
    for module in model.modules():  # rotary frequencies are computed, not stored
        if next(module.buffers(recurse=False), None) is not None:
            model._init_weights(module)
    weights = whole.state_dict() if rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    if rank() == 0:
        model.generation_config = whole.generation_config
    model.generation_config = broadcast(model.generation_config)
    return model.eval()


def shard(model: Model) -> None:
    """FSDP2: each decoder layer is a group; embedding, norm and head are the root's.

    Raises InputError for a model whose decoder layers are not under the usual name.
    """
    if not hasattr(model.base_model, "layers"):
        name = type(model.base_model).__name__
        raise InputError(f"--model: {name} has no `.layers` to shard, which is not supported")
    options = {"mesh": init_device_mesh(device().type, (world_size(),))}
    if device().type == "cuda":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.base_model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    # The chunked head needs the root's parameters: it has to run inside one hooked method.
    for method in (token_stats, likeliest):
        setattr(model, method.__name__, types.MethodType(method, model))
        register_fsdp_forward_method(model, method.__name__)


def reshard(model: Model) -> None:
    """Drop what a forward without backward leaves gathered: parameters are shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextlib.contextmanager
def unsharded(model: Model) -> Iterator[None]:
    """All weights on every rank, gathered once (bfloat16 on CUDA): decoding gathers nothing.

    FSDP2's hooks rest meanwhile: there is nothing left to gather, and on the host they take a
    quarter of a decoding step's time.
    """
    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for group in groups:
        group.set_reshard_after_forward(False, recurse=False)
        group.unshard()
    hooks = [h for group in groups for h in (group._forward_pre_hooks, group._forward_hooks)]
    before = [dict(h) for h in hooks]
    for at_rest in hooks:
        for key, function in list(at_rest.items()):
            if getattr(function, "__module__", "").startswith("torch.distributed.fsdp"):
                del at_rest[key]
    try:
        yield
    finally:
        for h, all_hooks in zip(hooks, before, strict=True):
            h.clear()
            h.update(all_hooks)  # in their order
        reshard(model)
        for group in groups:
            group.set_reshard_after_forward(group is not model, recurse=False)
