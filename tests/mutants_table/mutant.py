"""What a mutant is, and the names that several tables use."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # below csrc
    text: str
    change: tuple[str, ...]
    programs: tuple[str, ...]

    def place(self, source: str) -> tuple[int, int]:
        """Where its statement begins and ends. Raises ValueError unless its text occurs exactly once."""
        text = self.text if "«" in self.text else f"«{self.text}»"
        begin, *rest = (re.sub(r"(\\ )+", r"\\s*", re.escape(part)) for part in text.split("…"))
        between = f"(?:(?!{begin.replace('«', '').replace('»', '')}).)*?"  # the text does not begin in it once more
        pattern = between.join([begin, *rest]).replace("«", "(").replace("»", ")")
        found = [match.span(1) for match in re.finditer(pattern, source, re.DOTALL)]
        if len(found) != 1:
            raise ValueError(f"'{self.name}': its text occurs {len(found)} times in {self.file}, must once")
        return found[0]

    def replacement(self, statement: str) -> str:
        """What takes the statement's place."""
        if len(self.change) < 2:
            return "".join(self.change)
        old, new = self.change
        assert old in statement, self.name
        return statement.replace(old, new)


# By file and programs. A row is a mutant's name and its text: the statement in « », or all of it. … stands for any part
# of it, a space also for where a line breaks. Then nothing if the statement is left out, or what takes its place, or
# which text in it is replaced, and by what.
Table = dict[tuple[str, str], list[tuple[str, ...]]]


def mutants_of(table: Table) -> list[Mutant]:
    """Those of a table."""
    return [
        Mutant(name, file, text, tuple(change), tuple(programs.split()))
        for (file, programs), rows in table.items()
        for name, text, *change in rows
    ]


SYSTEM, RANK = "<Scope::System>", "<Scope::Rank>"
MET = "return nothing_to_wait_for();"
