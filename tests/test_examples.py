"""Prepared rows -> batches."""

from taking import pair

from pipeline.data.examples import prompt_batches, prompts
from pipeline.data.tokenization import ChatTokenizer


def test_prompt_batches_are_a_function_of_seed_and_number(tokenizer: ChatTokenizer) -> None:
    questions = prompts([pair(f"q{n}") for n in range(7)], tokenizer)
    batches = list(prompt_batches(questions, 3, 4, seed=5))
    assert [[p.key for p in batch] for batch in batches[2:]] == [
        [p.key for p in batch] for batch in list(prompt_batches(questions, 3, 4, seed=5))[2:]
    ]
    assert len({p.key for batch in batches[:2] for p in batch}) == 6  # one pass, no prompt twice
