"""A model to sample from beside the sharded one: the same samples, also after an update."""

import contextlib
import shutil
from pathlib import Path

import torch
from helpers import TINY, fused_norms, in_order
from ranks import launch

import rollout
from support import ranks
from support.head import Float32Head
from support.models import gathered


def worker(folder: Path) -> None:
    """Rollouts from a sharded model, before an update and after one."""
    ranks.start()
    tokenizer, plain = rollout.load_tokenizer(str(TINY)), rollout.load_model(str(folder))
    if ranks.rank() > 0:
        rollout.load_model = None  # the others are sent their shards
    policy = rollout.load_policy(str(folder))
    # ragged: ranks that gathered anew at each token would wait for each other
    prompts = [[20, 21 + i] for i in range(6 + ranks.rank())]
    options = {"max_new_tokens": 12, "batch_size": 4, "seed": ranks.rank()}
    for fails in (True, False):
        with contextlib.suppress(InterruptedError), gathered(policy) as twin:
            assert twin.device == policy.model.device and twin.dtype == torch.float32
            assert fused_norms(twin) == fused_norms(policy) == fused_norms(plain) > 0
            assert rollout.stop_ids(twin, tokenizer) == [0, 3]  # on every rank
            assert type(twin.lm_head) is type(policy.model.lm_head) is Float32Head
            ours, theirs = (
                in_order(rollout.sample(model, tokenizer, prompts, **options))
                for model in (twin, plain)
            )
            assert [r.ids for r in ours] == [r.ids for r in theirs]
            if fails:
                raise InterruptedError
        assert all(hasattr(p, "to_local") for p in policy.parameters())  # shards again
        with torch.no_grad():
            for parameter in (*policy.parameters(), *plain.parameters()):
                parameter.mul_(1.25)
    torch.distributed.destroy_process_group()


def test_samples_are_those_of_a_whole_model(tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 3]}')
    codes = launch(worker, 2, tmp_path / "log", folder)
    assert codes == [0, 0], (tmp_path / "log.0").read_text()[-3000:]
