"""The recipes of real models hold what their names promise: each stage of the chain fits the card, by the plan."""

import pytest
from recipe_needs import CARDS, STAGES, table, verdicts, written


@pytest.mark.parametrize("recipe", CARDS)
def test_a_recipe_fits_its_card(recipe: str) -> None:
    assert verdicts(recipe) == dict.fromkeys(STAGES, "fits")


def test_the_page_says_what_is_computed() -> None:
    assert written() == table(), "run `python -m tests.recipe_needs`"
