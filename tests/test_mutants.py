"""What `make mutants` needs of the source as it is; the mutants themselves take too long for here."""

import mutants
import pytest
from mutants_table import MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_replaces_whole_statements(mutant: mutants.Mutant) -> None:
    """Or they do not compile, none of them."""
    source = (mutants.CSRC / mutant.file).read_text()
    start, end = mutant.place(source)
    statement = source[start:end]
    replacement = mutant.replacement(statement)
    assert statement[-1] in ";}"
    assert statement.count("{") == statement.count("}") and statement.count("(") == statement.count(")")
    assert not replacement or replacement[-1] in ";}"


def test_names_and_statements() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for file in {mutant.file for mutant in MUTANTS}:
        assert "chosen_mutant == " in mutants.with_all_mutants(file, dict(enumerate(MUTANTS, 1)))
