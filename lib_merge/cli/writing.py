"""Commands that write models: merge, bake, convert, run, demo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from .. import report
from ..catalog import Catalog, refuse_missing, search
from ..errors import OutputError, RecipeError
from ..execute import Result
from ..files.hashes import HashCache
from ..files.publish import output_errors
from ..lora import TASKS
from ..merge import bake, convert, merge, run
from ..recipe import files
from ..verify import verify
from .folding import finish_fold
from .keeping import kept_recipe, with_inputs
from .lora import finish as finish_lora
from .options import (
    asked,
    debug_option,
    discard_option,
    dtype_options,
    glob_option,
    lora_alpha_option,
    models_option,
    vae_option,
    writing_options,
)
from .parse import lora_argument, metadata_object, model_argument, parameters, rule
from .show import Bar, error_fields, print_json, print_problems
from .text import describe_plan, describe_result, plan_dict, report_header


@click.command("merge")
@click.argument("models", nargs=-1, required=True, metavar="A B[@W] [C[@W] ...]")
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
@click.option(
    "--blocks",
    metavar="TEXT",
    help="BASE=0,IN00-IN05=0.2,M00=0.5,OUT=0.7, a shape (see `lib-merge blocks`), or 12/17/20/26/61 numbers.",
)
@click.option(
    "--mismatch", default="skip", show_default=True, help="Tensors that B lacks: skip (keep A's), zeros or error."
)
@click.option(
    "--allow-mixed-prediction",
    is_flag=True,
    help="Merge although only one of A and B has the marker v_pred or ztsnr; A's markers stay.",
)
@click.option("--exclude", multiple=True, metavar="P", help="Matching tensors keep A's values; repeatable.")
@click.option("--include-mode", is_flag=True, help="Merge only what --exclude matches.")
@discard_option
@glob_option
@vae_option
@click.option(
    "--lora",
    "loras",
    multiple=True,
    metavar="FILE[@W[@TE_W]][:BLOCKS]",
    help="Bake this LoRA into the result; repeatable.",
)
@lora_alpha_option
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of random methods.")
@dtype_options
@writing_options
def _merge(
    models: Sequence[str],
    method_id: str,
    params: Sequence[str],
    rules: Sequence[str],
    blocks: str | None,
    vae: str | None,
    loras: Sequence[str],
    metadata: str | None,
    **options: Any,
) -> None:
    """Merge checkpoints: A is the base, the output follows it.

    Methods that take any number of models (auto) take a strength for each but A: B@0.8 C@0.5
    """
    paths = [model_argument(text, method_id) for text in models]
    short = {name: options.pop(name) for name in ("alpha", "beta", "gamma", "delta")}
    given = parameters(params, {name: value for name, value in short.items() if value is not None})
    if len(paths) < 2:
        raise RecipeError(f"{method_id} needs at least two models", hint="lib-merge merge A B -o OUT")
    base, *others = paths
    if isinstance(base, tuple):
        raise RecipeError("model A is the base and takes no strength", hint=f"write {base[0]}")
    _finish(
        lambda how: merge(
            base,
            *others,
            out=how.pop("out"),
            method=method_id,
            params=given,
            rules=[rule(r) for r in rules],
            blocks=blocks or "",
            vae=vae,
            loras=[lora_argument(text) for text in loras],
            metadata=metadata_object(metadata),
            **how,
        ),
        options,
    )


@click.command("bake")
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.argument("loras", nargs=-1, required=True, metavar="LORA[@W[@TE_W]][:BLOCKS] ...")
@click.option("--blocks", metavar="TEXT", help="Block weights: numbers that multiply the strength, 1 where not named.")
@lora_alpha_option
@click.option("--exclude", multiple=True, metavar="P", help="Matching tensors keep their values; repeatable.")
@click.option("--include-mode", is_flag=True, help="Bake only into what --exclude matches.")
@glob_option
@dtype_options
@writing_options
def _bake(checkpoint: str, loras: Sequence[str], blocks: str | None, metadata: str | None, **options: Any) -> None:
    """Add LoRAs to a checkpoint, each with its strength W and, for the text encoders, TE_W.

    Every adapter format counts: LoRA, LoCon, LoHa, LoKr, DoRA, OFT, full differences, PEFT folders. Strengths may be
    negative. BLOCKS are block weights of one LoRA: style.safetensors@0.8:BASE=0,IN00-IN05=0.5
    """
    given = [lora_argument(text) for text in loras]
    _finish(
        lambda how: bake(
            checkpoint,
            *given,
            out=how.pop("out"),
            blocks=blocks or "",
            metadata=metadata_object(metadata),
            **how,
        ),
        options,
    )


@click.command("convert")
@click.argument("model", metavar="A")
@vae_option
@discard_option
@glob_option
@click.option("--only", metavar="unet|te|vae", help="Keep one component alone.")
@dtype_options
@writing_options
def _convert(model: str, metadata: str | None, **options: Any) -> None:
    """Write a checkpoint anew: other dtype, other VAE, fewer tensors, a pickle as safetensors."""
    _finish(lambda how: convert(model, out=how.pop("out"), metadata=metadata_object(metadata), **how), options)


@click.command("run")
@click.argument("recipe", metavar="RECIPE")
@click.argument("inputs", nargs=-1, metavar="[MODEL ...]")
@click.option(
    "--lora", "loras", multiple=True, metavar="FILE[@W[@TE_W]][:BLOCKS]", help="One LoRA more than the recipe has."
)
@models_option
@writing_options
def _run(recipe: str, inputs: Sequence[str], loras: Sequence[str], models: Sequence[str], **options: Any) -> None:
    """Run a recipe: a .json file, a merged file that holds one, or a preset by name (see `lib-merge presets`).

    MODEL … are for the slots that it leaves open, A first. Inputs beside a recipe's file are found by themselves.
    """
    path = Path(recipe)
    wanted = kept_recipe(recipe)
    wanted, given = with_inputs(wanted, inputs, [lora_argument(text) for text in loras])

    def again(how: dict[str, Any]) -> Any:
        how.pop("output", None)
        catalog = Catalog([Path(folder) for folder in models], HashCache(), near=[path.absolute().parent])
        located, missing = search(wanted, given, catalog)
        refuse_missing(missing)
        return run(wanted, out=how.pop("out"), files=located, **how)

    if wanted.task == "fold":
        named = {slot: str(found.file) for slot, found in files(wanted)}
        told = named.get("DENSE", ""), named.get("lora1", ""), named.get("SHIPPED", "")
        finish_fold(lambda how: again({**how, "out": how["output"]}), options, told)
    else:
        (finish_lora if wanted.task in TASKS else _finish)(again, options)


@click.command("demo")
@click.option("-o", "--output", "folder", default="lib_merge_demo", show_default=True, metavar="DIR")
@click.option("--overwrite", is_flag=True, help="Replace the files of an earlier demo.")
@debug_option
def _demo(folder: str, overwrite: bool, debug: bool) -> None:
    """Make two small sample checkpoints with SD1.5's tensor names, merge, report and verify them."""
    from ..samples import make_sample

    root = Path(folder)
    out, table = root / "merged.safetensors", root / "report.html"
    a, b = (root / f"sample_{name}.safetensors" for name in "ab")
    for path in (a, b, out, table):
        if path.exists() and not overwrite:
            raise OutputError("the demo would replace a file", file=path, hint="name another folder, or --overwrite")
    with output_errors(root):
        root.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate((a, b)):
        make_sample(path, number)
    print(f"made {a} and {b}\n\n$ lib-merge merge {a} {b} --alpha 0.3 -o {out} --report {table} --overwrite")
    made = merge(a, b, out=out, alpha=0.3, report=True, overwrite=True)
    report.save(made.rows or [], table, out.name, report_header(made))
    print(describe_result(made), f"\n\n$ lib-merge verify {out}", sep="")
    found = verify(out)
    print(f"{'verified' if found.ok else 'different'}: {found.compared} tensors are what the recipe says")
    print(f"\nThe report is in {table}. The same for your own files:")
    print("  lib-merge merge A.safetensors B.safetensors --alpha 0.3 -o mix.safetensors")
    if not found.ok:
        raise SystemExit(1)


def _finish(work: Callable[[dict[str, Any]], Result], options: dict[str, Any]) -> None:
    """Run a writing command with its common options and print what came of it."""
    as_json, report_path, how = asked(options)
    how |= {"out": how.pop("output"), "report": report_path is not None}
    with Bar() as bar:
        made = work({**how, "on_progress": bar})
    if options["dry_run"]:
        errors = made.plan.errors()
        failed = {"error": error_fields(errors)["error"]} if errors else {}
        print_json({**plan_dict(made.plan), **failed}) if as_json else print(describe_plan(made.plan))
        if errors:
            print_problems(errors)
            raise SystemExit(1)
        return
    if report_path is not None:
        report.save(made.rows or [], report_path, made.output.name, report_header(made))
    print_json(made.to_dict()) if as_json else print(describe_result(made))
