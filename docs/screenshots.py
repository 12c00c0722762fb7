"""`make screenshots`: pictures of the report and of MLflow for docs/images/, of whatever run lies here, in a headless Chromium."""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from browser import DESKTOP, PHONE, browser_path, page_in, shown

REPORT = Path("reports/index.html")
IMAGES = Path("docs/images")
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
    server = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + PATIENCE
        while not _answers(f"{address}/health"):
            assert server.poll() is None and time.monotonic() < deadline, "mlflow ui does not come up"
            time.sleep(1)
        yield address
    finally:
        server.terminate()
        server.wait()


def mlflow_pictures(address: str, experiment: str) -> None:
    """The experiment's runs: parents with their stages and the figures that are compared."""
    with page_in((1500, 700), "light") as (page, _):
        page.set_default_timeout(PATIENCE * 1000)
        page.goto(f"{address}/#/experiments/{experiment}/runs")
        page.get_by_text("seed ").first.wait_for()
        page.wait_for_timeout(3000)
        page.screenshot(path=IMAGES / "mlflow-runs.png")


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
            mlflow_pictures(address, "1")
    print(f"screenshots: {', '.join(str(file) for file in sorted(IMAGES.glob('*.png')))}")


if __name__ == "__main__":
    main()
