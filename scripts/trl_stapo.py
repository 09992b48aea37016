"""Train with STAPO's loss inside TRL's GRPOTrainer.

    python scripts/trl_stapo.py --model_name_or_path Qwen/Qwen3-1.7B-Base --output_dir runs/trl ...
    accelerate launch --num_processes 8 scripts/trl_stapo.py ...          # the same on eight GPUs

GRPOTrainer samples and rewards the responses, cuts them into micro-batches and steps the optimiser.
STAPOTrainer changes the loss. A mini-batch is all responses of one optimiser step. Before the step,
a pass without gradient over the mini-batch decides which tokens are silenced. All micro-batches and
all ranks share one tau_h and one denominator.

TRL also has vLLM, LoRA, DeepSpeed and several nodes. LoRA was tested, on CPUs. vLLM, DeepSpeed,
several nodes and GPUs were not run. docs/using-the-loss.md has complete commands for one and for
eight GPUs, and says what to watch.

For a script of your own, paste the section "the trainer". It needs TRL 1.16 and stapo.py, or the
copy of the loss that docs/using-the-loss.md makes. The section "the program" is this command line:
data, prompts and reward.
"""
# ruff: noqa: E402 - each section lists its own imports

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__" and not find_spec("trl"):
    sys.exit("trl_stapo.py: needs TRL: pip install 'trl==1.16.*'")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# ==================================================================================== the trainer

import torch
import trl

if not trl.__version__.startswith("1.16."):  # the methods below use private names of TRL
    raise ImportError(f"TRL {trl.__version__}: STAPOTrainer needs 1.16: pip install 'trl==1.16.*'")
from accelerate.utils import gather_object
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from stapo import clipped_loss, quantile, spurious_candidates, spurious_mask, stapo_loss

# Options of stapo.py for which TRL has another default. The command line uses them as its defaults.
DEFAULTS = {
    "epsilon_high": 0.28,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 20,  # optimiser steps: 5 rollouts with four mini-batches each (paper: 10)
    "weight_decay": 0.1,
    "vllm_importance_sampling_correction": False,
    "logging_steps": 1,
}

# Options that would change the objective or the sampler, and the value that each must keep.
FIXED = {
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "scale_rewards": "group",  # A is divided by the standard deviation of the group's rewards
    "multi_objective_aggregation": "sum_then_normalize",
    "mask_truncated_completions": False,  # truncated responses are trained like any other
    "beta": 0.0,  # no KL term
    "sync_ref_model": False,
    "entropy_coef": 0.0,  # no entropy bonus
    "use_adaptive_entropy": False,
    "top_entropy_quantile": 1.0,
    "delta": None,  # no second clip
    "off_policy_mask_threshold": None,
    # The policy that samples is the policy that is trained: full vocabulary, temperature 1.
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "generation_kwargs": None,  # can hold any of the five above
    "vllm_structured_outputs_regex": None,
    "neftune_noise_alpha": None,  # it trains on noisy embeddings
    # Continuous batching leaves the master weights rounded to bfloat16.
    "use_transformers_continuous_batching": False,
}


def check(config: GRPOConfig, tau_p: float, q: float, options: dict) -> None:
    """Raise a ValueError that names the option if an option would change STAPO's objective."""
    for name, value in FIXED.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name}={getattr(config, name)}: STAPO needs {name}={value}")
    for name, value in {"tau_p": tau_p, "q": q}.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value}: must be between 0 and 1")
    for name in ("tools", "rollout_func", "environment_factory"):
        if options.get(name):
            raise ValueError(f"{name}: STAPO has no mask for tokens that the policy did not sample")
    if config.use_vllm and config.vllm_importance_sampling_correction:
        option = "vllm_importance_sampling_correction"
        raise ValueError(f"{option}=True: it is another objective; set it to False")
    steps, accumulated = config.steps_per_generation, config.gradient_accumulation_steps
    if steps % accumulated:
        raise ValueError(
            f"gradient_accumulation_steps={accumulated}: must divide steps_per_generation={steps}"
        )


