"""Batches by hand."""

import torch

from pipeline.batch import Pairs, Rollout, map_rows, microbatches
from pipeline.data.examples import sequences

ROWS = sequences([([5, 6], [7, 2]), ([8], [9, 10, 11]), ([12, 13, 14], [2])])
ROLLOUT = Rollout(
    ROWS.tokens_BT,
    ROWS.prompt_lengths_B,
    ROWS.response_lengths_B,
    behaviour_logprobs_BR=-torch.tensor([[1.0, 2, 0], [3, 4, 5], [6, 0, 0]]),
    truncated_B=torch.tensor([False, True, False]),
    prompt_ids_B=torch.tensor([0, 1, 2]),
)


def test_masks_and_responses_come_from_lengths() -> None:
    assert ROWS.tokens_BT.tolist() == [[5, 6, 7, 2], [8, 9, 10, 11], [12, 13, 14, 2]]
    assert ROWS.response_mask_BR.tolist() == [[True, True, False], [True, True, True], [True, False, False]]
    assert [ids[:n].tolist() for ids, n in zip(ROWS.response_ids_BR, ROWS.response_lengths_B, strict=True)] == [
        [7, 2],
        [9, 10, 11],
        [2],
    ]
    assert ROWS.num_terms == 6


def test_selecting_trims_what_no_row_needs() -> None:
    part = ROLLOUT.select(torch.tensor([2, 0]))
    assert part.tokens_BT.tolist() == [[12, 13, 14, 2], [5, 6, 7, 2]]
    assert part.behaviour_logprobs_BR.tolist() == [[-6, 0], [-1, -2]]
    assert [len(piece) for piece in ROLLOUT.split(2)] == [2, 1]


def test_cut_answers_get_an_end_token_for_scoring() -> None:
    ended = ROLLOUT.ended(end_id=2)
    assert ended.tokens_BT.tolist() == [[5, 6, 7, 2, 0], [8, 9, 10, 11, 2], [12, 13, 14, 2, 0]]
    assert ended.response_lengths_B.tolist() == [2, 4, 1]
    assert ROLLOUT.select(torch.tensor([0, 2])).ended(end_id=2).tokens_BT.tolist() == [[5, 6, 7, 2], [12, 13, 14, 2]]


def test_microbatches_hold_rows_of_like_length_and_results_come_back_in_order() -> None:
    rows = sequences([([5], [6] * length) for length in (9, 1, 8, 2, 7)])
    assert [part.lengths_B.tolist() for _, part in microbatches(rows, 18)] == [[2, 3], [8, 9], [10]]
    lengths_B, mask_BR = map_rows(lambda part: (part.response_lengths_B, part.response_mask_BR.float()), rows, 18)
    assert lengths_B.tolist() == [9, 1, 8, 2, 7]
    assert mask_BR.sum(1).tolist() == [9, 1, 8, 2, 7]


def test_a_micro_batch_is_as_large_as_its_padded_tokens_allow() -> None:
    """Rows times the longest of them; a row longer than that is alone; nothing depends on the order of rows before."""
    rows = sequences([([5], [6] * length) for length in (9, 1, 2, 1, 29, 3)])
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]):
        batch = rows.select(torch.tensor(order))
        parts = {
            tokens: [part.lengths_B.tolist() for _, part in microbatches(batch, tokens)] for tokens in (1, 12, 10**6)
        }
        assert parts[1] == [[2], [2], [3], [4], [10], [30]]
        assert parts[12] == [[2, 2, 3], [4], [10], [30]]
        assert parts[10**6] == [[2, 2, 3, 4, 10, 30]]


def test_both_answers_of_a_pair_count() -> None:
    """Both are in memory until the backward pass; the longer one says how long."""
    pairs = Pairs(sequences([([5], [6]), ([5], [6, 7, 8])]), sequences([([5], [6, 7]), ([5], [6])]))
    assert [part.lengths_B.tolist() for _, part in microbatches(pairs, 16)] == [[3, 4]]
    assert [part.lengths_B.tolist() for _, part in microbatches(pairs, 15)] == [[3], [4]]
