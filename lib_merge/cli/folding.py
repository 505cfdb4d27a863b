"""Commands of the quantized fold: fold, fold-check, quantizer-check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from .. import report
from ..fold import Folded, fold, fold_check, quantizer_check
from ..fold.rounding import CHOICES
from ..version import __version__
from .options import Command, asked, debug_option, json_option, options, running_options
from .show import Bar, error_fields, print_json, print_problems

_rounding = click.option(
    "--rounding",
    default="auto",
    show_default=True,
    metavar="|".join(CHOICES),
    help="How codes are rounded; auto finds out which reproduces SHIPPED.",
)
_how: Callable[[Command], Command] = options(
    _rounding,
    click.option(
        "--round-dense",
        is_flag=True,
        help="Round each sum to the dense dtype before it is quantized, as merging with PEFT and converting does.",
    ),
    click.option("--lora-alpha", type=float, help="Alpha of every module, instead of the adapter's own."),
)


@click.command("fold")
@click.argument("dense", metavar="DENSE")
@click.argument("adapter", metavar="ADAPTER")
@click.argument("out", metavar="OUT")
@click.option("--quantize", required=True, metavar="SHIPPED", help="The quantized checkpoint to fold into.")
@_how
@running_options
def _fold(dense: str, adapter: str, out: str, quantize: str, **options: Any) -> None:
    """Fold a LoRA into a quantized checkpoint.

    The modules that ADAPTER names are computed from DENSE, the checkpoint that SHIPPED was made from, and quantized
    anew as SHIPPED stores them; every other byte of SHIPPED is copied.
    """

    def work(how: dict[str, Any]) -> Folded:
        return fold(dense, adapter, out, quantize=quantize, **how)

    finish_fold(work, options, (dense, adapter, quantize))


def finish_fold(
    work: Callable[[dict[str, Any]], Folded], options: dict[str, Any], inputs: tuple[str, str, str]
) -> None:
    """Run a fold with its common options and print what came of it; `inputs` as its report names them."""
    as_json, path, how = asked(options)
    how.pop("keep_recipe")  # nothing of a fold's output says anything of its inputs
    how["report"] = path is not None
    with Bar() as bar:
        made = work({**how, "on_progress": bar})
    if options["dry_run"]:
        failed = {"error": error_fields(made.problems)["error"]} if made.problems else {}
        print_json({**_plan_dict(made), **failed}) if as_json else print(_describe_plan(made))
        if made.problems:
            print_problems(made.problems)
            raise SystemExit(1)
        return
    if path is not None:
        report.save(made.rows or [], path, made.output.name, _header(made, *inputs))
    print_json(made.to_dict()) if as_json else print(_describe(made))


@click.command("fold-check")
@click.argument("dense", metavar="DENSE")
@click.argument("adapter", metavar="ADAPTER")
@click.argument("out", metavar="OUT")
@click.argument("shipped", metavar="SHIPPED")
@_how
@click.option("--threads", type=click.IntRange(1), help="Worker threads; default: the cores, at most 8.")
@json_option
@debug_option
def _fold_check(dense: str, adapter: str, out: str, shipped: str, as_json: bool, debug: bool, **options: Any) -> None:
    """Prove a fold: all bytes that it may not touch, and every group that it wrote, computed anew."""
    with Bar() as bar:
        found = fold_check(dense, adapter, out, shipped, on_progress=bar, **options)
    print_json(found.to_dict()) if as_json else print(found.describe())
    if not found.ok:
        raise SystemExit(1)


@click.command("quantizer-check")
@click.argument("dense", metavar="DENSE")
@click.argument("shipped", metavar="SHIPPED")
@click.argument("modules", nargs=-1, required=True, metavar="MODULE ...")
@_rounding
@json_option
@debug_option
def _quantizer_check(
    dense: str, shipped: str, modules: Sequence[str], rounding: str, as_json: bool, debug: bool
) -> None:
    """Quantize modules of DENSE and say how much of SHIPPED they reproduce."""
    found = quantizer_check(dense, shipped, *modules, rounding=rounding)
    if as_json:
        print_json({"modules": [vars(item) for item in found]})
    else:
        print("\n".join(item.describe() for item in found))


def _describe(made: Folded) -> str:
    """What a fold did, in a few lines."""
    lines = [f"wrote {made.output}: {made.folded} modules folded, {made.copied} tensors copied"]
    lines += [made.rounding.describe()] if made.rounding else []
    lines += [f"warning: {text}" for text in made.warnings]
    lines += [f"note: {text}" for text in made.notes]
    lines.append(f"{made.output_bytes / 1e6:,.1f} MB in {made.seconds:.1f} s, peak memory {made.peak_rss_mb:.0f} MB")
    if made.sha256:
        lines.append(f"sha256 {made.sha256}")
    return "\n".join(lines)


def _plan_dict(made: Folded) -> dict[str, Any]:
    """A plan for `--dry-run --json`."""
    steps = [
        {
            "key": module.storage.leaves[0].key,
            "dtype": module.storage.label,
            "shape": list(module.shape),
            "action": "merged",
            "method": "fold",
            "params": {"rank": module.change.rank, "scale": module.change.scale} if module.change else {},
            "reason": f"dense {module.dense}",
        }
        for module in made.modules
    ]
    return {
        "steps": steps,
        "counts": {"merged": made.folded, "copied": made.copied, "discarded": 0},
        "problems": [vars(problem) for problem in made.problems],
        "output_bytes": made.output_bytes,
        "peak_memory_mb": round(made.expected_peak_bytes / 1e6),
    }


def _describe_plan(made: Folded) -> str:
    """A plan for people."""
    lines = [
        f"plan: {made.folded} modules folded, {made.copied} tensors copied",
        f"output {made.output_bytes / 1e6:,.1f} MB, expected peak memory {made.expected_peak_bytes / 1e6:.0f} MB",
        *(f"note: {text}" for text in made.notes),
    ]
    for module in made.modules:
        change = f"rank {module.change.rank}, scale {module.change.scale:g}" if module.change else ""
        lines.append(f"  {module.storage.label}  {module.name}  {change}")
    return "\n".join(lines)


def _header(made: Folded, dense: str, adapter: str, shipped: str) -> dict[str, str]:
    """What a report says of the run above its table."""
    return {
        "method": "fold",
        "dense": Path(dense).name,
        "adapter": Path(adapter).name,
        "quantized": Path(shipped).name,
        "rounding": made.rounding.describe() if made.rounding else "",
        "versions": f"lib_merge {__version__}",
    }
