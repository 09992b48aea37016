"""scripts/trl_stapo.py: STAPO inside TRL, for any number of micro-batches and ranks.

The responses are canned: random ids of several lengths, so that many tokens of right responses are
candidates, and not equally many in each micro-batch.
"""

import json
import re
import shlex
import shutil
from dataclasses import make_dataclass
from unittest.mock import Mock

import pytest
import torch
from helpers import ROOT, SHAPE, TINY, example, make_random_model, read_rows
from ranks import launch
from reference import method_loss, plain_head, row_stats
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3MoeConfig, TrainerCallback

from rollout import Response, encode_prompt, load_model, load_tokenizer

trl_stapo = pytest.importorskip("trl_stapo", reason="trl is not installed")
grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")

# Sampled at a time. In a group of two only one has A > 0: the first tokens of two right responses
# to a prompt would have one entropy, and rounding would decide about a threshold between them.
PROMPTS, GROUP = 32, 2


def response(prompt: list[int], member: int) -> list[int]:
    g = torch.Generator().manual_seed(hash((*prompt, member)) % 2**31)
    length = int(torch.randint(3, 25, (), generator=g))
    return torch.randint(2, 100, (length,), generator=g).tolist()


class Engine:
    """In the place of TRL's VLLMGeneration, also on other ranks: canned responses."""

    def __init__(self, **_) -> None:
        self.generation_kwargs = {}

    def sync_weights(self) -> None:
        pass

    def generate(self, prompts, **_):
        canned = [response(ids, i % GROUP) for i, ids in enumerate(prompts)]
        logp = [[[None]] * len(ids) for ids in canned]  # vLLM's NaN
        return None, canned, logp, None


grpo_trainer.VLLMGeneration = Engine


def reward(completion_ids, **_) -> list[float]:
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def problems():
    rows = read_rows(TINY / "train.jsonl")[: 2 * PROMPTS]
    return trl_stapo.Dataset.from_list([{"prompt": row["problem"] + "\n"} for row in rows])


def always_or_by_chance(prompts, completion_ids, **_) -> list[float]:
    """1.2 for every response to a prompt of odd length, else 1 or 0."""
    by_chance = reward(completion_ids)
    return [1.2 if len(text) % 2 else x for text, x in zip(prompts, by_chance)]


def make_trainer(
    folder, micro_batches=1, mini_batches=4, ranks=1, model=None, peft_config=None, **options
):
    """Four optimiser steps of micro_batches each on canned responses."""
    slices = micro_batches * mini_batches
    small = {
        "output_dir": str(folder),
        "num_generations": GROUP,
        "per_device_train_batch_size": PROMPTS * GROUP // slices // ranks,
        "gradient_accumulation_steps": micro_batches,
        "steps_per_generation": slices,
        "max_steps": 4,
        "learning_rate": 1e-4,
        "epsilon_high": 0.28,
        "max_grad_norm": 0.0,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "use_vllm": True,
        "vllm_importance_sampling_correction": False,
    }
    return trl_stapo.STAPOTrainer(
        model or load_model(str(TINY)),
        options.pop("reward", reward),
        trl_stapo.GRPOConfig(**small | options),
        train_dataset=problems(),
        processing_class=load_tokenizer(str(TINY)),
        peft_config=peft_config,
    )


def logged(trainer) -> list[dict]:
    trainer.train()
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


