"""The calls of `api.py` as named endpoints of gradio, for `gradio_client`: texts in, JSON text out."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import gradio as gr

from ..host import Host
from . import api, gr_compat


def add_endpoints(host: Host) -> None:
    """Build the endpoints inside an open gradio context; nothing of them is seen in the page."""
    with gr.Column(visible=False, elem_id="merge_api"):
        asked = [_text(name) for name in api.ASKED]
        which = _text("which")
        answer = _text("answer")
        press = gr_compat.button("call", elem_id="merge_api_call")
    for name in api.CALLS:
        _endpoint(press, name, partial(api.submit, host, name), asked, answer)
    _endpoint(press, "plan", partial(api.plan, host), asked, answer)
    _endpoint(press, "job", lambda id: api.job(host, id) if id else api.jobs(host), [which], answer)
    _endpoint(press, "stop", partial(api.stop, host), [which], answer)
    _endpoint(press, "models", partial(api.models, host), [which], answer)


def _text(name: str) -> Any:
    value = "number" if name == "exists" else ""
    return gr_compat.own(gr.Textbox(value=value, label=f"api {name}", elem_id=f"merge_api_{name}"))


def _endpoint(press: Any, name: str, function: Callable[..., api.Answer], inputs: list[Any], answer: Any) -> None:
    def called(*values: str) -> str:
        return json.dumps(api.answered(function, *values), ensure_ascii=False)

    gr_compat.on(press.click, called, inputs, [answer], api_name=name)
