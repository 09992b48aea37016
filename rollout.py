"""Rollouts: problems and prompts in, sampled responses out, and the statistics of their tokens.

Read in the order of use: the model and its tokenizer, problems and prompts, sampling with Hugging
Face `generate` and a KV cache, then scoring, which gives for every response token the three
numbers that the paper is about: its log-probability, the entropy of the distribution it was drawn
from, and that distribution's collision probability (Sec. 3.2).
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


class InputError(ValueError):
    """Wrong input: the message names the flag, file or row and says what to do."""


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


def load_model(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Model:
    """A causal language model of a Hub id or a local folder, in evaluation mode."""
    model = load_pretrained(AutoModelForCausalLM, "model", name, dtype=dtype)
    check_head(model)
    return model.to(device).eval()


def check_head(model: Model) -> None:
    """Scoring multiplies hidden states by the head's weight; refuse a model that does more."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    extras = ("final_logit_softcapping", "logits_scaling", "logit_scale")
    found = [name for name in extras if getattr(config, name, None) not in (None, 1, 1.0)]
    if getattr(head, "bias", None) is not None:
        found.append("a bias")
    if found:
        raise InputError(f"--model: the output head has {', '.join(found)}, which is not supported")


def stop_ids(model: Model, tokenizer: Tokenizer) -> list[int]:
    """Every id that ends a response: the model's, the tokenizer's and the chat template's."""
    ids = model.generation_config.eos_token_id
    ids = set(ids if isinstance(ids, (list, tuple)) else [ids]) | {tokenizer.eos_token_id}
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<!>"}]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        _, answered, turn_end = text.rpartition("<!>")
        turn_end = tokenizer(turn_end, add_special_tokens=False).input_ids[:1]
        ids.update(i for i in turn_end if answered and i in tokenizer.added_tokens_decoder)
    return sorted(ids - {None})


# --------------------------------------------------------------------------- problems and prompts

# DAPO-Math-17k wraps each problem in its own instruction, which asks for another answer format.
DAPO_WRAPPER = re.compile(
    r"\s*Solve the following math problem step by step\. The last line of your response should be "
    r"of the form Answer: \$Answer \(without quotes\) where \$Answer is the answer to the problem\."
    r"\s*(.*?)\s*Remember to put your answer on its own line after \"Answer:\"\.\s*",
    re.DOTALL,
)


def load_problems(source: str, split: str = "train") -> list[dict[str, str]]:
    """Distinct problems of a Hub dataset or a local .jsonl or .parquet file, in file order.

    Columns understood: `problem`, `question` or a chat `prompt` (DAPO-Math-17k, whose wrapper is
    taken off); `answer`, `final_answer` (a list) or `reward_model["ground_truth"]`.
    Returns [{"problem": str, "answer": str}]; raises InputError naming the file or the row.
    """
    import datasets  # slow to import, and needed by no other function

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
    rows = rows.select_columns(columns or rows.column_names)
    problems = {}
    for number, row in enumerate(rows, start=1):
        problem, answer = read_row(row)
        if not problem or not answer:
            what = "answer" if problem else "problem"
            raise InputError(f"{source}: row {number} has no {what} (columns: {', '.join(row)})")
        problems.setdefault(problem, answer)  # DAPO-Math-17k holds each problem ~100 times
    return [{"problem": problem, "answer": answer} for problem, answer in problems.items()]


def read_row(row: dict) -> tuple[str, str]:
    """The (problem, answer) of one row in any layout that load_problems understands."""
    problem = row.get("problem") or row.get("question") or row.get("prompt") or ""
    if isinstance(problem, list):
        problem = problem[-1]["content"] or ""
        wrapped = DAPO_WRAPPER.fullmatch(problem)
        problem = wrapped[1] if wrapped else problem
    model = row.get("reward_model")
    answers = [row.get("answer"), row.get("final_answer")]
    answers += [model.get("ground_truth")] if isinstance(model, dict) else []
    answer = next((answer for answer in answers if answer is not None), "")
    if isinstance(answer, list):
        answer = ", ".join(map(str, answer))
    return str(problem).strip(), str(answer).strip()


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
    seed: int = 0,
    progress: str | None = None,
) -> list[Response]:
    """Sample one response for each prompt (repeat a prompt G times for a group of G).

    At most `batch_size` sequences are decoded at a time. `temperature` 0 is greedy decoding. The
    result is a function of the arguments and the weights: torch's generator is seeded here.
    `progress` names a tqdm bar over responses.
    """
    torch.manual_seed(seed)
    stops = stop_ids(model, tokenizer)
    rows: list[list[int]] = []
    bar = tqdm(total=len(prompts), desc=progress, leave=False, disable=progress is None)
    # Every field is named: those that a call leaves unset come from the model's generation_config
    # (Qwen3 ships top_k 20, top_p 0.95) or are transformers' own (top_k 50).
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": 0} if temperature > 0 else {}
    config = GenerationConfig(
        do_sample=temperature > 0,
        **sampling,
        max_new_tokens=max_new_tokens,
        eos_token_id=stops,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
    )
    with bar, decoding(model, config):
        longest = max(map(len, prompts), default=0) + max_new_tokens
        batch_size = rows_that_fit(model, longest, batch_size)
        for start in range(0, len(prompts), batch_size):
            rows += generate(model, prompts[start : start + batch_size], config, bar)
    return [
        Response(prompt, ids, ids[-1] not in stops, to_text(tokenizer, ids, True))
        for prompt, ids in zip(prompts, rows, strict=True)
    ]