class Check(TrainerCallback):
    """Each step's mask and gradient: from whole logits in float64, one response at a time."""

    def __init__(self, trainer) -> None:
        self.trainer, self.true = trainer, []

    def on_pre_optimizer_step(self, args, state, control, model, **_) -> None:
        slices = trl_stapo.gather_object(self.trainer._buffered_inputs)
        plain = load_model(str(TINY))
        plain.load_state_dict(model.state_dict())
        responses, *others = mini_batch(slices)
        loss, true = method_loss(plain, responses, *others, method="stapo")
        with torch.no_grad():
            logp, entropy = map(torch.cat, zip(*(row_stats(plain, each) for each in responses)))
        d = -logp - entropy
        true |= {"entropy": float(entropy.mean()), "sampling_gap": float(d.mean())}
        true |= {"sampling_z": float(d.sum() / d.square().sum().sqrt())}
        true |= {f"clip_ratio/{x}_mean": true[f"clip_{x}"] / len(d) for x in ("low", "high")}
        counts = [int((x["completion_mask"].bool() & ~x["keep"]).sum()) for x in slices]
        assert sum(counts) == true["silenced"] and len(set(counts)) > 2
        gradients = torch.autograd.grad(loss, [*plain.parameters()])
        for ours, theirs in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(ours.grad, theirs, rtol=1e-3, atol=1e-5)
        self.true.append(true)


# ------------------------------------------------------------------------------------------- ranks


def on_ranks(folder) -> None:
    """Responses are sampled twice, each time the mini-batch of two steps.

    Then once more, with eight responses to a prompt. Rounding is no advantage there.
    """
    steps = {"num_iterations": 2, "learning_rate": 3e-4}
    trainer = make_trainer(folder, micro_batches=2, mini_batches=1, ranks=2, **steps)
    trainer.add_callback(check := Check(trainer))
    log = logged(trainer)
    assert trainer.model.is_gradient_checkpointing
    assert ["sampling_z" in line for line in log] == [True, False, True, False]
    assert log[0]["sampling_z"] > 6  # the responses are not the policy's own
    for line, true in zip(log, check.true, strict=True):
        assert 2 < true["silenced"] == line["silenced"] < true["candidates"] == line["candidates"]
        for name in line.keys() & true.keys():
            assert line[name] == pytest.approx(true[name], rel=1e-3, abs=1e-5), name
    clipped = {log[1][f"clip_ratio/{which}_mean"] for which in ("low", "high")}
    assert min(clipped) > 0 and len(clipped) == 2
    eight = {"num_generations": 8, "max_steps": 1, "per_device_train_batch_size": 60}
    eight |= {"reward": always_or_by_chance}  # 15 groups, one of which is on both ranks
    trainer = make_trainer(folder, mini_batches=1, ranks=2, **eight)
    trainer.train()
    (batch,) = trainer._buffered_inputs
    expected = []
    for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"].bool()):
        first = [[response(ids[mask].tolist(), member)[0]] for member in range(GROUP)]
        text = trainer.processing_class.decode(ids[mask])
        expected.append(len({*always_or_by_chance([text] * GROUP, first)}) > 1)
    assert (batch["advantages"] != 0).tolist() == expected and any(expected)


def test_each_step_is_the_papers_on_two_ranks(tmp_path):
    """Else each micro-batch and each rank would have a quantile of its own."""
    assert launch(on_ranks, 2, tmp_path / "log", tmp_path, timeout=300) == [0, 0]


# --------------------------------------------------------------------------- what TRL has to offer


