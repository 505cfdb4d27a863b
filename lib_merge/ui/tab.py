"""The tab as a gradio Blocks, for a host to render or for the standalone page."""

from __future__ import annotations

from typing import Any

from ..host import Host
from . import gr_compat
from .merge_page import MergePage
from .tasks.registry import TASKS

TITLE, ELEMENT = "Merge", "merge_tab"


def merge_tab(host: Host, css: str | None = None, js: str = "") -> Any:
    """Build the tab.

    Args:
        host: the program around it.
        css: of the standalone page; None where a host loads it by itself.
        js: likewise: a function that is called when the page has loaded.
    """
    with gr_compat.blocks(css) as blocks:
        MergePage(host, TASKS).listen(blocks)
        if js:
            gr_compat.on(blocks.load, None, js=js)
    return blocks
