"""Every difference between gradio 3.41, 4.40, 5 and 6 that the tab meets; its other files know one gradio."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gradio as gr

MAJOR = int(gr.__version__.split(".")[0])


def supported(function: Callable[..., Any], **wanted: Any) -> dict[str, Any]:
    """Those keyword arguments that this gradio's version of a constructor, event or function takes by name."""
    taken = inspect.signature(function).parameters
    return {name: value for name, value in wanted.items() if name in taken}


def own(component: Any) -> Any:
    """Keep a component out of the host's `ui-config.json`, where the first default ever seen wins for good."""
    component.do_not_save_to_config = True
    return component


def on(
    listener: Callable[..., Any],
    function: Callable[..., Any] | None,
    inputs: Iterable[Any] = (),
    outputs: Iterable[Any] = (),
    *,
    js: str | None = None,
    queue: bool = False,
    latest_only: bool = False,
    api_name: str = "",
) -> Any:
    """Listen to an event, without gradio's own progress over our cards, and out of the API unless it is named.

    Args:
        listener: `button.click`, `blocks.load` …
        function: None for an event that is answered in the page alone.
        inputs: components whose values it takes.
        outputs: components that it updates.
        js: a function for the page, before `function`.
        queue: it is a generator, which needs the queue.
        latest_only: while it runs, further events wait and only the last of them is answered.
        api_name: of an event that other programs may call.
    """
    wanted: dict[str, Any] = {
        "api_name": api_name or False,
        "show_api": bool(api_name),
        "api_visibility": "public" if api_name else "private",
        "show_progress": "hidden",
        # None: hosts that allow one run of each event at a time would keep a second page waiting
        "concurrency_limit": None,
        "trigger_mode": "always_last" if latest_only else "multiple",
        "_js" if MAJOR < 4 else "js": js,
        "queue": queue if function else None,
    }
    if MAJOR >= 6 and not api_name:
        del wanted["api_name"]  # there it takes names only
    return listener(function, list(inputs), list(outputs), **supported(listener, **wanted))


def while_typing(component: Any, function: Callable[..., Any], inputs: Sequence[Any], outputs: Iterable[Any]) -> None:
    """Answer each change of a text as it is typed, the last one for certain."""
    waiting = None
    if MAJOR < 4:  # answers may overtake each other there: it asks when the keys have rested
        waiting = (
            "(...values) => new Promise(done => { clearTimeout(window.libMergeTyping);"
            f" window.libMergeTyping = setTimeout(() => done(values.slice(0, {len(inputs)})), 300); }})"
        )
    on(component.input, function, inputs, outputs, js=waiting, latest_only=True)


def button(text: str, **kwargs: Any) -> Any:
    """A button."""
    return own(gr.Button(text, **supported(gr.Button.__init__, **kwargs)))


def html(value: str = "", *, close: bool = False, **kwargs: Any) -> Any:
    """HTML as it is, without the padding that some versions add; `close`: it belongs to the entry above it."""
    classes = ["lm-holder", "lm-close"] if close else ["lm-holder"]
    return gr.HTML(value, **supported(gr.HTML.__init__, padding=False, elem_classes=classes, **kwargs))


def choice(choices: list[str], value: str | None, **kwargs: Any) -> Any:
    """A list to choose one text from; nothing is chosen where `value` is None, which newer versions must be told."""
    return own(gr.Dropdown(choices, value=value, **supported(gr.Dropdown.__init__, filterable=True, **kwargs)))


def row(**kwargs: Any) -> Any:
    """A row whose entries end at the same height or not, as said and not as the version would have it."""
    return gr.Row(**{"equal_height": False, **kwargs})


def edits(component: Any) -> list[Callable[..., Any]]:
    """The events by which a user, and no program, changes a component's value.

    A slider tells at the end of a drag, a text when it is left: each of them asks for a new plan.
    """
    if isinstance(component, gr.Textbox):
        return [component.blur, component.submit]
    if isinstance(component, gr.Slider):
        return [component.release]
    return [component.change] if isinstance(component, gr.Number) else [component.input]


def blank(value: Any) -> Any:
    """None for what an empty list gives: '' or [] or None, by version."""
    return None if value in ("", []) else value


def blocks(css: str | None) -> Any:
    """Blocks for a host to render (css None), or the outermost ones of the standalone page.

    The standalone page has system fonts: it asks no other machine for anything.
    """
    look = {} if css is None or MAJOR >= 6 else {"css": css, "theme": _theme()}
    return gr.Blocks(analytics_enabled=False, **look)


def launch(demo: Any, css: str, **kwargs: Any) -> Any:
    """Serve the standalone page; returns what gradio's `launch` returns."""
    queueing = {"concurrency_count": 16} if MAJOR < 4 else {"default_concurrency_limit": 16}
    demo.queue(**supported(demo.queue, **queueing))
    look = {"css": css, "theme": _theme()} if MAJOR >= 6 else {}
    wanted = {"show_api": False, "ssr_mode": False, "quiet": True, "footer_links": [], "share": False, **look, **kwargs}
    return demo.launch(**supported(demo.launch, **wanted))


def _theme() -> Any:
    fonts = ["ui-sans-serif", "system-ui", "sans-serif"]
    mono = ["ui-monospace", "Consolas", "monospace"]
    return gr.themes.Default(font=fonts, font_mono=mono)
