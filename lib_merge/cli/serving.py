"""The command that opens the Merge tab without a web UI."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from ..errors import FileError, RecipeError
from ..host import Host, standalone

# Where a web UI keeps its models, below its own folder.
_WEBUI = {"checkpoint": "models/Stable-diffusion", "lora": "models/Lora", "vae": "models/VAE"}


@click.command("app")
@click.option("--checkpoints", multiple=True, metavar="DIR", help="Folder of checkpoints; repeatable.")
@click.option("--loras", multiple=True, metavar="DIR", help="Folder of LoRAs; repeatable.")
@click.option("--output", metavar="DIR", help="Folder to save to; default: the first folder of checkpoints.")
@click.option("--webui", metavar="PATH", help="Use the model folders of this web UI.")
@click.option("--demo", is_flag=True, help="Make small sample models and open the tab on them.")
@click.option("--listen", is_flag=True, help="Let other machines open the page; asks for --auth.")
@click.option("--auth", metavar="USER:PASS", help="The page asks for this name and password.")
@click.option("--port", type=click.IntRange(1, 65535), help="Default: the first free one from 7860 on.")
@click.option("--debug", is_flag=True, help="Show a traceback with an error.")
def _app(
    checkpoints: Sequence[str],
    loras: Sequence[str],
    output: str | None,
    webui: str | None,
    demo: bool,
    listen: bool,
    auth: str | None,
    port: int | None,
    debug: bool,
) -> None:
    """Open the Merge tab in a browser, without a web UI around it."""
    user = _auth(auth, listen)
    folders = _folders(checkpoints, loras, webui)
    if demo:
        folders["checkpoint"].append(_demo_models(Path(output or "lib_merge_demo")))
    if not folders["checkpoint"]:
        raise RecipeError(
            "no folder of checkpoints is given", hint="--checkpoints DIR, --webui PATH, or --demo to try it"
        )
    for folder in (*folders["checkpoint"], *folders["lora"]):
        _existing(folder)
    target = _existing(Path(output)) if output else None
    host = standalone(folders["checkpoint"], folders["lora"], folders["vae"], target)
    _serve(host, listen, user, port)


def _folders(checkpoints: Sequence[str], loras: Sequence[str], webui: str | None) -> dict[str, list[Path]]:
    """Kind of model -> folders; a web UI must have one for checkpoints, the others may be missing."""
    folders = {"checkpoint": [*map(Path, checkpoints)], "lora": [*map(Path, loras)], "vae": []}
    if webui is not None:
        _existing(Path(webui, _WEBUI["checkpoint"]))
        for kind, place in _WEBUI.items():
            folders[kind] += [folder for folder in [Path(webui, place)] if folder.is_dir()]
    return folders


def _serve(host: Host, listen: bool, auth: tuple[str, str] | None, port: int | None) -> None:
    from ..app import serve

    def told(url: str) -> None:
        print(f"The Merge tab is at {url}  (Ctrl+C ends it)", flush=True)

    serve(host, listen=listen, auth=auth, port=port, told=told)


def _auth(text: str | None, listen: bool) -> tuple[str, str] | None:
    if listen and not text:
        raise RecipeError("--listen lets others merge and fill your disk", hint="add --auth USER:PASS")
    if text is None:
        return None
    user, colon, password = text.partition(":")
    if not (user and colon and password):
        raise RecipeError("--auth is not a name and a password", hint="write --auth USER:PASS")
    return user, password


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise FileError("there is no such folder", file=folder)
    return folder.absolute()


def _demo_models(folder: Path) -> Path:
    """Sample checkpoints, made where they are not there yet."""
    from ..samples import make_sample

    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(("sample_base", "sample_style", "sample_portraits")):
        path = folder / f"{name}.safetensors"
        if not path.exists():
            print(f"making {path}", flush=True)
            make_sample(path, number)
    return folder
