"""The decoding loop that `generate` runs for rollout.py: slots with a KV cache written in place.

A slot is a row of the cache. A slot whose response has ended takes the next prompt. No slot should
be idle, because a decoding step takes the GPU's host as long for 3 rows as for 64. Rows with the
same prompt, such as a group of G, share the prefill of this prompt. On CUDA a decoding step is
recorded once and then replayed: see `Decoder`.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers import PreTrainedModel as Model
from transformers.cache_utils import Cache, DynamicLayer
from transformers.utils import ModelOutput

from support.progress import log
from support.seeds import uniform

CHECK_EVERY = 8  # decoding steps between two looks at the tokens: a look waits for the GPU
PREFILL_TOKENS = 16384  # most tokens in a forward over prompts
CACHE_BLOCK = 128  # tokens by which the cache grows on a CPU
ALIGN = 8  # attention kernels want lengths that are a multiple of this
# Bytes to draw a token, for each id of the vocabulary. When top-p sorts: logits, divided by the
# temperature too (4 each), sorted values and indices (4 and 8), CUDA's buffers (32). All twice: a
# recorded step keeps its own.
DRAW_BYTES = 2 * 52
# On a GPU a step is recorded for each pair (rows, visible positions), in about 0.12 s and 25 MB.
# Rows are rounded up to eighths of the slots, positions to sixteenths of the cache and at least to
# multiples of 256. Smaller parts make more recordings. Larger parts read more keys and values that
# no row needs. At 256, for 128 rows of Qwen3-1.7B on an H100, both cost the same (estimated).
ROW_PARTS, VISIBLE_PARTS, VISIBLE_LEAST = 8, 16, 256


class SlotCache(Cache):
    """Keys and values of each layer, (slots, heads, capacity, width), written in place.

    The positions of every slot start at 0. Behind the last position of a slot is garbage, of an
    earlier response or of padding. The mask of a decoding step hides the garbage.
    """

    def __init__(self, model: Model, longest: int, inputs: dict[str, Any]) -> None:
        super().__init__(layers=[])  # reports itself empty: a prefill without a mask is causal
        self.device, self.dtype = model.device, model.dtype
        self.longest = rounded_up(longest, ALIGN)
        # `generate` has made an empty cache. This one takes its place, at each forward: if it held
        # itself, its memory would stay until Python looks for circles.
        (self.name,) = [name for name, value in inputs.items() if isinstance(value, Cache)]
        self.model = functools.partial(model, **inputs)
        self.slots = self.capacity = self.visible = 0
        self.write_index: tuple = ()  # `forward` sets it and `visible`, and `update` reads them
        self.keys, self.values = [], []  # a tensor for each layer

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

    def copy(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` positions of some slots to other slots."""
        source = torch.tensor(sources, device=self.device)
        target = torch.tensor(targets, device=self.device)
        for states in (*self.keys, *self.values):
            states[target, :, :length] = states[source, :, :length]

    def forward(
        self,
        ids: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        *,
        mask: torch.Tensor | None,
        visible: int,
    ) -> ModelOutput:
        """Forward ids (B, T) long, and put the tokens into slots (B, 1) at positions (B, T) long.

        They attend to the first `visible` positions of slots 0 to B - 1, as far as mask (additive)
        allows. If visible is 0, they attend to each other.
        """
        self.write_index, self.visible = (slots, slice(None), positions), visible
        tokens = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
        return self.model(**tokens, **{self.name: self})

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
    rotary = hasattr(model.base_model, "rotary_emb") and not getattr(model.config, "alibi", False)
    return full and rotary


def rounded_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


