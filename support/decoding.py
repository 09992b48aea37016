"""The decoding loop that `generate` runs for rollout.py: slots with a KV cache written in place.

A slot is a row of the cache. A slot whose response has ended takes the next prompt. No slot should
be idle, because a decoding step takes the GPU's host as long for 3 rows as for 64.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers import PreTrainedModel as Model
from transformers.cache_utils import Cache, DynamicLayer

from support.errors import InputError
from support.seeds import uniform

CHECK_EVERY = 8  # decoding steps between two looks at the tokens: a look waits for the GPU
PREFILL_TOKENS = 16384  # most tokens in a forward over prompts
CACHE_BLOCK = 128  # tokens by which the cache grows on a CPU
NAN_LOGITS = "--model: its logits are NaN while sampling; look for weights that are not finite"


class SlotCache(Cache):
    """Keys and values of each layer, (slots, heads, capacity, width), written in place.

    The positions of every slot start at 0. Behind the last position of a slot is garbage, of an
    earlier response or of padding. The mask of a decoding step hides the garbage.
    """

    def __init__(self, longest: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(layers=[])  # reports itself empty: a prefill without a mask is causal
        self.longest, self.device, self.dtype = rounded_up(longest, 8), device, dtype
        self.slots = self.capacity = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def reserve(self, slots: int, length: int) -> None:
        """Make room for `length` tokens in each of the first `slots` slots.

        The number of slots never grows after the first call. New room is filled with 0, because
        NaN would get past a mask.
        """
        if length <= self.capacity:
            return
        # On a CPU the cache grows: other programs share the memory, and most responses end early.
        # On a GPU the cache is whole at once: a growing cache would leave free blocks behind that
        # are too small for the next one.
        on_gpu = self.device.type == "cuda"
        length = self.longest if on_gpu else rounded_up(length, CACHE_BLOCK)
        self.slots, self.capacity = slots, min(length, self.longest)
        for states in (self.keys, self.values):
            for i, old in enumerate(states):
                states[i] = functional.pad(old[:slots], (0, 0, 0, self.capacity - old.shape[2]))

    def move(self, source: int, target: int) -> None:
        """Copy one slot's keys and values to another slot."""
        for states in (*self.keys, *self.values):
            states[target] = states[source]

    def write_to(self, slots: torch.Tensor, positions: torch.Tensor, visible: int) -> None:
        """Let the next forward write to slots (B, 1) long at positions (B, T) long.

        It attends to the first `visible` positions of slots 0 to B - 1, or if 0, to its own tokens.
        """
        self.write_index, self.visible = (slots, slice(None), positions), visible

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new key and value, (B, heads, T, width) each.

        transformers calls it in every layer. Returns the keys and values that the layer attends to.
        """
        attended = []
        for states, new in ((self.keys, key), (self.values, value)):
            if layer_idx == len(states):  # the first forward
                states.append(new.new_zeros(self.slots, new.shape[1], self.capacity, new.shape[3]))
            whole = states[layer_idx]
            whole[self.write_index] = new.transpose(1, 2)
            attended.append(whole[: len(new), :, : self.visible] if self.visible else new)
        return attended[0], attended[1]


def has_full_attention(model: Model) -> bool:
    """Whether every layer attends to all earlier tokens, with rotary positions."""
    layers = DynamicCache(config=model.config).layers
    full = bool(layers) and all(type(layer) is DynamicLayer for layer in layers)
    return full and hasattr(model.base_model, "rotary_emb")


def rounded_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


@dataclass
class Row:
    """A prompt and its response so far."""

    prompt_index: int  # among all prompts
    seed: int
    ids: list[int]  # of the prompt and of the response
    prompt_length: int

    def response_length(self) -> int:
        return len(self.ids) - self.prompt_length


@torch.inference_mode()
def decoding_loop(
    model: Model,
    prompts: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    slots: int,
    seeds: list[int],
    **inputs: Any,
) -> Iterator[dict[int, list[int]]]:
    """Decode left-padded prompts (N, P) long, `slots` of them at a time; `generate` calls it.

    Every few tokens it yields {index of the prompt: ids of its response, stop id included} for the
    responses that have ended, often an empty dict. Raises InputError if logits are NaN.
    """
    # Any other processor would change the distribution that responses are drawn from.
    processors = {type(processor).__name__ for processor in logits_processor}
    assert processors <= {"TemperatureLogitsWarper", "TopPLogitsWarper"}, processors
    # The mask is None if nothing is padded. `generate` sees the mask only if it is no parameter.
    mask = inputs.pop("attention_mask")
    starts = [0] * len(prompts) if mask is None else (mask == 0).sum(1).tolist()
    waiting = [
        Row(index, seed, ids[start:], prompt_length=len(ids) - start)
        for index, (seed, ids, start) in enumerate(zip(seeds, prompts.tolist(), starts))
    ]
    running: list[Row] = []  # one for each slot
    stops, max_new_tokens = set(generation_config.eos_token_id), generation_config.max_new_tokens
    longest = max(row.prompt_length for row in waiting) + max_new_tokens
    cache = SlotCache(longest, model.device, model.dtype)
    # `generate` has prepared an empty cache. The argument's name depends on the version.
    inputs = {key: cache if isinstance(value, Cache) else value for key, value in inputs.items()}
    forward = functools.partial(model, **inputs)

    def draw(token: torch.Tensor, logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        greedy = not generation_config.do_sample
        return next_token(logits_processor(token, logits), None if greedy else uniforms)

    while waiting or running:
        # 1. The free slots, which are the last ones, take the next prompts.
        first, free = len(running), slots - len(running)
        running, waiting = running + waiting[:free], waiting[free:]
        steps = min(CHECK_EVERY, *(max_new_tokens - row.response_length() for row in running))
        cache.reserve(len(running), max(len(row.ids) for row in running) + steps)
        prefill(forward, cache, first, running[first:])
        # 2. Every row gets a few tokens.
        tokens = decode(forward, cache, running, steps, draw).tolist()
        for row, ids in zip(running, tokens, strict=True):
            if min(ids) < 0:
                raise InputError(NAN_LOGITS)
            row.ids += until_stop(ids, stops)
        # 3. Rows that have ended leave, and the row in the last slot moves into the free slot. The
        # walk is backwards: the row in the last slot has been looked at and has not ended.
        ended = {}
        for slot in reversed(range(len(running))):
            row = running[slot]
            if row.ids[-1] in stops or row.response_length() == max_new_tokens:
                ended[row.prompt_index] = row.ids[row.prompt_length :]
                last = running.pop()
                if last is not row:
                    running[slot] = last
                    cache.move(len(running), slot)
        yield ended


def prefill(forward: Callable, cache: SlotCache, first: int, rows: list[Row]) -> None:
    """Put the keys and values of new rows' prompts into the slots from `first` on.

    The last token of each prompt is left out. `decode` forwards it.
    """
    size = max(1, PREFILL_TOKENS // max((len(row.ids) for row in rows), default=1))
    for start in range(0, len(rows), size):
        batch = [row.ids[:-1] for row in rows[start : start + size]]
        width = max(map(len, batch))
        if width > 0:
            # Attention is causal, so padding on the right needs no mask.
            ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in batch])  # (B, width)
            slots = torch.arange(len(batch), device=cache.device)[:, None] + first + start
            positions = torch.arange(width, device=cache.device).expand(len(batch), -1)
            cache.write_to(slots, positions, visible=0)
            ids = ids.to(cache.device)
            forward(input_ids=ids, attention_mask=None, position_ids=positions)


def decode(
    forward: Callable, cache: SlotCache, rows: list[Row], steps: int, draw: Callable
) -> torch.Tensor:
    """Draw `steps` more tokens for each of R rows: (R, steps) long."""
    device, longest, tokens = cache.device, max(len(row.ids) for row in rows), []
    token = torch.tensor([[row.ids[-1]] for row in rows], device=device)  # (R, 1)
    slots = torch.arange(len(rows), device=device)[:, None]  # (R, 1)
    # For each step: the position of its input token, and a random number for its output token.
    positions = torch.tensor([[len(row.ids) - 1] for row in rows], device=device)
    positions = positions + torch.arange(steps, device=device)  # (R, steps)
    seeds = torch.tensor([[row.seed] for row in rows], device=device)  # (R, 1)
    uniforms = uniform(seeds, positions + 1)  # (R, steps)
    for step in range(steps):
        position = positions[:, step, None]  # (R, 1)
        visible = rounded_up(longest + step, 8)  # attention kernels want a multiple of 8
        hidden = torch.arange(visible, device=device) > position  # (R, visible)
        mask = torch.zeros(hidden.shape, dtype=cache.dtype, device=device)
        mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None]  # (R, 1, 1, visible)
        cache.write_to(slots, position, visible)
        given = {"attention_mask": mask, "position_ids": position}
        logits = forward(input_ids=token.clamp(min=0), **given).logits[:, -1].float()  # (R, V)
        token = draw(token, logits, uniforms[:, step, None])  # (R, 1)
        tokens.append(token)
    return torch.cat(tokens, 1)


def next_token(logits: torch.Tensor, uniforms: torch.Tensor | None) -> torch.Tensor:
    """Draw a token for each row of logits (R, V) float32: (R, 1) long, -1 if a logit is NaN.

    uniforms (R, 1) float64 are random numbers in [0, 1), which are looked up in the cumulative
    distribution. If uniforms is None, the token is the likeliest one. The distribution is float64:
    a rare token's probability is not rounded away.
    """
    if uniforms is None:
        largest, token = logits.max(-1, keepdim=True)  # NaN is the largest of all
        return token.masked_fill(largest.isnan(), -1)
    cumulative = logits.softmax(-1, dtype=torch.float64).cumsum(-1)  # (R, V)
    token = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    return token.masked_fill(cumulative[:, -1:].isnan(), -1)


def until_stop(ids: list[int], stops: set[int]) -> list[int]:
    """ids up to their first stop id, which is kept."""
    return ids[: next((i for i, token in enumerate(ids, 1) if token in stops), len(ids))]


def rows_that_fit(model: Model, length: int, batch_size: int) -> int:
    """batch_size, or on CUDA as many rows of `length` tokens as fit in 80 % of the free memory.

    The 20 % that stay free are enough for plain `generate`, which copies one layer's keys or values
    when its cache grows.
    """
    if model.device.type != "cuda":
        return batch_size
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys_and_values = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
    # For each id of the vocabulary, when top-p sorts: logits, divided by the temperature too (4
    # bytes each), sorted values and indices (4 and 8), CUDA's buffers (32): 52 bytes.
    per_row = keys_and_values * rounded_up(length, 8) + 52 * config.vocab_size
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    return max(1, min(batch_size, int(0.8 * free / per_row)))
