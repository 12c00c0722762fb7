"""`make chat`: base, SFT and policy answer side by side, each in a conversation of its own; one base, three adapters.

/greedy and /sample say how, /reset forgets, /quit ends. Questions may come from a pipe, one a line.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from rich.columns import Columns
from rich.panel import Panel
from rich.text import Text

from pipeline.data.examples import Prompt
from pipeline.data.records import Message
from pipeline.data.tokenization import ChatTokenizer
from pipeline.diagnosis.opening import untracked
from pipeline.errors import UserError
from pipeline.opening import open_base
from pipeline.params.evaluate import EvaluateParams
from pipeline.params.runtime import RuntimeParams
from pipeline.params.section import load_section, parse_seed, read_params
from pipeline.progress import console
from pipeline.randomness import prepare_torch
from pipeline.roles import Policy
from pipeline.rollout import Sampling, generate, sampling_of
from pipeline.samples import answers
from pipeline.stage import Stage, quiet_libraries

TITLES = {"base": "base", "sft": "SFT", "policy": "policy"}
HELP = "/greedy the likeliest answers   /sample others each time   /reset a new conversation   /quit"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what a model writes does not steer the terminal


@dataclass
class Chat:
    """Three conversations about the same questions.

    turns: number of questions asked so far; each is sampled with noise of its own.
    """

    roles: dict[str, Policy]
    tokenizer: ChatTokenizer
    sampling: Sampling
    turns: int = 0
    history: dict[str, tuple[Message, ...]] = field(default_factory=dict)

    def ask(self, question: str) -> dict[str, str]:
        """What each says, having heard its own answers to the questions before."""
        said = {}
        for name, policy in self.roles.items():
            messages = (*self.history.get(name, ()), Message("user", question))
            prompt = Prompt(0, messages, self.tokenizer.prompt_ids(messages))
            [said[name]] = answers(generate(policy, [prompt], self.sampling, self.turns), self.tokenizer)
            self.history[name] = (*messages, Message("assistant", said[name]))
        self.turns += 1
        return said

    def obey(self, command: str) -> str:
        """Does what a line that begins with / asks for; what to tell the person."""
        match command:
            case "/greedy" | "/sample":
                self.sampling = replace(self.sampling, greedy=command == "/greedy")
                return f"answers are {'the likeliest' if self.sampling.greedy else 'sampled'} from now on"
            case "/reset":
                self.history.clear()
                return "a new conversation"
            case "/help":
                return HELP
            case _:
                return f"{command} is not known here: {HELP}"


def open_chat(stage: Stage) -> Chat:
    """The roles on one base.

    Raises:
        DataError: a stage before has not run.
        BaseModelError: an artifact does not fit the base.
    """
    backbone = open_base(stage)
    for name in ("sft", "policy"):
        backbone.load_adapter(name, stage.input(f"artifacts/{name}"))
    temperature, tokenizer = stage.params(EvaluateParams, "evaluate").temperature, stage.tokenizer
    roles = {
        name: Policy(backbone, None if name == "base" else name, temperature, stage.runtime.logprob_chunk)
        for name in TITLES
    }
    return Chat(roles, tokenizer, sampling_of(tokenizer, stage.runtime, stage.seed))


def lines() -> Iterator[str]:
    """What is typed, or piped in, until /quit or the end."""
    while True:
        try:
            line = console.input("[bold]you[/bold] > ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/quit":
            return
        if line:
            yield line


def show(said: dict[str, str]) -> None:
    """Side by side where there is room, one below the other where there is not."""
    if not console.is_terminal:
        for name, text in said.items():
            console.print(f"{TITLES[name]}: {CONTROL.sub('', text)}", markup=False)
        return
    width = max(24, console.width // len(said) - 1)
    console.print(
        Columns([Panel(Text(CONTROL.sub("", text)), title=TITLES[name], width=width) for name, text in said.items()])
    )


def main() -> None:
    """Asks for questions until there are none."""
    quiet_libraries()
    try:
        runtime, seed = load_section("runtime", RuntimeParams), parse_seed(read_params())
        prepare_torch(seed, runtime)
        chat = open_chat(untracked("evaluate", seed, runtime))
        console.print(f"chat: {HELP}", markup=False)
        for line in lines():
            if line.startswith("/"):
                console.print(f"chat: {chat.obey(line)}", markup=False)
            else:
                show(chat.ask(line))
    except UserError as error:
        console.print(f"chat: {error}", markup=False, style="red")
        sys.exit(1)


if __name__ == "__main__":
    main()