def test_lora(tmp_path):
    peft = pytest.importorskip("peft")
    lora = {"r": 4, "lora_dropout": 0.5, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    logs = []
    for count in (1, 4):
        config = peft.LoraConfig(**lora)
        trainer = make_trainer(tmp_path, count, peft_config=config, learning_rate=1e-2)
        logs.append(logged(trainer))
        trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
        assert all("lora" in name for name in trained)
    for a, b in zip(*logs, strict=True):
        names = "loss", "grad_norm", "silenced"
        assert [a[x] for x in names] == pytest.approx([b[x] for x in names], rel=1e-3)
        assert a["silenced"] > 2


def test_bfloat16_layers_and_a_float32_head(tmp_path):
    """ln p and H, from the states before the head: a bfloat16 product would round them."""
    model = make_random_model(320, spread=0.5)
    trainer = make_trainer(tmp_path, 4, model=model, bf16=True)
    trainer.train()
    batch, seen = trainer._buffered_inputs[0], {}
    layer = model.model.layers[0].mlp.down_proj
    layer.register_forward_hook(lambda _, __, output: seen.update(layer=output))
    model.model.register_forward_hook(lambda _, __, output: seen.update(last=output[0][:, :-1]))
    width = batch["completion_ids"].size(1)
    with torch.no_grad():
        logp, entropy = trainer.statistics(model, batch)
    assert seen["layer"].dtype == torch.bfloat16
    mask = batch["completion_mask"].bool()
    hidden, targets = seen["last"][:, -width:][mask], batch["completion_ids"][mask]
    true = plain_head(hidden, model.lm_head.weight.detach(), targets)
    for ours, theirs in zip((logp, entropy), true):
        torch.testing.assert_close(ours[mask], theirs.float(), rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------------- refused


CHANGES_THE_LOSS = """loss_type importance_sampling_level scale_rewards multi_objective_aggregation
    mask_truncated_completions beta entropy_coef use_adaptive_entropy top_entropy_quantile delta
    off_policy_mask_threshold temperature top_p top_k min_p repetition_penalty generation_kwargs
    use_transformers_continuous_batching vllm_importance_sampling_correction
    label_smoothing_factor neftune_noise_alpha vllm_structured_outputs_regex use_liger_kernel
    an_option_of_a_later_version""".split()


@pytest.mark.parametrize("name", CHANGES_THE_LOSS)
def test_options_that_stapo_has_no_place_for_are_refused_by_name(tmp_path, monkeypatch, name):
    config = trl_stapo.GRPOConfig
    later = make_dataclass("Later", [("an_option_of_a_later_version", str, "off")], bases=(config,))
    monkeypatch.setattr(trl_stapo, "GRPOConfig", later)
    options = later(str(tmp_path), use_cpu=True, use_vllm=True, **trl_stapo.DEFAULTS)
    trl_stapo.check(options, {})
    trl_stapo.check(later(str(tmp_path), use_cpu=True), {})  # an option of vLLM, without vLLM
    assert hasattr(options, name)
    setattr(options, name, "another")
    with pytest.raises(ValueError, match=f"^{name}=another: STAPO needs {name}="):
        trl_stapo.check(options, {})


def test_tools_uneven_mini_batches_and_bfloat16_weights_are_refused(tmp_path):
    """By name; and a router's loss."""
    config = trl_stapo.GRPOConfig(str(tmp_path), use_cpu=True, **trl_stapo.DEFAULTS)
    for name in ("tools", "rollout_func", "environment_factory"):
        with pytest.raises(ValueError, match=f"^{name}: STAPO has no mask"):
            trl_stapo.check(config, {name: [print]})
    config.steps_per_generation, config.gradient_accumulation_steps = 3, 2
    with pytest.raises(ValueError, match="^gradient_accumulation_steps: must divide"):
        trl_stapo.check(config, {})
    with pytest.raises(ValueError, match="^dtype: trained weights must be float32"):
        make_trainer(tmp_path, model=make_random_model(320).bfloat16())
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(**SHAPE, head_dim=8, **experts, router_aux_loss_coef=0.5)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="^router_aux_loss_coef=0.5: STAPO needs 0.0$"):
        make_trainer(tmp_path, model=model, router_aux_loss_coef=None)


def test_dropout_layers_are_switched_off(tmp_path):
    config = GPT2Config(vocab_size=320, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.5)
    model = make_trainer(tmp_path, model=AutoModelForCausalLM.from_config(config)).model
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0}
    model = make_random_model(vocab_size=320)
    model.model.layers[0].self_attn.attention_dropout = 0.5  # as its config says: no layer
    model = make_trainer(tmp_path, model=model).model
    assert model.model.layers[0].self_attn.attention_dropout == 0


