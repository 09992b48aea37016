"""scripts/trl_stapo.py: STAPO inside TRL, for any number of micro-batches and ranks.

The responses are canned: random ids of several lengths, so that many tokens of right responses are
candidates, and not equally many in each micro-batch.
"""

import json
import re
import shutil
import subprocess
import types

import costs
import pytest
import torch
from conftest import ROOT, TINY, example, make_random_model, responses_of, to_batch
from ranks import launch
from reference import candidates_and_silenced, plain_head, row_stats
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

import stapo
from rollout import (
    Response,
    TokenStats,
    encode_prompt,
    load_model,
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


class Watched(TrainerCallback):
    """Keeps the parameters and gradients before each optimiser step, and its micro-batches."""

    def __init__(self) -> None:
        self.seen, self.trainer = [], None

    def on_pre_optimizer_step(self, args, state, control, model, **_) -> None:
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        count = args.gradient_accumulation_steps
        first = state.global_step * count % args.steps_per_generation
        self.seen.append(
            types.SimpleNamespace(
                weights={name: p.detach().clone() for name, p in parameters.items()},
                gradients={name: p.grad.clone() for name, p in parameters.items()},
                slices=[dict(x) for x in self.trainer._buffered_inputs[first : first + count]],
            )
        )


def train(folder, kind=trl_stapo.STAPOTrainer, model=None, settings=(), **options):
    """Four optimiser steps on canned responses: the trainer, its `seen` and its `end` weights."""

    class Canned(kind):
        def _generate_single_turn(self, prompt_ids, *_):
            return [response(ids, i % GROUP) for i, ids in enumerate(prompt_ids)], None

    watched = Watched()
    trainer = Canned(
        model or load_model(str(TINY)),
        reward,
        config(folder, **options),
        train_dataset=problems(2 * PROMPTS),
        processing_class=load_tokenizer(str(TINY)),
        callbacks=[watched],
        **dict(settings),
    )
    watched.trainer = trainer
    trainer.train()
    named = trainer.model.named_parameters()
    trainer.end = {name: p.detach().clone() for name, p in named if p.requires_grad}
    trainer.seen = watched.seen
    return trainer


def distance(one, other) -> float:
    """Between the ends of two trainings, relative to the way there."""
    start, a, b = one.seen[0].weights, one.end, other.end
    apart = sum(float((a[name] - b[name]).square().sum()) for name in a)
    return (apart / sum(float((a[name] - start[name]).square().sum()) for name in a)) ** 0.5


def logged(trainer) -> list[dict]:
    """What it logged at each step."""
    return [row for row in trainer.state.log_history if "loss" in row]


@pytest.fixture(scope="module")
def at_once(tmp_path_factory):
    """Four mini-batches of one micro-batch each."""
    return train(tmp_path_factory.mktemp("at-once"))


# ---------------------------------------------------------------------- micro-batches, and controls


@pytest.mark.parametrize("micro_batches", [4, 8])
def test_micro_batches_give_the_same_steps(at_once, tmp_path, micro_batches):
    trainer = train(tmp_path, micro_batches=micro_batches)
    assert distance(at_once, trainer) < 1e-3
    for one, other in zip(logged(at_once), logged(trainer), strict=True):
        names = ("loss", "grad_norm", "candidates", "silenced", "entropy")
        names += ("clip_ratio/low_mean", "clip_ratio/high_mean")
        assert [one[x] for x in names] == pytest.approx([other[x] for x in names], rel=1e-3)
        assert one["silenced"] > 2
    for update in trainer.seen:  # else a quantile of each micro-batch would be the same
        silenced = [int((x["completion_mask"].bool() & ~x["keep"]).sum()) for x in update.slices]
        assert len(set(silenced)) > 1


class OwnQuantile(trl_stapo.STAPOTrainer):
    """Each micro-batch silences below its own quantile; the count is the mini-batch's."""

    def select_tokens(self, micro_batches):
        for batch in micro_batches:
            super().select_tokens([batch])
        num_kept = sum(batch["keep"].sum() for batch in micro_batches)
        for batch in micro_batches:
            batch["num_kept"] = num_kept


class OwnCount(trl_stapo.STAPOTrainer):
    """Each micro-batch is a mean over its own tokens, and the means are averaged."""

    def select_tokens(self, micro_batches):
        super().select_tokens(micro_batches)
        for batch in micro_batches:
            batch["num_kept"] = batch["keep"].sum() * len(micro_batches)


@pytest.mark.parametrize("kind", [OwnQuantile, OwnCount])
def test_a_quantile_or_a_count_of_each_micro_batch_would_be_seen(at_once, tmp_path, kind):
    assert distance(at_once, train(tmp_path, kind, micro_batches=4)) > 0.02


# -------------------------------------------------------------------------- the paper's own numbers


def mini_batch(update) -> stapo.Batch:
    """The responses of a mini-batch, with the advantages and old log-probabilities TRL gave."""
    responses, old = [], []
    for batch in update.slices:
        names = "prompt_ids", "prompt_mask", "completion_ids", "completion_mask"
        for row in range(len(batch["advantages"])):
            prompt, prompt_mask, ids, mask = (batch[name][row] for name in names)
            prompt, ids = prompt[prompt_mask.bool()].tolist(), ids[mask.bool()].tolist()
            responses.append(Response(prompt, ids, False, ""))
            logp = batch["old_per_token_logps"][row][mask.bool()]
            unknown = torch.full_like(logp, 1e9)  # H under pi_old: not to be used
            old.append(TokenStats(logp, unknown, unknown))
    advantages = torch.cat([batch["advantages"] for batch in update.slices]).tolist()
    return to_batch(responses, advantages, old)


class Recorder(torch.optim.SGD):
    """Keeps the gradients and takes no step."""

    def step(self):
        self.gradients = [p.grad.clone() for p in self.param_groups[0]["params"]]


def test_each_step_is_stapo_update(tmp_path):
    """p, H, the mask and the gradient of stapo.py, on the same responses and weights."""
    trainer = train(tmp_path, micro_batches=4)
    model = stapo.load_policy(str(TINY))
    cfg = stapo.Config(tokens_per_micro_batch=200, grad_clip=1e9)
    for update, line in zip(trainer.seen, logged(trainer), strict=True):
        model.load_state_dict(update.weights, strict=False)
        batch, optimizer = mini_batch(update), Recorder(model.parameters())
        stats = stapo.statistics_pass(model, batch, cfg)
        choice = stapo.silence_spurious(batch, stats, cfg)
        counts = stapo.count_tokens(batch, stats, choice)
        stapo.update(model, optimizer, batch, choice.keep, counts, cfg)
        assert counts["silenced"] == line["silenced"] < counts["candidates"] == line["candidates"]
        for ours, theirs in zip(optimizer.gradients, update.gradients.values(), strict=True):
            torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-5)


