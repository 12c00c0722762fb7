"""`make report`: reports/index.html, of the last run, whatever of it is there."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.errors import UserError
from pipeline.files import write_text
from pipeline.params.runtime import RuntimeParams
from pipeline.params.section import load_section
from pipeline.progress import console
from pipeline.report.page import comparison, picture, render
from pipeline.report.run import RunFacts, read_run
from pipeline.tracking.destination import SQLITE, destination
from pipeline.tracking.records import Records
from pipeline.tracking.runs import Refused, Unavailable
from pipeline.tracking.store import Store
from pipeline.tracking.tracker import STORE_LOCK, say

PAGE = Path("reports/index.html")


def asked_store() -> tuple[Store, Records] | None:
    """MLflow and its runs of this experiment; None where no database has been made yet.

    Raises:
        Unavailable, Refused: it does not answer.
    """
    to = destination(load_section("runtime", RuntimeParams))
    if to.uri.startswith(SQLITE) and not Path(to.uri.removeprefix(SQLITE)).exists():
        return None  # to ask would make it
    store = Store.connect(to.uri, to.folder / STORE_LOCK)
    return store, Records(store, to.experiment)


def read_with_records() -> tuple[RunFacts, Store | None]:
    """The run that lies here, with what MLflow knows of it; and MLflow, where it answers."""
    try:
        known = asked_store()
        if known:
            return read_run(Path(), known[1].find), known[0]
    except (Unavailable, Refused) as error:
        say(f"MLflow does not answer ({error}); the report has no times and versions.")
    return read_run(Path()), None


def send(store: Store, run: RunFacts) -> None:
    """The page, and the histograms of scores as pictures, to the pipeline run; once more is as good as once."""
    record = run.stages[run.evaluation].record if run.evaluation else None
    if record is None:
        return
    store.keep(record.parent_id, PAGE, f"report/{PAGE.name}")
    with TemporaryDirectory() as folder:
        for chart in comparison(run):
            file = Path(folder, f"{chart.title.lower().replace(' ', '_').replace(',', '')}.svg")
            file.write_text(picture(chart), encoding="utf-8")
            store.keep(record.parent_id, file, f"report/{file.name}")


def main() -> None:
    """Writes the page, says where it is, and sends it to MLflow."""
    try:
        run, store = read_with_records()
        write_text(PAGE, render(run, list(Path("recipes").glob("*.yaml"))))
    except UserError as error:
        console.print(str(error), markup=False, style="red")
        sys.exit(1)
    console.print(f"report: {PAGE}", markup=False)
    if store:
        try:
            send(store, run)
        except (Unavailable, Refused) as error:
            say(f"MLflow did not take the report ({error}); `make report` sends it again.")


if __name__ == "__main__":
    main()
