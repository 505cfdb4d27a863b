"""Entry of the Merge tab in a web UI: runs at its start and again at every Reload UI."""

import sys
from pathlib import Path

from modules import script_callbacks

# Some hosts take an extension's folder off the path once its scripts have run: what is imported here stays.
root = str(Path(__file__).resolve().parent.parent)
if root not in sys.path:
    sys.path.insert(0, root)

try:
    from lib_merge import webui
except ImportError as error:
    missing = error.name or str(error)
else:
    missing = ""


def tabs():
    """The tab, built anew each time; where something is not installed, one line that says what."""
    if missing:
        import gradio

        with gradio.Blocks(analytics_enabled=False) as blocks:
            gradio.HTML(f"<p>The Merge tab needs the Python package <b>{missing}</b>: install it and restart.</p>")
        return [(blocks, "Merge", "merge_tab")]
    from lib_merge.ui.tab import ELEMENT, TITLE, merge_tab

    return [(merge_tab(webui.host()), TITLE, ELEMENT)]


def routes(demo, app):
    """The calls of other programs, where the host was started with an API of its own, behind its own passwords."""
    if missing or (users := webui.api_users()) is None:
        return
    from lib_merge.ui.routes import add_routes

    add_routes(app, webui.host(), users)


script_callbacks.on_ui_tabs(tabs)
script_callbacks.on_app_started(routes)
