"""Somebody else's reward model: a sequence-classification model with its own tokenizer, asked about the same conversations.

Its ids are not ours, so texts go out and scores come in: a row's prompt is looked up among the conversations that were
asked, the answer is decoded, and both are put into the model's own chat template.

Axes: B rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pipeline.batch import Pairs, Rollout, Sequences, map_rows
from pipeline.data.conversations import Conversation
from pipeline.data.examples import Prompt
from pipeline.data.records import Message
from pipeline.data.templates import as_dicts
from pipeline.data.tokenization import ChatTokenizer
from pipeline.errors import BaseModelError
from pipeline.files import write_json
from pipeline.roles import RewardModel
from pipeline.weights import read_json

RECORD = "classifier.json"
"""What a stage leaves of such a model: which it is and how its scores are shifted. Its weights stay where they are."""


@dataclass
class Classifier:
    """Scores as `pipeline.roles.RewardModel` gives them.

    conversations: those that may be asked about, by our ids of their prompts.
    ours: the policy's tokenizer.
    shift: added to its score.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    ours: ChatTokenizer
    conversations: dict[tuple[int, ...], Conversation]
    shift: float = 0.0

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.model.device

    def __call__(self, batch: Pairs) -> tuple[Tensor, Tensor]:
        """Scores of the chosen and of the rejected answers; float32, [B] each."""
        return self.score(batch.chosen), self.score(batch.rejected)

    @torch.no_grad()
    def score(self, batch: Sequences) -> Tensor:
        """Scores of whole answers; float32, [B]."""
        chats = [as_dicts(chat) for chat in self._texts(batch)]
        # without padding a batch of unequal texts cannot be: one by one then
        size = 1 if self.model.config.pad_token_id is None else len(chats)
        parts = [self._logits(chats[start : start + size]) for start in range(0, len(chats), size)]
        return torch.cat(parts) + self.shift

    def move(self, by: Tensor) -> None:
        """Adds a number to every score from now on."""
        self.shift += float(by)

    def score_all(self, batch: Sequences, microbatch_tokens: int) -> Tensor:
        """`score` over any number of rows; on the CPU, [B]."""
        return map_rows(lambda rows: (self.score(rows),), batch, microbatch_tokens)[0]

    def score_minibatches(self, rollout: Rollout, end_id: int, microbatch_tokens: int, minibatch_size: int) -> Tensor:
        """The same for answers as they were sampled: its own template ends them all."""
        return map_rows(lambda rows: (self.score(rows.ended(end_id)),), rollout, microbatch_tokens, minibatch_size)[0]

    def _logits(self, chats: list[list[dict[str, str]]]) -> Tensor:
        inputs = self.tokenizer.apply_chat_template(
            chats, padding=len(chats) > 1, padding_side="right", return_tensors="pt", return_dict=True
        )
        longest = getattr(self.model.config, "max_position_embeddings", None)
        if longest is not None and inputs["input_ids"].shape[1] > longest:
            raise BaseModelError(
                f"The reward model has {longest} positions but a conversation is {inputs['input_ids'].shape[1]} of its tokens "
                "long; lower tokens.max_prompt or tokens.max_response."
            )
        return self.model(**inputs.to(self.device)).logits[:, 0].float()

    def _texts(self, batch: Sequences) -> list[Conversation]:
        starts, lengths = batch.prompt_lengths_B.tolist(), batch.lengths_B.tolist()
        texts = []
        for ids, start, length in zip(batch.tokens_BT.tolist(), starts, lengths, strict=True):
            answer = Message("assistant", self.ours.decode(ids[start:length]))
            texts.append((*self.conversations[tuple(ids[:start])], answer))
        return texts


Scorer = RewardModel | Classifier
"""Whoever says how good an answer is."""


def load_classifier(
    key: str,
    spec: str,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    ours: ChatTokenizer,
    asked: Iterable[Prompt],
) -> Classifier:
    """The model in `folder`, frozen; the parameter `key`, with the value `spec`, names it.

    asked: all prompts that it may be asked about.

    Raises:
        BaseModelError: it cannot be loaded, has more than one label, no chat template, or a padding token that it was not told of.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)  # nosec B615  # a local folder
        model, loaded = AutoModelForSequenceClassification.from_pretrained(  # nosec B615  # a local folder
            folder, dtype=dtype, use_safetensors=True, device_map={"": device}, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise BaseModelError(f"{key} is {spec!r} but cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    if loaded["missing_keys"]:
        raise BaseModelError(
            f"{key} is {spec!r} but it lacks {', '.join(sorted(loaded['missing_keys']))[:200]}: a reward model's head is never "
            "made up; name a model for sequence classification, not a language model."
        )
    if model.config.num_labels != 1:
        raise BaseModelError(
            f"{key} is {spec!r}, a model of {model.config.num_labels} labels, but a reward model has 1: one score for a text."
        )
    if not tokenizer.chat_template:
        raise BaseModelError(
            f"{key} is {spec!r} but its tokenizer has no chat template; put the one that it was trained with into its folder, as "
            "chat_template.jinja."
        )
    if model.config.pad_token_id != tokenizer.pad_token_id:
        model.config.pad_token_id = None  # scores are then read at the last token, text by text
    model.requires_grad_(False).eval()
    conversations = {tuple(prompt.ids): prompt.messages for prompt in asked}
    return Classifier(model, tokenizer, ours, conversations, getattr(model.config, "score_shift", 0.0))


def save_record(folder: Path, fingerprint: str, shift: float) -> None:
    """Says in an output of DVC's which model it is.

    Raises:
        StorageError: see `pipeline.files.write_bytes`.
    """
    write_json(folder / RECORD, {"fingerprint": fingerprint, "shift": shift})


def read_record(folder: Path) -> tuple[str, float] | None:
    """The fingerprint and the shift; None where the folder holds an adapter."""
    if not (folder / RECORD).is_file():
        return None
    record = read_json(folder / RECORD)
    return record["fingerprint"], record["shift"]
