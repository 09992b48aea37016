"""Models: they are read from the Hub or a folder, prepared, and refused if a run would be wrong.

1. Reading: `load_model`, `load_config`. `empty_model` makes a model without its weights. `prepared`
   puts this project's norms and output head into both.
2. What is refused: `check_positions`, `check_length`, `check_head`, `check_ties`.
3. Which weights a name stands for: `weights_of`.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers import PreTrainedModel as Model

from support.errors import InputError, first_line
from support.files import file_fingerprint, fingerprint
from support.head import float32_logits, use_float32_head
from support.norms import fuse_norms

# ---------------------------------------------------------------------------------------- reading


def load_pretrained(kind: type, what: str, name: str, **options: Any) -> Any:
    """kind.from_pretrained(name, **options); raises InputError in place of the Hub's own errors."""
    if Path(name, "adapter_config.json").is_file():  # with peft it is put on any weights beside it
        hint = "merge it into its base model first (merge_and_unload of peft)"
        hint += ", and give a folder with the merged model but without adapter_config.json"
        raise InputError(f"{name}: an adapter folder: {hint}")
    try:
        return kind.from_pretrained(name, **options)
    except (OSError, ValueError, SafetensorError) as error:
        hint = f"give a Hub id or a folder ({first_line(error)})"
        raise InputError(f"{name}: no {what} there, {hint}") from error


def load_model(
    name: str, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Model:
    """A causal language model of a Hub id or a local folder, in eval mode. Raises InputError."""
    options = {"dtype": dtype, "config": load_config(name), "output_loading_info": True}
    model, info = load_pretrained(AutoModelForCausalLM, "model", name, **options)
    if info["missing_keys"]:  # transformers draws these at random
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise InputError(f"{name}: has no weights for {missing}; look for a complete copy")
    if getattr(model, "_hf_peft_config_loaded", False):  # of a Hub id; load_pretrained sees folders
        raise InputError(f"{name}: has an adapter beside its weights; give the merged model alone")
    check_positions(name, model)
    return prepared(model).to(device).eval()


def empty_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Model:
    """The same model on "meta", without memory for its weights."""
    with torch.device("meta"):
        return prepared(AutoModelForCausalLM.from_config(config, dtype=dtype))


def prepared(model: Model) -> Model:
    """A model whose RMSNorms are one kernel each, and whose logits are a float32 product.

    In float32 its numbers are the same. Weights and their names stay.
    """
    return use_float32_head(fuse_norms(model))


def load_config(name: str) -> PreTrainedConfig:
    """A model's configuration without dropout and router noise. Raises InputError.

    An update runs in training mode, because gradient checkpointing needs it. Dropout or router
    noise would then change the probabilities: no ratio would be 1 before the first update.
    """
    config = load_pretrained(AutoConfig, "model", name)
    yarn_positions(name)  # puts them into the cache
    for part in (config, config.get_text_config()):
        for key in [key for key, value in vars(part).items() if isinstance(value, float)]:
            if "drop" in key or "jitter" in key:
                setattr(part, key, 0.0)
    return config


@functools.cache  # a checkpoint may be deleted while its model is in use
def yarn_positions(name: str) -> int:
    """How many positions YaRN gives a model: factor x original; 0 if its config.json does not say.

    The config in memory cannot tell, because transformers fills in the original number.
    """
    config, _ = PreTrainedConfig.get_config_dict(name)
    config = config.get("text_config", config)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for kind in (rope, *rope.values()):  # there may be a dict for each type of layer
        if isinstance(kind, dict) and "yarn" in (kind.get("rope_type"), kind.get("type")):
            original = kind.get("original_max_position_embeddings") or 0
            return int((kind.get("factor") or 1) * original)
    return 0


# -------------------------------------------------------------------------------- what is refused


def check_positions(name: str, model: Model) -> None:
    """Raise InputError if rotary frequencies depend on the longest row of a batch.

    The probabilities of a response's tokens would then depend on the responses beside it.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        # A dict has one kind for each type of layer.
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds or "default"]:
            if "dynamic" in kind or kind == "longrope":
                raise InputError(
                    f"{name}: its config.json has rope_type {kind!r}, rotary positions that depend "
                    "on the longest row of a batch, which is not supported"
                )


def check_length(
    config: PreTrainedConfig, prompts: list[list[int]], max_new_tokens: int, flag: str
) -> None:
    """Raise InputError, naming `flag`, if a response could outgrow the model's positions.

    config: the model's. A config without a number of positions refuses nothing.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions and config.name_or_path:  # under YaRN it can be the number before the factor
        positions = max(positions, yarn_positions(config.name_or_path))
    longest = max(map(len, prompts), default=0)
    if positions and longest + max_new_tokens > positions:
        raise InputError(
            f"{flag} {max_new_tokens}: the longest prompt has {longest} tokens and the model "
            f"{positions} positions, so at most {max(0, positions - longest)} fit"
        )


@torch.no_grad()
def check_head(model: Model) -> None:
    """Raise InputError unless the model's logits are hidden states times the head's weight.

    HeadStats relies on this. A bias, a scale or a soft cap on the logits would make every
    log-probability wrong. The flags of a config for these have many names, so logits are compared.
    """
    ids = torch.arange(2, 10, device=model.device)[None]  # (1, 8), in every vocabulary
    hidden = model.base_model(ids, use_cache=False).last_hidden_state[0]  # (8, D)
    expected = float32_logits(hidden, model.get_output_embeddings().weight)  # (8, V)
    logits = model(ids, use_cache=False).logits[0].float()
    if not logits.isfinite().all():
        raise InputError("--model: its logits are not finite; look for weights that are NaN")
    if not torch.allclose(expected, logits, rtol=1e-3, atol=1e-3 * float(logits.abs().max())):
        raise InputError(
            "--model: its logits are not hidden states times the weight of its output head "
            "(a bias, a scale or a soft cap), which is not supported"
        )


def check_ties(name: str, model: Model) -> None:
    """Raise InputError if config.json ties embedding and output head, but the weights differ.

    transformers then loads two tensors. Ranks build the model from its config, with one tensor for
    both: the head's weights would replace the embedding's.
    """

    def tied(model: Model) -> bool:
        return model.get_output_embeddings().weight is model.get_input_embeddings().weight

    if tied(empty_model(model.config)) and not tied(model):
        raise InputError(
            f"{name}: its config.json ties the embedding and the output head, but the files have "
            'different weights for them; set "tie_word_embeddings" to false in a copy of the folder'
        )


# ----------------------------------------------------------------- which weights a name stands for

# The files of a model's folder that decide what is sampled.
MODEL_FILES = """config.json generation_config.json tokenizer* vocab* merges.txt added_tokens.json
    special_tokens_map.json chat_template* *.model *.safetensors *.index.json *model*.bin"""


def weights_of(name: str) -> str:
    """Identify a model's weights: other weights under the same name give another text.

    For a folder it is a hash of the model's files, so a copy of the folder has the same one. For a
    Hub id it is the commit that is in the cache.
    """
    load_config(name)  # puts it into the cache; raises InputError
    folder = Path(name)
    if folder.is_dir():
        files = {file for pattern in MODEL_FILES.split() for file in folder.glob(pattern)}
        files = sorted(file for file in files if file.is_file())
        return fingerprint([[file.name, file_fingerprint(file)] for file in files])
    cached = try_to_load_from_cache(name, "config.json")
    return f"{name}, commit {Path(cached).parent.name}" if isinstance(cached, str) else name
