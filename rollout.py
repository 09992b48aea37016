"""Rollouts: prompts in, sampled responses out, and p and H of their tokens.

1. Tokenizer and model: `load_tokenizer`, `load_policy`. support/models.py reads models, and says
   which ones are refused.
2. Prompts: `encode_prompt`.
3. Sampling: `sample` yields responses as they end. Hugging Face's `generate` runs `decoding_loop`
   of support/decoding.py, and `next_token` there draws each token from pi.
4. The policy: `response_stats` cuts rows into micro-batches, `Policy.forward` runs the model, and
   `HeadStats` of support/head.py computes p and H from hidden states.
"""

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jinja2 import TemplateError
from transformers import AutoTokenizer, GenerationConfig
from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer

from support import InputError, models, ranks
from support.batch import micro_batches
from support.decoding import decoding_loop, has_full_attention, rows_that_fit, until_stop
from support.head import HeadStats, TokenStats
from support.models import load_config, load_model, load_pretrained
from support.progress import log, track
from support.seeds import mix_seed

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


# ---------------------------------------------------------------------------- tokenizer and model


def load_tokenizer(name: str, chat_template: str = "") -> Tokenizer:
    """Load the tokenizer of a Hub id or a local folder, with a pad token. Raises InputError.

    chat_template: "" keeps the tokenizer's own, "none" removes it, anything else is a file with a
    template, or a JSON file with a `chat_template`.
    """
    tokenizer = load_pretrained(AutoTokenizer, "tokenizer", name)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # made from config.json alone
        raise InputError(f"{name}: no tokenizer in this folder; save its base model's there")
    if chat_template == "none":
        tokenizer.chat_template = None
    elif chat_template:
        tokenizer.chat_template = read_template(chat_template)
    if tokenizer.chat_template:
        check_template(tokenizer, name, chat_template)
    if tokenizer.pad_token_id is None:
        # Padding is masked everywhere, so any id will do.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def read_template(file: str) -> str:
    """Read a chat template, or the one in a tokenizer_config.json. Raises InputError."""
    try:
        text = Path(file).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--chat_template {file}: no text there ({error})") from error
    try:
        stored = json.loads(text)
    except ValueError:  # Jinja begins {% or {{
        return text
    template = stored.get("chat_template") if isinstance(stored, dict) else None
    if isinstance(template, list):  # several templates, each with its name
        named = {each.get("name"): each for each in template if isinstance(each, dict)}
        template = named.get("default", {}).get("template")
    if not isinstance(template, str):
        raise InputError(f"--chat_template {file}: its JSON has no chat_template")
    return template


def check_template(tokenizer: Tokenizer, name: str, file: str) -> None:
    """Raise InputError if a chat template cannot be used. Print a line if it writes the date.

    It is that of the model `name`, or of a file.
    """
    source = file or name
    problem = "What is 1 + 1?"
    turns = [{"role": "user", "content": problem}]
    try:
        # A macro takes the place of the function that transformers gives to templates.
        date = "{% macro strftime_now(format) %}<<date>>{% endmacro %}"
        options = {"chat_template": date + tokenizer.get_chat_template(), "tokenize": False}
        text = tokenizer.apply_chat_template(turns, **options)
    except TemplateError as error:
        line = f"line {error.lineno}: " if hasattr(error, "lineno") else ""
        raise InputError(f"{source}: no chat template ({line}{error})") from error
    if problem not in text:
        what = "the chat template leaves out the problem"
        raise InputError(f"{source}: {what}; it must write the content of each of `messages`")
    if file and re.search(rf">\\n|\\n<|\\n\Z|\\n{re.escape(problem)}", text):
        what = r"the chat template writes \n as two characters, as in JSON"
        raise InputError(f"{source}: {what}; give the JSON file, or write line ends")
    if "<<date>>" in text:
        what = "the chat template writes today's date, so prompts change at midnight"
        log(f"{source}: {what}. To keep them, give --chat_template FILE with the date written in")


def load_policy(name: str, gradient_checkpointing: bool = False) -> "Policy":
    """Load a Policy with float32 weights. Every rank calls it. Raises InputError.

    FSDP2 shards the Policy, except on a single CPU process. Only rank 0 reads the weights, into
    CPU memory.
    """
    whole = None  # not a result of `read`: on_rank_0 would send the model to every rank

    def read() -> None:
        nonlocal whole
        whole = load_model(name)
        models.check_head(whole)

    ranks.on_rank_0(read)  # the other ranks wait here for a download
    if not dist.is_initialized():
        return Policy(whole, gradient_checkpointing)
    policy = Policy(models.empty_model(load_config(name)), gradient_checkpointing)
    models.load_sharded(policy, whole)
    return policy