def test_the_mask_is_the_papers(at_once):
    """I, and what is logged: from whole logits in float64, one response at a time."""
    model = load_model(str(TINY))
    for update, line in zip(at_once.seen, logged(at_once), strict=True):
        model.load_state_dict(update.weights, strict=False)
        whole, (batch,) = mini_batch(update), update.slices
        with torch.no_grad():
            stats = [row_stats(model, response) for response in responses_of(whole)]
        logp, entropy, _ = map(torch.cat, zip(*stats))
        advantages = whole.advantages.repeat_interleave(whole.mask.sum(1))
        paper = {"tau_p": 0.002, "q": 0.75, "quantile_over": "candidates"}
        found = candidates_and_silenced("stapo", logp, advantages, entropy, **paper)
        assert torch.equal(batch["keep"][batch["completion_mask"].bool()], ~found[1])
        assert [line["candidates"], line["silenced"]] == [int(x.sum()) for x in found]
        assert float(batch["num_kept"]) == len(logp) - line["silenced"]
        assert line["entropy"] == pytest.approx(float(entropy.mean()), rel=1e-4)


# ------------------------------------------------------------------------------------------- ranks


def on_ranks(folder, ranks: int) -> None:
    """Responses are sampled twice, each time the mini-batch of two steps."""
    trainer = train(folder / "run", micro_batches=2, mini_batches=1, num_iterations=2, ranks=ranks)
    silenced = [
        int((x["completion_mask"].bool() & ~x["keep"]).sum()) for x in trainer.seen[1].slices
    ]
    saved = {"seen": trainer.seen, "end": trainer.end, "log": logged(trainer)}
    torch.save(saved | {"silenced": silenced}, folder / f"{ranks}-{trainer.args.process_index}.pt")


