"""The decoding loop that `generate` runs for rollout.py: slots with a KV cache written in place.

A slot is a row of the cache. One whose response has ended takes the next prompt: a step costs a
GPU's host as much for 3 rows as for 64, so no slot should be idle. Read from top to bottom: the
cache, attention on it, the order of the slots, the loop, the draw of a token.
"""

import functools
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from tqdm import tqdm
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers import PreTrainedModel as Model
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from support.seeds import uniform

CHECK_EVERY = 8  # decoding steps: reading the tokens waits for the GPU
PREFILL_TOKENS = 16384  # in a forward over prompts

# Tokens by which the cache grows. A GPU should copy it seldom; a CPU reads adjacent rows faster.
CACHE_BLOCK = {"cpu": 8, "cuda": 256}

# Attention reads the slots range by range, each up to its own longest row; the ranges are kept in
# order of length. Where they end, as shares of the slots: more of them read less and launch more.
RANGE_ENDS = {"cpu": (1 / 8, 1 / 2, 1), "cuda": (1,)}

# ------------------------------------------------------------------------- the cache and attention


class SlotCache(Cache):
    """Keys and values (slots, heads, capacity, width) of each layer, written in place.

    Every slot counts its positions from 0. Behind its last position is what an earlier response or
    the padding of a prompt has left; the mask of a decoding step hides it.
    """

    def __init__(self, longest: int, device: torch.device) -> None:
        super().__init__(layers=[])  # reports itself empty: a prefill without a mask is causal
        self.longest, self.block = rounded_up(longest, 8), suited(CACHE_BLOCK, device)
        self.slots = self.capacity = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def reserve(self, slots: int, length: int) -> None:
        """Room for `length` tokens in each of the first `slots`; their number never grows again.

        What is new is filled with 0: NaN would get past a mask.
        """
        if length > self.capacity:
            self.slots, self.capacity = slots, min(rounded_up(length, self.block), self.longest)
            for states in (self.keys, self.values):
                for i, old in enumerate(states):
                    more = self.capacity - old.shape[2]
                    states[i] = functional.pad(old[:slots], (0, 0, 0, more))

    def move(self, rows: dict[int, int]) -> None:
        """Rows {new slot: old slot} change places, all at once."""
        if rows:
            device = self.keys[0].device
            new, old = (torch.tensor([*slots], device=device) for slots in (rows, rows.values()))
            for states in (*self.keys, *self.values):
                states[new] = states[old]

    def write_to(self, slots: torch.Tensor, positions: torch.Tensor, visible: int) -> None:
        """The next forward writes to slots (B, 1) at positions (B, T).

        It attends to the first `visible` positions of slots 0 to B - 1; 0: to its own tokens.
        """
        self.place, self.visible = (slots, slice(None), positions), visible

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's new keys and values (B, heads, T, width) -> those that it attends to."""
        attended = []
        for states, new in ((self.keys, key), (self.values, value)):
            if layer_idx == len(states):  # the first forward
                states.append(new.new_zeros(self.slots, new.shape[1], self.capacity, new.shape[3]))
            whole = states[layer_idx]
            whole[self.place] = new.transpose(1, 2)
            attended.append(whole[: len(new), :, : self.visible] if self.visible else new)
        return attended[0], attended[1]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    ranges: list[tuple[int, int, int]] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of a forward on a SlotCache, as transformers calls it: (B, T, heads, width).

    query, key, value (B, heads, T, width); attention_mask (B, 1, 1, visible), None for a prefill,
    which is causal. ranges of a decoding step: (first slot, end, positions to read); where a model
    does not hand them on, every position is read. A mask for each head is left to transformers.
    """
    if attention_mask is None or attention_mask.shape[1] > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    # The queries of one key head lie side by side: no key is copied for them.
    query = query.unflatten(1, (key.shape[1], -1)).squeeze(3)  # (B, key heads, group, width)
    out = []
    for start, end, width in ranges or [(0, len(key), key.shape[2])]:
        k, v = key[start:end, :, :width], value[start:end, :, :width]
        q, mask = query[start:end], attention_mask[start:end, ..., :width]
        scale = options.get("scaling")
        out.append(functional.scaled_dot_product_attention(q, k, v, mask, scale=scale))
    whole = out[0] if len(out) == 1 else torch.cat(out)  # (B, key heads, group, width)
    return whole.flatten(1, 2)[:, None], None


AttentionInterface.register("slots", attend)
AttentionMaskInterface.register("slots", sdpa_mask)  # of a prefill


# -------------------------------------------------------------------------- the order of the slots


def ranges_of(lengths: list[int], device: torch.device) -> list[tuple[int, int]]:
    """The ranges (first slot, end) that attention reads one after the other; rows in any order."""
    ends = suited(RANGE_ENDS, device) if min(lengths) < max(lengths) else (1,)
    cuts = itertools.pairwise([0, *(int(len(lengths) * end) for end in ends)])
    return [(start, end) for start, end in cuts if start < end]


def arrange(
    lengths: dict[int, int], places: dict[int, int], ranges: list[tuple[int, int]]
) -> list[int]:
    """Rows {row: length} -> the row of each slot: the longest in the first range, and so on.

    Within its range a row stays in the slot that it has in `places`, if it has one.
    """
    by_length, slots = sorted(lengths, key=lengths.get, reverse=True), []
    for start, end in ranges:
        rows = by_length[start:end]
        staying = {places[i]: i for i in rows if start <= places.get(i, -1) < end}
        moving = iter(set(rows) - set(staying.values()))
        slots += [staying[s] if s in staying else next(moving) for s in range(start, end)]
    return slots


def suited(values: dict[str, Any], device: torch.device) -> Any:
    """The value for this kind of device; what is no CPU is taken for a GPU."""
    return values["cpu" if device.type == "cpu" else "cuda"]


def rounded_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


# ---------------------------------------------------------------------------------------- the loop


@torch.inference_mode()
def decoding_loop(
    model: Model,
    _longest_prompt: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    prompts: list[list[int]],
    seeds: list[int],
    batch_size: int,
    bar: tqdm,
    **inputs: Any,
) -> list[list[int]]:
    """What `generate` runs: every prompt through one of `batch_size` slots -> the response ids."""
    stops, max_new_tokens = set(generation_config.eos_token_id), generation_config.max_new_tokens
    texts = [list(prompt) for prompt in prompts]  # ids of prompt and response
    queue = deque(range(len(prompts)))
    running: dict[int, int] = {}  # which slot each prompt has
    cache = SlotCache(max(map(len, prompts)) + max_new_tokens, model.device)
    forward = functools.partial(model, **inputs | {"past_key_values": cache})

    def choose(token: torch.Tensor, logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        numbers = numbers if generation_config.do_sample else None
        return next_token(logits_processor(token, logits), numbers)

    while queue or running:
        # 1. The next prompts take free slots; rows move to keep the ranges in order of length.
        fresh = [queue.popleft() for _ in range(min(len(queue), batch_size - len(running)))]
        lengths = {i: len(texts[i]) for i in (*running, *fresh)}
        ranges = ranges_of([*lengths.values()], model.device)
        slots = arrange(lengths, running, ranges)
        cache.move({s: running[i] for s, i in enumerate(slots) if running.get(i, s) != s})
        # 2. The fresh prompts are read; then every slot gets a few tokens.
        left = [len(prompts[i]) + max_new_tokens - len(texts[i]) for i in slots]
        steps = min(CHECK_EVERY, *left)
        cache.reserve(len(slots), max(lengths.values()) + steps)
        prefill(forward, cache, {s: prompts[i] for s, i in enumerate(slots) if i not in running})
        rows = [texts[i] for i in slots], [seeds[i] for i in slots]
        tokens = decode(forward, cache, *rows, ranges, steps, choose)
        # 3. Slots whose response has ended are free.
        running = {}
        for slot, (i, new) in enumerate(zip(slots, tokens.tolist(), strict=True)):
            texts[i] += until_stop(new, stops)
            if texts[i][-1] in stops or left[slot] == steps:
                bar.update()
            else:
                running[i] = slot
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def prefill(forward: Callable, cache: SlotCache, prompts: dict[int, list[int]]) -> None:
    """Cache {slot: prompt} but for the last token of each, which is the first to be decoded."""
    device = forward.func.device
    waiting = [(slot, prompt[:-1]) for slot, prompt in prompts.items()]
    size = max(1, PREFILL_TOKENS // max(map(len, prompts.values()), default=1))
    for start in range(0, len(waiting), size):
        slots, batch = zip(*waiting[start : start + size])
        width = max(map(len, batch))
        if width > 0:
            # Causal, so that padding on the right needs no mask.
            ids = [ids + [0] * (width - len(ids)) for ids in batch]
            positions = torch.arange(width, device=device).expand(len(batch), -1)
            cache.write_to(torch.tensor(slots, device=device)[:, None], positions, visible=0)
            ids = torch.tensor(ids, device=device)  # (B, width)
            forward(input_ids=ids, attention_mask=None, position_ids=positions)


def decode(
    forward: Callable,
    cache: SlotCache,
    texts: list[list[int]],
    seeds: list[int],
    ranges: list[tuple[int, int]],
    steps: int,
    choose: Callable,
) -> torch.Tensor:
    """`steps` tokens for each text, whose slot is its place: (R, steps) long, not waited for."""
    device, dtype = forward.func.device, forward.func.dtype
    lengths, tokens = [len(text) for text in texts], []
    longest = [max(lengths[start:end]) for start, end in ranges]
    token = torch.tensor([[text[-1]] for text in texts], device=device)  # (R, 1)
    slots = torch.arange(len(texts), device=device)[:, None]
    # Of each step: where its input token stands, and the random number that its output takes.
    positions = torch.tensor(lengths, device=device)[:, None] - 1  # (R, 1)
    positions = positions + torch.arange(steps, device=device)  # (R, steps)
    numbers = uniform(torch.tensor(seeds, device=device)[:, None], positions + 1)  # (R, steps)
    # Attention kernels want a multiple of 8.
    widest = rounded_up(max(lengths) + steps, 8)
    hidden = torch.arange(widest, device=device) >= positions[:, :1]  # (R, widest)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None]  # (R, 1, 1, widest)
    for step in range(steps):
        position = positions[:, step, None]  # (R, 1)
        mask.scatter_(3, position[:, None, None], 0.0)  # seen from now on
        read = [(*r, rounded_up(n + step, 8)) for r, n in zip(ranges, longest, strict=True)]
        visible = max(width for *_, width in read)
        cache.write_to(slots, position, visible)
        inputs = {"attention_mask": mask[..., :visible], "position_ids": position, "ranges": read}
        out = forward(input_ids=token, **inputs)
        token = choose(token, out.logits[:, -1].float(), numbers[:, step, None])  # (R, 1)
        tokens.append(token)
    return torch.cat(tokens, 1)


# ------------------------------------------------------------------------------ the draw of a token


def next_token(scores: torch.Tensor, numbers: torch.Tensor | None) -> torch.Tensor:
    """Unnormalised log-probabilities (R, V) -> a token of each row, (R, 1) long.

    numbers (R, 1) float64 in [0, 1) are looked up in the cumulative distribution, which is float64
    too: a rare token's share is not rounded away, and one number a row is cheaper than the one a
    word that torch.multinomial draws. None: the likeliest token.
    """
    if numbers is None:
        return scores.argmax(-1, keepdim=True)
    cumulative = scores.softmax(-1, dtype=torch.float64).cumsum(-1)  # (R, V)
    token = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)
    # NaN finds the id V. With one that exists, training's own checks report what is not finite.
    return token.clamp(max=scores.shape[1] - 1)


def until_stop(ids: list[int], stops: set[int]) -> list[int]:
    """ids up to their first stop id, which is kept; what follows it was not asked for."""
    return ids[: next((i for i, token in enumerate(ids, 1) if token in stops), len(ids))]
