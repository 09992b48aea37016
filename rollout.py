"""Rollouts: problems and prompts in, sampled responses out, and the statistics of their tokens.

Read in the order of use: the model and its tokenizer; problems and prompts; sampling, which Hugging
Face's `generate` hands on to the loop in support/decoding.py, whose `next_token` draws from pi;
then the statistics of every response token. They are the token's log-probability, the entropy of
the distribution it was drawn from, and that distribution's collision probability, from which dumps
have the gradient's norm (Sec. 3.2).
"""

import contextlib
import functools
import itertools
import math
import re
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    PreTrainedConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.cache_utils import DynamicLayer

from support import distributed
from support.decoding import CHECK_EVERY, decoding_loop, rounded_up, until_stop
from support.errors import InputError, first_line
from support.norms import fuse_norms
from support.progress import bar as progress_bar
from support.progress import first_time, quiet_datasets, say, track
from support.seeds import mix_seed

# gradient_checkpointing_enable has a new name in newer transformers; the old one works in all.
warnings.filterwarnings("ignore", message=".gradient_checkpointing_enable. is deprecated")

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


# ---------------------------------------------------------------------------- model and tokenizer


def load_pretrained(kind: type, what: str, name: str, **options: Any) -> Any:
    """kind.from_pretrained(name), with an InputError in place of the Hub's many."""
    try:
        return kind.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        hint = f"give a Hub id or a folder ({first_line(error)})"
        raise InputError(f"{name}: no {what} there, {hint}") from error


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a Hub id or a local folder, with a pad token; raises InputError."""
    tokenizer = load_pretrained(AutoTokenizer, "tokenizer", name)
    if tokenizer.pad_token_id is None:
        # Padding is masked everywhere, so any id will do; the end of sequence is always there.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def load_model(
    name: str, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Model:
    """A causal language model of a Hub id or a local folder, in evaluation mode."""
    options = {"dtype": dtype, "config": load_config(name)}
    model = load_pretrained(AutoModelForCausalLM, "model", name, **options)
    check_positions(name, model)
    return fuse_norms(model).to(device).eval()  # each RMSNorm is one kernel, with the same numbers


def load_config(name: str) -> PreTrainedConfig:
    """A model's configuration without dropout and router noise.

    An update runs in training mode, which gradient checkpointing asks for. With either of the two
    it would see other probabilities than the policy that sampled, and no ratio would be 1.
    """
    config = load_pretrained(AutoConfig, "model", name)
    for part in (config, config.get_text_config()):
        for key in [key for key, value in vars(part).items() if isinstance(value, float)]:
            if "drop" in key or "jitter" in key:
                setattr(part, key, 0.0)
    return config


def load_policy(name: str, gradient_checkpointing: bool = False) -> Model:
    """A model with float32 weights and the methods below.

    On CUDA, with one GPU too, FSDP2 shards it over the ranks, and it computes in bfloat16. Rank 0
    alone reads the weights, on the CPU; every rank builds an empty model, cuts it into shards and
    receives its own, so that no GPU ever holds the whole float32 model.
    """
    whole = load_model(name) if distributed.rank() == 0 else None
    if whole:
        check_head(whole)
    distributed.barrier()  # the others wait here, however long a download takes
    if not dist.is_initialized():  # a CPU alone
        return with_methods(whole, gradient_checkpointing)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(name), dtype=torch.float32)
    distributed.shard(with_methods(model, gradient_checkpointing), GATHERED_METHODS)
    model.to_empty(device=distributed.device())
    for module in model.modules():  # rotary frequencies are computed, not stored
        if next(module.buffers(recurse=False), None) is not None:
            model._init_weights(module)
    weights = whole.state_dict() if whole else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    generation_config = whole.generation_config if whole else None
    model.generation_config = distributed.broadcast(generation_config)
    return model.eval()


GATHERED_METHODS = ("token_stats", "likeliest")


def with_methods(model: Model, gradient_checkpointing: bool = False) -> Model:
    """The model with two functions of this file as methods: token_stats and likeliest.

    They use the head's weight outside the model's own forward. FSDP2 gathers weights only around
    calls of the model's own methods, so these two functions have to be methods.
    """
    model.token_stats = types.MethodType(token_stats, model)
    model.likeliest = types.MethodType(likeliest, model)
    if gradient_checkpointing:  # activations of the backward pass are computed again, not kept
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def check_positions(name: str, model: Model) -> None:
    """Raise InputError where rotary frequencies depend on the longest row of a batch.

    The probabilities of a response's tokens would depend on the responses beside it.
    """
    kinds: set[str] = set()
    for module in model.modules():
        kind = getattr(module, "rope_type", None) or "default"
        # A dict has one for each type of layer.
        kinds.update(kind.values() if isinstance(kind, dict) else [kind])
    for kind in kinds:
        if "dynamic" in kind or kind == "longrope":
            raise InputError(
                f"{name}: its config.json has rope_type {kind!r}, rotary positions that depend on "
                "the longest row of a batch, which is not supported"
            )


@torch.no_grad()
def check_head(model: Model) -> None:
    """Raise InputError unless the model's logits are hidden states times the head's weight.

    Token statistics rely on it. A bias, a scale or a soft cap on the logits would make every
    log-probability wrong, under whatever name the model's code has it. Wants float32 weights.
    """
    ids = torch.arange(2, 10, device=model.device)[None]  # (1, 8), in every vocabulary
    hidden = model.base_model(ids, use_cache=False).last_hidden_state  # (1, 8, D)
    expected = hidden @ model.get_output_embeddings().weight.T  # (1, 8, V)
    logits = model(ids, use_cache=False).logits
    if not torch.allclose(expected, logits, rtol=1e-3, atol=1e-3 * float(logits.abs().max())):
        raise InputError(
            "--model: its logits are not hidden states times the weight of its output head "
            "(a bias, a scale or a soft cap), which is not supported"
        )


def stop_ids(model: Model, tokenizer: Tokenizer) -> list[int]:
    """Every id that ends a response: the model's, the tokenizer's and the chat template's."""
    ids = model.generation_config.eos_token_id
    ids = set(ids if isinstance(ids, (list, tuple)) else [ids]) | {tokenizer.eos_token_id}
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<!>"}]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        _, answered, turn_end = text.rpartition("<!>")
        turn_end = tokenizer(turn_end, add_special_tokens=False).input_ids[:1]
        if answered and turn_end and turn_end[0] in tokenizer.added_tokens_decoder:
            ids.add(turn_end[0])
    return sorted(ids - {None})


