"""`make sync-tracking`: delivers to MLflow what it has missed."""

import sys

from pipeline.errors import UserError
from pipeline.params.runtime import RuntimeParams
from pipeline.params.section import load_section
from pipeline.tracking.delivery import deliver_earlier
from pipeline.tracking.destination import destination
from pipeline.tracking.runs import Unavailable
from pipeline.tracking.spool import spools
from pipeline.tracking.store import Store
from pipeline.tracking.tracker import STORE_LOCK, say


def main() -> None:
    """Says what it has delivered; exit status 1 where something is left."""
    try:
        to = destination(load_section("runtime", RuntimeParams))
        found = spools(to.folder)
        store = Store.connect(to.uri, to.folder / STORE_LOCK) if found else None
        for spool in found:
            arrived = deliver_earlier(spool, store, say)
            if arrived:
                say(f"{spool.run}: {arrived} entries delivered")
    except Unavailable as error:
        say(f"MLflow does not answer: {error}")
    except UserError as error:
        say(str(error))
        sys.exit(1)
    left = {spool.run: spool.waiting() for spool in found}
    for run, count in left.items():
        if count:
            say(f"{run}: {count} entries are left")
    if any(left.values()):
        sys.exit(1)
    say("Nothing is waiting: MLflow has everything.")


if __name__ == "__main__":
    main()
