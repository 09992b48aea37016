"""Train with STAPO's loss inside TRL's GRPOTrainer.

    python scripts/trl_stapo.py --model_name_or_path Qwen/Qwen3-1.7B-Base --output_dir runs/trl ...

GRPOTrainer samples and rewards the responses, cuts them into micro-batches and steps the optimiser.
STAPOTrainer changes the loss. A mini-batch is all responses of one optimiser step. Before the step,
a pass without gradient over the mini-batch decides which tokens are silenced. All micro-batches and
all ranks share one tau_h and one denominator. docs/using-the-loss.md has complete commands, and a
script of your own that imports STAPOTrainer.

Tested with TRL 1.16, on CPUs. The trainer overrides and calls private names of TRL: TRL has no
public way to see a mini-batch before its first micro-batch, or to change advantages.
"""

import sys
from dataclasses import fields, make_dataclass
from pathlib import Path

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import TrainingArguments
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config
from trl.trainer.utils import add_fused_lm_head

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stapo
from reward import reward_all
from rollout import stop_ids, to_text
from stapo import clipped_loss, ratio_sums, spurious_mask
from support.flags import PATHS, expanded


class STAPOTrainer(GRPOTrainer):
    """GRPOTrainer with STAPO's loss. It raises ValueError for options that STAPO has no place for.

    tau_p and q are S2T's, all other arguments are GRPOTrainer's. The loss and its gradient do not
    depend on the number of micro-batches and ranks. Responses also end at the chat template's end
    of turn. Dropout layers are switched off, and logits are a float32 product: noise and rounding
    would change which tokens have p < tau_p.
    """

    def __init__(self, model, reward_funcs=None, args=None, *, tau_p=0.002, q=0.75, **options):
        args = args or GRPOConfig("runs/trl", **DEFAULTS)
        check(args, options)
        args.disable_dropout = True
        super().__init__(model, reward_funcs, args, **options)
        needed = args.generation_batch_size // self.num_generations
        if hasattr(self.train_dataset, "__len__") and len(self.train_dataset) < needed:
            what = f"has {len(self.train_dataset)} problems, and a rollout needs {needed}"
            hint = "lower --steps_per_generation or --per_device_train_batch_size"
            raise ValueError(f"train_dataset: {what}; {hint}")
        if self.aux_loss_enabled:  # a mixture of experts; TRL's default is the model's coefficient
            raise ValueError(f"router_aux_loss_coef={self.router_aux_loss_coef}: STAPO needs 0.0")
        trained = {p.dtype for p in self.model.parameters() if p.requires_grad}
        if trained != {torch.float32}:  # TRL makes LoRA's bfloat16 for a model in 4 or 8 bits
            raise ValueError(f"dtype: trained weights must be float32, and some are {trained}")
        for module in self.model.modules():  # TRL has switched off layers of type Dropout alone
            for name in [key for key, rate in vars(module).items() if type(rate) is float]:
                if "drop" in name:
                    setattr(module, name, 0.0)
        # TRL's own flag for this fails for LoRA on a model with tied embeddings (1.16).
        inner = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        add_fused_lm_head(inner, cast_lm_head_to_fp32=True, outputs=("log_probs", "entropy"))
        self.tau_p, self.q = tau_p, q
        # TRL itself stops at the model's and the tokenizer's ids. The chat template of a base model
        # can end a turn with another id. A saved model lists all of them, for other programs.
        stops = sorted({*self.eos_token_ids, *stop_ids(inner, self.processing_class)})
        self.eos_token_ids = inner.generation_config.eos_token_id = stops
        if self.use_vllm:
            self.vllm_generation.generation_kwargs["stop_token_ids"] = stops
        else:
            self.generation_config.eos_token_id = self.generation_kwargs["eos_token_id"] = stops

    def _generate_and_score_completions(self, inputs):
        """Return a rollout of this rank. If a group's rewards are all equal, A is 0.

        TRL divides rounding by 1e-4: eight rewards of 1.2 get A = 0.001. Else A has both signs.
        """
        batch = super()._generate_and_score_completions(inputs)
        size = self.num_generations if self.model.training else self.num_generations_eval
        groups = self.accelerator.gather(batch["advantages"]).view(-1, size)  # of all ranks
        differ = ((groups.amax(1) > 0) & (groups.amin(1) < 0)).repeat_interleave(size)
        first = self.accelerator.process_index * len(inputs)
        batch["advantages"] = batch["advantages"] * differ[first : first + len(inputs)]
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
        """Decide which tokens of a mini-batch are kept, before its optimiser step; log its metrics.

        A forward pass over all micro-batches gives p and H. Each micro-batch gets its rows of I as
        `keep`, and the mini-batch's `denominator`. Gradients are averaged over ranks.
        """
        stats = [self.statistics(self.model, batch) for batch in micro_batches]
        logp, entropy = (torch.cat(rows) for rows in zip(*stats))  # (B, T) each, of this rank
        advantages = torch.cat([batch["advantages"] for batch in micro_batches])  # (B,)
        mask = torch.cat([batch["completion_mask"].bool() for batch in micro_batches])  # (B, T)

        def all_cat(values):  # every rank gets the entropies of all ranks' candidates
            return torch.cat(gather_object([values.cpu()])).to(values.device)

        silenced, candidates, _ = spurious_mask(
            logp, advantages, entropy, mask, tau_p=self.tau_p, q=self.q, over_ranks=all_cat
        )
        keep = mask & ~silenced  # (B, T)
        kept = self.accelerator.reduce(keep.sum(), "sum").clamp(min=1)
        keep_rows = keep.split([len(batch["advantages"]) for batch in micro_batches])
        for batch, rows in zip(micro_batches, keep_rows, strict=True):
            batch |= {"keep": rows, "denominator": kept / self.accelerator.num_processes}
        old_logp = logp  # TRL leaves out old_per_token_logps if pi_theta is pi_old
        if "old_per_token_logps" in micro_batches[0]:
            old_logp = torch.cat([batch["old_per_token_logps"] for batch in micro_batches])
        low, high = self.epsilon_low, self.epsilon_high
        sums = ratio_sums(logp, old_logp, advantages, mask, eps_low=low, eps_high=high)
        d = (-logp - entropy)[mask]  # as in rollout.sampling_gap
        sums |= {"candidates": candidates.sum(), "silenced": silenced.sum()}
        sums |= {"entropy": entropy[mask].sum(), "d": d.sum(), "d_squared": d.square().sum()}
        total = {name: x.item() for name, x in self.accelerator.reduce(sums, "sum").items()}
        count = max(total["tokens"], 1)
        log = self._metrics["train" if self.model.training else "eval"]
        log["candidates"].append(total["candidates"])
        log["silenced"].append(total["silenced"])
        log["entropy"].append(total["entropy"] / count)
        log["clip_ratio/low_mean"].append(total["clip_low"] / count)
        log["clip_ratio/high_mean"].append(total["clip_high"] / count)
        if self._step % (self.args.steps_per_generation * self.num_iterations) == 0:
            log["sampling_gap"].append(total["d"] / count)  # pi_theta is the policy that sampled
            log["sampling_z"].append(total["d"] / max(total["d_squared"], 1e-9) ** 0.5)

    def compute_loss(self, model, inputs, *_, **options) -> torch.Tensor:
        """Return a micro-batch's part of -J, which is divided by the mini-batch's kept tokens."""
        logp, _ = self.statistics(model, inputs)
        return clipped_loss(
            logp,
            inputs.get("old_per_token_logps", logp),
            inputs["advantages"],
            inputs["keep"],
            eps_low=self.epsilon_low,
            eps_high=self.epsilon_high,
            denominator=inputs["denominator"],
        )

    def statistics(self, model, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ln p and H of a micro-batch's response tokens, (B, T) float32 each."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)  # (B, prompt + T)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        compute = self._get_per_token_logps_and_entropies
        return compute(model, ids, mask, batch["completion_ids"].size(1), compute_entropy=True)[:2]


# Options of stapo.py for which TRL has another default. The command line uses them as its defaults.
DEFAULTS = {
    "epsilon_high": 0.28,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 20,  # optimiser steps: 5 rollouts with four mini-batches each (paper: 10)
    "weight_decay": 0.1,
    "logging_steps": 1,
    "router_aux_loss_coef": 0.0,  # None: a mixture of experts has its own
    "vllm_importance_sampling_correction": False,
}

# The options of TRL that STAPOTrainer honours. Any other must keep TRL's default, because many
# change the objective or the policy that samples. TRL 1.16 has 77 options, later versions more.
HONOURED = set(
    """cache_implementation cast_lm_head_to_fp32 chat_template_kwargs disable_dropout
    ds3_gather_for_generation epsilon epsilon_high generation_batch_size log_completions
    log_completions_hub_repo log_multimodal log_unique_prompts max_completion_length
    model_init_kwargs num_completions_to_print num_generations num_generations_eval num_iterations
    pad_to_multiple_of reward_weights router_aux_loss_coef shuffle_dataset steps_per_generation
    trust_remote_code use_vllm vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port
    vllm_max_model_length vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host
    vllm_server_port vllm_server_timeout vllm_tensor_parallel_size""".split()
)
# The options of transformers' own trainer are honoured, except these.
HONOURED |= {field.name for field in fields(TrainingArguments)}
HONOURED -= {"label_smoothing_factor", "neftune_noise_alpha", "use_liger_kernel"}


def check(config: GRPOConfig, options: dict) -> None:
    """Raise a ValueError that names the option if an option has no place in STAPO's objective."""
    needed = {field.name: field.default for field in fields(GRPOConfig)}
    # TRL's default is a weight for each token of vLLM's, which is not in STAPO's loss.
    needed["vllm_importance_sampling_correction"] = False
    for name in sorted(needed.keys() - HONOURED):
        acts = config.use_vllm or not name.startswith("vllm_")
        if acts and getattr(config, name) != needed[name]:
            raise ValueError(f"{name}={getattr(config, name)}: STAPO needs {name}={needed[name]}")
    for name in ("tools", "rollout_func", "environment_factory"):
        if options.get(name):
            raise ValueError(f"{name}: STAPO has no mask for tokens that the policy did not sample")
    if config.steps_per_generation % config.gradient_accumulation_steps:
        raise ValueError("gradient_accumulation_steps: must divide steps_per_generation")


def check_model(model: ModelConfig) -> None:
    """Raise a ValueError that names the option if an option would be left out in silence."""
    passed = {"model_name_or_path", "model_revision", "dtype", "attn_implementation", "use_peft"}
    for field in fields(model):
        value = getattr(model, field.name)
        of_lora = field.name.startswith(("lora_", "use_rslora", "use_dora"))
        if field.name in passed or value == field.default or (of_lora and model.use_peft):
            continue
        hint = "add --use_peft" if of_lora else "the model would not get it"
        raise ValueError(f"--{field.name} {value}: {hint}")


# The flags that TRL does not have are those of stapo.py.
OWN = "data instruction reward max_prompt_tokens tau_p q".split()
Flags = make_dataclass("Own", [(f.name, f.type, f) for f in fields(stapo.Config) if f.name in OWN])


def make_trainer(argv: list[str] | None = None) -> STAPOTrainer:
    """Return the trainer for a command line. Raises ValueError if a flag is wrong."""
    parser = TrlParser((Flags, GRPOConfig, ModelConfig))
    parser.set_defaults(**DEFAULTS)
    flags, config, model = parser.parse_args_and_config(argv)
    check_model(model)
    for name in PATHS & vars(flags).keys():
        setattr(flags, name, expanded(getattr(flags, name)))
    more = {"model": model.model_name_or_path, "max_new_tokens": config.max_completion_length}
    stapo.check_flags(cfg := stapo.Config(**vars(flags), **more))
    task = stapo.load_task(cfg)
    dataset = []
    for index, problem in enumerate(task.problems):
        prompt = "\n".join(filter(None, (problem["problem"], flags.instruction)))
        turns = [{"role": "user", "content": prompt}]  # TRL applies the chat template to these
        prompt = turns if task.tokenizer.chat_template else prompt + "\n"
        if prompt != turns and task.tokenizer(prompt).input_ids != problem["prompt_ids"]:
            what = "its tokenizer ends every prompt; turn add_eos_token off in its files"
            raise ValueError(f"{more['model']}: {what}")
        dataset.append({"prompt": prompt, "index": index})

    def grade(completion_ids, index, **_) -> list[float]:
        texts = [to_text(task.tokenizer, ids, True) for ids in completion_ids]
        stops = {*trainer.eos_token_ids}
        infos = [{"tokens": len(x), "truncated": not stops & {*x[-1:]}} for x in completion_ids]
        return reward_all(task.reward, texts, [task.problems[i] for i in index], infos)

    how = {"revision": model.model_revision, "dtype": model.dtype}
    how |= {"attn_implementation": model.attn_implementation}
    config.model_init_kwargs = how | (config.model_init_kwargs or {})
    options = {"tau_p": flags.tau_p, "q": flags.q, "peft_config": get_peft_config(model)}
    options |= {"train_dataset": Dataset.from_list(dataset), "processing_class": task.tokenizer}
    trainer = STAPOTrainer(model.model_name_or_path, grade, config, **options)  # grade needs it
    return trainer


def main(argv: list[str] | None = None) -> None:
    try:
        trainer = make_trainer(argv)
    except ValueError as error:
        # stapo.py's messages begin "--max_new_tokens 80: ". TRL's parser has '--max_new_tokens'.
        error = str(error).replace("--max_new_tokens ", "--max_completion_length ")
        sys.exit(f"trl_stapo.py: {error}")
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
