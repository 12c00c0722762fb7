"""Secrets are left out of what is printed, spooled or sent."""

import os
import re
from collections.abc import Mapping

MASK = "***"
USER_AND_PASSWORD = re.compile(r"(?<=://)[^/\s\"]+@")  # a quote ends an address in JSON
SECRET_VARIABLE = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIALS?)(_|$)", re.IGNORECASE)
SHORTEST = 8  # a shorter value is no secret, and would be found in plain words


def masked(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """The text without user and password of addresses, and without the values of variables such as HF_TOKEN."""
    text = USER_AND_PASSWORD.sub(f"{MASK}@", text)
    for name, value in environment.items():
        if SECRET_VARIABLE.search(name) and len(value) >= SHORTEST:
            text = text.replace(value, MASK)
    return text