def stop_ids(model: Model, tokenizer: Tokenizer) -> list[int]:
    """Return the ids that end a response: the model's, the tokenizer's, the chat template's."""
    ids = model.generation_config.eos_token_id
    ids = set(ids if isinstance(ids, (list, tuple)) else [ids]) | {tokenizer.eos_token_id}
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<!>"}]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        _, has_answer, turn_end = text.rpartition("<!>")
        end_ids = tokenizer(turn_end, add_special_tokens=False).input_ids
        if has_answer and end_ids and end_ids[0] in tokenizer.added_tokens_decoder:
            ids.add(end_ids[0])
    return sorted(ids - {None})


# ---------------------------------------------------------------------------------------- prompts


def encode_prompt(
    tokenizer: Tokenizer, problem: str, instruction: str = INSTRUCTION, **switches: Any
) -> list[int]:
    """Return the ids of a problem and its instruction, in the chat template if there is one.

    switches: options of the template, such as enable_thinking.
    """
    content = f"{problem}\n{instruction}" if instruction else problem
    if not tokenizer.chat_template:
        ids = tokenizer(content + "\n").input_ids
        # Fine-tuning can leave a tokenizer behind that ends every text. The prompt must go on.
        return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids
    turns = [{"role": "user", "content": content}]
    options = {"tokenize": False, "add_generation_prompt": True, **switches}
    text = tokenizer.apply_chat_template(turns, **options)
    return tokenizer(text, add_special_tokens=False).input_ids


# --------------------------------------------------------------------------------------- sampling


@dataclass
class Response:
    """One sampled response."""

    prompt_ids: list[int]
    ids: list[int]  # the stop id included, a token like any other
    truncated: bool  # ended by max_new_tokens, not by a stop id
    text: str


def sample(
    model: Model,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    batch_size: int = 256,
    seed: int | list[int] = 0,
    cuda_graphs: bool = True,
    progress: str | None = None,
) -> Iterator[tuple[int, Response]]:
    """Sample one response to each prompt (repeat a prompt G times for a group of G).

    When a response has ended, it yields (index of the prompt, response). Equal prompts share one
    prefill while one of their responses is decoded: put them next to each other.

    At most `batch_size` responses are decoded at a time. `temperature` 0 is greedy decoding. `seed`
    is a list with one seed for each response, or a number from which such a list is made. A
    response depends on its prompt, its seed and the weights. The responses beside it change only
    its rounding. `cuda_graphs` only saves time on CUDA. `progress` names a bar over responses.

    A model with sliding windows or a recurrent state has another cache, without slots. Its prompts
    are sampled by plain `generate`, in batches. A batch ends when its longest response has ended,
    and takes the seed of its first response. So the samples depend on the size of the batches. On a
    GPU this size depends on the free memory.

    Raises RuntimeError if the model is in training mode.
    """
    if model.training:
        raise RuntimeError("the model is in training mode: call model.eval() before sampling")
    if not prompts:
        return
    seeds = [mix_seed(seed, i) for i in range(len(prompts))] if isinstance(seed, int) else seed
    stops = stop_ids(model, tokenizer)
    config = sampling_config(temperature, top_p, max_new_tokens, stops, tokenizer.pad_token_id)
    size = rows_that_fit(model, max(map(len, prompts)) + max_new_tokens, batch_size)
    if has_full_attention(model):
        loop = functools.partial(decoding_loop, slots=size, seeds=seeds, record=cuda_graphs)
        sampled = generate(model, prompts, config, custom_generate=loop)
    else:
        sampled = generate_in_batches(model, prompts, config, size, seeds)
    for index, ids in track(sampled, progress, len(prompts)):
        text = to_text(tokenizer, ids, skip_special=True)
        yield index, Response(prompts[index], ids, ids[-1] not in stops, text)
    if model.device.type == "cuda":
        # Give the cache's memory back to the GPU. Otherwise gradients and AdamW's moments would be
        # put into pieces of it, and no free piece would be large enough for the next cache.
        torch.cuda.empty_cache()


def sampling_config(
    temperature: float, top_p: float, max_new_tokens: int | None, stops: list[int], pad: int
) -> GenerationConfig:
    """Return a GenerationConfig that sets every field that changes the sampling.

    A field that is not set would come from the model's generation_config (Qwen3 has top_k 20 and
    top_p 0.95), or from transformers' defaults (top_k 50).
    """
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": 0} if temperature > 0 else {}
    return GenerationConfig(
        do_sample=temperature > 0,
        **sampling,
        max_new_tokens=max_new_tokens,
        eos_token_id=stops,
        pad_token_id=pad,
        use_cache=True,
    )


def generate(
    model: Model, prompts: list[list[int]], config: GenerationConfig, **options: Any
) -> Any:
    """Call model.generate on all prompts. It needs left padding, which decoding_loop strips.

    The model's own generation_config is set aside during the call: `config` has every field.
    """
    width, pad = max(map(len, prompts)), config.pad_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])  # (N, P)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])  # (N, P)
    options |= {"attention_mask": mask.to(model.device), "generation_config": config}
    models_config, model.generation_config = model.generation_config, GenerationConfig()
    try:
        return model.generate(ids.to(model.device), synced_gpus=False, **options)
    finally:
        model.generation_config = models_config


