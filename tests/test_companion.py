"""The loss in other hands: pasted, in a bare loop, in TRL and verl, and equal to theirs."""

import importlib.util
import inspect
import json
import re
import types

import pytest
import torch
from conftest import ROOT, TINY
from reference import drawn

import stapo
from reward import load_reward
from stapo import quantile, stapo_loss

SECTION = (
    "quantile",
    "group_advantages",
    "spurious_candidates",
    "spurious_mask",
    "clipped_loss",
    "ratio_sums",
)
SECTION += ("stapo_loss", "grpo_loss")


def example(name: str) -> str:
    """The code block of the README behind the comment <!-- example: name -->."""
    readme = (ROOT / "README.md").read_text()
    return re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", readme, re.DOTALL)[1]


def needs(package: str):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


def test_the_loss_section_can_be_pasted():
    namespace: dict = {}
    source = "\n\n".join(inspect.getsource(getattr(stapo, name)) for name in SECTION)
    exec("import torch\n" + source, namespace)
    pasted = namespace["stapo_loss"](*drawn(), tau_p=0.1)
    own = stapo_loss(*drawn(), tau_p=0.1)
    assert torch.equal(pasted[0], own[0]) and pasted[1] == own[1]
    rewards = torch.tensor([[1.0, -1.0, -1.0]])
    assert torch.equal(namespace["group_advantages"](rewards), stapo.group_advantages(rewards))


def test_bare_example():
    logp, old_logp, _, entropy, mask = drawn()
    rewards = torch.tensor([[1.0, -1.0, -1.0], [1.0, 1.0, -1.0]])
    names = {"rewards": rewards, "logp": logp.requires_grad_(), "old_logp": old_logp}
    names |= {"entropy": entropy, "mask": mask}
    exec(example("bare"), names)
    assert names["loss"].isfinite() and logp.grad.abs().sum() > 0


def test_reward_example(tmp_path):
    """DAPO's strict rule, loaded as --reward loads it."""
    (tmp_path / "own.py").write_text(example("reward"))
    strict = load_reward(f"{tmp_path}/own.py:strict")
    problem = {"row": {"reward_model": {"ground_truth": "34"}}}
    for right in (r"so \boxed{34}.", r"\boxed{3} no, \boxed{34}" + "x" * 80):
        assert strict(right, problem) == 1.0
    wrong = r"\boxed{34.0}", r"\boxed{34}" + "x" * 100, r"\boxed{34} \boxed{3", "34}", ""
    assert all(strict(text, problem) == -1.0 for text in wrong)


def test_the_readme_shows_the_kernel():
    """The lines of the README's second section are those that training runs."""
    source = inspect.getsource(stapo.clipped_loss).partition('"""')[2].partition('"""\n')[2]
    assert f"```python\n{source}```" in (ROOT / "README.md").read_text()


def test_micro_batches_of_one_response_are_another_objective():
    """The README's toy: two right responses and a wrong one, two rare tokens in each right one."""
    p = torch.tensor([[0.5, 0.001, 0.001], [0.5, 0.001, 0.001], [0.5, 0.5, 0.5]])
    entropy = torch.tensor([[1.0, 0.1, 0.2], [1.0, 1.5, 1.6], [1.0, 1.0, 1.0]])
    rho = torch.tensor([[1.0, 1.2, 0.5], [1.0, 1.1, 1.2], [1.0, 0.9, 1.1]])
    advantages = stapo.group_advantages(torch.tensor([[1.0, 1.0, -1.0]]))[0]
    mask = torch.tensor([[True] * 3, [True] * 3, [True, False, False]])
    tensors = p.log(), p.log() - rho.log(), advantages, entropy, mask
    whole, metrics = stapo_loss(*tensors)
    parts = [stapo_loss(*(t[i : i + 1] for t in tensors)) for i in range(3)]
    mean = sum(float(loss) for loss, _ in parts) / 3
    silenced = [int(m["silenced"]) for _, m in parts]
    assert (int(metrics["silenced"]), silenced) == (3, [1, 1, 0])
    assert (round(float(whole), 3), round(mean, 3)) == (-0.173, 0.029)


def trl_config(folder):
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=40,
        max_steps=2,
        learning_rate=1e-4,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


@needs("trl")
def test_trl_example_trains_and_equals_trls_losses(tmp_path):
    from datasets import Dataset

    namespace: dict = {}
    exec(example("trl"), namespace)
    compared = []

    class Compared(namespace["STAPOTrainer"]):
        def _compute_loss(self, model, inputs):
            inputs = {k: v for k, v in inputs.items()}
            old = torch.randn(inputs["completion_ids"].shape)
            rows = [(inputs[f"prompt_{x}"], inputs[f"completion_{x}"]) for x in ("ids", "mask")]
            ids, attention = (torch.cat(row, dim=1) for row in rows)
            mask = inputs["completion_mask"].bool()
            with torch.no_grad():
                logp, entropy, _ = self._get_per_token_logps_and_entropies(
                    model, ids, attention, mask.size(1), compute_entropy=True
                )
            inputs["old_per_token_logps"] = logp + 0.3 * old
            args = logp, inputs["old_per_token_logps"], inputs["advantages"], entropy
            clip = {"tau_p": 0.0, "eps_low": 0.2, "eps_high": 0.28}
            justrl = stapo_loss(*args, mask, **clip)[0]
            few = mask & (entropy >= quantile(entropy[mask], 0.8))
            entropy20 = stapo_loss(*args, few, **clip, num_kept=mask.sum())[0]
            theirs = super(namespace["STAPOTrainer"], self)._compute_loss
            self.top_entropy_quantile = 0.2
            their_entropy20 = float(theirs(model, inputs).detach())
            self.top_entropy_quantile = 1.0
            compared.append((float(justrl), float(theirs(model, inputs).detach())))
            compared.append((float(entropy20), their_entropy20))
            loss = super()._compute_loss(model, inputs)
            assert float(loss.detach()) == pytest.approx(
                float(stapo_loss(*args, mask)[0]), rel=1e-3
            )
            return loss

    rows = [json.loads(x) for x in (TINY / "train.jsonl").read_text().splitlines()[:8]]
    trainer = Compared(
        model=str(TINY),
        reward_funcs=lambda completions, **_: [float("7" in text) for text in completions],
        train_dataset=Dataset.from_list([{"prompt": row["problem"] + "\n"} for row in rows]),
        args=trl_config(tmp_path),
    )
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.train()
    assert any((a != b).any() for a, b in zip(before, trainer.model.parameters()))
    assert len(compared) == 4
    for ours, theirs in compared:
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


@needs("verl")
def test_verl_example_is_registered_and_equals_verls_token_mean():
    from verl.trainer.ppo.core_algos import compute_policy_loss, get_policy_loss_fn

    exec(example("verl"), {})
    logp, old_logp, advantages, entropy, mask = drawn()
    config = types.SimpleNamespace(clip_ratio_low=0.2, clip_ratio_high=0.28)
    repeated = advantages[:, None] * mask
    args = old_logp, logp, repeated, mask.float()
    loss, _ = get_policy_loss_fn("stapo")(*args, config=config, entropy=entropy)
    assert float(loss) == pytest.approx(float(stapo_loss(*drawn())[0]), rel=1e-5)
    theirs = compute_policy_loss(
        *args, cliprange_low=0.2, cliprange_high=0.28, cliprange=0.2, clip_ratio_c=1e6
    )[0]
    justrl = stapo_loss(logp, old_logp, advantages, entropy, mask, tau_p=0.0)[0]
    assert float(justrl) == pytest.approx(float(theirs), rel=1e-5)
