"""`make screenshots`: pictures of the report and of MLflow for docs/images/, of whatever run lies here, in a headless Chromium."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from browser import DESKTOP, PHONE, browser_path, page_in, shown
from mlflow.tracking import MlflowClient
from playwright.sync_api import Page

from pipeline.tracking.view import KEY, PIPELINE_KEY

REPORT = Path("reports/index.html")
IMAGES = Path("docs/images")
EVALUATED = "summary.win_rate_judge"
PATIENCE = 180  # seconds for MLflow's server to come up, and for one of its pages


def report_pictures() -> None:
    """The report's top in light, its curves in dark, and on a phone."""
    tall = (DESKTOP[0], 1500)
    for name, size, scheme, section in (
        ("report-light", tall, "light", None),
        ("report-dark", tall, "dark", "#compared"),
        ("report-phone", PHONE, "dark", None),
    ):
        with page_in(size, scheme) as (page, wrong):
            shown(page, REPORT)
            if section:
                page.locator(section).scroll_into_view_if_needed()
                page.evaluate(f"document.querySelector('{section}').scrollIntoView({{behavior: 'instant'}})")
            page.screenshot(path=IMAGES / f"{name}.png")
            assert not wrong, wrong


@contextmanager
def mlflow_ui() -> Iterator[str]:
    """The address of MLflow's pages while it serves mlflow.db."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = ["mlflow", "ui", "--backend-store-uri", "sqlite:///mlflow.db", "--artifacts-destination", "mlruns"]
    command += ["--port", str(port), "--workers", "1"]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + PATIENCE
        while not _answers(f"{address}/health"):
            assert server.poll() is None and time.monotonic() < deadline, "mlflow ui does not come up"
            time.sleep(1)
        yield address
    finally:
        server.terminate()
        server.wait()


def mlflow_pictures(address: str) -> None:
    """The pipeline runs, the newest that was evaluated, two such compared where there are two, and the registered policies."""
    client = MlflowClient("sqlite:///mlflow.db")
    experiments = [found for found in client.search_experiments() if found.name != "Default"]
    experiment = max(experiments, key=lambda found: found.last_update_time).experiment_id
    runs = client.search_runs([experiment], order_by=["attributes.start_time DESC"])
    parents = [run.info.run_id for run in runs if PIPELINE_KEY in run.data.tags and EVALUATED in run.data.metrics]
    _picture(f"{address}/#/experiments/{experiment}/runs?viewStateShareKey={KEY}", "Created", "mlflow-runs")
    if parents:
        _picture(f"{address}/#/experiments/{experiment}/runs/{parents[0]}", "Description", "mlflow-run")
    if len(parents) > 1:
        both = quote(json.dumps(parents[:2]))
        _picture(
            f"{address}/#/compare-runs?runs={both}&experiments={quote(json.dumps([experiment]))}",
            "Comparing",
            "mlflow-compare",
            _plotted,
        )
    for model in client.search_registered_models():
        _picture(f"{address}/#/models/{quote(model.name)}", "Aliases", "mlflow-model")


def _plotted(page: Page) -> None:
    """A comparison's plot, of the figures that runs are compared by."""
    page.get_by_role("button", name="Clear All").click()
    for field, keys in enumerate(
        (["ppo.kl_coef"], ["summary.kl", "summary.win_rate_reward", "summary.win_rate_judge"])
    ):
        box = page.get_by_role("combobox").nth(field)
        for key in keys:
            box.click()
            box.fill(key)
            page.get_by_role("option", name=key, exact=True).or_(page.get_by_title(key, exact=True)).last.click()
        box.press("Escape")


def _picture(address: str, awaited: str, name: str, arrange: Callable[[Page], None] = lambda page: None) -> None:
    """A page of MLflow once a text is on it, its assistant's panel closed."""
    with page_in((1900, 700), "light") as (page, _):
        page.set_default_timeout(PATIENCE * 1000)
        page.goto(address)
        page.get_by_text(awaited).first.wait_for()
        page.wait_for_timeout(5000)
        close = page.get_by_role("button", name="Close")
        if close.count():
            close.first.click()
            page.wait_for_timeout(2000)
        arrange(page)
        page.wait_for_timeout(1000)
        page.screenshot(path=IMAGES / f"{name}.png")


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def main() -> None:
    """Exit status 1 where something is not there."""
    if browser_path() is None:
        sys.exit("There is no Chromium on this machine; install one (apt install chromium).")
    if not REPORT.is_file():
        sys.exit(f"There is no {REPORT}; run `make report`.")
    IMAGES.mkdir(exist_ok=True)
    report_pictures()
    if Path("mlflow.db").is_file():
        with mlflow_ui() as address:
            mlflow_pictures(address)
    print(f"screenshots: {', '.join(str(file) for file in sorted(IMAGES.glob('*.png')))}")


if __name__ == "__main__":
    main()
