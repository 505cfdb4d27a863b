"""The command line `lib-merge`: options to recipes, results to text or one JSON object. The only place that prints."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from . import report
from .catalog import Catalog, refuse_missing, search
from .cli_parse import metadata_object, model_argument, parameters, read_recipe, rule
from .cli_text import describe_plan, describe_result, inspect_text, method_dict, method_text, methods_table, plan_dict
from .errors import MergeError, OutputError, PlanError, Problem, RecipeError
from .events import Progress
from .execute import Result
from .files.hashes import HashCache
from .inspection import inspect
from .kernels.registry import all_methods, method
from .merge import convert, merge, run
from .recipe import to_json
from .verify import verify
from .version import __version__

Command = Callable[..., Any]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="lib-merge")
def cli() -> None:
    """Merge checkpoints by streaming: exact, reproducible, verifiable, in a few hundred MB of memory."""


def _options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several click options as one decorator, shown in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
_debug_option = click.option("--debug", is_flag=True, help="Show a traceback with an error.")
_models_option = click.option(
    "--models", multiple=True, metavar="DIR", help="Folder to look for inputs in; repeatable."
)
_glob_option = click.option("--glob", is_flag=True, help="Patterns are globs (* ?) instead of regular expressions.")
_discard_option = click.option("--discard", multiple=True, metavar="P", help="Leave matching tensors out; repeatable.")
_vae_option = click.option("--vae", metavar="FILE", help="Take the VAE from this file.")
_dtype_options = _options(
    click.option(
        "--save-dtype",
        default="auto",
        show_default=True,
        help="auto, keep, fp64, fp32, fp16, bf16, fp8_e4m3fn or fp8_e5m2; wider sources stay wider.",
    ),
    click.option("--override-dtype", is_flag=True, help="Force every float tensor to --save-dtype."),
    click.option("--metadata", metavar="JSON", help="Extra header metadata, a JSON object."),
)
_writing_options = _options(
    click.option("-o", "--output", required=True, metavar="OUT", help="File (.safetensors) to write, or folder."),
    click.option("--report", "report_path", metavar="FILE", help="Write a per-tensor report: .csv, .json or .html."),
    click.option("--overwrite", is_flag=True, help="Replace an existing output."),
    click.option("--number", is_flag=True, help="Write NAME_1, NAME_2 … where the output exists."),
    click.option("--no-recipe", is_flag=True, help="Store nothing that names the inputs."),
    click.option("--hash", "hash_output", is_flag=True, help="Compute the output's sha256."),
    click.option("--no-fsync", is_flag=True, help="Do not wait until the output is on the disk."),
    click.option("--threads", type=click.IntRange(1), help="Worker threads; default: the cores, at most 8."),
    click.option("--dry-run", is_flag=True, help="Print the plan and write nothing."),
    click.option("--strict", is_flag=True, help="Warnings count as errors."),
    _json_option,
    _debug_option,
)


@cli.command("merge")
@click.argument("models", nargs=-1, required=True, metavar="A B [C ...]")
@click.option("--method", "method_id", default="weighted_sum", show_default=True, help="See `lib-merge methods`.")
@click.option("-p", "params", multiple=True, metavar="NAME=VALUE", help="A parameter of the method; repeatable.")
@click.option("--alpha", type=float, help="Short for -p alpha=…")
@click.option("--beta", type=float, help="Short for -p beta=…")
@click.option("--gamma", type=float, help="Short for -p gamma=…")
@click.option("--delta", type=float, help="Short for -p delta=…")
@click.option(
    "--rule",
    "rules",
    multiple=True,
    metavar='"P: NAME=VALUE …"',
    help="Parameters of matching tensors; later rules win.",
)
@click.option("--blocks", metavar="TEXT", help="BASE=0,IN00-IN05=0.2,M00=0.5,OUT=0.7, or 12/17/20/26/61 numbers.")
@click.option(
    "--mismatch", default="skip", show_default=True, help="Tensors that B lacks: skip (keep A's), zeros or error."
)
@click.option("--exclude", multiple=True, metavar="P", help="Matching tensors keep A's values; repeatable.")
@click.option("--include-mode", is_flag=True, help="Merge only what --exclude matches.")
@_discard_option
@_glob_option
@_vae_option
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of random methods.")
@_dtype_options
@_writing_options
def _merge(
    models: Sequence[str],
    method_id: str,
    params: Sequence[str],
    rules: Sequence[str],
    blocks: str | None,
    vae: str | None,
    metadata: str | None,
    **options: Any,
) -> None:
    """Merge checkpoints: A is the base, the output follows it."""
    paths = [model_argument(text, method_id) for text in models]
    short = {name: options.pop(name) for name in ("alpha", "beta", "gamma", "delta")}
    given = parameters(params, {name: value for name, value in short.items() if value is not None})
    if len(paths) < 2:
        raise RecipeError(f"{method_id} needs at least two models", hint="lib-merge merge A B -o OUT")
    _finish(
        lambda how: merge(
            *paths,
            out=how.pop("out"),
            method=method_id,
            params=given,
            rules=[rule(r) for r in rules],
            blocks=blocks or "",
            vae=vae,
            metadata=metadata_object(metadata),
            **how,
        ),
        options,
    )


@cli.command("convert")
@click.argument("model", metavar="A")
@_vae_option
@_discard_option
@_glob_option
@click.option("--only", metavar="unet|te|vae", help="Keep one component alone.")
@_dtype_options
@_writing_options
def _convert(model: str, metadata: str | None, **options: Any) -> None:
    """Write a checkpoint anew: other dtype, other VAE, fewer tensors, a pickle as safetensors."""
    _finish(lambda how: convert(model, out=how.pop("out"), metadata=metadata_object(metadata), **how), options)


@cli.command("run")
@click.argument("recipe", metavar="RECIPE")
@_models_option
@_writing_options
def _run(recipe: str, models: Sequence[str], **options: Any) -> None:
    """Run a recipe again: a .json file, or a merged file that holds one. Inputs beside it are found by themselves."""
    path = Path(recipe)

    def again(how: dict[str, Any]) -> Result:
        wanted = read_recipe(path)
        catalog = Catalog([Path(folder) for folder in models], HashCache(), near=[path.absolute().parent])
        located, missing = search(wanted, {}, catalog)
        refuse_missing(missing)
        return run(wanted, out=how.pop("out"), files=located, **how)

    _finish(again, options)


@cli.command("verify")
@click.argument("out", metavar="OUT")
@_models_option
@click.option("--threads", type=click.IntRange(1), help="Worker threads.")
@_json_option
@_debug_option
def _verify(out: str, models: Sequence[str], threads: int | None, as_json: bool, debug: bool) -> None:
    """Compute a merged model anew from its recipe and compare it byte for byte."""
    with _Bar() as bar:
        found = verify(out, models=models, threads=threads, on_progress=bar)
    if as_json:
        _print_json(found.to_dict())
    elif found.missing_inputs:
        print(f"not verified: {', '.join(found.missing_inputs)} not found; name the folder with --models DIR")
    elif found.differing:
        print(f"different: {len(found.differing)} of {found.compared} tensors differ")
        print("\n".join(f"  {key}" for key in found.differing[:20]))
    else:
        near = f"; {len(found.within_2_ulp)} differ within 2 ulp (another CPU)" if found.within_2_ulp else ""
        print(f"verified: {found.compared} tensors are what the recipe says{near}")
    if not found.ok:
        raise SystemExit(1)


@cli.command("inspect")
@click.argument("file", metavar="FILE")
@click.option("--check", is_flag=True, help="Read all numbers and look for NaN and infinities.")
@_json_option
@_debug_option
def _inspect(file: str, check: bool, as_json: bool, debug: bool) -> None:
    """Say what a model file is, from its header."""
    found = inspect(file, check=check)
    _print_json(found) if as_json else print(inspect_text(found))
    if found.get("damaged"):
        raise SystemExit(1)


@cli.command("recipe")
@click.argument("file", metavar="FILE")
@_json_option
@_debug_option
def _recipe(file: str, as_json: bool, debug: bool) -> None:
    """Print the recipe that a merged file holds."""
    _print_json(json.loads(to_json(read_recipe(Path(file)))), indent=None if as_json else 2)


@cli.command("methods")
@click.argument("method_id", required=False, metavar="[ID]")
@click.option("--all", "show_all", is_flag=True, help="Compatibility methods too.")
@_json_option
@_debug_option
def _methods(method_id: str | None, show_all: bool, as_json: bool, debug: bool) -> None:
    """List the merge methods, or show one with formula and parameters."""
    chosen = [method(method_id)] if method_id else list(all_methods().values())
    if as_json:
        _print_json({"methods": [method_dict(item) for item in chosen]})
    else:
        print(method_text(chosen[0]) if method_id else methods_table(chosen))


@cli.command("demo")
@click.option("-o", "--output", "folder", default="lib_merge_demo", show_default=True, metavar="DIR")
@click.option("--overwrite", is_flag=True, help="Replace the files of an earlier demo.")
@_debug_option
def _demo(folder: str, overwrite: bool, debug: bool) -> None:
    """Make two small sample checkpoints with SD1.5's tensor names, merge, report and verify them."""
    from .samples import make_sample

    root = Path(folder)
    out, table = root / "merged.safetensors", root / "report.html"
    a, b = (root / f"sample_{name}.safetensors" for name in "ab")
    for path in (a, b, out, table):
        if path.exists() and not overwrite:
            raise OutputError("the demo would replace a file", file=path, hint="name another folder, or --overwrite")
    root.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate((a, b)):
        make_sample(path, number)
    print(f"made {a} and {b}\n\n$ lib-merge merge {a} {b} --alpha 0.3 -o {out} --report {table} --overwrite")
    made = merge(a, b, out=out, alpha=0.3, report=True, overwrite=True)
    report.save(made.rows or [], table, out.name)
    print(describe_result(made), f"\n\n$ lib-merge verify {out}", sep="")
    found = verify(out)
    print(f"{'verified' if found.ok else 'different'}: {found.compared} tensors are what the recipe says")
    print(f"\nThe report is in {table}. The same for your own files:")
    print("  lib-merge merge A.safetensors B.safetensors --alpha 0.3 -o mix.safetensors")
    if not found.ok:
        raise SystemExit(1)