@dataclass
class Row:
    """A prompt and its response so far. After prefill its slot has all ids except the last."""

    prompt_index: int  # among all prompts
    prompt: tuple[int, ...]  # its ids
    seed: int
    ids: list[int]  # of the prompt and of the response

    def response(self) -> list[int]:
        return self.ids[len(self.prompt) :]


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
    record: bool,
    **inputs: Any,
) -> Iterator[tuple[int, list[int]]]:
    """Decode left-padded prompts (N, P) long, `slots` of them at a time; `generate` calls it.

    When a response has ended, it yields (index of the prompt, ids of the response, stop id
    included). record: record steps on CUDA. slots, seeds and record come from rollout.py, and the
    rest from `generate`. Its documentation does not list them. In transformers 5.23 and 5.24
    `inputs` are keywords of the model's forward: attention_mask and position_ids (N, P),
    logits_to_keep 1, use_cache True, and an empty DynamicCache, which is called past_key_values in
    5.23 and cache in 5.24.
    """
    # Any other processor would change the distribution that responses are drawn from.
    processors = {type(processor).__name__ for processor in logits_processor}
    assert processors <= {"TemperatureLogitsWarper", "TopPLogitsWarper"}, processors
    # Were the mask a parameter here, `generate` would not see it. None: nothing is padded.
    mask = inputs.pop("attention_mask")
    starts = [0] * len(prompts) if mask is None else (mask == 0).sum(1).tolist()
    waiting = [
        Row(index, tuple(ids[start:]), seed, ids[start:])
        for index, (seed, ids, start) in enumerate(zip(seeds, prompts.tolist(), starts))
    ]
    running: list[Row] = []  # one for each slot
    stops, max_new_tokens = set(generation_config.eos_token_id), generation_config.max_new_tokens
    longest = max(len(row.prompt) for row in waiting) + max_new_tokens
    cache = SlotCache(model, longest, inputs)

    def draw(token: torch.Tensor, logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        greedy = not generation_config.do_sample
        return next_token(logits_processor(token, logits), None if greedy else uniforms)

    decoder = Decoder(cache, draw, min(slots, len(waiting)), record)
    while waiting or running:
        # 1. The free slots, which are the last ones, take the next prompts.
        first, free = len(running), slots - len(running)
        running, waiting = running + waiting[:free], waiting[free:]
        # No row may pass max_new_tokens.
        steps = min(CHECK_EVERY, *(max_new_tokens - len(row.response()) for row in running))
        cache.reserve(len(running), max(len(row.ids) for row in running) + steps)
        prefill(cache, running, first)
        # 2. Every row gets a few tokens.
        tokens = decoder.decode(running, steps).tolist()
        for row, ids in zip(running, tokens, strict=True):
            row.ids += until_stop(ids, stops)
        # 3. Rows that have ended leave, and the row in the last slot moves into the free slot. The
        # walk is backwards: the row in the last slot has been looked at and has not ended.
        for slot in reversed(range(len(running))):
            row = running[slot]
            response = row.response()
            if response[-1] in stops or len(response) == max_new_tokens:
                last = running.pop()
                if last is not row:
                    running[slot] = last
                    cache.copy([len(running)], [slot], len(last.ids))
                yield row.prompt_index, response


def prefill(cache: SlotCache, rows: list[Row], first: int) -> None:
    """Put the keys and values of the prompts of new rows, rows[first:], into their slots.

    A prompt is forwarded once. Other new rows with the same prompt copy its keys and values, also
    from a row that is already decoding. The last token of each prompt is left out. `decode`
    forwards it.
    """
    slot_of: dict[tuple[int, ...], int] = {}  # prompt -> the first slot that has it
    new, sources, targets = [], [], []
    for slot, row in enumerate(rows):
        source = slot_of.setdefault(row.prompt, slot)
        if slot >= first and source == slot:
            new.append(slot)
        elif slot >= first:
            sources.append(source)
            targets.append(slot)
    size = max(1, PREFILL_TOKENS // max((len(rows[slot].prompt) for slot in new), default=1))
    for start in range(0, len(new), size):
        slots = new[start : start + size]
        batch = [rows[slot].ids[:-1] for slot in slots]
        width = max(map(len, batch))
        if width > 0:
            # Attention is causal, so padding on the right needs no mask.
            ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in batch])  # (B, width)
            positions = torch.arange(width, device=cache.device).expand(len(batch), -1)
            slot = torch.tensor(slots, device=cache.device)[:, None]  # (B, 1)
            cache.forward(ids.to(cache.device), slot, positions, mask=None, visible=0)
    if targets:
        cache.copy(sources, targets, length=max(len(rows[slot].prompt) for slot in targets))