def test_two_ranks_are_one_process(tmp_path):
    assert launch(on_ranks, 2, tmp_path / "log", tmp_path, 2) == [0, 0]
    on_ranks(tmp_path, 1)
    one, first, second = (
        types.SimpleNamespace(**torch.load(tmp_path / name, weights_only=False))
        for name in ("1-0.pt", "2-0.pt", "2-1.pt")
    )
    assert sum(first.silenced) != sum(second.silenced)
    assert distance(one, first) < 1e-3 and distance(one, second) < 1e-3
    for a, b in zip(one.log, first.log, strict=True):
        names = "candidates", "silenced", "entropy", "clip_ratio/low_mean", "grad_norm", "loss"
        assert [a[x] for x in names] == pytest.approx([b[x] for x in names], rel=1e-3)


# --------------------------------------------------------------------------- what TRL has to offer


def test_gradient_checkpointing_changes_nothing(at_once, tmp_path):
    trainer = train(tmp_path, micro_batches=4, gradient_checkpointing=True)
    assert trainer.model.is_gradient_checkpointing
    assert distance(at_once, trainer) < 1e-3


def test_without_candidates_it_is_trls_dapo_loss(tmp_path):
    """With tau_p = 0, and one mini-batch for each sampling: TRL counts tokens over all of them."""
    options = {"micro_batches": 4, "mini_batches": 1, "num_iterations": 2}
    ours = train(tmp_path, settings={"tau_p": 0.0}, **options)
    theirs = train(tmp_path, trl_stapo.GRPOTrainer, disable_dropout=True, **options)
    assert distance(ours, theirs) < 1e-3
    for a, b in zip(logged(ours), logged(theirs), strict=True):
        assert [a["loss"], a["grad_norm"]] == pytest.approx([b["loss"], b["grad_norm"]], rel=1e-3)
        assert a["candidates"] == a["silenced"] == 0


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
    assert all("lora" in name for name in one.end) and distance(one, other) < 1e-3
    assert logged(one)[-1]["silenced"] == logged(other)[-1]["silenced"] > 2


