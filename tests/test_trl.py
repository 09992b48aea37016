"""scripts/trl_stapo.py: STAPO inside TRL, for any number of micro-batches and ranks.

The responses are canned: random ids of several lengths, so that many tokens of right responses are
candidates, and not equally many in each micro-batch.
"""

import json
import re
import shutil
import subprocess
import types

import pytest
import torch
from helpers import ROOT, TINY, example, make_random_model
from ranks import launch
from reference import method_loss, plain_head, row_stats
from transformers import TrainerCallback

import stapo
from rollout import (
    Response,
    encode_prompt,
    in_order,
    load_model,
    load_policy,
    load_tokenizer,
    pad_batch,
    response_stats,
    sample,
)

trl_stapo = pytest.importorskip("trl_stapo", reason="trl is not installed")

# Sampled at a time. In a group of two only one has A > 0: the first tokens of two right responses
# to a prompt would have one entropy, and rounding would decide about a threshold between them.
PROMPTS, GROUP = 32, 2


def config(folder, micro_batches: int = 1, mini_batches: int = 4, ranks: int = 1, **options):
    """Optimiser steps of micro_batches each; max_steps 4, and a rate at which they show."""
    slices = micro_batches * mini_batches
    small = {
        "output_dir": str(folder),
        "num_generations": GROUP,
        "per_device_train_batch_size": PROMPTS * GROUP // slices // ranks,
        "gradient_accumulation_steps": micro_batches,
        "steps_per_generation": slices,
        "max_steps": 4,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "epsilon_high": 0.28,
        "max_grad_norm": 0.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    return trl_stapo.GRPOConfig(**small | options)


def response(prompt: list[int], member: int) -> list[int]:
    """The ids of a prompt's response: 3 to 24 of them."""
    g = torch.Generator().manual_seed(hash((*prompt, member)) % 2**31)
    length = int(torch.randint(3, 25, (), generator=g))
    return torch.randint(2, 100, (length,), generator=g).tolist()


def reward(completion_ids, **_) -> list[float]:
    """About half of the responses are right."""
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def problems(count: int):
    rows = [json.loads(x) for x in (TINY / "train.jsonl").read_text().splitlines()[:count]]
    return trl_stapo.Dataset.from_list([{"prompt": row["problem"] + "\n"} for row in rows])


def train(folder, model=None, settings=(), **options):
    """Four optimiser steps on canned responses: the trainer, with what the callback has `seen`."""
    seen = []

    class Canned(trl_stapo.STAPOTrainer):
        def _generate_single_turn(self, prompt_ids, *_):
            return [response(ids, i % GROUP) for i, ids in enumerate(prompt_ids)], None

    class Watched(TrainerCallback):
        """Keeps the parameters and gradients before each optimiser step, and its micro-batches."""

        def on_pre_optimizer_step(self, args, state, control, model, **_):
            parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
            count = args.gradient_accumulation_steps
            first = state.global_step * count % args.steps_per_generation
            update = types.SimpleNamespace()
            update.weights = {name: p.detach().clone() for name, p in parameters.items()}
            update.gradients = {name: p.grad.clone() for name, p in parameters.items()}
            update.slices = [dict(x) for x in trainer._buffered_inputs[first : first + count]]
            seen.append(update)

    trainer = Canned(
        model or load_model(str(TINY)),
        reward,
        config(folder, **options),
        train_dataset=problems(2 * PROMPTS),
        processing_class=load_tokenizer(str(TINY)),
        callbacks=[Watched()],
        **dict(settings),
    )
    trainer.train()
    trainer.seen = seen
    return trainer


def logged(trainer) -> list[dict]:
    """What it logged at each step."""
    return [row for row in trainer.state.log_history if "loss" in row]


# -------------------------------------------------------------------------- the paper's own numbers


def mini_batch(slices: list[dict]) -> tuple[list, list, list]:
    """The responses, with the advantages and the old log-probabilities that TRL gave them."""
    responses, old_logp = [], []
    for batch in slices:
        names = "prompt_ids", "prompt_mask", "completion_ids", "completion_mask"
        for row, logp in enumerate(batch["old_per_token_logps"]):
            prompt, prompt_mask, ids, mask = (batch[name][row] for name in names)
            prompt, ids = prompt[prompt_mask.bool()].tolist(), ids[mask.bool()].tolist()
            responses.append(Response(prompt, ids, False, ""))
            old_logp.append(logp[mask.bool()])
    return responses, torch.cat([batch["advantages"] for batch in slices]).tolist(), old_logp


def silenced(batch: dict) -> int:
    return int((batch["completion_mask"].bool() & ~batch["keep"]).sum())


def check_step(update, slices: list[dict], line: dict) -> None:
    """Mask, loss, gradient and line: from whole logits in float64, one response at a time."""
    model = load_model(str(TINY))
    model.load_state_dict(update.weights, strict=False)
    responses, *given = mini_batch(slices)
    loss, sums = method_loss(model, responses, *given, method="stapo")
    assert 2 < sums["silenced"] == line["silenced"] < sums["candidates"] == line["candidates"]
    assert sum(map(silenced, slices)) == line["silenced"]
    assert line["loss"] == pytest.approx(sums["loss"], rel=1e-3, abs=1e-5)
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, parameters)
    for ours, theirs in zip(update.gradients.values(), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        entropy = torch.cat([row_stats(model, response)[1] for response in responses])
    assert line["entropy"] == pytest.approx(float(entropy.mean()), rel=1e-4)
    clipped = [sums[f"clip_{end}"] / len(entropy) for end in ("low", "high")]
    names = "clip_ratio/low_mean", "clip_ratio/high_mean"
    assert [line[name] for name in names] == pytest.approx(clipped, rel=1e-3)


@pytest.mark.parametrize("micro_batches", [1, 8])
def test_each_step_is_the_papers(tmp_path, micro_batches):
    """Also with evaluations in between, which take each batch as its own mini-batch."""
    trainer = train(
        tmp_path,
        micro_batches=micro_batches,
        gradient_checkpointing=micro_batches > 1,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=16,
        settings={"eval_dataset": problems(16)},
    )
    for update, line in zip(trainer.seen, logged(trainer), strict=True):
        check_step(update, update.slices, line)
        # else a quantile of each micro-batch would be the same
        assert len(set(map(silenced, update.slices))) > 1 or micro_batches == 1
    assert logged(trainer)[0]["sampling_z"] > 6  # the responses are not the policy's own
    assert trainer.model.is_gradient_checkpointing == (micro_batches > 1)
    evaluated = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert len(evaluated) == 2 and all(row["eval_silenced"] > 2 for row in evaluated)


def test_a_group_of_equal_rewards_has_no_advantage(tmp_path, monkeypatch):
    """The float32 mean of eight rewards of 1.2 is below 1.2, and TRL divides the rest by 1e-4."""

    def graded(completion_ids, **_):  # the first half is equal, but the first has no reward
        half = len(completion_ids) // 2
        return [None] + [1.2] * (half - 1) + [float(ids[0] % 2) for ids in completion_ids[half:]]

    monkeypatch.setitem(globals(), "reward", graded)
    trainer = train(tmp_path, num_generations=8, max_steps=1)
    A = torch.cat([batch["advantages"] for batch in trainer._buffered_inputs]).abs()
    assert (A == 0).sum() >= len(A) // 2 and (A > 0.3).any()
    assert ((A == 0) | (A > 0.3)).all()


# --------------------------------------------------------------- in a script of the reader's own

SECTION = (ROOT / "scripts" / "trl_stapo.py").read_text()
SECTION = SECTION.split("= the trainer\n")[1].split("\n# =====")[0]
CHAT = """{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"""


def chat_model(folder):
    """The tiny model, as a base model with a chat template whose end of turn no config names."""
    shutil.copytree(TINY, folder)
    tokenizer = load_tokenizer(str(TINY))
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_the_section_alone_trains_and_what_it_saves_stops_at_the_end_of_a_turn(tmp_path):
    """Pasted, with the copy of the loss as its only other file."""
    imported = re.findall(r"^(?:from|import) (\w+)", SECTION, re.MULTILINE)
    assert set(imported) == {"torch", "trl", "accelerate", "stapo"}
    exec(SECTION, pasted := {})
    tokenizer = chat_model(tmp_path / "model")
    turns = [{"prompt": [{"role": "user", "content": f"{i} + 1?"}]} for i in range(64)]
    dataset = trl_stapo.Dataset.from_list(turns)
    options = {"train_dataset": dataset, "processing_class": tokenizer}
    small = config(tmp_path / "run", max_steps=1, max_completion_length=8)
    trainer = pasted["STAPOTrainer"](str(tmp_path / "model"), reward, small, **options)
    trainer.train()
    assert len(logged(trainer)) == 1
    stops = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    trainer.save_model()
    saved = json.loads((tmp_path / "run" / "generation_config.json").read_text())
    assert sorted(saved["eos_token_id"]) == stops


# ------------------------------------------------------------------------------------------- ranks


def on_ranks(folder) -> None:
    """Responses are sampled twice, each time the mini-batch of two steps."""
    trainer = train(folder / "run", micro_batches=2, mini_batches=1, num_iterations=2, ranks=2)
    saved = {"seen": trainer.seen, "log": logged(trainer)}
    torch.save(saved, folder / f"rank-{trainer.args.process_index}.pt")


def test_two_ranks_share_a_mini_batch(tmp_path):
    assert launch(on_ranks, 2, tmp_path / "log", tmp_path, timeout=300) == [0, 0]
    first, second = (
        torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)
    )
    for one, other, line in zip(first["seen"], second["seen"], first["log"], strict=True):
        check_step(one, one.slices + other.slices, line)
        for name, gradient in one.gradients.items():
            torch.testing.assert_close(other.gradients[name], gradient)
        counts = [sum(map(silenced, update.slices)) for update in (one, other)]
        assert counts[0] != counts[1]