def generate_in_batches(
    model: Model, prompts: list[list[int]], config: GenerationConfig, size: int, seeds: list[int]
) -> Iterator[tuple[int, list[int]]]:
    """Sample by plain `generate`, for a model whose cache has no slots; yields as decoding_loop."""
    stops = set(config.eos_token_id)
    for start in range(0, len(prompts), size):
        batch = prompts[start : start + size]
        torch.manual_seed(seeds[start])
        rows = generate(model, batch, config)[:, max(map(len, batch)) :]  # (B, T)
        for index, ids in enumerate(rows.tolist(), start):
            yield index, until_stop(ids, stops)


def to_text(tokenizer: Tokenizer, ids: list[int], skip_special: bool = False) -> str:
    """Return ids as text. Ids above the vocabulary have none: a head can be wider (Qwen3)."""
    size = len(tokenizer)
    return tokenizer.decode([i for i in ids if i < size], skip_special_tokens=skip_special)


# -------------------------------------------------------------------------------------- the policy


class Policy(torch.nn.Module):
    """pi_theta: a transformers model whose forward returns ln p and H of responses' tokens."""

    def __init__(self, model: Model, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.model = model
        self.eval()
        if gradient_checkpointing:  # activations are computed again in the backward pass
            model.activation_checkpointing_enable({"use_reentrant": False})

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, *, logp_only: bool = False
    ) -> TokenStats:
        """Log-probability and entropy of every response token of right-padded rows.

        ids (B, L) long; mask (B, L) bool, True on response tokens; both on any device.
        Returns logp (ln p) and entropy (nats), (B, L) float32 each, with gradients, on the model's
        device. Column t is about token t, which is predicted from the tokens before it. Both are 0
        outside the mask and at a row's first token. Temperature 1, full vocabulary. With
        `logp_only` entropy is None and takes no time.
        """
        ids, mask = ids.to(self.model.device), mask.to(self.model.device)
        # Attention is causal and the padding is on the right, so no attention mask is needed.
        # A rank without rows takes part in the collectives of other ranks: it forwards one token.
        rows = ids if len(ids) else ids.new_zeros(1, 1)
        hidden = self.model.base_model(rows, use_cache=False).last_hidden_state  # (B, L, D)
        # The hidden state at column t predicts the token at column t + 1.
        row, t = mask[:, 1:].nonzero().unbind(1)  # (N,) each
        weight = self.model.get_output_embeddings().weight  # (V, D)
        logp, entropy = HeadStats.apply(hidden[row, t], weight, ids[row, t + 1], logp_only)  # (N,)
        zeros = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)  # (B, L)
        logp = zeros.index_put((row, t + 1), logp)
        if entropy is not None:
            entropy = zeros.index_put((row, t + 1), entropy)
        return TokenStats(logp, entropy)


@torch.no_grad()
def response_stats(
    policy: Policy, ids: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor, budget: int
) -> TokenStats:
    """Return ln p and H of every response token under the policy: (B, L) float32 each, on the CPU.

    ids (B, L) long, mask (B, L) bool, lengths (B,) long of prompt and response: right-padded rows
    on the CPU. budget: the most tokens of a micro-batch. Every rank calls it.
    """
    whole = torch.zeros(2, *ids.shape)  # ln p and H
    parts = ranks.even_out(micro_batches(lengths.tolist(), budget))
    for part in track(parts, "logp and entropy"):
        rows = torch.tensor(part, dtype=torch.long)
        width = max(lengths[rows].tolist(), default=0)
        stats = policy(ids[rows, :width], mask[rows, :width])
        whole[:, rows, :width] = torch.stack(stats).cpu()  # one transfer for the micro-batch
    models.reshard(policy)
    return TokenStats(*whole)


def sampling_gap(
    logp: torch.Tensor, entropy: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (gap, z): how far the tokens are from what the policy of logp and entropy would draw.

    logp (ln p), entropy (nats) and mask (bool, or 0 and 1) have one shape, any. If y is drawn from
    pi, the expectation of -ln pi(y) is H, given all tokens before y. So d = -logp - H has the mean
    0. gap is the mean of d over the tokens in mask. z = sum(d) / sqrt(sum(d^2)) is about standard
    normal. Top-k, top-p, a temperature or stale weights make |z| large. Both are 0-dim tensors on
    the CPU, because the GPU of a Mac has no float64.
    """
    d = -logp[mask.bool()].cpu().double() - entropy[mask.bool()].cpu().double()
    return d.mean(), d.sum() / d.square().sum().sqrt()