class Products(TorchDispatchMode):
    """The operands' types of every matrix product with `width` columns, and of all others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.head, self.others = width, set(), set()

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            a, b = args[-2:]
            found = self.head if b.size(-1) == self.width else self.others
            found.add((a.dtype, b.dtype))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_bfloat16_layers_and_a_float32_head(tmp_path, tied):
    """The product itself, and ln p and H from it: what a bfloat16 head would round away."""
    model = make_random_model(320, tied, spread=0.5)
    trainer = train(tmp_path, model=model, micro_batches=4, bf16=True)
    batch, hidden = trainer.seen[-1].slices[0], []
    model.model.register_forward_hook(lambda _, __, output: hidden.append(output[0][:, :-1]))
    width = batch["completion_ids"].size(1)
    with torch.no_grad(), Products(model.config.vocab_size) as products:
        logp, entropy = trainer.statistics(model, batch)
    assert products.head == {(torch.float32, torch.float32)}
    assert products.others == {(torch.bfloat16, torch.bfloat16)}
    targets, mask = batch["completion_ids"].flatten(), batch["completion_mask"].bool()
    weight = model.get_output_embeddings().weight
    flat = hidden[0][:, -width:].flatten(0, 1)
    exact = plain_head(flat.detach(), weight.detach(), targets)
    rounded = plain_head(flat.detach().bfloat16(), weight.detach().bfloat16(), targets)
    for ours, true, coarse in zip((logp, entropy), exact, rounded):
        true, coarse = true.view_as(ours)[mask].float(), coarse.view_as(ours)[mask].float()
        torch.testing.assert_close(ours[mask], true, rtol=1e-5, atol=1e-5)
        assert (coarse - true).abs().max() > 1e-3


def test_an_evaluation_takes_each_batch_as_a_mini_batch(tmp_path):
    trainer = train(
        tmp_path,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=16,
        settings={"eval_dataset": problems(16)},
    )
    evaluated = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert len(evaluated) == 2 and all(row["eval_silenced"] > 2 for row in evaluated)


# ----------------------------------------------------------------------------------------- refused

OTHERS = {
    "loss_type": "bnpo",
    "importance_sampling_level": "sequence",
    "scale_rewards": "batch",
    "multi_objective_aggregation": "normalize_then_sum",
    "mask_truncated_completions": True,
    "beta": 0.1,
    "sync_ref_model": True,
    "entropy_coef": 0.01,
    "use_adaptive_entropy": True,
    "top_entropy_quantile": 0.2,
    "delta": 2.0,
    "off_policy_mask_threshold": 0.5,
    "temperature": 0.7,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "generation_kwargs": {"top_k": 20},
    "vllm_structured_outputs_regex": "[0-9]+",
    "neftune_noise_alpha": 5.0,
    "use_transformers_continuous_batching": True,
}


def refusal(folder, settings=(), **options) -> str:
    with pytest.raises(ValueError) as error:
        train(folder, settings=settings, **options)
    return str(error.value)


def test_options_that_stapo_has_no_place_for_are_refused_by_name(tmp_path):
    model = load_model(str(TINY))
    assert OTHERS.keys() == trl_stapo.FIXED.keys()
    for name, value in OTHERS.items():
        message = refusal(tmp_path, model=model, **{name: value})
        assert message.startswith(f"{name}={value}: ")
    message = refusal(tmp_path, model=model, scale_rewards=False)  # TRL's other spelling
    assert message.startswith("scale_rewards=none: ")


def test_other_refusals(tmp_path):
    message = refusal(tmp_path, micro_batches=2, steps_per_generation=5)
    assert message.startswith("gradient_accumulation_steps=2: ")
    message = refusal(tmp_path, use_vllm=True)
    assert message.startswith("vllm_importance_sampling_correction=True: ")
    for name in ("tools", "rollout_func", "environment_factory"):
        assert refusal(tmp_path, {name: [print]}).startswith(f"{name}: ")
    assert refusal(tmp_path, {"q": 1.5}).startswith("q=1.5: ")
    with pytest.raises(ValueError, match="^dtype: .*bfloat16"):
        train(tmp_path, model=load_model(str(TINY), torch.bfloat16))


# ---------------------------------------------------------------------------- engines and commands


class Engine:
    """In the place of TRL's VLLMGeneration: draws from the tiny model at `temperature`."""

    temperature, offset = 1.0, 0.0  # offset: of its ln p from the trainer's

    def __init__(self, **options) -> None:
        self.generation_kwargs, self.length = {}, options["max_completion_length"]
        self.policy, self.tokenizer = stapo.load_policy(str(TINY)), load_tokenizer(str(TINY))

    def sync_weights(self) -> None:
        pass

    def generate(self, prompts, **_):
        options = {"max_new_tokens": self.length, "temperature": self.temperature}
        drawn = sample(self.policy, self.tokenizer, prompts, **options)
        ids, attention, mask = pad_batch(drawn)
        scored = response_stats(self.policy, ids, mask, attention.sum(1), 4096).logp + self.offset
        logp = [[[x] for x in row[here].tolist()] for row, here in zip(scored, mask)]
        logp[0][0] = [None]  # vLLM's NaN
        return None, [response.ids for response in drawn], logp, None


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", Engine)
    return monkeypatch


def page() -> list[list[str]]:
    """The flags of each command of the page, as bash reads them."""
    text = (ROOT / "docs" / "using-the-loss.md").read_text()
    block = re.search(r"```sh\n(flags=.*?)```", text, re.DOTALL)[1]
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


def run(argv: list[str], monkeypatch):
    """trl_stapo.main: the trainer, after it has saved."""
    made = []
    real = trl_stapo.make_trainer
    monkeypatch.setattr(trl_stapo, "make_trainer", lambda argv: made.append(real(argv)) or made[0])
    trl_stapo.main(argv)
    return made[0]


