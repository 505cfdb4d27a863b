"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from .. import report

Command = Callable[..., Any]


def options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several click options as one decorator, shown in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
debug_option = click.option("--debug", is_flag=True, help="Show a traceback with an error.")
models_option = click.option("--models", multiple=True, metavar="DIR", help="Folder to look for inputs in; repeatable.")
glob_option = click.option("--glob", is_flag=True, help="Patterns are globs (* ?) instead of regular expressions.")
discard_option = click.option("--discard", multiple=True, metavar="P", help="Leave matching tensors out; repeatable.")
vae_option = click.option("--vae", metavar="FILE", help="Take the VAE from this file.")
lora_alpha_option = click.option("--lora-alpha", type=float, metavar="X", help="Alpha of LoRAs that carry none.")
dtype_options = options(
    click.option(
        "--save-dtype",
        default="auto",
        show_default=True,
        help="auto, keep, fp64, fp32, fp16, bf16, fp8_e4m3fn or fp8_e5m2; wider sources stay wider.",
    ),
    click.option("--override-dtype", is_flag=True, help="Force every float tensor to --save-dtype."),
    click.option("--metadata", metavar="JSON", help="Extra header metadata, a JSON object."),
)
running_options = options(
    click.option("--report", "report_path", metavar="FILE", help="Write a per-tensor report: .csv, .json or .html."),
    click.option("--overwrite", is_flag=True, help="Replace an existing output."),
    click.option("--number", is_flag=True, help="Write NAME_1, NAME_2 … where the output exists."),
    click.option("--no-recipe", is_flag=True, help="Store nothing that names the inputs."),
    click.option("--hash", "hash_output", is_flag=True, help="Compute the output's sha256."),
    click.option("--no-fsync", is_flag=True, help="Do not wait until the output is on the disk."),
    click.option("--threads", type=click.IntRange(1), help="Worker threads; default: the cores, at most 8."),
    click.option("--device", default="cpu", show_default=True, help="Where methods are computed: cpu or cuda."),
    click.option("--dry-run", is_flag=True, help="Print the plan and write nothing."),
    click.option("--strict", is_flag=True, help="Warnings count as errors."),
    json_option,
    debug_option,
)
writing_options = options(
    click.option("-o", "--output", required=True, metavar="OUT", help="File (.safetensors) to write, or folder."),
    running_options,
)


def asked(given: Mapping[str, Any]) -> tuple[bool, Path | None, dict[str, Any]]:
    """What a command with `running_options` was told.

    Args:
        given: its options by name.

    Returns:
        Whether JSON is wanted, where the report goes (None: nowhere), and the other options as the library calls them.

    Raises:
        MergeError: the report cannot be written there.
    """
    how = dict(given)
    as_json, table = how.pop("as_json"), how.pop("report_path")
    how.pop("debug")
    path = Path(table) if table else None
    if path is not None:
        path = report.numbered(path) if how["number"] else path
        report.check_report_path(path, how["overwrite"])
    how["keep_recipe"] = not how.pop("no_recipe")
    how["hash"] = how.pop("hash_output") or as_json
    how["fsync"] = not how.pop("no_fsync")
    return as_json, path, how