# --------------------------------------------------------------------------- what TRL has to offer


def test_lora(tmp_path):
    peft = pytest.importorskip("peft")
    lora = {"r": 4, "lora_dropout": 0.5, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    one, other = (
        train(
            tmp_path,
            micro_batches=micro_batches,
            settings={"peft_config": peft.LoraConfig(**lora)},
            learning_rate=1e-2,
        )
        for micro_batches in (1, 4)
    )
    assert all("lora" in name for name in one.seen[0].weights)
    for a, b in zip(logged(one), logged(other), strict=True):
        names = "loss", "grad_norm", "silenced"
        assert [a[x] for x in names] == pytest.approx([b[x] for x in names], rel=1e-3)
        assert a["silenced"] > 2


def test_bfloat16_layers_and_a_float32_head(tmp_path):
    """ln p and H, from the states before the head: a bfloat16 product would round them."""
    model = make_random_model(320, spread=0.5)
    trainer = train(tmp_path, model=model, micro_batches=4, bf16=True)
    batch, seen = trainer.seen[-1].slices[0], {}
    layer = model.model.layers[0].mlp.down_proj
    layer.register_forward_hook(lambda _, __, output: seen.update(layer=output))
    model.model.register_forward_hook(lambda _, __, output: seen.update(last=output[0][:, :-1]))
    width = batch["completion_ids"].size(1)
    with torch.no_grad():
        logp, entropy = trainer.statistics(model, batch)
    assert seen["layer"].dtype == torch.bfloat16
    targets, mask = batch["completion_ids"].flatten(), batch["completion_mask"].bool()
    weight = model.get_output_embeddings().weight.detach()
    flat = seen["last"][:, -width:].flatten(0, 1)
    exact = plain_head(flat, weight, targets)
    rounded = plain_head(flat.bfloat16(), weight.bfloat16(), targets)
    for ours, true, coarse in zip((logp, entropy), exact, rounded):
        true, coarse = true.view_as(ours)[mask].float(), coarse.view_as(ours)[mask].float()
        torch.testing.assert_close(ours[mask], true, rtol=1e-5, atol=1e-5)
        assert (coarse - true).abs().max() > 1e-3


# ----------------------------------------------------------------------------------------- refused


def test_options_that_stapo_has_no_place_for_are_refused_by_name(tmp_path):
    for name in trl_stapo.FIXED:
        options = config(tmp_path)
        trl_stapo.check(options, {})
        assert hasattr(options, name)
        setattr(options, name, "another")
        with pytest.raises(ValueError, match=f"^{name}=another: "):
            trl_stapo.check(options, {})


def test_other_refusals(tmp_path):
    refused = [
        ("gradient_accumulation_steps: ", {"micro_batches": 2, "steps_per_generation": 5}),
        ("scale_rewards=none", {"scale_rewards": False}),  # TRL's other spelling
        ("tools", {"settings": {"tools": [print]}}),
        ("dtype: .*bfloat16", {"model": load_model(str(TINY), torch.bfloat16)}),
    ]
    for words, options in refused:
        with pytest.raises(ValueError, match=f"^{words}"):
            train(tmp_path, **options)
    for wrong in ("--beta 0.1", "--data none.jsonl", "--max_prompt_tokens 2", "--q 2"):
        with pytest.raises(SystemExit, match=f"^trl_stapo.py: .*{wrong.split()[1]}"):
            trl_stapo.main([*WITHOUT_VLLM, *small(tmp_path), *wrong.split()])


# ---------------------------------------------------------------------------- engines and commands


class Engine:
    """In the place of TRL's VLLMGeneration: draws from the tiny model."""

    def __init__(self, **options) -> None:
        self.generation_kwargs, self.length = {}, options["max_completion_length"]
        self.policy, self.tokenizer = load_policy(str(TINY)), load_tokenizer(str(TINY))

    def sync_weights(self) -> None:
        pass

    def generate(self, prompts, **_):
        options = {"max_new_tokens": self.length}
        drawn = in_order(sample(self.policy.model, self.tokenizer, prompts, **options))
        ids, mask, lengths = pad_batch(drawn)
        scored = response_stats(self.policy, ids, mask, lengths, 4096).logp
        logp = [[[x] for x in row[here].tolist()] for row, here in zip(scored, mask)]
        logp[0][0] = [None]  # vLLM's NaN
        return None, [response.ids for response in drawn], logp, None


def page() -> list[list[str]]:
    """The flags of each command of the page, as bash reads them."""
    text = (ROOT / "docs" / "using-the-loss.md").read_text()
    section = text.partition("## TRL")[2].partition("- **Set")[0].partition("**Tested")[2]
    block = "".join(re.findall(r"```sh\n(.*?)```", section, re.DOTALL))
    written = """python() { printf '%s\\n' "$@" --end; }
        accelerate() { python "$@"; }; torchrun() { python "$@"; }
    """
    out = subprocess.run(["bash", "-c", written + block], capture_output=True, text=True).stdout
    commands = [command.split("\n") for command in out.split("\n--end\n")[:-1]]
    return [command[command.index("scripts/trl_stapo.py") + 1 :] for command in commands]


EIGHT, ONE_GPU, WITHOUT_VLLM, TWO_PROCESSES = page()


def small(folder) -> list[str]:
    """Flags that make any of the page's commands run here."""
    return f"""--model_name_or_path {TINY} --data {TINY}/train.jsonl --instruction= --max_steps 2
        --output_dir {folder} --max_completion_length 60 --gradient_accumulation_steps 2 --use_cpu
        --steps_per_generation 8 --learning_rate 1e-3 --report_to none --disable_tqdm true
        """.split()


@pytest.mark.parametrize("flags", [EIGHT, WITHOUT_VLLM], ids=["vllm", "without"])
def test_the_pages_commands(tmp_path, monkeypatch, flags):
    """The second with its own reward, between 0 and 1 on average; the grader's is below."""
    (tmp_path / "own.py").write_text(
        "def short(text, row):\n"
        "    return float(len(text) % 2) if row['answer'] and '<|' not in text else None"
    )
    reward_flags = [] if flags is EIGHT else ["--reward", f"{tmp_path}/own.py:short"]
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", Engine)
    made, real = [], trl_stapo.make_trainer
    monkeypatch.setattr(trl_stapo, "make_trainer", lambda argv: made.append(real(argv)) or made[0])
    trl_stapo.main([*flags, *small(tmp_path), *reward_flags])
    (trainer,) = made
    assert all(getattr(trainer.args, name) == x for name, x in trl_stapo.DEFAULTS.items())
    assert trainer.args.bf16 and trainer.clip == {"eps_low": 0.2, "eps_high": 0.28}
    saved, base = load_model(str(tmp_path)).state_dict(), load_model(str(TINY)).state_dict()
    assert any((saved[key] != base[key]).any() for key in base)
    first, second = logged(trainer)
    assert 0 < first["reward"] < 1 if reward_flags else first["reward"] < 0
    assert abs(first["sampling_z"]) < 5
    assert "sampling_gap" not in second  # of the same rollout
    if flags is EIGHT:
        assert trainer.vllm_generation.generation_kwargs == {"stop_token_ids": [0]}


def test_the_defaults_are_those_of_stapo(tmp_path):
    """Except for the sizes; TRL counts the warm-up in optimiser steps, four for a rollout."""
    config = trl_stapo.GRPOConfig(str(tmp_path), use_cpu=True, **trl_stapo.DEFAULTS)
    stapos, group = stapo.Config(), config.num_generations
    assert (config.epsilon, config.epsilon_high) == (stapos.eps_low, stapos.eps_high)
    assert (config.learning_rate, config.weight_decay) == (stapos.lr, stapos.weight_decay)
    assert (config.max_grad_norm, group) == (stapos.grad_clip, stapos.group_size)
    assert config.warmup_steps == 4 * stapos.warmup_steps


def test_the_pages_commands_make_four_updates_a_rollout():
    """The sizes that the page says."""
    sizes = []
    for flags in (EIGHT, ONE_GPU, WITHOUT_VLLM, TWO_PROCESSES):
        pairs = dict(zip(flags, flags[1:]))
        steps, accumulated = "--steps_per_generation", "--gradient_accumulation_steps"
        assert int(pairs[steps]) == 4 * int(pairs[accumulated])
        sizes.append(int(pairs.get("--per_device_train_batch_size", 8)) * int(pairs[accumulated]))
    assert sizes == [64, 64, 16, 16] and 8 * sizes[0] == 512
    assert EIGHT == ONE_GPU


def on_two_processes(folder) -> None:
    short = "--max_steps 1 --per_device_train_batch_size 2 --max_completion_length 16".split()
    trl_stapo.main([*TWO_PROCESSES, *short, "--output_dir", str(folder)])


def test_the_pages_two_processes(tmp_path):
    launched = launch(on_two_processes, 2, tmp_path / "log", tmp_path / "run", timeout=300)
    assert launched == [0, 0]
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_and_stops_are_those_of_stapo(tmp_path, chat):
    """In a chat template the end of a turn ends a response, also of a base model."""
    tokenizer = chat_model(tmp_path / "model") if chat else load_tokenizer(str(TINY))
    argv = small(tmp_path / "run")
    argv += ["--model_name_or_path", f"{tmp_path}/model"] * chat
    problem = json.loads((TINY / "train.jsonl").read_text().splitlines()[0])["problem"]
    ids = encode_prompt(tokenizer, problem, "Think.")
    argv += ["--max_prompt_tokens", str(len(ids)), "--tau_p", "0.01", "--q", "0.5"]
    trainer = trl_stapo.make_trainer([*argv, "--instruction", "Think."])
    assert trainer.s2t == {"tau_p": 0.01, "q": 0.5}
    prompts = [trainer.train_dataset[0]["prompt"]]
    assert trainer._tokenize_prompts(prompts)[0] == [ids]
    stops = [0, *tokenizer.convert_tokens_to_ids(["<|im_end|>"])] if chat else [0]
    assert trainer.eos_token_ids == trainer.generation_config.eos_token_id == stops


# ------------------------------------------------------------------------------ the page's examples


def test_the_pages_trainer_and_its_check(tmp_path, monkeypatch):
    """The config of a script of your own, in small; then the first check: tau_p = 0 is dapo."""
    import trl

    real = trl.GRPOConfig
    given = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 4}
    given |= {"use_cpu": True, "report_to": [], "max_completion_length": 16, "num_iterations": 2}
    given |= {"output_dir": str(tmp_path), "save_strategy": "no", "learning_rate": 1e-3}
    monkeypatch.setattr(trl, "GRPOConfig", lambda folder, **page: real(**page | given))
    names = {"model": str(TINY), "dataset": problems(64), "reward": reward}
    exec(example("trl"), names)
    args = names["trainer"].args
    assert names["trainer"].s2t["tau_p"] == 0.002 and args.bf16 and args.steps_per_generation == 64
    assert all(getattr(args, name) == x for name, x in trl_stapo.DEFAULTS.items())
    monkeypatch.setattr(trl_stapo, "GRPOConfig", trl.GRPOConfig)  # of a trainer without a config
    default = trl_stapo.STAPOTrainer(str(TINY), reward, train_dataset=names["dataset"])
    assert default.clip == {"eps_low": 0.2, "eps_high": 0.28}
    exec(example("check"), checked := {})

    compared = []

    class Counted(checked["Checked"]):
        def compute_loss(self, model, inputs, **_):
            compared.append(float(super().compute_loss(model, inputs).detach()))
            return super().compute_loss(model, inputs)

    clip = {"epsilon": 0.01, "epsilon_high": 0.02}  # so that it acts, and is not the default
    one_mini_batch = real(**trl_stapo.DEFAULTS | given | clip)
    options = {"train_dataset": names["dataset"], "processing_class": load_tokenizer(str(TINY))}
    Counted(str(TINY), reward, one_mini_batch, tau_p=0.0, **options).train()
    assert len(compared) == 8 and any(compared)
    with pytest.raises(AssertionError, match="not close"):
        Counted(str(TINY), reward, one_mini_batch, tau_p=0.5, **options).train()