# --------------------------------------------------------------------------- problems and prompts

# DAPO-Math-17k wraps each problem in its own instruction, which asks for another answer format.
DAPO_WRAPPER = re.compile(
    r"\s*Solve the following math problem step by step\. The last line of your response should be "
    r"of the form Answer: \$Answer \(without quotes\) where \$Answer is the answer to the problem\."
    r"\s*(.*?)\s*Remember to put your answer on its own line after \"Answer:\"\.\s*",
    re.DOTALL,
)


def load_problems(
    source: str, split: str = "train", *, whole_rows: bool = False, progress: str | None = None
) -> list[dict[str, Any]]:
    """Distinct problems of a Hub dataset or a local .jsonl, .json or .parquet file, in file order.

    Columns understood: `problem`, `question` or `prompt`, text or a chat (DAPO-Math-17k's, whose
    wrapper is taken off); `answer`, `final_answer` or `reward_model["ground_truth"]`.
    Returns [{"problem": str, "answer": str}]; raises InputError naming the file or the row. With
    `whole_rows` each problem has its "row" too, a dict of every column, and needs no answer.
    `progress` names a bar over the rows.
    """
    import datasets  # slow to import, and needed by no other function

    quiet_datasets()
    builders = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
    builder = builders.get(Path(source).suffix)
    if builder and not Path(source).is_file():
        raise InputError(f"{source}: no such file")
    if builder and Path(source).stat().st_size == 0:
        raise InputError(f"{source}: the file is empty")
    try:
        if builder:
            rows = datasets.load_dataset(builder, data_files=source, split="train")
        else:
            rows = datasets.load_dataset(source, split=split)
    except Exception as error:  # datasets raises a dozen unrelated kinds
        reason = first_line(error)
        raise InputError(f"{source}: cannot be read as a dataset ({reason})") from error
    wanted = ("problem", "question", "prompt", "answer", "final_answer", "reward_model")
    columns = [name for name in wanted if name in rows.column_names]
    if columns and not whole_rows:
        rows = rows.select_columns(columns)
    problems: dict[str, dict[str, Any]] = {}  # DAPO-Math-17k holds each problem ~100 times
    batches = (zip(*batch.values()) for batch in rows.iter(1000))  # far faster than row by row
    bar = progress_bar(len(rows), progress)
    for number, values in enumerate(itertools.chain.from_iterable(batches), start=1):
        row = dict(zip(rows.column_names, values))
        problem, answer = read_row(row)
        if not problem or not (answer or whole_rows):
            what = "problem that is text, or a chat of user and assistant alone"
            if problem:
                what = "answer that is text, a finite number or a flat list of these"
            raise InputError(f"{source}: row {number} has no {what} (columns: {', '.join(row)})")
        if problem not in problems:
            problems[problem] = {"problem": problem, "answer": answer}
            problems[problem] |= {"row": row} if whole_rows else {}
        bar.update()
    bar.close()
    return list(problems.values())