def to_text(tokenizer: Tokenizer, ids: list[int], skip_special: bool = False) -> str:
    """Ids as text; a head may be wider than the vocabulary (Qwen3), and such ids have none."""
    size = len(tokenizer)
    return tokenizer.decode([i for i in ids if i < size], skip_special_tokens=skip_special)


def rows_that_fit(model: Model, length: int, batch_size: int) -> int:
    """batch_size, or on CUDA what fits: the KV cache of rows of `length` tokens in free memory."""
    if model.device.type != "cuda":
        return batch_size
    config, size = model.config.get_text_config(), next(model.parameters()).element_size()
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * size
    per_row = per_token * length + 24 * config.vocab_size  # logits, softmax and their sums
    idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    free = torch.cuda.mem_get_info()[0] + idle
    return max(1, min(batch_size, int(0.8 * free / per_row)))


@contextlib.contextmanager
def decoding(model: Model, config: GenerationConfig) -> Iterator[None]:
    """The model ready to decode by `config` alone; raises RuntimeError where more would run."""
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


DROP_EVERY = 8  # decoding steps: dropping a row copies the cache, keeping it costs a row


def generate(
    model: Model, prompts: list[list[int]], config: GenerationConfig, bar: tqdm
) -> list[list[int]]:
    """`generate` on left-padded prompts, with `decode` as its loop."""
    width = max(map(len, prompts))
    pad, device = config.pad_token_id, model.device
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)  # (B, P)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    options = {"generation_config": config, "custom_generate": decode, "bar": bar}
    return model.generate(ids, attention_mask=mask, **options)


@torch.inference_mode()
def decode(
    model: Model,
    tokens: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    bar: tqdm,
    **inputs: Any,
) -> list[list[int]]:
    """The decoding loop: token by token on a KV cache, with finished rows dropped from it.

    tokens (B, P) long: the prompts; inputs: the attention mask, positions and empty cache that
    generate has prepared. Returns the response ids of each prompt, stop id included.
    """
    rows, longest = len(tokens), generation_config.max_new_tokens
    mask, positions = inputs.pop("attention_mask"), inputs.pop("position_ids")
    stops = torch.tensor(generation_config.eos_token_id, device=tokens.device)
    said = tokens.new_zeros(rows, longest)
    # The length is where the sampler stopped, never where padding begins: pad may be a stop id
    # itself, or an id that the model can sample.
    length = tokens.new_full((rows,), longest)
    alive = torch.arange(rows, device=tokens.device)  # (R,) the rows that are still computed
    for count in range(1, longest + 1):  # count: tokens of every row, this step's included
        out = model(input_ids=tokens, attention_mask=mask, position_ids=positions, **inputs)
        scores = logits_processor(tokens, out.logits[:, -1].float())  # (R, V)
        drawn = draw(scores) if generation_config.do_sample else scores.argmax(-1)
        said[alive, count - 1] = drawn
        stopped = torch.where(torch.isin(drawn, stops), count, longest)
        length[alive] = length[alive].minimum(stopped)
        tokens, positions = drawn[:, None], positions[:, -1:] + 1
        if mask is not None:  # None: no prompt is padded
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        if count % DROP_EVERY == 0 or count == longest:
            kept = (length[alive] > count).nonzero().squeeze(1)
            bar.update(len(alive) - len(kept))
            if not len(kept):
                break
            if len(kept) < len(alive):
                alive, tokens, positions = alive[kept], tokens[kept], positions[kept]
                mask = None if mask is None else mask[kept]
                inputs["past_key_values"].batch_select_indices(kept)
    return [ids[:count] for ids, count in zip(said.tolist(), length.tolist(), strict=True)]


