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
from reference import method_loss, plain_head
from transformers import TrainerCallback

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

# The trainer as in a script of the reader's own: pasted, beside a copy of the loss.
SECTION = (ROOT / "scripts" / "trl_stapo.py").read_text()
SECTION = SECTION.split("= the trainer\n")[1].split("\n# =====")[0]
exec(SECTION, PASTED := {})

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

    class Canned(PASTED["STAPOTrainer"]):
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


def test_the_section_needs_nothing_else_of_the_project():
    imported = re.findall(r"^(?:from|import) (\w+)", SECTION, re.MULTILINE)
    assert set(imported) == {"torch", "trl", "accelerate", "stapo"}


# ------------------------------------------------------------------------------------------- ranks


def on_ranks(folder) -> None:
    """Responses are sampled twice, each time the mini-batch of two steps."""
    iterations = {"mini_batches": 1, "num_iterations": 2, "gradient_checkpointing": True}
    trainer = train(folder / "run", micro_batches=2, ranks=2, **iterations)
    assert trainer.model.is_gradient_checkpointing
    saved = {"seen": trainer.seen, "log": logged(trainer)}
    torch.save(saved, folder / f"rank-{trainer.args.process_index}.pt")


def test_each_step_is_the_papers_on_two_ranks(tmp_path):
    """Else each micro-batch and each rank would have a quantile of its own."""
    assert launch(on_ranks, 2, tmp_path / "log", tmp_path, timeout=300) == [0, 0]
    first, second = (
        torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)
    )
    for one, other, line in zip(first["seen"], second["seen"], first["log"], strict=True):
        check_step(one, one.slices + other.slices, line)
        for name, gradient in one.gradients.items():
            torch.testing.assert_close(other.gradients[name], gradient)
        counts = [list(map(silenced, update.slices)) for update in (one, other)]
        assert counts[0][0] != counts[0][1] and sum(counts[0]) != sum(counts[1])
    assert first["log"][0]["sampling_z"] > 6  # the responses are not the policy's own


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
    for ours, true in zip((logp, entropy), plain_head(flat, weight, targets)):
        true = true.view_as(ours)[mask].float()
        torch.testing.assert_close(ours[mask], true, rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------------- refused


def test_options_that_stapo_has_no_place_for_are_refused_by_name(tmp_path):
    for name in trl_stapo.FIXED:
        options = config(tmp_path)
        trl_stapo.check(options, {})
        assert hasattr(options, name)
        setattr(options, name, "another")
        with pytest.raises(ValueError, match=f"^{name}=another: "):
            trl_stapo.check(options, {})


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


EIGHT, _, _, TWO_PROCESSES = page()


def small(folder) -> list[str]:
    """Flags that make any of the page's commands run here."""
    return f"""--model_name_or_path {TINY} --data {TINY}/train.jsonl --instruction= --max_steps 2
        --output_dir {folder} --max_completion_length 60 --gradient_accumulation_steps 2 --use_cpu
        --steps_per_generation 8 --learning_rate 1e-3 --report_to none --disable_tqdm true
        """.split()


def test_the_pages_command_with_vllm(tmp_path, monkeypatch):
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", Engine)
    made, real = [], trl_stapo.make_trainer
    monkeypatch.setattr(trl_stapo, "make_trainer", lambda argv: made.append(real(argv)) or made[0])
    trl_stapo.main([*EIGHT, *small(tmp_path)])
    (trainer,) = made
    assert all(getattr(trainer.args, name) == x for name, x in trl_stapo.DEFAULTS.items())
    assert trainer.args.bf16 and trainer.clip == {"eps_low": 0.2, "eps_high": 0.28}
    saved, base = load_model(str(tmp_path)).state_dict(), load_model(str(TINY)).state_dict()
    assert any((saved[key] != base[key]).any() for key in base)
    first, second = logged(trainer)
    assert -1 < first["reward"] < 0
    assert abs(first["sampling_z"]) < 5
    assert "sampling_gap" not in second  # of the same rollout
    assert trainer.vllm_generation.generation_kwargs == {"stop_token_ids": [0]}


def on_two_processes(folder) -> None:
    short = "--max_steps 1 --per_device_train_batch_size 2 --max_completion_length 16".split()
    trl_stapo.main([*TWO_PROCESSES, *short, "--output_dir", str(folder)])


def test_the_pages_two_processes(tmp_path):
    launched = launch(on_two_processes, 2, tmp_path / "log", tmp_path / "run", timeout=300)
    assert launched == [0, 0]
    assert (tmp_path / "run" / "model.safetensors").exists()


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


def test_prompts_and_stops_are_those_of_stapo(tmp_path):
    """In a chat template the end of a turn ends a response, also of a base model."""
    tokenizer = chat_model(tmp_path / "model")
    argv = [*small(tmp_path / "run"), "--model_name_or_path", f"{tmp_path}/model"]
    problem = json.loads((TINY / "train.jsonl").read_text().splitlines()[0])["problem"]
    ids = encode_prompt(tokenizer, problem, "Think.")
    argv += ["--max_prompt_tokens", str(len(ids)), "--tau_p", "0.01", "--q", "0.5"]
    trainer = trl_stapo.make_trainer([*argv, "--instruction", "Think."])
    assert trainer.s2t == {"tau_p": 0.01, "q": 0.5}
    prompts = [trainer.train_dataset[0]["prompt"]]
    assert trainer._tokenize_prompts(prompts)[0] == [ids]
    stops = [0, tokenizer.convert_tokens_to_ids("<|im_end|>")]
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
    exec(example("check"), checked := {})
    checked = checked["Checked"]
    clip = {"epsilon": 0.01, "epsilon_high": 0.02}  # so that it acts, and is not the default
    one_mini_batch = real(**trl_stapo.DEFAULTS | given | clip)
    options = {"train_dataset": names["dataset"], "processing_class": load_tokenizer(str(TINY))}
    checked(str(TINY), reward, one_mini_batch, tau_p=0.0, **options).train()
    with pytest.raises(AssertionError, match="not close"):
        checked(str(TINY), reward, one_mini_batch, tau_p=0.5, **options).train()