def read_row(row: dict) -> tuple[str, str]:
    """The (problem, answer) of one row in any layout that load_problems understands, "" for none.

    Each is the first that is usable of those that the row has.
    """
    problems = map(problem_text, map(row.get, ("problem", "question", "prompt")))
    graded_by = row.get("reward_model")
    answers = [row.get("answer"), row.get("final_answer")]
    answers += [graded_by.get("ground_truth")] if isinstance(graded_by, dict) else []
    return next(filter(None, problems), ""), next(filter(None, map(cell_text, answers)), "")


def problem_text(value: Any) -> str:
    """Text as it is; of a chat the user's last turn, or "" if others than an assistant speak."""
    if not isinstance(value, list):
        return cell_text(value)
    turns = [turn if isinstance(turn, dict) else {"content": turn} for turn in value]
    said = {str(turn.get("role") or "user"): turn.get("content") for turn in turns}  # last of each
    last = said.get("user") if said.keys() <= {"user", "assistant"} else None
    text = "" if isinstance(last, list) else cell_text(last)
    wrapped = DAPO_WRAPPER.fullmatch(text)
    return wrapped[1].strip() if wrapped else text


def cell_text(value: Any) -> str:
    """Text or a finite number as text, a flat list of them with commas; "" of anything else."""
    items = value if isinstance(value, list) else [value]
    for item in items:
        if not isinstance(item, str) and not (type(item) in (int, float) and abs(item) < math.inf):
            return ""
    return ", ".join(map(str, items)).strip()


def encode_prompt(tokenizer: Tokenizer, problem: str, instruction: str = INSTRUCTION) -> list[int]:
    """Token ids of a problem and its instruction, in the chat template where there is one."""
    content = f"{problem}\n{instruction}" if instruction else problem
    if not tokenizer.chat_template:
        return tokenizer(content + "\n").input_ids
    turns = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids


# --------------------------------------------------------------------------------------- sampling