def test_a_tokenizer_that_ends_prompts_is_refused(tmp_path):
    """TRL would sample after the end. stapo.py takes the end off."""
    shutil.copytree(TINY, tmp_path / "model")
    tokenizer = load_tokenizer(str(TINY))
    end = [("<|endoftext|>", tokenizer.eos_token_id)]
    ending = TemplateProcessing(single="$A <|endoftext|>", special_tokens=end)
    tokenizer.backend_tokenizer.post_processor = ending
    tokenizer.save_pretrained(tmp_path / "model")
    command = f"--model_name_or_path {tmp_path}/model --data {TINY}/train.jsonl --use_cpu"
    with pytest.raises(SystemExit, match="its tokenizer ends every prompt"):
        trl_stapo.main([*command.split(), "--output_dir", str(tmp_path)])


def test_flags_of_the_model_and_a_checkpoint_are_passed_on(tmp_path, monkeypatch):
    monkeypatch.setattr(trl_stapo, "STAPOTrainer", made := Mock())
    made.side_effect = lambda model, grade, config, **_: Mock(args=config, train=made.train)
    command = f"""--model_name_or_path {TINY} --data {TINY}/train.jsonl --use_cpu --model_revision
        v1 --dtype bfloat16 --attn_implementation eager --resume_from_checkpoint of/step-5"""
    trl_stapo.main([*command.split(), "--output_dir", str(tmp_path)])
    how = {"revision": "v1", "dtype": "bfloat16", "attn_implementation": "eager"}
    assert made.call_args.args[2].model_init_kwargs == how
    made.train.assert_called_once_with(resume_from_checkpoint="of/step-5")


@pytest.mark.parametrize(
    "flag, named",
    [
        ("--max_completion_length 0", "--max_completion_length 0: must be at least 1"),
        ("--max_completion_length 9000", "--max_completion_length 9000: the longest prompt"),
        ("--max_new_tokens 80", "'--max_new_tokens'"),  # TRL has no such flag
        ("--load_in_4bit true", "--load_in_4bit True: the model would not get it"),
        ("--lora_r 8", "--lora_r 8: add --use_peft"),
        ("--data=$DISK/none.jsonl", "/no disk/none.jsonl: cannot be read"),
        ("--steps_per_generation 8000", "has 4000 problems, and a rollout needs 8000; lower"),
    ],
)
def test_a_message_names_the_flag_that_was_given(tmp_path, flag, named, monkeypatch):
    monkeypatch.setenv("DISK", "/no disk")
    command = f"--model_name_or_path {TINY} --data {TINY}/train.jsonl --use_cpu {flag}"
    with pytest.raises(SystemExit) as error:
        trl_stapo.main([*command.split(), "--output_dir", str(tmp_path)])
    assert named in str(error.value)


# --------------------------------------------------------------------------------------- commands


def page() -> list[list[str]]:
    text = (ROOT / "docs" / "using-the-loss.md").read_text().partition("## TRL")[2]
    block = re.search(r"```sh\n(.*?)```", text, re.DOTALL)[1].replace("\\\n", "")
    shared = re.search(r"flags=\((.*?)\)", block, re.DOTALL)[1]
    commands = re.findall(r"scripts/trl_stapo.py (.*)", block)
    return [shlex.split(command.replace('"${flags[@]}"', shared)) for command in commands]


def on_two_processes(folder) -> None:
    short = "--max_steps 2 --learning_rate 1e-3 --disable_tqdm true".split()
    trl_stapo.main([*page()[-1], *short, "--output_dir", str(folder)])


def test_the_pages_two_processes(tmp_path):
    """TRL's own sampler draws from the policy; the model that is saved has changed."""
    assert launch(on_two_processes, 2, tmp_path / "log", tmp_path, timeout=300) == [0, 0]
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert abs(state["log_history"][0]["sampling_z"]) < 5
    saved, base = load_model(str(tmp_path)).state_dict(), load_model(str(TINY)).state_dict()
    assert any((saved[key] != base[key]).any() for key in base)


