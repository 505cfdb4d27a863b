"""The pages of the tab as gradio's tabs: built one after the other, turned to by events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import gradio as gr

from . import gr_compat


class Pages:
    """Built inside an open gradio context; each page is filled inside `page`."""

    def __init__(self) -> None:
        self.tabs = gr_compat.own(gr.Tabs(elem_id="merge_pages"))
        self._pages: dict[str, Any] = {}

    @contextmanager
    def page(self, name: str, title: str) -> Iterator[None]:
        """What is built inside stands on the page of that name."""
        with self.tabs, gr.Tab(title, id=name, elem_id=f"merge_page_{name}") as tab:
            self._pages[name] = tab
            yield

    def turn_to(self, name: str) -> dict[Any, Any]:
        """The update of `tabs` that shows a page."""
        return {self.tabs: gr.update(selected=name)}

    def on_select(self, name: str, function: Callable[..., Any], inputs: Iterable[Any], outputs: Iterable[Any]) -> Any:
        """Call a function whenever the page is turned to."""
        return gr_compat.on(self._pages[name].select, function, inputs, outputs)
