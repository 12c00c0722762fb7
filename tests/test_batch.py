"""Batches by hand."""

import torch

from pipeline.batch import Rollout, map_rows, microbatches
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
    assert [part.lengths_B.tolist() for _, part in microbatches(rows, 2)] == [[2, 3], [8, 9], [10]]
    lengths_B, mask_BR = map_rows(lambda part: (part.response_lengths_B, part.response_mask_BR.float()), rows, 2)
    assert lengths_B.tolist() == [9, 1, 8, 2, 7]
    assert mask_BR.sum(1).tolist() == [9, 1, 8, 2, 7]
