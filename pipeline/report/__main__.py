"""`make report`: reports/index.html, of the last run, whatever of it is there."""

import sys
from pathlib import Path

from pipeline.errors import UserError
from pipeline.files import write_text
from pipeline.params.runtime import RuntimeParams
from pipeline.params.section import load_section
from pipeline.progress import console
from pipeline.report.page import render
from pipeline.report.run import RunFacts, read_run
from pipeline.tracking.destination import SQLITE, destination
from pipeline.tracking.records import Records
from pipeline.tracking.store import Refused, Store, Unavailable
from pipeline.tracking.tracker import STORE_LOCK, say

PAGE = Path("reports/index.html")


def known_run(folder: Path) -> RunFacts:
    """The run, with what MLflow has of it where MLflow answers."""
    to = destination(load_section("runtime", RuntimeParams))
    if to.uri.startswith(SQLITE) and not Path(to.uri.removeprefix(SQLITE)).exists():
        return read_run(folder)  # to ask would make the database
    try:
        return read_run(folder, Records(Store.connect(to.uri, to.folder / STORE_LOCK), to.experiment).find)
    except (Unavailable, Refused) as error:
        say(f"MLflow does not answer ({error}); the report has no times and versions.")
        return read_run(folder)


def main() -> None:
    """Writes the page and says where it is."""
    try:
        run = known_run(Path())
        write_text(PAGE, render(run, list(Path("recipes").glob("*.yaml"))))
    except UserError as error:
        console.print(str(error), markup=False, style="red")
        sys.exit(1)
    console.print(f"report: {PAGE}", markup=False)


if __name__ == "__main__":
    main()
