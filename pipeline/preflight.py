"""What `make repro` asks before DVC starts: are the parameters sound, is the data there? DVC's own answers say no remedy."""

import sys

from pipeline.data.sources import find_data
from pipeline.errors import UserError
from pipeline.params.check import check_params
from pipeline.params.data import DataParams
from pipeline.params.section import load_section
from pipeline.progress import console


def main() -> None:
    """Exit status 1, and one line, where something is wrong."""
    try:
        check_params()
        for kind, path in load_section("data", DataParams).sources.items():
            find_data(f"data.{kind}", path)
    except UserError as error:
        console.print(str(error), markup=False, style="red")
        sys.exit(1)


if __name__ == "__main__":
    main()
