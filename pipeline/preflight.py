"""What `make repro` asks before DVC starts: are the parameters sound, are the data and the user's reward functions there? DVC's own answers say no remedy."""

import sys

from pipeline.data.sources import find_data
from pipeline.errors import UserError
from pipeline.params.check import check_params
from pipeline.params.data import DataParams
from pipeline.params.ppo import PPOParams
from pipeline.params.section import load_section
from pipeline.progress import console
from pipeline.rewards import find_functions


def main() -> None:
    """Exit status 1, and one line, where something is wrong."""
    try:
        check_params()
        for kind, path in load_section("data", DataParams).sources.items():
            find_data(f"data.{kind}", path)
        find_functions(load_section("ppo", PPOParams).reward)
    except UserError as error:
        console.print(str(error), markup=False, style="red")
        sys.exit(1)


if __name__ == "__main__":
    main()