@dataclass
class Response:
    """One sampled response; `ids` holds the stop id too, which is a token like any other."""

    prompt_ids: list[int]
    ids: list[int]
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
    progress: str | None = None,
    ended: Callable[[int, Response], None] | None = None,
    poll: Callable[[], None] | None = None,
) -> list[Response]:
    """Sample one response for each prompt (repeat a prompt G times for a group of G).

    At most `batch_size` responses are decoded at a time. `temperature` 0 is greedy decoding.
    `seed` is a list with one seed for each response, or a number from which the list is made. A
    response depends on its own prompt and seed and on the weights: what else is decoded beside it
    changes its rounding alone. `progress` names a bar over responses. `ended` is called with a
    prompt's place and its response as soon as that has ended, and `poll` every CHECK_EVERY tokens;
    what either of them raises ends the sampling.

    A model with sliding windows or a recurrent state needs a cache of its own, which has no slots.
    Its prompts go in batches, each of which waits for its longest response. Plain `generate` draws
    from torch's generator, and a batch has one seed, that of its first response. So what is sampled
    depends on the size of the batches and, on a GPU, on the memory that is free.
    """
    if not prompts:
        return []
    seeds = [mix_seed(seed, i) for i in range(len(prompts))] if isinstance(seed, int) else seed
    stops = stop_ids(model, tokenizer)
    config = sampling_config(temperature, top_p, max_new_tokens, stops, tokenizer.pad_token_id)
    size = rows_that_fit(model, max(map(len, prompts)) + max_new_tokens, batch_size, top_p)
    responses: dict[int, Response] = {}
    bar = progress_bar(len(prompts), progress)

    def end(place: int, ids: list[int]) -> None:
        text = to_text(tokenizer, ids, True)
        truncated = ids[-1] not in stops
        responses[place] = Response(prompts[place], ids, truncated, text)
        bar.update()
        if ended:
            ended(place, responses[place])

    def look() -> None:
        bar.update(0)  # a log gets its line a minute, also where no response ends
        if poll:
            poll()

    with contextlib.closing(bar), ready_to_generate(model, config):
        if has_full_attention(model):
            loop = functools.partial(decoding_loop, slots=size, seeds=seeds, end=end, poll=look)
            generate(model, prompts, config, custom_generate=loop)
        else:
            generate_in_batches(model, prompts, config, size, seeds, end=end, poll=look)
    if model.device.type == "cuda":
        # The cache's memory goes back to the GPU. Otherwise gradients and AdamW's moments would be
        # put into pieces of it, and no free piece would be large enough for the next cache.
        torch.cuda.empty_cache()
    return [responses[place] for place in range(len(prompts))]


