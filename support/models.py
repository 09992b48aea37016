"""Models: they are read, refused if a run would be wrong, prepared, and sharded over ranks.

On CUDA the model is always sharded, also on one GPU: FSDP2's mixed precision keeps float32 weights
and computes in bfloat16.
"""

import contextlib
import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers import PreTrainedModel as Model

from support import InputError, ranks
from support.checkpoints import checkpoints
from support.head import float32_logits, use_float32_head

# Classes of transformers with the formula of torch's RMSNorm: x / sqrt(mean(x^2) + epsilon) *
# weight. Many other classes share only a part of the name: Gemma's norm scales by 1 + weight.
RMS_NORMS = {
    f"{family}RMSNorm"
    for family in "Llama Mistral Mixtral Olmo2 Olmo3 Phi3 Qwen2 Qwen3 Qwen3Moe SmolLM3".split()
}

# ---------------------------------------------------------------------------------------- reading


def load_pretrained(kind: type, what: str, name: str, **options: Any) -> Any:
    """kind.from_pretrained(name, **options); raises InputError in place of the Hub's own errors."""
    try:
        return kind.from_pretrained(name, **options)
    except (OSError, ValueError, ImportError) as error:  # attn_implementation can need a package
        if newest := max(checkpoints(Path(name)), default=None):
            raise InputError(f"{name}: a run; its newest checkpoint is {newest}") from error
        reason = shorten(str(error), 700)  # a gated model's error says where to log in
        hint = "give a Hub id, a model's folder, or a run's checkpoint"
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
    # transformers leaves these out, or with an adapter_config.json adds an adapter to the model.
    if more := {*info["unexpected_keys"]} | {key for key in model.state_dict() if ".lora_" in key}:
        unexpected = ", ".join(sorted(more)[:3])
        hint = "merge its adapters, or look for a plain copy"
        raise InputError(f"{name}: its model has no place for the weights {unexpected}; {hint}")
    for module in model.modules():
        kind = str(getattr(module, "rope_type", ""))  # of a dict: a kind for each type of layer
        if "dynamic" in kind or "longrope" in kind:
            # The probabilities of a response's tokens would depend on the responses beside it.
            what = f"its rope_type {kind} has positions that depend on the longest row of a batch"
            raise InputError(f"{name}: {what}, which is not supported")
    model = prepared(model).to(device).eval()
    with torch.no_grad():
        logits = model(torch.arange(2, 10, device=device)[None], use_cache=False).logits
    if not logits.isfinite().all():
        raise InputError(f"{name}: its logits are not finite; look for weights that are not finite")
    return model


def empty_model(config: PreTrainedConfig) -> Model:
    """The same model in float32 on "meta", without memory for its weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return prepared(model)


def prepared(model: Model) -> Model:
    """Change a model's modules. Rank 0's whole one, FSDP's and the sampling twin must be alike."""
    return use_float32_head(fuse_norms(model))


def load_config(name: str) -> PreTrainedConfig:
    """A model's configuration without dropout and router noise. Raises InputError.

    An update runs in training mode, because gradient checkpointing needs it. Dropout or router
    noise would then change the probabilities: no ratio would be 1 before the first update.
    """
    config = load_pretrained(AutoConfig, "model", name)
    for part in (config, config.get_text_config()):
        for key in [key for key, value in vars(part).items() if isinstance(value, float)]:
            if "drop" in key or "jitter" in key:
                setattr(part, key, 0.0)
    return config


def check_length(config: PreTrainedConfig, longest: int, max_new_tokens: int) -> None:
    """Raise InputError if a response could outgrow the model's positions.

    config: the model's; longest: the tokens of the longest prompt. A config without a number of
    positions refuses nothing.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions and longest + max_new_tokens > positions:
        what = f"the longest prompt has {longest} tokens and the model {positions} positions"
        fit = max(0, positions - longest)
        raise InputError(f"--max_new_tokens {max_new_tokens}: {what}, so at most {fit} fit")


@torch.no_grad()
def check_head(model: Model) -> None:
    """Raise InputError unless the model's logits are hidden states times the head's weight.

    HeadStats relies on this. A bias, a scale or a soft cap on the logits would make every
    log-probability wrong. The flags of a config for these have many names, so logits are compared.
    """
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    if model.config.get_text_config().tie_word_embeddings and head is not embedding:
        hint = "set tie_word_embeddings to false, or take its head out of the files"
        raise InputError(
            f"--model: its config ties its head to its embedding, not its files; {hint}"
        )
    ids = torch.arange(2, 10, device=model.device)[None]  # (1, 8), in every vocabulary
    hidden = model.base_model(ids, use_cache=False).last_hidden_state[0]  # (8, D)
    expected = float32_logits(hidden, head)  # (8, V)
    logits = model(ids, use_cache=False).logits[0].float()
    if not torch.allclose(expected, logits, rtol=1e-3, atol=1e-3 * float(logits.abs().max())):
        what = "its logits are more than hidden states times the weight of its output head"
        raise InputError(f"--model: {what} (a bias, a scale or a soft cap); take another model")


def weights_of(name: str) -> str:
    """Identify a model's files: other weights under the same name give another text.

    It is a hash of a folder's files, or the commit of a Hub id in the cache: load the model before.
    """
    if Path(name).is_dir():
        whole = hashlib.sha256()
        for file in sorted(filter(Path.is_file, Path(name).iterdir())):
            with file.open("rb") as content:
                whole.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
        return whole.hexdigest()[:16]
    cached = try_to_load_from_cache(name, "config.json")
    return f"{name}, commit {Path(cached).parent.name}" if isinstance(cached, str) else name


# ------------------------------------------------------------------------------------------ norms


def fuse_norms(model: Model) -> Model:
    """Replace each norm in RMS_NORMS by torch's RMSNorm, one kernel on a GPU; returns the model.

    The RMSNorm of transformers is eight kernels, half of all that a decoding step launches. In
    float32 the numbers are the same, in bfloat16 they may round differently. So training, token
    statistics and sampling all use the same norms.
    """
    for parent in list(model.modules()):
        for name, norm in parent.named_children():
            if type(norm).__name__ in RMS_NORMS:
                fused = torch.nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, device="meta")
                fused.weight = norm.weight
                setattr(parent, name, fused)
    return model


# ------------------------------------------------------------------------------------------ FSDP2


def load_sharded(policy: torch.nn.Module, whole: Model | None) -> None:
    """Shard a policy on "meta" with FSDP2, and fill its shards from rank 0's whole model.

    Each decoder layer of `policy.model` is a group. The policy itself is the root group, with the
    embedding, the last norm and the head. No GPU ever holds the whole float32 model, unless it is
    the only one. Every rank calls it, the others with None.
    """
    options = {"mesh": init_device_mesh(ranks.device().type, (ranks.world_size(),))}
    if ranks.device().type == "cuda":
        # Inputs of layers stay as they are: OLMo's and ERNIE's rotary cosines are float32. The
        # model that samples is not sharded, so nothing would cast them there.
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        options["mp_policy"] = precision
    for layer in policy.model.base_model.layers:
        fully_shard(layer, **options)
    fully_shard(policy, **options)
    policy.to_empty(device=ranks.device())
    # Buffers such as rotary frequencies are in no file.
    others = (dict(whole.named_buffers()), whole.generation_config) if whole else None
    buffers, policy.model.generation_config = ranks.broadcast(others)
    for key, buffer in policy.model.named_buffers():
        buffer.copy_(buffers[key])
    weights = whole.state_dict() if whole else {}
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(policy.model, weights, options=from_rank_0)


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