def draw(scores: torch.Tensor) -> torch.Tensor:
    """One sample of each row of unnormalised log-probabilities (R, V) -> (R,) long.

    Inverts the cumulative distribution, in float64: a rare token's share is not rounded away,
    and one uniform number a row is cheaper than the one a word that torch.multinomial draws.
    """
    cumulative = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
    uniform = torch.rand_like(cumulative[:, :1])
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).squeeze(1)


# ---------------------------------------------------------------------------------------- scoring


def pad_batch(
    responses: list[Response], device: str | torch.device = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded [prompt, response] rows -> input_ids, attention_mask, response_mask: (B, L).

    Under causal attention no token sees the padding, so that its id, 0, matters nowhere.
    """
    width = max(len(r.prompt_ids) + len(r.ids) for r in responses)
    ids = torch.zeros(len(responses), width, dtype=torch.long)
    attention = torch.zeros(len(responses), width, dtype=torch.bool)
    response_mask = torch.zeros(len(responses), width, dtype=torch.bool)
    for i, r in enumerate(responses):
        start, end = len(r.prompt_ids), len(r.prompt_ids) + len(r.ids)
        ids[i, :end] = torch.tensor(r.prompt_ids + r.ids)
        attention[i, :end] = True
        response_mask[i, start:end] = True
    return ids.to(device), attention.to(device), response_mask.to(device)


def token_stats(
    model: Model,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    chunk: int = 256,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability, entropy and collision probability of every response token.

    input_ids (B, L) long; attention_mask, response_mask (B, L) bool, padding on either side.
    Returns logp (ln, with gradient), entropy (nats) and collision (sum of squared probabilities):
    each (B, L) float32, aligned with input_ids (column t is about token t, predicted from the
    tokens before it) and 0 outside response_mask. Temperature 1, full vocabulary.
    """
    predicted = response_mask.clone()
    predicted[:, 0] = False  # nothing comes before the first token
    # Under causal attention a token never sees padding to its right, so right padding needs no
    # mask; positions count real tokens, so left padding does not shift them.
    left_padded = not bool(attention_mask[:, 0].all())
    hidden = model.base_model(
        input_ids,
        attention_mask=attention_mask.long() if left_padded else None,
        position_ids=(attention_mask.long().cumsum(1) - 1).clamp(min=0) if left_padded else None,
        use_cache=False,
    ).last_hidden_state  # (B, L, H)
    hidden = hidden[:, :-1][predicted[:, 1:]]  # (N, H): the states that predict response tokens
    weight = model.get_output_embeddings().weight  # (V, H)
    stats = head_stats(hidden, weight, input_ids[predicted], chunk=chunk)
    empty = torch.zeros(input_ids.shape, dtype=torch.float32, device=input_ids.device)
    logp, entropy, collision = (empty.masked_scatter(predicted, s) for s in stats)
    return logp, entropy, collision


def head_stats(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, chunk: int = 256
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output head, in chunks of tokens: (N, V) logits never exist at once.

    hidden (N, H), weight (V, H), targets (N,) long -> logp, entropy (nats), collision: (N,)
    float32. The gradient flows through logp only, to hidden and weight.
    """
    return HeadStats.apply(hidden, weight, targets, chunk)


BLOCK = 32  # rows


class HeadStats(torch.autograd.Function):
    """Softmax statistics with a backward that recomputes each chunk of logits."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk):
        stats = hidden.new_empty(4, len(targets), dtype=torch.float32)
        for i in range(0, len(targets), chunk):
            logits = product(hidden[i : i + chunk], weight)  # (C, V) float32
            # few rows at a time, so that pi is a small second buffer beside the logits
            for j, block in enumerate(logits.split(BLOCK)):
                rows = slice(i + j * BLOCK, i + j * BLOCK + len(block))
                stats[3, rows] = block.logsumexp(-1)
                block -= stats[3, rows, None]  # ln pi
                stats[0, rows] = block.gather(1, targets[rows, None]).squeeze(1)
                probs = block.exp()  # pi
                stats[1, rows] = -torch.linalg.vecdot(probs, block)  # H = -sum_v pi ln pi
                stats[2, rows] = torch.linalg.vecdot(probs, probs)  # sum_v pi^2
            del logits, block, probs  # before the next chunk's exist
        logp, entropy, collision, lse = stats.unbind()
        logp, entropy, collision = logp.clone(), entropy.clone(), collision.clone()
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.chunk = chunk
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
            grad = product(hidden[rows], weight).sub_(lse[rows, None]).exp_().neg_()
            grad.scatter_add_(1, targets[rows, None], torch.ones_like(grad[:, :1]))
            grad *= grad_logp[rows, None]
            grad = grad.to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            add_product(grad_weight, grad.T, hidden[rows])
            del grad
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def product(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
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


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
