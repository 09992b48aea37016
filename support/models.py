"""Models: they are read from the Hub or a folder, prepared, and refused if a run would be wrong."""

import hashlib
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers import PreTrainedModel as Model

from support.errors import InputError
from support.files import fingerprint
from support.head import float32_logits, use_float32_head
from support.norms import fuse_norms


def load_pretrained(kind: type, what: str, name: str, **options: Any) -> Any:
    """kind.from_pretrained(name, **options); raises InputError in place of the Hub's own errors."""
    try:
        return kind.from_pretrained(name, **options)
    except (OSError, ValueError, SafetensorError, UnpicklingError) as error:
        hint = "give a Hub id or a folder"
        if isinstance(error, (SafetensorError, UnpicklingError)):
            hint = "its file of weights is no whole one; copy or download it again"
        elif (Path(name) / "adapter_config.json").is_file():
            hint = "it is an adapter; merge it into its base model and save that"
        reason = str(error).partition("\n")[0]
        raise InputError(f"{name}: no {what} there, {hint} ({reason})") from error


def load_model(
    name: str, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Model:
    """A causal language model of a Hub id or a local folder, in eval mode. Raises InputError."""
    options = {"dtype": dtype, "config": load_config(name), "output_loading_info": True}
    model, info = load_pretrained(AutoModelForCausalLM, "model", name, **options)
    if info["missing_keys"]:  # transformers draws these at random
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise InputError(f"{name}: has no weights for {missing}; look for a complete copy")
    check_positions(name, model)
    return use_float32_head(fuse_norms(model)).to(device).eval()


def empty_model(config: PreTrainedConfig) -> Model:
    """The same model in float32 on "meta", without memory for its weights.

    Raises InputError if its layers are not where FSDP2 is told to look for them.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if not hasattr(model.base_model, "layers"):
        what = f"{type(model).__name__} has no base_model.layers, which GPUs and several ranks need"
        raise InputError(f"{config.name_or_path}: {what}; take another model")
    return use_float32_head(fuse_norms(model))


def load_config(name: str) -> PreTrainedConfig:
    """A model's configuration without dropout and router noise. Raises InputError.

    An update runs in training mode, because gradient checkpointing needs it. Dropout or router
    noise would then change the probabilities: no ratio would be 1 before the first update.
    """
    config = load_pretrained(AutoConfig, "model", name)
    if getattr(config, "quantization_config", None):
        raise InputError(f"{name}: is a quantised model; its weights must be float32 or bfloat16")
    for part in (config, config.get_text_config()):
        for key in [key for key, value in vars(part).items() if isinstance(value, float)]:
            if "drop" in key or "jitter" in key:
                setattr(part, key, 0.0)
    return config


def check_positions(name: str, model: Model) -> None:
    """Raise InputError if rotary frequencies depend on the longest row of a batch.

    The probabilities of a response's tokens would then depend on the responses beside it.
    """
    for module in model.modules():
        kind = str(getattr(module, "rope_type", ""))  # of a dict: a kind for each type of layer
        if "dynamic" in kind or "longrope" in kind:
            what = f"its rope_type {kind} has positions that depend on the longest row of a batch"
            raise InputError(f"{name}: {what}, which is not supported")


def check_length(config: PreTrainedConfig, longest: int, max_new_tokens: int, flag: str) -> None:
    """Raise InputError, naming `flag`, if a response could outgrow the model's positions.

    config: the model's; longest: the tokens of the longest prompt. A config without a number of
    positions refuses nothing.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions and longest + max_new_tokens > positions:
        what = f"the longest prompt has {longest} tokens and the model {positions} positions"
        fit = max(0, positions - longest)
        raise InputError(f"{flag} {max_new_tokens}: {what}, so at most {fit} fit")


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
        raise InputError("--model: its logits are not finite; look for weights that are not finite")
    if not torch.allclose(expected, logits, rtol=1e-3, atol=1e-3 * float(logits.abs().max())):
        what = "its logits are more than hidden states times the weight of its output head"
        raise InputError(f"--model: {what} (a bias, a scale or a soft cap); take another model")


def weights_of(name: str) -> str:
    """Identify a model's files: other weights under the same name give another text.

    It is a hash of a folder's files, or the commit of a Hub id in the cache: load the model before.
    """
    if Path(name).is_dir():
        digests = {}
        for file in filter(Path.is_file, Path(name).iterdir()):
            with file.open("rb") as content:
                digests[file.name] = hashlib.file_digest(content, "sha256").hexdigest()
        return fingerprint(digests)
    cached = try_to_load_from_cache(name, "config.json")
    return f"{name}, commit {Path(cached).parent.name}" if isinstance(cached, str) else name
