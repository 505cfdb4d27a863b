"""The tab as a gradio Blocks, for a host to render or for the standalone page."""

from __future__ import annotations

from typing import Any

import gradio as gr

from ..host import Host
from . import gr_compat
from .endpoints import add_endpoints
from .history_page import HistoryPage
from .merge_page import MergePage
from .pages import Pages
from .recipes_page import RecipesPage
from .report_page import ReportPage
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
        with gr.Column(elem_id="merge_root"):
            pages = Pages()
            with pages.page("merge", "Merge"):
                merging = MergePage(host, TASKS)
            with pages.page("report", "Report"):
                report = ReportPage(host)
            with pages.page("recipes", "Recipes"):
                recipes = RecipesPage(host)
            with pages.page("history", "History"):
                history = HistoryPage(host)
        merging.listen(blocks)
        report.listen(blocks, pages)
        recipes.listen(blocks, merging, pages)
        history.listen(blocks, merging, pages)
        add_endpoints(host)
        if js:
            gr_compat.on(blocks.load, None, js=js)
    return blocks
