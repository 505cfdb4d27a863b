"""The Merge tab on its own: `python -m lib_merge.app`, the same as `lib-merge app`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import MergeError
from .host import Host


def serve(
    host: Host, *, listen: bool, auth: tuple[str, str] | None, port: int | None, told: Callable[[str], None]
) -> None:
    """Show the tab until the process is interrupted.

    Args:
        host: where models come from.
        listen: other machines may open the page.
        auth: (user, password) that the page asks for.
        port: to serve on; None for the first that is free from 7860 on.
        told: is given the address once the page answers.

    Raises:
        MergeError: gradio is not installed, or the port is taken.
    """
    demo, url = start(host, listen=listen, auth=auth, port=port)
    told(url)
    try:
        demo.block_thread()
    finally:
        demo.close()


def start(host: Host, *, listen: bool, auth: tuple[str, str] | None, port: int | None) -> tuple[Any, str]:
    """As `serve`, but returns (gradio's Blocks, address) as soon as the page answers."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # before gradio is imported: it asks at once
    try:
        from .ui import gr_compat
        from .ui.tab import merge_tab
    except ImportError as error:
        raise MergeError(f"the page needs gradio ({error})", hint="pip install 'lib_merge[app]'") from error
    css = _data("style.css")
    demo = merge_tab(host, css, f"() => {{ {_data('javascript/merge.js')} }}")
    try:
        _, url, _ = gr_compat.launch(
            demo,
            css,
            server_name="0.0.0.0" if listen else "127.0.0.1",
            server_port=port,
            auth=auth,
            prevent_thread_lock=True,
            inbrowser=False,
        )
    except OSError as error:
        raise MergeError(f"the page cannot be served: {error}", hint="name another --port") from error
    return demo, url


def _data(name: str) -> str:
    """A file that lies beside the package in the tree, and inside it in a wheel."""
    here = Path(__file__).resolve().parent
    packed = here / "_data" / name
    return (packed if packed.exists() else here.parent / name).read_text("utf-8")


if __name__ == "__main__":
    from .cli import main

    sys.exit(main(["app", *sys.argv[1:]]))