def sampling_config(
    temperature: float, top_p: float, max_new_tokens: int, stops: list[int], pad: int
) -> GenerationConfig:
    """Every field is named.

    Those that a call leaves unset come from the model's generation_config (Qwen3 ships top_k 20,
    top_p 0.95) or are transformers' own (top_k 50).
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
) -> torch.Tensor | None:
    """model.generate on all prompts, left-padded as it wants them; decoding_loop strips them."""
    width, pad = max(map(len, prompts)), config.pad_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])  # (N, P)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])  # (N, P)
    options |= {"attention_mask": mask.to(model.device), "generation_config": config}
    return model.generate(ids.to(model.device), synced_gpus=False, **options)


def generate_in_batches(
    model: Model,
    prompts: list[list[int]],
    config: GenerationConfig,
    size: int,
    seeds: list[int],
    *,
    end: Callable[[int, list[int]], None],
    poll: Callable[[], None],
) -> None:
    """decoding_loop's part for a model whose cache has no slots, by plain `generate`.

    `end` gets a batch as a whole. Otherwise a stop would leave its short responses, the long ones
    would be drawn again with another seed, and responses would come out too short.
    """
    name = type(model).__name__
    if first_time(name):
        say(f"{name} needs a cache of its own: plain generate, in batches")
    stops, polls = set(config.eos_token_id), StoppingCriteriaList([Poll(poll)])
    for start in range(0, len(prompts), size):
        batch = prompts[start : start + size]
        torch.manual_seed(seeds[start])
        rows = generate(model, batch, config, stopping_criteria=polls)  # (B, P + T)
        generated = rows[:, max(map(len, batch)) :]  # (B, T)
        for i, ids in enumerate(generated.tolist()):
            end(start + i, until_stop(ids, stops))


class Poll(StoppingCriteria):
    """Calls a function now and then, and ends no response."""

    def __init__(self, poll: Callable[[], None]) -> None:
        self.poll = poll

    def __call__(self, input_ids: torch.Tensor, *_args: Any, **_options: Any) -> torch.Tensor:
        if input_ids.shape[1] % CHECK_EVERY == 0:
            self.poll()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def to_text(tokenizer: Tokenizer, ids: list[int], skip_special: bool = False) -> str:
    """Ids as text; a head may be wider than the vocabulary (Qwen3), and such ids have none."""
    size = len(tokenizer)
    return tokenizer.decode([i for i in ids if i < size], skip_special_tokens=skip_special)


def rows_that_fit(model: Model, length: int, batch_size: int, top_p: float) -> int:
    """batch_size, or on CUDA what fits: rows of `length` tokens in four fifths of free memory."""
    if model.device.type != "cuda":
        return batch_size
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    config, itemsize = model.config.get_text_config(), model.dtype.itemsize
    per_row = bytes_per_row(config, length, itemsize, top_p)
    return max(1, min(batch_size, int(0.8 * free / per_row)))


def bytes_per_row(config: PreTrainedConfig, length: int, itemsize: int, top_p: float = 1.0) -> int:
    """What a slot takes on a GPU: keys and values of `length` tokens, and its next token's."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * width * itemsize
    # The cache of slots is reserved whole. Plain `generate` copies one layer's keys or values at a
    # time when its cache grows. With two layers or more, the fifth of the memory that is left free
    # is enough for the copy.
    # Of each id of the vocabulary there are two logits (2 and 4 bytes), the softmax and its sums (8
    # each): 24 bytes, rounded up. Top-p sorts before the softmax: there are three logits (2, 4, 4),
    # sorted values and indices (4, 8) and CUDA's own buffers (32): 56 bytes, rounded up.
    per_id = 24 if top_p == 1 else 56
    return per_token * rounded_up(length, 8) + per_id * config.vocab_size


@contextlib.contextmanager
def ready_to_generate(model: Model, config: GenerationConfig) -> Iterator[None]:
    """Inside, nothing of the model's own generation_config applies: `config` has every field.

    Raises RuntimeError where `generate` would run a logits processor that config does not ask for.
    """
    own, training = model.generation_config, model.training
    model.generation_config = GenerationConfig()
    model.eval()  # gradient checkpointing, active in training mode, would turn the cache off
    try:
        used = model._prepare_generation_config(config)[0]
        used = {type(p).__name__ for p in model._get_logits_processor(used, model_kwargs={})}
        wanted = {"TemperatureLogitsWarper"} if config.temperature not in (None, 1) else set()
        wanted |= {"TopPLogitsWarper"} if config.top_p not in (None, 1) else set()
        if used != wanted:
            raise RuntimeError(f"generate would apply {sorted(used)}, not {sorted(wanted)}")
        yield
    finally:
        model.generation_config = own
        model.train(training)


def has_full_attention(model: Model) -> bool:
    """Whether in every layer a token attends to all before it, placed by rotary positions."""
    layers = DynamicCache(config=model.config).layers
    full = bool(layers) and all(type(layer) is DynamicLayer for layer in layers)
    return full and hasattr(model.base_model, "rotary_emb")


# ------------------------------------------------------------------------------ token statistics


class TokenStats(NamedTuple):
    """What the paper looks at in a token, as tensors of one shape; float32, full vocabulary."""

    logp: torch.Tensor  # ln pi(y) of the token that was sampled
    entropy: torch.Tensor | None  # H of the distribution that it was drawn from, nats
    collision: torch.Tensor | None  # sum_v pi(v)^2 of that distribution