def _finish(work: Callable[[dict[str, Any]], Result], options: dict[str, Any]) -> None:
    """Run a writing command with its common options and print what came of it."""
    as_json, table = options.pop("as_json"), options.pop("report_path")
    options.pop("debug")
    report_path = Path(table) if table else None
    if report_path is not None:
        report_path = report.numbered(report_path) if options["number"] else report_path
        report.check_report_path(report_path, options["overwrite"])
    how = {
        **options,
        "out": options["output"],
        "keep_recipe": not options["no_recipe"],
        "hash": options["hash_output"] or as_json,
        "fsync": not options["no_fsync"],
        "report": report_path is not None,
    }
    for name in ("output", "no_recipe", "hash_output", "no_fsync"):
        how.pop(name)
    with _Bar() as bar:
        made = work({**how, "on_progress": bar})
    if options["dry_run"]:
        _print_json(plan_dict(made.plan)) if as_json else print(describe_plan(made.plan))
        if errors := made.plan.errors():
            _print_problems(errors)
            raise SystemExit(1)
        return
    if report_path is not None:
        report.save(made.rows or [], report_path, made.output.name)
    _print_json(made.to_dict()) if as_json else print(describe_result(made))


class _Bar:
    """A progress bar on stderr, only where somebody watches."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __call__(self, progress: Progress) -> None:
        if self._bar is None:
            from tqdm import tqdm  # here: what only reads headers shows no bar and need not wait for it

            self._bar = tqdm(total=progress.total_bytes, unit="B", unit_scale=True, disable=None, leave=False)
        self._bar.set_description(progress.stage, refresh=False)
        self._bar.update(progress.done_bytes - self._bar.n)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _print_json(value: Any, indent: int | None = None) -> None:
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, indent=indent, ensure_ascii=not unicode))


def _print_error(error: MergeError, as_json: bool) -> None:
    only = Problem("error", error.what, error.file, error.tensor, error.hint)
    problems = error.problems if isinstance(error, PlanError) else (only,)
    if as_json:
        fields = {"what": error.what, "file": error.file, "tensor": error.tensor, "hint": error.hint}
        _print_json({"error": fields, "problems": [vars(problem) for problem in problems]})
    _print_problems(problems)


def _print_problems(problems: Iterable[Problem]) -> None:
    for item in problems:
        where = [f"{name} {value}" for name, value in (("file", item.file), ("tensor", item.tensor)) if value]
        print(f"error: {item.what}" + (f" ({', '.join(where)})" if where else ""), file=sys.stderr)
        if item.hint:
            print(f"hint: {item.hint}", file=sys.stderr)


def _print_usage_error(error: click.UsageError) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command: click shows the help
        error.show()
        return
    print(f"error: {error.format_message()}", file=sys.stderr)
    command = error.ctx.command_path if error.ctx else "lib-merge"
    print(f"hint: {command} --help", file=sys.stderr)


def _terminated(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; None takes those of the process.

    Returns:
        0 done or check passed, 1 stopped or failed, 2 the command line cannot be parsed, 130 interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):  # a console that lacks a character shows its number instead
        with suppress(AttributeError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, _terminated)
    try:
        cli.main(args=words, prog_name="lib-merge", standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        _print_usage_error(error)
        return 2
    except (click.Abort, KeyboardInterrupt):
        print("error: interrupted; nothing was written under the output's name", file=sys.stderr)
        return 130
    except MergeError as error:
        if "--debug" in words:
            raise
        _print_error(error, "--json" in words)
        return 1
    except SystemExit as stop:
        return int(stop.code or 0)
    except BrokenPipeError:  # who read our output has gone
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for what Python still flushes at its end
        return 1
    except Exception as error:
        if "--debug" in words:
            raise
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        print("hint: this should not happen: run it again with --debug and report what it shows", file=sys.stderr)
        return 1
    return 0