@pytest.mark.parametrize("flags", [EIGHT, WITHOUT_VLLM], ids=["vllm", "without"])
def test_the_pages_commands(tmp_path, engine, capsys, flags):
    trainer = run(flags + small(tmp_path), engine)
    assert all(getattr(trainer.args, name) == x for name, x in trl_stapo.DEFAULTS.items())
    assert trainer.args.bf16 and trainer.clip == {"eps_low": 0.2, "eps_high": 0.28}
    saved, base = load_model(str(tmp_path)).state_dict(), load_model(str(TINY)).state_dict()
    assert any((saved[key] != base[key]).any() for key in base)
    first, second = logged(trainer)
    assert abs(first["sampling_z"]) < 5 and ("sampling_kl" in first) == (flags is EIGHT)
    assert "sampling_gap" not in second  # of the same rollout
    plan = "trl_stapo.py: mini-batches a rollout: 4, responses a mini-batch: 8, processes: 1\n"
    assert plan in capsys.readouterr().out


def test_the_pages_commands_make_four_updates_a_rollout():
    """The sizes that the page and the comments of its commands say."""
    found = []
    for flags in (EIGHT, ONE_GPU, WITHOUT_VLLM, TWO_PROCESSES):
        pairs = dict(zip(flags, flags[1:]))
        steps, accumulated = "--steps_per_generation", "--gradient_accumulation_steps"
        assert int(pairs[steps]) == 4 * int(pairs[accumulated])
        found.append(int(pairs.get("--per_device_train_batch_size", 8)) * int(pairs[accumulated]))
    assert found == [64, 64, 16, 16] and 8 * found[0] == 512
    assert ("--use_vllm" in EIGHT, "--use_vllm" in WITHOUT_VLLM) == (True, False)
    assert EIGHT == ONE_GPU


def on_two_processes(folder) -> None:
    short = "--max_steps 1 --per_device_train_batch_size 2 --max_completion_length 16".split()
    trl_stapo.main([*TWO_PROCESSES, *short, "--output_dir", str(folder)])


def test_the_pages_two_processes(tmp_path):
    launched = launch(on_two_processes, 2, tmp_path / "log", tmp_path / "run", timeout=300)
    assert launched == [0, 0]
    first, second = ((tmp_path / f"log.{rank}").read_text() for rank in (0, 1))
    plan = "mini-batches a rollout: 4, responses a mini-batch: 8, processes: 2\n"
    assert plan in first and "mini-batch" not in second
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_the_default_is_one_update_a_rollout_and_the_script_says_so(tmp_path):
    options = {"gradient_accumulation_steps": 16, "use_cpu": True}
    plan = trl_stapo.plan(trl_stapo.GRPOConfig(str(tmp_path), **options))
    assert plan.startswith("mini-batches a rollout: 1, responses a mini-batch: 128, processes: 1;")
    assert plan.endswith("--steps_per_generation 64)")


def test_what_the_pages_commands_need():
    """The page's GB, from the shape of the model."""
    text = (ROOT / "docs" / "using-the-loss.md").read_text().replace("\n", " ")
    model = costs.empty_model("1.7B")
    weights, token = costs.parameters(model), costs.cache_bytes(model.config)
    rows = int((0.3 * 80e9 - 2 * weights) / (3072 * token))
    for said in (
        f"16 bytes a parameter, {16e-9 * weights:.1f} GB",
        f"{4e-9 * weights:.1f} GB more",
        f"which is 24 GB: {2e-9 * weights:.1f} GB",
        f"at {1e-3 * token:.0f} kB a token. So at most {rows} responses of 3,072 tokens",
        f"{2e-3 * token:.0f} kB a token, {64 * 3072 * 2e-9 * token:.0f} GB for 64 responses",
        f"beside {14e-9 * weights:.0f} GB for the moments and for the weights",
        f"{256 * 3072 * 2e-9 * token:.0f} GB",
    ):
        assert said in text, said


