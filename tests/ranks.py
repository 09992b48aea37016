"""Worker of test_distributed.py: trains on canned rollouts and writes what every rank computed.

    torchrun --nproc-per-node N tests/ranks.py FOLDER

FOLDER holds a random model `tied` and `untied`, a tokenizer and `problems.jsonl`. For each case it
writes FOLDER/world<N>-<case>.pt on rank 0: the gradients of every optimiser step, the metrics.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import stapo
from rollout import Response
from support import bookkeeping, distributed

PROMPTS, GROUP = 8, 4

# case: (flags, rewards of the groups that learn nothing, response lengths)
CASES = {
    "stapo": ("--method stapo --steps 2 --dump_every 2", "", "ragged"),
    "stapo-all": ("--method stapo --quantile_over all", "", "ragged"),
    "20-entropy": ("--method 20-entropy", "", "ragged"),
    "random": ("--method random", "", "ragged"),
    "grpo": ("--method grpo --beta 0.1", "", "ragged"),
    "untied": ("--method stapo --model {folder}/untied", "", "ragged"),
    "checkpointing": ("--method stapo --gradient_checkpointing True", "", "ragged"),
    "one-micro-batch-each": ("--tokens_per_micro_batch 1", "", "ragged"),
    "idle-ranks": ("--method stapo", "0145", "ragged"),  # ranks whose every group has A = 0
    "no-candidates": ("--method stapo --tau_p 0", "", "ragged"),
    "nothing-to-learn": ("--method stapo", "01234567", "ragged"),
    "early-end": ("--method stapo", "", "early"),  # one rank's responses are a token or none
    "poisoned": ("--method stapo", "", "ragged"),  # one rank's loss is NaN, once
    "stopped": ("--method stapo --steps 2", "", "ragged"),  # one rank's wish amid step 2's updates
}


def canned_rollouts(case: str) -> dict:
    """prompt -> (responses of its group); the same for every number of ranks."""
    _, idle, lengths = CASES[case]
    generator = torch.Generator().manual_seed(7)

    def draw(high: int) -> int:
        return int(torch.randint(1, high, (1,), generator=generator))

    canned = {}
    for place in range(PROMPTS):
        group = []
        for member in range(GROUP):
            length = draw(30)
            if lengths == "early" and place in (0, 4):
                length = member % 2
            ids = [2 + draw(90) for _ in range(length)]
            reward = "1" if str(place) in idle else "1" if member <= place % 3 else "-1"
            group.append(Response([], ids, False, reward))
        canned[place] = group
    return canned


def run(case: str, folder: Path) -> None:
    flags = CASES[case][0].format(folder=folder)
    canned, gradients, calls = canned_rollouts(case), [], []
    is_last = distributed.rank() == distributed.world_size() - 1

    def sample(model, tokenizer, prompts, **_):
        """The response that belongs to each prompt's place in the batch."""
        step = len(calls) // len(prompts) + 1
        order = stapo.batch_indices(step, PROMPTS, PROMPTS, 0)
        calls.extend(prompts)
        responses = []
        for row, prompt in enumerate(prompts):
            number = next(i for i, p in enumerate(texts) if tokenizer(p + "\n").input_ids == prompt)
            canned_one = canned[order.index(number)][row % GROUP]
            responses.append(Response(prompt, canned_one.ids, False, canned_one.text))
        return responses

    class Recorder(torch.optim.AdamW):
        def step(self, **options):
            if options:  # torch's own call, which makes room for the moments that are loaded
                return super().step(**options)
            whole = [p.grad for group in self.param_groups for p in group["params"]]
            gradients.append([g.full_tensor() if hasattr(g, "full_tensor") else g for g in whole])
            gradients[-1] = [g.clone() for g in gradients[-1]]
            super().step()
            if case == "stopped" and len(gradients) == 3 and is_last:
                os.kill(os.getpid(), signal.SIGTERM)

    texts = [json.loads(line)["problem"] for line in open(folder / "problems.jsonl")]
    real = stapo.sample, stapo.load_reward, torch.optim.AdamW, stapo.batch_loss
    stapo.sample, torch.optim.AdamW = sample, Recorder
    stapo.load_reward = lambda spec: lambda text, problem: float(text)
    if case == "poisoned":
        poison = [is_last]

        def batch_loss(*args):
            loss, sums = real[3](*args)
            return (loss * float("nan") if poison and poison.pop() else loss), sums

        stapo.batch_loss = batch_loss
    output = folder / f"world{distributed.world_size()}-{case}"
    argv = f"""--model {folder}/tied --data {folder}/problems.jsonl --instruction= --steps 1
        --batch_size {PROMPTS} --mini_batch_size 4 --group_size {GROUP} --max_new_tokens 30
        --lr 1e-6 --warmup_steps 0 --tau_p 0.002 --save_every 0 --gradient_checkpointing False
        --tokens_per_micro_batch 300 --output {output} {flags}"""
    parser = bookkeeping.Parser(stapo.Config)
    try:
        stapo.train(stapo.Config(**vars(parser.parse_args(argv.split()))))
        if case == "stopped":
            del calls[len(calls) // 2 :]  # the second step samples again
            resumed = vars(parser.parse_args(argv.split())) | {"resume": True}
            stapo.train(stapo.Config(**resumed))
    finally:
        stapo.sample, stapo.load_reward, torch.optim.AdamW, stapo.batch_loss = real
    if distributed.rank() == 0:
        lines = [json.loads(line) for line in open(output / "metrics.jsonl")]
        torch.save({"gradients": gradients, "metrics": lines}, f"{output}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.start()
    for case in CASES:
        run(case, Path(sys.argv[1]))
    distributed.finish()
