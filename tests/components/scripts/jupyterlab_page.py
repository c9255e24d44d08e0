"""In Chromium: run the cells of the notebook at an address, press the stop button of the last cell
once its two workers run, and take pictures. Prints what was seen, as JSON."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

CELL_MS = 90_000


def output(page: Page, number: int, text: str) -> str:
    """The output of a cell, once it has ``text``."""
    cell = page.locator(".jp-Notebook .jp-CodeCell").nth(number)
    cell.locator(".jp-OutputArea-output", has_text=text).first.wait_for(timeout=CELL_MS)
    return "\n".join(cell.locator(".jp-OutputArea-output").all_inner_texts())


def main(chromium: str, address: str, pictures: Path) -> None:
    options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=options)
        page = browser.new_page(viewport={"width": 1200, "height": 1000})
        page.goto(address, timeout=CELL_MS)
        page.locator(".jp-Notebook .jp-CodeCell").nth(3).wait_for(timeout=CELL_MS)
        page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for(timeout=CELL_MS)
        page.locator(".jp-Notebook .jp-CodeCell").first.locator(".cm-content").click()
        for _ in range(4):
            page.keyboard.press("Shift+Enter")
        ran = output(page, 1, "rank 1 of 2")
        used = output(page, 2, "sum")
        output(page, 3, "[1] worker")
        running = output(page, 3, "[0] worker")
        page.screenshot(path=str(pictures / "notebook-running.png"))
        page.locator(
            "[data-command='notebook:interrupt-kernel'], button[title^='Interrupt']"
        ).first.click()
        last = page.locator(".jp-Notebook .jp-CodeCell").nth(3)
        last.locator(".jp-InputPrompt", has_text="[4]:").wait_for(timeout=CELL_MS)
        stopped = output(page, 3, "KeyboardInterrupt")
        page.screenshot(path=str(pictures / "notebook-stopped.png"))
        browser.close()
    workers = re.findall(r"worker (\d+)", running)
    print(json.dumps({"ran": ran, "used": used, "stopped": stopped, "workers": workers}))


main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
