"""scripts/verify.py: a second model judges what the rule refused, in the results of eval.py."""

import shutil

import pytest
import verify
from helpers import TINY, read_rows, write_rows

import eval as evaluation
from rollout import Response

VERDICTS = r"""
CORRECT | A | CORRECT | Correct | \boxed{A} | A. | (A) correct | **A**: Correct
CORRECT | A: CORRECT - both are 5 | A: CORRECT\nProblem: ... | <think>\n\n</think>\n\nA
INCORRECT |  B.\n | Incorrect | B: INCORRECT - there is a final answer and it disag
INVALID | **C** | (C) INVALID | C: INVALID - the solution breaks off
UNREADABLE | A: INCORRECT | INCORRECT or CORRECT | A or B | The answer is CORRECT | NOT CORRECT
UNREADABLE | D | correctly |  | \n\n | <think>A | A: CORRECT or B | a final | A, B, C
UNREADABLE | A: CORRECT - there is no final answer, so INVALID | A: CORRECT - not really
UNREADABLE | A final answer | Correct? No | A: there is a final answer and it disagrees
"""


@pytest.mark.parametrize("row", VERDICTS.strip().splitlines())
def test_verdicts_are_parsed_strictly(row):
    verdict, *replies = row.replace(r"\n", "\n").split(" | ")
    found = {reply: verify.parse_verdict(reply) for reply in replies}
    assert found == dict.fromkeys(replies, verdict)


def test_the_verifier_looks_again_at_what_the_rule_refused(tmp_path, monkeypatch):
    """The policy is right on problem 0 alone. The verifier accepts problem 1, and so on."""
    asked = []

    def sample(model, tokenizer, prompts, **options):
        for index, prompt in reversed([*enumerate(map(tokenizer.decode, prompts))]):
            if "<end_of_solution>" in prompt:
                assert options["temperature"] == 0, "the verifier decodes greedily"
                asked.append(prompt)
                number = int(prompt.split("problem ")[-1].split("\n")[0])
                text = ["never asked", "A", "B", "C", "who knows"][number]
            else:
                number = int(prompt.split("\n")[0].removeprefix("problem "))
                answer = f"\\boxed{{{7 if number == 0 else 100 + number}}}"
                text = "x" * 5000 + "<|endoftext|><think>" + answer + " \n" * verify.TAIL
            yield index, Response(prompts[index], [0] * 9, False, text)

    monkeypatch.setattr(evaluation.rollout, "sample", sample)
    problems = [{"problem": f"problem {i}", "answer": "7"} for i in range(5)]
    file, out = write_rows(tmp_path / "five.jsonl", *problems), tmp_path / "out"
    flags = f"--model {TINY} --benchmarks {file} --decoding training --samples 2"
    evaluation.main(f"{flags} --max_new_tokens 500 --output {out}".split())
    table = (out / "table.md").read_text()
    assert "| training | rule | 20.00 | 20.00 |" in table
    judge = shutil.copytree(TINY, tmp_path / "J")
    template = "{{ messages[0].content }}{{ 'no thinking' if enable_thinking is false }}"
    (judge / "chat_template.jinja").write_text(template)
    for _ in range(2):  # again: the rule's own verdicts are still there
        verify.main(["--folder", str(out), "--verifier", str(judge)])
        verified = (out / "verified.md").read_text()
        assert f"| training | rule, then {judge} | 40.00 | 40.00 |" in verified
        assert verified.endswith("| five | training | 2 | 2 | 2 | 2 |\n")
    assert (out / "table.md").read_text() == table
    assert len(asked) == 16 and not any("problem 0\n" in prompt for prompt in asked)
    for prompt in asked:
        assert "<reference_answer>\n7\n</reference_answer>" in prompt
        tail = prompt.split("<end_of_solution>\n")[1].split("\n</end_of_solution>")[0]
        # Special tokens that a response spells are broken: they could end the verifier's turn.
        assert len(tail) == verify.TAIL + 1 and "x< |endoftext|><think>\\boxed{10" in tail[-40:]
        assert prompt.endswith("no thinking")
    rows = [row for row in read_rows(out / "samples.jsonl") if not row["correct"]]
    assert [row["verdict"] for row in rows[::2]] == [*verify.VERDICTS]
    evaluation.main(f"{flags} --max_new_tokens 500 --output {out}".split())
    assert not (out / "verified.md").exists()  # it was of the rows before


def test_a_folder_without_results_ends_in_one_line(tmp_path):
    with pytest.raises(SystemExit) as stop:
        verify.main(["--folder", str(tmp_path), "--verifier", str(TINY)])
    assert stop.value.code.startswith(f"verify.py: --folder {tmp_path}: holds no results")