class Decoder:
    """The decoding step of all slots, in place on tensors that stay where they are.

    On CUDA the host needs longer to launch the kernels of a step than the GPU to run them. So the
    step is recorded as a CUDA graph, once for each pair (rows, visible positions), and replayed. A
    replay runs the same kernels on the same addresses, which is right within a rollout:
    - The weights, the cache and `state` stay where they are. FSDP2 gathers the weights to new
      addresses for the next rollout, so recordings end with their rollout.
    - A step takes nothing from the host. Its mask and its random numbers are made from `state`.
    - A step leaves its results in `state` and the cache, so recordings can share other memory.
    - A recording must first draw the tokens that the step itself draws.
    """

    recordings_work = True  # until one fails: then this process makes no more

    def __init__(self, cache: SlotCache, draw: Callable, slots: int, record: bool) -> None:
        self.cache, self.draw = cache, draw
        # For each slot: its last token, the position of this token, and the seed of its row.
        self.state = torch.zeros(3, slots, 1, dtype=torch.long, device=cache.device)
        self.slot = torch.arange(slots, device=cache.device)[:, None]  # (slots, 1)
        self.on_gpu = cache.device.type == "cuda"
        self.record = record and self.on_gpu and self.recordings_work
        self.pool = torch.cuda.graph_pool_handle() if self.record else None
        # The recording of each pair (rows, visible positions). None: its step has run once.
        self.recordings: dict[tuple[int, int], torch.cuda.CUDAGraph | None] = {}

    def decode(self, rows: list[Row], steps: int) -> torch.Tensor:
        """Draw `steps` more tokens for each of R rows: (R, steps) long."""
        state = [(row.ids[-1], len(row.ids) - 1, row.seed) for row in rows]
        # A step also moves slots without a row on. From position 0 they stay within the cache.
        self.state.zero_()
        self.state[:, : len(rows), 0] = torch.tensor(state).T.to(self.state.device)
        longest, tokens = max(len(row.ids) for row in rows), []
        for step in range(steps):
            padded, visible = self.rounded(len(rows), longest + step)
            self.run(padded, visible)
            tokens.append(self.state[0, : len(rows)].clone())
        return torch.cat(tokens, 1)

    def rounded(self, num_rows: int, visible: int) -> tuple[int, int]:
        """The pair for a step that needs at least so many, with recordings and without."""
        if not self.on_gpu:
            return num_rows, rounded_up(visible, ALIGN)
        slots, capacity = len(self.slot), self.cache.capacity
        part = max(VISIBLE_LEAST, rounded_up(capacity // VISIBLE_PARTS, ALIGN))
        num_rows = rounded_up(num_rows, -(-slots // ROW_PARTS))
        return min(num_rows, slots), min(rounded_up(visible, part), capacity)

    def run(self, num_rows: int, visible: int) -> None:
        """Take a step: as it is the first time, recorded the second time, then replayed."""
        if recording := self.recordings.get((num_rows, visible)):
            recording.replay()
        elif self.record and (num_rows, visible) in self.recordings:
            self.record_step(num_rows, visible)
        else:  # before a recording libraries must have loaded the kernels
            self.step(num_rows, visible)
            self.recordings[num_rows, visible] = None

    def step(self, num_rows: int, visible: int) -> None:
        """Forward the last tokens of the first R slots, and write the next ones over them."""
        token, position, seed = self.state[:, :num_rows]  # (R, 1) each
        hidden = torch.arange(visible, device=token.device) > position  # (R, visible)
        mask = torch.zeros(hidden.shape, dtype=self.cache.dtype, device=token.device)
        mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None]  # (R, 1, 1, visible)
        slot = self.slot[:num_rows]  # (R, 1)
        out = self.cache.forward(token, slot, position, mask=mask, visible=visible)
        logits = out.logits[:, -1].float()  # (R, V)
        position += 1
        token.copy_(self.draw(token, logits, uniform(seed, position)))

    def record_step(self, num_rows: int, visible: int) -> None:
        """Take a step, and record it. If that fails, decoding goes on without recordings."""
        before = self.state.clone()
        self.step(num_rows, visible)
        after, recording = self.state.clone(), torch.cuda.CUDAGraph()
        try:
            # `graph` changes the current stream, and changes it back unless the recording fails:
            # `stream` always does. NCCL's watchdog thread asks for events: "thread_local" lets it.
            with (
                torch.cuda.stream(torch.cuda.current_stream(self.cache.device)),
                torch.cuda.graph(recording, pool=self.pool, capture_error_mode="thread_local"),
            ):
                self.step(num_rows, visible)  # computes nothing
            self.state.copy_(before)
            recording.replay()
            if not self.state.equal(after):
                raise RuntimeError("a replay differs from its step")
            self.recordings[num_rows, visible] = recording
        except RuntimeError as error:
            self.state.copy_(after)
            self.record, self.recordings, Decoder.recordings_work = False, {}, False
            # The end of a recording raises too, and hides what failed within it.
            why = str(error.__context__ or error).split("\n")[0]
            hint = "if torch fails later (before 2.13 it can), give --no_cuda_graphs"
            log(f"decoding goes on without CUDA graphs: {why}; {hint}")


def next_token(logits: torch.Tensor, uniforms: torch.Tensor | None) -> torch.Tensor:
    """Draw a token for each row of logits (R, V) float32: (R, 1) long.

    uniforms (R, 1) float64 are random numbers in [0, 1), which are looked up in the cumulative
    distribution. If uniforms is None, the token is the likeliest one. The distribution is float64:
    a rare token's probability is not rounded away.
    """
    if uniforms is None:
        return logits.max(-1, keepdim=True).indices
    cumulative = logits.softmax(-1, dtype=torch.float64).cumsum(-1)  # (R, V)
    return torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)


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
    per_row = keys_and_values * rounded_up(length, ALIGN) + DRAW_BYTES * config.vocab_size
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    return max(1, min(batch_size, int(0.8 * free / per_row)))