def test_a_reward_of_ones_own_and_a_wrong_flag(tmp_path, monkeypatch, capsys):
    own = "def short(text, row):\n    return float(len(text) % 2) if row['answer'] else None"
    (tmp_path / "own.py").write_text(own)
    argv = [*WITHOUT_VLLM, *small(tmp_path / "run"), "--reward", f"{tmp_path}/own.py:short"]
    assert 0 < logged(run(argv, monkeypatch))[0]["reward"] < 1
    monkeypatch.undo()
    for wrong in (["--beta", "0.1"], ["--data", "none.jsonl"], ["--max_prompt_tokens", "2"]):
        with pytest.raises(SystemExit) as error:
            trl_stapo.main(argv + wrong)
        assert wrong[-1] in str(error.value)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_sampling_gap_shows_what_an_engine_does(tmp_path, engine, temperature):
    engine.setattr(Engine, "temperature", temperature)
    engine.setattr(Engine, "offset", 0.01)
    more = "--bf16 false --learning_rate 0 --per_device_train_batch_size 32".split()
    first, second = logged(run([*EIGHT, *small(tmp_path), *more], engine))
    assert first["sampling_kl"] == pytest.approx(0.01, abs=1e-4)
    assert second["sampling_kl"] == pytest.approx(0.01, abs=1e-4)
    assert "sampling_gap" not in second  # in general the policy has been updated since
    assert first["sampling_z"] < -10 if temperature == 0.5 else abs(first["sampling_z"]) < 5


CHAT = """{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"""


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_and_stops_are_those_of_stapo(tmp_path, engine, chat):
    """In a chat template the end of a turn ends a response, also of a base model."""
    shutil.copytree(TINY, tmp_path / "model")
    tokenizer = load_tokenizer(str(TINY))
    if chat:
        tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
        tokenizer.chat_template = CHAT
        tokenizer.save_pretrained(tmp_path / "model")
    argv = small(tmp_path / "run") + ["--model_name_or_path", f"{tmp_path}/model"]
    problem = json.loads((TINY / "train.jsonl").read_text().splitlines()[0])["problem"]
    for flags in ([], ["--use_vllm"]):
        trainer = trl_stapo.make_trainer(argv + flags + ["--instruction", "Think."])
        prompts = [trainer.train_dataset[0]["prompt"]]
        ids = encode_prompt(tokenizer, problem, "Think.")
        assert trainer._tokenize_prompts(prompts)[0] == [ids]
        stops = [0, *tokenizer.convert_tokens_to_ids(["<|im_end|>"])] if chat else [0]
        assert trainer.eos_token_ids == stops
        if flags:
            assert trainer.vllm_generation.generation_kwargs == {"stop_token_ids": stops}
        else:
            assert trainer.generation_config.eos_token_id == stops


# ------------------------------------------------------------------------------ the page's examples


def test_the_pages_trainer_and_its_check(tmp_path, monkeypatch):
    """The config of a script of one's own, in small; then the first check: tau_p = 0 is dapo."""
    import trl

    real = trl.GRPOConfig
    given = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 4}
    given |= {"use_cpu": True, "report_to": [], "max_completion_length": 16, "num_iterations": 2}
    given |= {"output_dir": str(tmp_path), "save_strategy": "no", "learning_rate": 1e-3}
    monkeypatch.setattr(trl, "GRPOConfig", lambda folder, **page: real(**page | given))
    names = {"model": str(TINY), "dataset": problems(16), "reward": reward}
    exec(example("trl"), names)
    args = names["trainer"].args
    assert names["trainer"].tau_p == 0.002 and args.bf16 and args.steps_per_generation == 64
    assert all(getattr(args, name) == x for name, x in trl_stapo.DEFAULTS.items())
    monkeypatch.setattr(trl_stapo, "GRPOConfig", trl.GRPOConfig)  # of a trainer without a config
    default = trl_stapo.STAPOTrainer(str(TINY), reward, train_dataset=names["dataset"])
    assert default.clip == {"eps_low": 0.2, "eps_high": 0.28}
    exec(example("check"), checked := {})

    compared = []

    class Counted(checked["Checked"]):
        def _compute_loss(self, model, inputs):
            compared.append(float(super()._compute_loss(model, inputs).detach()))
            return super()._compute_loss(model, inputs)

    one_mini_batch = real(**trl_stapo.DEFAULTS | given)
    options = {"train_dataset": names["dataset"], "processing_class": load_tokenizer(str(TINY))}
    Counted(str(TINY), reward, one_mini_batch, tau_p=0.0, **options).train()
    assert len(compared) == 8 and any(compared)
    with pytest.raises(AssertionError, match="not close"):
        Counted(str(TINY), reward, one_mini_batch, tau_p=0.5, **options).train()
