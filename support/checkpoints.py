"""Checkpoints: folders with the model, its tokenizer and the optimiser's moments."""

import json
import shutil
import warnings
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer

from support import ranks
from support.progress import log
from support.ranks import on_rank_0

# A single process saves checkpoints too.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def checkpoints(run: Path) -> list[Path]:
    """List the complete checkpoints of a run, oldest first. step_000020_copy is none of them."""
    return sorted(run.glob("checkpoints/step_" + "[0-9]" * 6))


def delete(folder: Path) -> None:
    """Delete a checkpoint, or say why not. What is left of it has another name."""
    try:
        left = folder.rename(folder.with_suffix(".deleted"))
        shutil.rmtree(left)
    except OSError as error:
        log(f"{folder}: cannot be deleted ({error})")


def save_checkpoint(folder: Path, model: Model, optimizer: Optimizer, tokenizer: Tokenizer) -> None:
    """Write checkpoints/step_N: weights and tokenizer in HF format, `trainer/` for the optimiser.

    The folder gets its name when it is whole, so a crash leaves no half of a checkpoint. Any number
    of ranks can continue from it: all else is a function of seed and step.
    """
    partial = folder.with_suffix(".partial")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)  # a collective; rank 0 gets them

    def write_model() -> None:
        partial.mkdir(parents=True)
        head = model.get_output_embeddings()
        if head.weight is model.get_input_embeddings().weight:  # tied: one tensor, saved once
            weights.pop(next(n for n, m in model.named_modules() if m is head) + ".weight")
        model.save_pretrained(partial, state_dict=weights)
        add_old_rope(partial / "config.json")
        tokenizer.save_pretrained(partial)

    on_rank_0(write_model)  # the others wait here, however long rank 0 writes
    moments = get_optimizer_state_dict(model, optimizer)
    # In the patient group a rank waits for the others' disks, however long these take.
    dcp.save(moments, checkpoint_id=partial / "trainer", process_group=ranks.patient)
    on_rank_0(lambda: partial.rename(folder))


def add_old_rope(file: Path) -> None:
    """Write rotary positions into a model's config.json as transformers 4 reads them, too.

    Version 4 would read a base of 10,000 without a word. Version 5 reads `rope_parameters`.
    """
    config = json.loads(file.read_text("utf-8"))
    rope = dict(config.get("rope_parameters") or {})
    if theta := rope.pop("rope_theta", None):
        config["rope_theta"] = theta
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = rope
        file.write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def load_optimizer(folder: Path, model: Model, optimizer: Optimizer) -> None:
    """Load the optimiser's moments from a checkpoint, on any number of ranks."""
    moments = get_optimizer_state_dict(model, optimizer)
    dcp.load(moments, checkpoint_id=folder / "trainer", process_group=ranks.patient)
    set_optimizer_state_dict(model, optimizer, moments)
