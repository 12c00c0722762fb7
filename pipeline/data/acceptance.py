"""Rows whose conversation the model's chat template refuses are found while rows still have their line numbers."""

from collections.abc import Callable
from functools import cache

from pipeline.data.records import Message, Record
from pipeline.data.tokenization import ChatTokenizer, RefusedConversation
from pipeline.data.turns import BadRow

Keep = Callable[[tuple[Record, ...]], None]


def refuse_conversations(tokenizer: ChatTokenizer, keep: Keep) -> Keep:
    """`keep`, but a row with a conversation that the template refuses raises BadRow.

    Templates refuse by the order of roles, so one conversation is tried for each order that is met.
    """

    @cache
    def refusal(roles: tuple[str, ...]) -> str | None:
        try:
            tokenizer.whole_prompt_ids(tuple(Message(role, "x") for role in roles))
        except RefusedConversation as error:
            return " ".join(str(error.__cause__).split())
        return None

    def checked(records: tuple[Record, ...]) -> None:
        for record in records:
            roles = tuple(message.role for message in record.prompt)
            if (reason := refusal(roles)) is not None:
                order = ", ".join(roles)
                raise BadRow(
                    "prompt", "a list", f"has the roles {order}, which the model's chat template refuses: {reason}"
                )
        keep(records)

    return checked
