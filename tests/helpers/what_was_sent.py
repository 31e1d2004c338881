"""The text of an error says what each rank sent: even ranks one thing, odd ranks another."""

import re


def is_said(message, even, odd):
    """Of the ranks that had come to the call; the others have sent nothing."""
    first = message.splitlines()[0]
    said = re.findall(r"rank ([\d, ]+) sent ([^;]*)", first)
    parities = {int(rank) % 2 for ranks, _ in said for rank in ranks.split(", ")}
    alike = all(text == (even, odd)[int(rank) % 2] for ranks, text in said for rank in ranks.split(", "))
    return " in call " in first and parities == {0, 1} and alike
