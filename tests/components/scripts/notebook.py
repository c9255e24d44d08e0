"""Run the cells of a notebook, given as JSON on stdin, in a real kernel: nbclient. Prints the
outputs of each cell as JSON. With ``--stop TEXT`` the kernel is interrupted, as by the stop button,
as soon as a cell prints TEXT, and the next cells run all the same."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import nbformat
from nbclient import NotebookClient

STOP = sys.argv[2] if sys.argv[1:2] == ["--stop"] else ""


class Client(NotebookClient):
    """Presses the stop button, once."""

    pressed: asyncio.Task[None] | None = None

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        text = msg.get("content", {}).get("text", "")
        if STOP and self.pressed is None and STOP in text:
            self.pressed = asyncio.ensure_future(self.km.interrupt_kernel())
        return super().process_message(msg, cell, cell_index)


async def main() -> None:
    cells = [nbformat.v4.new_code_cell(each) for each in json.load(sys.stdin)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = Client(notebook, kernel_name="python3", timeout=240, allow_errors=True)
    async with client.async_setup_kernel():
        for number, cell in enumerate(notebook.cells):
            await client.async_execute_cell(cell, number)
    print(json.dumps([cell.outputs for cell in notebook.cells]))


asyncio.run(main())
