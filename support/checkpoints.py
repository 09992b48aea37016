"""Checkpoints: a model that any program loads, and the optimiser's state beside it."""

import contextlib
import logging
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils.logging import disable_progress_bar

from support import distributed
from support.distributed import all_list, broadcast, raised_on_all, rank
from support.errors import InputError, first_line
from support.files import fingerprint, sync, writing
from support.progress import log

# A single process saves checkpoints too.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def checkpoints(run: Path) -> list[Path]:
    """List the complete checkpoints of a run, oldest first. step_000020_copy is none of them."""
    paths = run.glob("checkpoints/step_*")
    return sorted((path for path in paths if re.fullmatch(r"step_\d{6,}", path.name)), key=step_of)


def newest_checkpoint(run: Path) -> Path | None:
    """Find the newest checkpoint on rank 0, for every rank: listings of other hosts can be old."""
    return broadcast((checkpoints(run) or [None])[-1])


def remove_partials(run: Path) -> None:
    """Remove what is left of saves that were cut off or have failed."""
    for half in run.glob("checkpoints/step_*.partial"):
        shutil.rmtree(half, ignore_errors=True)


def step_of(checkpoint: Path | None) -> int:
    return int(checkpoint.name.removeprefix("step_")) if checkpoint else 0


def save_checkpoint(
    folder: Path, model: Model, optimizer: Optimizer, tokenizer: Tokenizer, keep_last: int
) -> None:
    """Write checkpoints/step_N: weights and tokenizer in HF format, `trainer/` for the optimiser.

    The folder gets its name when all its files are on the disk, so a crash leaves no half of a
    checkpoint. Then the oldest checkpoints are deleted. Any number of ranks can continue from a
    checkpoint. It needs no other state, because data order, sampling and noise are functions of the
    seed and the step. Raises InputError on every rank if the disk is full.
    """
    partial = folder.with_suffix(".partial")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)  # a collective; rank 0 gets them
    with saving(folder):  # The others wait at its end, however long rank 0 writes.
        if rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            head = model.get_output_embeddings()
            if head.weight is model.get_input_embeddings().weight:  # tied: one tensor, saved once
                weights.pop(next(n for n, m in model.named_modules() if m is head) + ".weight")
            disable_progress_bar()  # transformers': one for each checkpoint would stay
            model.save_pretrained(partial, state_dict=weights)
            tokenizer.save_pretrained(partial)
    moments = get_optimizer_state_dict(model, optimizer)
    with saving(folder):
        dcp.save(moments, checkpoint_id=partial / "trainer", **patiently())
    with saving(folder):
        if rank() == 0:
            for path in [*partial.rglob("*"), partial]:
                sync(path)
            partial.rename(folder)
            sync(folder.parent)
            delete_old(folder, keep_last)


@contextlib.contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Around each part of a save: an error of one rank's disk is an InputError on every rank."""
    with raised_on_all(), writing(folder):
        try:
            yield
        except SafetensorError as error:
            raise OSError(first_line(error)) from error
        except dcp.api.CheckpointException as error:
            cause = unwrapped(error)
            if not isinstance(cause, (OSError, RuntimeError)):  # RuntimeError: torch.save's
                raise
            raise OSError(f"is the disk full? ({first_line(cause)})") from error


def unwrapped(error: BaseException) -> BaseException:
    """Return the error of a rank that DCP has wrapped, or what another error was raised from."""
    if isinstance(error, dcp.api.CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error.__cause__ or error


def delete_old(newest: Path, keep_last: int) -> None:
    """Delete all but the newest checkpoints. One that cannot be deleted does not end the run.

    A checkpoint of a later step was copied here from another run: it stays, and does not count.
    """
    saved = [x for x in checkpoints(newest.parent.parent) if step_of(x) <= step_of(newest)]
    for old in saved[:-keep_last]:
        try:
            shutil.rmtree(old.rename(old.with_suffix(".partial")))  # half of it is no checkpoint
        except OSError as error:
            log(f"{old} cannot be deleted ({first_line(error)}); the run goes on")


def load_optimizer(folder: Path, model: Model, optimizer: Optimizer) -> None:
    """Load the optimiser's moments from a checkpoint, on any number of ranks."""
    moments = get_optimizer_state_dict(model, optimizer)
    logging.disable(logging.WARNING)  # of damaged files DCP prints tracebacks; `loading` has a line
    try:
        dcp.load(moments, checkpoint_id=folder / "trainer", **patiently())
    finally:
        logging.disable(logging.NOTSET)
    set_optimizer_state_dict(model, optimizer, moments)


def patiently() -> dict:
    """Options of DCP with which a rank waits for the others' disks, however long these take."""
    return {"process_group": distributed.patient, "no_dist": not dist.is_initialized()}


@contextlib.contextmanager
def loading(checkpoint: Path | None) -> Iterator[None]:
    """Around code that loads a checkpoint: a damaged one is an InputError. None: no checkpoint."""
    try:
        yield
    except (OSError, ValueError, dcp.api.CheckpointException) as error:
        if checkpoint is None:
            raise
        run = checkpoint.parent.parent
        others = [path.name for path in checkpoints(run) if path != checkpoint]
        hint = "there is no other: start anew in another --output"
        if others:
            hint = f"delete it, and --resume {run} continues from {others[-1]}"
        what = f"{checkpoint} cannot be loaded ({first_line(unwrapped(error))})"
        raise InputError(f"{what}; if it is damaged, {hint}") from error


def weights_fingerprint(model: torch.nn.Module) -> str:
    """Identify a model's weights, whatever files and ranks they are spread over.

    The weights must be float32. Each parameter gives the sum of its bits, read as integers. Every
    rank must call this.
    """
    sums = {}
    for name, weight in model.named_parameters():
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        parts = local.detach().flatten().view(torch.int32).split(2**24)  # the sum copies its input
        sums[name] = sum(int(part.sum(dtype=torch.int64)) for part in parts)
    ranks = all_list(sums)
    return fingerprint({name: sum(each[name] for each in ranks) for name in sums})
