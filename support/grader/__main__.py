"""Print the table of kinds in docs/reference.md: python -m support.grader."""

from support.grader import STAGES


def table() -> str:
    """Return the Markdown table of all rules that are shown, in the order of the stages."""
    rules = [rule for stage in STAGES for rule in stage.rules if rule.shown]
    lines = ["| kind | counts | does not count |", "|---|---|---|"]
    return "\n".join(lines + [f"| {rule.name} | {rule.row} |" for rule in rules])


if __name__ == "__main__":
    print(table())
