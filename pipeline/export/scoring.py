"""Does the exported reward model give the reward model's scores? Asked as a user would ask it: texts in, plain transformers.

Axes: B texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipeline.batch import Sequences
from pipeline.data.examples import sequences
from pipeline.data.records import Message, Pair
from pipeline.data.templates import as_dicts
from pipeline.data.tokenization import ChatTokenizer
from pipeline.errors import BaseModelError

Conversation = tuple[Message, ...]
TOGETHER = 8  # texts that are scored in one pass
LARGEST_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Mean distance of scores as a share of their spread over the texts: rounding alone."""


@dataclass(frozen=True)
class Texts:
    """Answered conversations that no limit cuts, as messages and as the pipeline's rows."""

    conversations: list[Conversation]
    rows: Sequences


def whole_texts(pairs: Sequence[Pair], chat: ChatTokenizer, count: int) -> Texts:
    """The first `count` answers of the pairs, or what fits of them, where the prompt is not cut and no special token is spelled.

    Raises:
        BaseModelError: there are fewer than two.
    """
    conversations, rows = [], []
    for pair in pairs:
        for answer in (pair.chosen, pair.rejected):
            ids, cut = chat.response_ids(answer)
            if cut:  # its beginning is an answer too
                answer = chat.decode(ids[:-1])
                ids, cut = chat.response_ids(answer)
            spelled = any(chat.holds_special(text) for text in (answer, *(turn.content for turn in pair.prompt)))
            if not cut and not spelled and not chat.is_cut(pair.prompt) and len(rows) < count:
                conversations.append((*pair.prompt, Message("assistant", answer)))
                rows.append((chat.prompt_ids(pair.prompt), ids))
    if len(rows) < 2:
        raise BaseModelError(
            "The exported reward model cannot be checked: nearly every held-out prompt is cut; raise tokens.max_prompt."
        )
    return Texts(conversations, sequences(rows))


@torch.no_grad()
def plain_scores(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
) -> Tensor:
    """Scores of whole conversations by a sequence-classification model with its own chat template; float32, [B]."""
    shift = getattr(model.config, "score_shift", 0.0)
    scores = []
    for start in range(0, len(conversations), TOGETHER):
        part = [as_dicts(conversation) for conversation in conversations[start : start + TOGETHER]]
        inputs = tokenizer.apply_chat_template(part, padding=True, return_tensors="pt", return_dict=True)
        scores.append(model(**inputs.to(model.device)).logits[:, 0].float().cpu() + shift)
    return torch.cat(scores)


@dataclass(frozen=True)
class ScoreAgreement:
    """gap: mean distance of scores. spread: their standard deviation. largest: what gap / spread may be."""

    gap: float
    worst: float
    spread: float
    texts: int
    largest: float

    def __str__(self) -> str:
        return (
            f"scores of {self.texts} texts are {self.gap:.2g} apart on average and {self.worst:.2g} at most, "
            f"with a spread of {self.spread:.3g} (the average may be {self.largest:g} of that)"
        )

    def check(self) -> None:
        """Raises:
        BaseModelError: the scores differ by more than rounding explains.
        """
        if not self.gap <= self.largest * self.spread:
            raise BaseModelError(f"The exported reward model gives other scores: {self}; nothing is exported.")


def score_agreement(scores_B: Tensor, exported_B: Tensor, dtype: torch.dtype) -> ScoreAgreement:
    """The reward model's scores beside those of its export."""
    gaps_B = (scores_B - exported_B).abs()
    spread = float(scores_B.std(correction=0))
    return ScoreAgreement(float(gaps_B.mean()), float(gaps_B.max()), spread, len(scores_B), LARGEST_GAP[dtype])
