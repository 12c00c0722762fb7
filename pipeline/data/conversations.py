"""Conversations cut and rearranged, whatever the template."""

from dataclasses import replace

from pipeline.data.records import Message

Conversation = tuple[Message, ...]


def without_oldest_turns(conversation: Conversation) -> Conversation | None:
    """The conversation from its second user's turn on, with its system message; None where there is no second."""
    users = [place for place, message in enumerate(conversation) if message.role == "user"]
    if len(users) < 2:
        return None
    return (*(message for message in conversation[:1] if message.role == "system"), *conversation[users[1] :])


def system_merged(conversation: Conversation) -> Conversation:
    """System messages put before the user's turn that follows them, a blank line between."""
    merged: list[Message] = []
    waiting: list[str] = []
    for message in conversation:
        if message.role == "system":
            waiting.append(message.content)
        elif message.role == "user":
            merged.append(replace(message, content="\n\n".join([*waiting, message.content])))
            waiting = []
        else:
            merged.append(message)
    return tuple(merged)


def roles_of(conversation: Conversation) -> str:
    """The roles in order, for an error."""
    return ", ".join(message.role for message in conversation)