def pad_batch(responses: list[Response]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded [prompt, response] rows -> input_ids, attention_mask, response_mask: (B, L).

    Under causal attention no token sees the padding, so that its id, 0, matters nowhere.
    """
    width = max(len(r.prompt_ids) + len(r.ids) for r in responses)
    ids = torch.zeros(len(responses), width, dtype=torch.long)
    attention = torch.zeros(len(responses), width, dtype=torch.bool)
    response_mask = torch.zeros(len(responses), width, dtype=torch.bool)
    for i, r in enumerate(responses):
        start = len(r.prompt_ids)
        end = start + len(r.ids)
        ids[i, :end] = torch.tensor(r.prompt_ids + r.ids)
        attention[i, :end] = True
        response_mask[i, start:end] = True
    return ids, attention, response_mask


def micro_batches(lengths: list[int], budget: int) -> list[list[int]]:
    """Places in `lengths`, longest first, cut so that rows x longest row stays within `budget`.

    micro_batches([3, 9, 4, 2], budget=9) is [[1], [2, 0], [3]]: the row of 9 tokens fills the
    budget alone, those of 4 and 3 take 2 x 4. A row longer than the budget is a batch of its own.
    Every rank gets the same number of batches: the short ones end with empty batches, whose
    forward keeps the ranks' collectives in step.
    """
    batches: list[list[int]] = []
    longest = 0  # of the last batch: its first row
    for place in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if batches and (len(batches[-1]) + 1) * longest <= budget:
            batches[-1].append(place)
        else:
            batches.append([place])
            longest = lengths[place]
    count = distributed.all_max(len(batches))
    return batches + [[]] * (count - len(batches))


def batch_stats(
    model: Model, ids: torch.Tensor, mask: torch.Tensor, *, logp_only: bool = False
) -> TokenStats:
    """token_stats of a right-padded micro-batch that is on the CPU."""
    # The tokens are counted on the CPU, so that token_stats need not wait for a GPU.
    count = int(mask[:, 1:].sum())
    ids, mask = (t.to(model.device, non_blocking=True) for t in (ids, mask))
    # The function below, as with_methods attached it.
    return model.token_stats(ids, None, mask, count=count, logp_only=logp_only)


@torch.no_grad()
def response_stats(
    model: Model, ids: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor, budget: int
) -> TokenStats:
    """The statistics of every response token under this model: (B, L) float32 on the CPU.

    ids (B, L) long, mask (B, L) bool, lengths (B,) of prompt and response: right-padded rows.
    `budget` is the tokens of a micro-batch, whose rows are cut to their longest.
    """
    found = TokenStats(*(torch.zeros(ids.shape) for _ in TokenStats._fields))
    for places in track(micro_batches(lengths.tolist(), budget), "statistics"):
        rows = torch.tensor(places, dtype=torch.long)
        width = max(lengths[rows].tolist(), default=0)
        stats = batch_stats(model, ids[rows, :width], mask[rows, :width])
        three = torch.stack(stats).cpu()  # (3, B, W): one transfer for the micro-batch
        for whole, values in zip(found, three, strict=True):
            whole[rows, :width] = values
    distributed.reshard(model)
    return found


def token_stats(
    model: Model,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    response_mask: torch.Tensor,
    *,
    chunk: int | None = None,
    logp_only: bool = False,
    count: int | None = None,
) -> TokenStats:
    """Log-probability, entropy and collision probability of every response token.

    input_ids (B, L) long; attention_mask, response_mask (B, L) bool, padding on either side. The
    attention mask may be None where padding is on the right alone.
    Returns logp (ln, with gradient), entropy (nats) and collision (sum of squared probabilities):
    each (B, L) float32, aligned with input_ids (column t is about token t, predicted from the
    tokens before it) and 0 outside response_mask. Temperature 1, full vocabulary. With
    `logp_only` the other two are None and take no time. `count`: how many are True in
    response_mask, its first column left out; without it a GPU is asked, which waits for its work.
    """
    predicted = response_mask.clone()
    predicted[:, :1] = False  # nothing comes before the first token
    count = int(predicted.sum()) if count is None else count
    rows, columns = predicted.nonzero_static(size=count).unbind(1)  # (N,) each
    # Under causal attention a token never sees padding to its right, so right padding needs no
    # mask; positions count real tokens, so left padding does not shift them.
    left_padded = attention_mask is not None and not bool(attention_mask[:, 0].all())
    # A rank without rows takes part in the collectives of the others: it forwards a dummy token.
    hidden = model.base_model(
        input_ids if len(input_ids) else input_ids.new_zeros(1, 1),
        attention_mask=attention_mask.long() if left_padded else None,
        position_ids=(attention_mask.long().cumsum(1) - 1).clamp(min=0) if left_padded else None,
        use_cache=False,
    ).last_hidden_state  # (B, L, D)
    hidden = hidden[rows, columns - 1]  # (N, D): the states that predict response tokens
    weight, targets = model.get_output_embeddings().weight, input_ids[rows, columns]  # (V, D), (N,)
    stats = head_stats(hidden, weight, targets, chunk=chunk, logp_only=logp_only)
    empty = torch.zeros(input_ids.shape, dtype=torch.float32, device=input_ids.device)

    def placed(values: torch.Tensor | None) -> torch.Tensor | None:  # (N,) -> (B, L)
        return None if values is None else empty.index_put((rows, columns), values)

    return TokenStats(placed(stats.logp), placed(stats.entropy), placed(stats.collision))


@torch.no_grad()
def likeliest(
    model: Model, ids: torch.Tensor, count: int, *, k: int = 5
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model would rather have said: the k likeliest tokens at the last `count` places.

    ids (L,) long, a prompt and its response, count < L. Returns their probabilities (count, k)
    float32, largest first, and their ids (count, k) long, both on the CPU; row t is about the
    place of ids[L - count + t]. Temperature 1, full vocabulary.
    """
    row = ids[None].to(model.device)  # (1, L)
    hidden = model.base_model(row, use_cache=False).last_hidden_state  # (1, L, D)
    hidden = hidden[0, -count - 1 : -1]  # (count, D): the states that predict those places
    weight = model.get_output_embeddings().weight  # (V, D)
    probabilities, top_ids = torch.empty(count, k), torch.empty(count, k, dtype=torch.long)
    chunk = head_chunks(hidden.device).logits
    for i in range(0, count, chunk):
        logits = float32_logits(hidden[i : i + chunk], weight)  # (C, V) float32
        top = logits.topk(k)  # (C, k)
        probabilities[i : i + chunk] = (top.values - logits.logsumexp(-1, keepdim=True)).exp()
        top_ids[i : i + chunk] = top.indices
    return probabilities, top_ids


def sampling_gap(
    logp: torch.Tensor, entropy: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether tokens were drawn from the policy that gave logp and entropy: (gap in nats, z).

    logp, entropy, mask: any one shape, of the sampled tokens under that policy. For a token drawn
    from pi, -ln pi(y) has the mean H, given everything before it. So d = -logp - H sums up
    martingale differences: gap = mean(d) is 0 but for chance, and z = sum(d) / sqrt(sum(d^2)) is
    about standard normal. Top-k, top-p, a temperature or stale weights make |z| large.
    """
    d = (-logp.double() - entropy.double())[mask]
    return d.mean(), d.sum() / d.square().sum().sqrt()


class HeadChunks(NamedTuple):
    """How many tokens the output head works on at a time.

    With many, fewer kernels are launched, which is what counts on a GPU. With few, their logits
    stay in a CPU's caches.
    """

    logits: int  # in a forward: (tokens, V) logits exist at once
    softmax: int  # in a forward: of these, the tokens whose softmax exists at once
    gradient: int  # in a backward: each chunk reads and writes the weight's whole gradient


HEAD_CHUNKS = {"cpu": HeadChunks(256, 32, 256), "cuda": HeadChunks(384, 128, 1536)}


def head_chunks(device: torch.device) -> HeadChunks:
    """What suits a device."""
    return HEAD_CHUNKS["cpu" if device.type == "cpu" else "cuda"]


def head_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    chunk: int | None = None,
    logp_only: bool = False,
) -> TokenStats:
    """The output head, in chunks of tokens: (N, V) logits never exist at once.

    hidden (N, D), weight (V, D), targets (N,) long -> logp, entropy (nats), collision: (N,)
    float32; with `logp_only` entropy and collision are None. The gradient flows through logp only,
    to hidden and weight. chunk: tokens at a time, by default what suits the device (HEAD_CHUNKS).
    """
    sizes = head_chunks(hidden.device)
    sizes = sizes._replace(logits=chunk, gradient=chunk) if chunk else sizes
    logp, entropy, collision = HeadStats.apply(hidden, weight, targets, sizes, logp_only)
    return TokenStats(logp, entropy, collision)


class HeadStats(torch.autograd.Function):
    """Softmax statistics with a backward that recomputes each chunk of logits."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, sizes, logp_only):
        empty = hidden.new_empty(len(targets), dtype=torch.float32)
        logp, entropy, collision, lse = (torch.empty_like(empty) for _ in range(4))
        for i in range(0, len(targets), sizes.logits):
            logits = float32_logits(hidden[i : i + sizes.logits], weight)  # (C, V) float32
            # few rows at a time, so that pi is a small second buffer beside the logits
            for j, block in enumerate(logits.split(sizes.softmax)):
                rows = slice(i + j * sizes.softmax, i + j * sizes.softmax + len(block))
                lse[rows] = block.logsumexp(-1)
                chosen = block.gather(1, targets[rows, None]).squeeze(1)
                logp[rows] = chosen - lse[rows]
                if not logp_only:
                    block -= lse[rows, None]  # ln pi
                    probs = block.exp()  # pi
                    entropy[rows] = -torch.linalg.vecdot(probs, block)  # H = -sum_v pi ln pi
                    collision[rows] = torch.linalg.vecdot(probs, probs)  # sum_v pi^2
                    del probs
            del logits, block  # before the next chunk's exist
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.chunk = sizes.gradient
        if logp_only:
            return logp, None, None
        ctx.mark_non_differentiable(entropy, collision)
        return logp, entropy, collision

    @staticmethod
    def backward(ctx, grad_logp, _entropy, _collision):
        hidden, weight, targets, lse = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for i in range(0, len(targets), ctx.chunk):
            rows = slice(i, i + ctx.chunk)
            # d logp / d logits = onehot - pi
            grad = float32_logits(hidden[rows], weight)  # (C, V) float32: the logits
            grad.sub_(lse[rows, None]).exp_().neg_()  # -pi, in the same memory
            grad.scatter_add_(1, targets[rows, None], torch.ones_like(grad[:, :1]))
            grad *= grad_logp[rows, None]
            grad = grad.to(hidden.dtype)  # in bfloat16 a copy: the float32 one is freed here
            grad_hidden[rows] = grad @ weight
            add_product(grad_weight, grad.T, hidden[rows])
            del grad  # before the next chunk's exists
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def float32_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden @ weight.T accumulated and returned in float32: p < 0.002 is decided on it."""
    if hidden.dtype == torch.float32:
        return hidden @ weight.T
    if hidden.is_cuda:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return hidden.float() @ weight.T.float()


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right in float32; on CUDA bfloat16 operands go to the tensor cores as is."""
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())