def check_model(trainer: GRPOTrainer) -> None:
    """Do the same for what is known only after the model is loaded."""
    if trainer._is_vlm:
        raise ValueError("processing_class: give a tokenizer, images are not supported")
    if trainer.aux_loss_enabled:
        raise ValueError("router_aux_loss_coef: STAPO has no such term; set it to 0")
    if getattr(trainer.model.config.get_text_config(), "attention_dropout", 0):
        raise ValueError("attention_dropout: set it to 0 in the model's config")
    for module in trainer.model.modules():  # TRL switches off layers of type Dropout, but no others
        for name, rate in vars(module).items():
            if "drop" in name and isinstance(rate, float) and rate:
                kind = type(module).__name__
                raise ValueError(f"{name}={rate} of {kind}: set it to 0 in the model's config")
    trained = {p.dtype for p in trainer.model.parameters() if p.requires_grad}
    if trained != {torch.float32}:
        why = "TRL makes them bfloat16 if the model is loaded in 4 or 8 bits"
        raise ValueError(f"dtype: trained weights must be float32, and some are {trained}; {why}")
    if hasattr(trainer.train_dataset, "__len__"):  # a streamed data set has none
        # TRL drops an incomplete rollout. Without a whole one it would train nothing.
        count, args = len(trainer.train_dataset), trainer.args
        if count < (needed := args.generation_batch_size // args.num_generations):
            raise ValueError(f"train_dataset: {count} prompts, but a rollout takes {needed}")


def end_of_turn(tokenizer) -> list[int]:
    """Return the id that ends a turn in the chat template, as a list of one or of none."""
    if not tokenizer.chat_template:
        return []
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<!>"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    _, answer, rest = text.rpartition("<!>")
    ids = tokenizer(rest, add_special_tokens=False).input_ids[:1]
    return ids if answer and ids and ids[0] in tokenizer.added_tokens_decoder else []


class STAPOTrainer(GRPOTrainer):
    """GRPOTrainer with STAPO's loss. It raises ValueError for options that STAPO has no place for.

    model, reward_funcs, args and all other arguments are GRPOTrainer's; tau_p and q are S2T's.
    The loss and its gradient do not depend on the number of micro-batches and ranks. As in any
    GRPOTrainer, an advantage is divided by the standard deviation of the rewards plus 1e-4.
    Responses also end at the chat template's end of turn. Dropout layers are switched off, and
    logits are a float32 product: noise and rounding would change which tokens have p < tau_p.
    """

    def __init__(
        self, model, reward_funcs=None, args=None, *, tau_p=0.002, q=0.75, **options
    ) -> None:
        args = args or GRPOConfig("runs/trl", **DEFAULTS)
        check(args, tau_p, q, options)
        args.disable_dropout = True
        super().__init__(model, reward_funcs, args, **options)
        check_model(self)
        # TRL's own flag for this fails for LoRA on a model with tied embeddings (1.16).
        lora = hasattr(self.model, "get_base_model")
        inner = self.model.get_base_model() if lora else self.model
        add_fused_lm_head(inner, cast_lm_head_to_fp32=True, outputs=("log_probs", "entropy"))
        self.tau_p, self.q = tau_p, q
        self.clip = {"eps_low": self.epsilon_low, "eps_high": self.epsilon_high}
        # TRL itself stops at the model's and the tokenizer's ids. The chat template of a base model
        # can end a turn with another id. A saved model lists all of them, for other programs.
        stops = sorted({*self.eos_token_ids, *end_of_turn(self._tokenizer)})
        self.eos_token_ids = inner.generation_config.eos_token_id = stops
        if self.use_vllm:
            self.vllm_generation.generation_kwargs["stop_token_ids"] = stops
        else:
            self.generation_config.eos_token_id = self.generation_kwargs["eos_token_id"] = stops

    def _calculate_rewards(self, *batch):
        """Return the rewards, (responses of all ranks, functions), and keep them."""
        self.rewards = super()._calculate_rewards(*batch)
        return self.rewards

    def _generate_and_score_completions(self, inputs):
        """Return a rollout of this rank. If a group's rewards are all equal, A is 0, not rounding.

        TRL divides the rounding of the group's mean by 1e-4. Eight rewards of 1.2 get A = 0.001.
        """
        batch = super()._generate_and_score_completions(inputs)
        group = self.num_generations if self.model.training else self.num_generations_eval
        # As in TRL, a response that no function rewards (NaN) is left out.
        rewards = (self.rewards * self.reward_weights.to(self.rewards.device)).nansum(1)
        unknown = self.rewards.isnan().all(1).view(-1, group)
        most = rewards.view(-1, group).masked_fill(unknown, -torch.inf).amax(1)
        least = rewards.view(-1, group).masked_fill(unknown, torch.inf).amin(1)
        first = self.accelerator.process_index * len(inputs)
        equal = (most <= least).repeat_interleave(group)[first : first + len(inputs)]
        batch["advantages"] = batch["advantages"].masked_fill(equal, 0.0)
        return batch

    def _prepare_inputs(self, generation_batch):
        """Return the next micro-batch, and choose the tokens of a mini-batch at its first one."""
        inputs = super()._prepare_inputs(generation_batch)
        count = self.args.gradient_accumulation_steps
        if not self.model.training:
            self.select_tokens([inputs])
        elif self._step % count == 0:
            first = self._step % self.args.steps_per_generation
            self.select_tokens(self._buffered_inputs[first : first + count])
        return inputs

    @torch.no_grad()
    def select_tokens(self, micro_batches: list[dict]) -> None:
        """Decide which tokens of a mini-batch are kept (Algorithm 1), before its optimiser step.

        A forward pass over all micro-batches gives p and H under the current policy, and from them
        tau_h and I. Each micro-batch gets two entries: `keep`, its rows of I, (B, T) bool; and
        `denominator`, the number of kept tokens on all ranks, divided by the number of ranks.
        """
        names = [name for name, value in micro_batches[0].items() if value.dim() > 0]
        whole = {name: torch.cat([batch[name] for batch in micro_batches]) for name in names}
        stats = [self.statistics(self.model, batch) for batch in micro_batches]
        logp, entropy = (torch.cat(rows) for rows in zip(*stats))  # (B, T) each, of this rank
        advantages, mask = whole["advantages"], whole["completion_mask"].bool()  # (B,), (B, T)
        candidates = spurious_candidates(logp, advantages, mask, tau_p=self.tau_p)  # (B, T)
        # Every rank gets the entropies of all ranks' candidates, and so the same tau_h.
        entropies = torch.cat(gather_object([entropy[candidates].cpu()]))
        thresholds = {"tau_p": self.tau_p, "tau_h": quantile(entropies, self.q).to(entropy.device)}
        keep = mask & ~spurious_mask(logp, advantages, entropy, mask, **thresholds)  # (B, T)
        denominator = self.accelerator.reduce(keep.sum(), "sum").clamp(min=1)
        keep_rows = keep.split([len(batch["advantages"]) for batch in micro_batches])
        for batch, rows in zip(micro_batches, keep_rows, strict=True):
            # Gradients are summed over micro-batches and averaged over ranks.
            batch |= {"keep": rows, "denominator": denominator / self.accelerator.num_processes}
        # TRL leaves out old_per_token_logps if pi_theta is pi_old.
        old_logp = whole.get("old_per_token_logps", logp)
        tokens = logp, old_logp, advantages, entropy, mask
        self.record(tokens, thresholds, whole.get("sampling_per_token_logps"))

    def _compute_loss(self, model, inputs):
        """Return a micro-batch's part of -J, which is divided by the mini-batch's kept tokens."""
        logp, _ = self.statistics(model, inputs)
        old_logp = inputs.get("old_per_token_logps")
        old_logp = logp.detach() if old_logp is None else old_logp
        tokens = logp, old_logp, inputs["advantages"], inputs["keep"]
        return clipped_loss(*tokens, **self.clip, denominator=inputs["denominator"])

    def statistics(self, model, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ln p and H of a micro-batch's response tokens, (B, T) float32 each."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        args = model, ids, attention, batch["completion_ids"].size(1)
        logp, entropy, _ = self._get_per_token_logps_and_entropies(*args, compute_entropy=True)
        return logp, entropy

    def record(self, tokens: tuple, thresholds: dict, drawn: torch.Tensor | None) -> None:
        """Log a mini-batch's metrics, over all ranks. drawn (B, T): ln p that vLLM reports."""
        logp, old_logp, _, entropy, mask = tokens
        _, sums = stapo_loss(*tokens, **thresholds, **self.clip)
        d = (-logp - entropy)[mask]  # as in rollout.sampling_gap
        sums |= {"d": d.sum(), "d_squared": d.square().sum()}
        if drawn is not None:
            known = mask & drawn.isfinite()
            sums |= {"drawn": known.sum(), "log_ratio": (drawn - old_logp)[known].sum()}
        total = {k: x.item() for k, x in self.accelerator.reduce(sums, "sum").items()}
        count = max(total["tokens"], 1)
        values = {"candidates": total["candidates"], "silenced": total["silenced"]}
        values |= {"entropy": total["entropy_sum"] / count}
        values |= {f"clip_ratio/{x}_mean": total[f"clip_{x}"] / count for x in ("low", "high")}
        if self._step % (self.args.steps_per_generation * self.num_iterations) == 0:
            # The first optimiser step after sampling: pi_theta is the policy that sampled.
            values["sampling_gap"] = total["d"] / count
            values["sampling_z"] = total["d"] / max(total["d_squared"], 1e-9) ** 0.5
        if drawn is not None:
            values["sampling_kl"] = total["log_ratio"] / max(total["drawn"], 1)
        for name, value in values.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)


# ==================================================================================== the program

from datasets import Dataset
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from reward import load_reward
from rollout import INSTRUCTION, encode_prompt, load_tokenizer, to_text
from support.errors import InputError
from support.flags import flag
from support.models import check_length, load_config
from support.problems import load_problems
from support.progress import device_in_words


@dataclass
class Arguments:
    """The flags that TRL does not have."""

    data: str = flag("BytedTsinghua-SIA/DAPO-Math-17k", "Hub id, .jsonl, .json or .parquet")
    instruction: str = flag(INSTRUCTION, "follows every problem; may be empty")
    reward: str = flag("", "FILE.py:FUNCTION in place of the grader: (response, row) -> float")
    max_prompt_tokens: int = flag(1024, "longer prompts are dropped")
    tau_p: float = flag(0.002, "S2T: a token is a candidate below this probability")
    q: float = flag(0.75, "S2T: silence candidates below this quantile of entropy")


def plan(config: GRPOConfig) -> str:
    """Return a line with the number and the size of a rollout's mini-batches."""
    accumulated, processes = config.gradient_accumulation_steps, config.world_size
    count = config.steps_per_generation // accumulated
    size = config.per_device_train_batch_size * accumulated * processes
    line = f"mini-batches a rollout: {count}, responses a mini-batch: {size}, "
    line += f"processes: {processes}"
    if count * config.num_iterations == 1:
        line += "; with one update a rollout the ratio is 1 and nothing is clipped"
        line += f" (the paper makes four: --steps_per_generation {4 * accumulated})"
    return line


def devices(config: GRPOConfig) -> str:
    """Return a line with the devices and the number formats."""
    name = torch.cuda.get_device_name() if config.device.type == "cuda" else config.device.type
    computation = "bfloat16" if config.bf16 else "float16" if config.fp16 else "float32"
    return device_in_words([name] * config.world_size, "float32", computation)


def make_trainer(argv: list[str] | None = None) -> STAPOTrainer:
    """Return the trainer for a command line. Raises ValueError if a flag is wrong."""
    parser = TrlParser((Arguments, GRPOConfig, ModelConfig))
    parser.set_defaults(**DEFAULTS)
    flags, config, model = parser.parse_args_and_config(argv)
    check(config, flags.tau_p, flags.q, {})  # before anything is loaded
    if config.process_index == 0:
        print(f"trl_stapo.py: {plan(config)}\ntrl_stapo.py: {devices(config)}", flush=True)
    tokenizer = load_tokenizer(model.model_name_or_path)
    reward = load_reward(flags.reward)
    problems = load_problems(flags.data, whole_rows=bool(flags.reward))
    dataset, encoded = [], []
    for index, problem in enumerate(problems):
        ids = encode_prompt(tokenizer, problem["problem"], flags.instruction)
        if 0 < len(ids) <= flags.max_prompt_tokens:
            prompt = "\n".join(filter(None, (problem["problem"], flags.instruction)))
            turns = [{"role": "user", "content": prompt}]  # TRL applies the chat template to these
            prompt = turns if tokenizer.chat_template else prompt + "\n"
            if not tokenizer.chat_template and tokenizer(prompt).input_ids != ids:
                why = "its tokenizer ends every prompt, and TRL samples after that end"
                hint = "turn add_eos_token off in the tokenizer's files"
                raise InputError(f"{model.model_name_or_path}: {why}; {hint}")
            dataset.append({"prompt": prompt, "index": index})
            encoded.append(ids)
    if not dataset:
        raise InputError(f"max_prompt_tokens={flags.max_prompt_tokens}: every prompt is longer")
    model_config, longest = load_config(model.model_name_or_path), config.max_completion_length
    check_length(model_config, encoded, longest, "--max_completion_length")

    def grade(completion_ids, index, **_) -> list[float]:
        texts = [to_text(tokenizer, ids, True) for ids in completion_ids]
        return [reward(text, problems[i]) for text, i in zip(texts, index, strict=True)]

    config.model_init_kwargs = {
        "revision": model.model_revision,
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
    } | (config.model_init_kwargs or {})
    return STAPOTrainer(
        model.model_name_or_path,
        grade,
        config,
        tau_p=flags.tau_p,
        q=flags.q,
        train_dataset=Dataset.from_list(dataset),
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )


def main(argv: list[str] | None = None) -> None:
    try:
        trainer = make_trainer(argv)
    except ValueError as error:
        sys.exit(f"trl_stapo.py: {error}")
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