CHAT = """{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"""


@pytest.mark.parametrize("command", page(), ids=["eight", "alone", "two"])
def test_a_command_of_the_page_has_the_prompts_and_stops_of_stapo(tmp_path, command):
    """A base model's config does not name the end of a turn. It ends a response all the same."""
    shutil.copytree(TINY, tmp_path / "model")
    tokenizer = load_tokenizer(str(TINY))
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path / "model")
    ids = encode_prompt(tokenizer, read_rows(TINY / "train.jsonl")[0]["problem"], "Think.")
    own = f"""--model_name_or_path {tmp_path}/model --data {TINY}/train.jsonl --instruction Think.
        --output_dir {tmp_path} --max_prompt_tokens {len(ids)} --tau_p 0.01 --q 0.5 --use_cpu
        --reward {tmp_path}/own.py:exact"""
    exact = 'def exact(text, row): return 2.0 * (text == "It is " + row["answer"]) - 1'
    (tmp_path / "own.py").write_text(exact)
    trainer = trl_stapo.make_trainer([*command, *own.split()])
    assert all(getattr(trainer.args, name) == x for name, x in trl_stapo.DEFAULTS.items())
    assert trainer.args.bf16 and (trainer.tau_p, trainer.q) == (0.01, 0.5)
    stops = [0, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    prompts, index = (trainer.train_dataset[:9][name] for name in ("prompt", "index"))
    assert trainer._tokenize_prompts(prompts[:1])[0] == [ids]
    golds = {row["problem"]: row["answer"] for row in read_rows(TINY / "train.jsonl")}
    golds = [golds[turns[0]["content"].removesuffix("\nThink.")] for turns in prompts]
    right = [[*tokenizer(f"It is {gold}").input_ids, stop] for gold, stop in zip(golds, stops * 9)]
    rewards = trainer.reward_funcs[0](completion_ids=right + right[::-1], index=index + index)
    assert rewards == [1 if a == b else -1 for a, b in zip(golds * 2, golds + golds[::-1])]
    if trainer.use_vllm:
        assert trainer.vllm_generation.generation_kwargs == {"stop_token_ids": stops}
    else:
        assert trainer.generation_config.eos_token_id == stops
    assert trainer.eos_token_ids == trainer.model.generation_config.eos_token_id == stops


# ------------------------------------------------------------------------------ the page's examples


def test_the_pages_trainer_and_its_check(tmp_path, monkeypatch):
    """The config of a script of your own, in small; then the first check: tau_p = 0 is dapo."""
    import trl

    real = trl.GRPOConfig
    given = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 4}
    given |= {"use_cpu": True, "report_to": [], "max_completion_length": 16, "num_iterations": 2}
    given |= {"output_dir": str(tmp_path), "save_strategy": "no", "learning_rate": 1e-3}
    monkeypatch.setattr(trl, "GRPOConfig", lambda folder, **page: real(**page | given))
    names = {"model": str(TINY), "dataset": problems(), "reward": reward}
    exec(example("trl"), names)
    args = names["trainer"].args
    assert names["trainer"].tau_p == 0.002 and args.bf16 and args.steps_per_generation == 64
    assert all(getattr(args, name) == x for name, x in trl_stapo.DEFAULTS.items())
    exec(example("check"), checked := {})
    checked = checked["Checked"]
    clip = {"epsilon": 0.01, "epsilon_high": 0.02}  # so that it acts, and is not the default
    one_mini_batch = real(**trl_stapo.DEFAULTS | given | clip)
    options = {"train_dataset": names["dataset"], "processing_class": load_tokenizer(str(TINY))}
    checked(str(TINY), reward, one_mini_batch, tau_p=0.0, **options).train()
    with pytest.raises(AssertionError, match="not close"):
        checked(str(TINY), reward, one_mini_batch, tau_p=0.5, **options).train()
