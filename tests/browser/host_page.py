"""Runs a stand-in for a web UI with our tab in it; started by the tests in an environment with that host's gradio.

The page around the tab mirrors what the hosts do: extensions' Blocks rendered in a TabItem, `ui-config.json` written
from what is not excluded, our script and style loaded by the page.
"""

import json
import sys
from pathlib import Path

import gradio as gr
from modules import family, paths, script_callbacks, scripts, sd_models, shared

CONFIG = Path(paths.data_path) / "ui-config.json"


def saved(blocks, prefix):
    """The components whose first values a host would keep for ever."""
    kinds = (gr.Slider, gr.Radio, gr.Checkbox, gr.Textbox, gr.Number, gr.Dropdown, gr.Button)
    found = [b for b in blocks.blocks.values() if type(b) in kinds and not getattr(b, "do_not_save_to_config", False)]
    return [f"{prefix}/{getattr(b, 'label', None) or getattr(b, 'value', '')}" for b in found]


def build():
    """The host's page; called at the start and at every Reload UI."""
    sd_models.list_models()
    scripts.load_scripts()
    tabs = script_callbacks.ui_tabs_callback()
    kept = [name for interface, _, element in tabs for name in saved(interface, element)]
    CONFIG.write_text(json.dumps(kept))
    extension = next(Path(paths.extensions_dir).iterdir())
    theme = gr.themes.Default(font=["sans-serif"], font_mono=["monospace"])  # no fonts from elsewhere
    with gr.Blocks(css=(extension / "style.css").read_text(), theme=theme, analytics_enabled=False) as demo:
        with gr.Tabs(elem_id="tabs"):
            for interface, title, element in tabs:
                with gr.TabItem(title, id=element, elem_id=f"tab_{element}"):
                    interface.render()
        script = (extension / "javascript" / "merge.js").read_text()
        # Hosts translate by replacing texts in the page.
        texts = "document.querySelectorAll('#merge_root label > span')"
        translate = f"{texts}.forEach(e => {{ e.textContent = '\u8a33 ' + e.textContent }})"
        demo.load(None, [], [], **{JS: f"() => {{ window.gradioApp = () => document; {script}; {translate} }}"})
    return demo


JS = "_js" if gr.__version__.startswith("3") else "js"

if __name__ == "__main__":
    build()  # Reload UI builds everything anew in the same process
    page = build()
    if not shared.cmd_opts.no_gradio_queue:
        page.queue(64)
    page.launch(
        server_name="127.0.0.1", server_port=int(sys.argv[1]), share=False, quiet=True, prevent_thread_lock=True
    )
    print(family.NAME, "serves", flush=True)
    page.block_thread()
