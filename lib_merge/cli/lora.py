"""Commands that make LoRAs: lora merge, extract, resize, compare, convert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import click

from .. import report
from ..families import STYLES
from ..lora import VARIANTS, Converted, LoraResult, compare_loras, convert_lora, extract_lora, merge_loras, resize_lora
from ..lora import Comparison as LoraComparison
from .lora_plans import describe_lora_plan, lora_plan_dict
from .options import asked, debug_option, json_option, lora_alpha_option, options, writing_options
from .parse import lora_argument, metadata_object, parameters
from .show import Bar, print_json

_dtype = options(
    click.option(
        "--save-dtype", default="auto", show_default=True, help="auto (that of the inputs), fp32, fp16, bf16 …"
    ),
    click.option("--metadata", metavar="JSON", help="Extra header metadata, a JSON object."),
)


@click.group("lora")
def _group() -> None:
    """Merge LoRAs into one, extract one from two checkpoints, resize, compare, convert."""


_optimizer = options(
    click.option("--scope", default="per_prefix", show_default=True, help="auto decides for each weight; global: once "
                 "for all; additive: sums."),
    click.option("--profile", default="v1.2", show_default=True, help="v1.2 (all strategies), no_slerp, classic."),
    click.option("--rules", default="ordered", show_default=True, help="ordered, or document: its literal thresholds."),
    click.option("--refinement", default="standard", show_default=True, help="standard, enhanced, or maximum: in a "
                 "common basis, stored exactly."),
    click.option("--sparsify", default="none", show_default=True, help="none, dare, della, dare_conflict, "
                 "della_conflict."),
    click.option("--density", metavar="X|auto", help="Share that TIES (default 0.5) or --sparsify (0.7) keeps."),
    click.option("--dampening", type=float, metavar="X", help="0 … 1: how far DARE leaves what it keeps as it is."),
    click.option("--smoothing", type=float, metavar="X", help="0 … 1: how far a weight's numbers are drawn to its "
                 "block's; default 0.25."),
    click.option("--auto-strength/--no-auto-strength", default=None, help="Make no weight's result larger than its "
                 "largest input; default: of the sums that auto makes."),
    click.option("--output-strength", metavar="X|auto", help="Factor of the whole result; auto: the largest advised."),
    click.option("--normalize/--no-normalize", default=True, show_default=True, help="Means stay means; or give them "
                 "the size of the strengths."),
    click.option("--lossless", is_flag=True, help="Store what factors cannot hold as whole differences (.diff)."),
)  # fmt: skip


@_group.command("merge")
@click.argument("loras", nargs=-1, required=True, metavar="LORA[@W[@TE_W]][:BLOCKS] ...")
@click.option("--method", default="concat", show_default=True, help="concat (the exact sum), auto (what suits each "
              "weight), weighted_average, slerp, consensus, ties, or another program's merge: kohya_merge, "
              "kohya_concat, kohya_svd, supermerger_same_strength, peft_…")  # fmt: skip
@_optimizer
@click.option("--rank", metavar="N|auto", help="Cut modules to this rank; auto: as small as --max-error allows.")
@click.option("--max-rank", type=click.IntRange(1), metavar="N", help="No module gets more; default: the added ranks.")
@click.option("--max-error", type=float, metavar="X", help="Relative error that a cut allows; default 0.05.")
@click.option("--base", metavar="CHECKPOINT", help="Needed for DoRA, OFT, (IA)³, GLoRA and full copies.")
@click.option(
    "-p",
    "params",
    multiple=True,
    metavar="NAME=VALUE",
    help="A parameter of another program's merge, or a "
    f"variant of a step, off by default: {', '.join(VARIANTS)} (=true).",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of random methods.")
@lora_alpha_option
@_dtype
@writing_options
def _merge(loras: Sequence[str], params: Sequence[str], metadata: str | None, **options: Any) -> None:
    """Merge LoRAs into one that does what they do together, at the strengths W that prompts would give them.

    Without other options the result is the exact sum, of the added ranks. Ranks and formats may differ; strengths may
    be negative. TE_W is the strength of the text encoders where it is another. BLOCKS are block weights, numbers that
    multiply the strength: style.safetensors@0.8:BASE=0,IN00-IN05=0.5. With --method auto the numbers of each
    weight decide how its LoRAs are put together: alike ones by consensus, unrelated ones by SLERP, conflicting ones by
    TIES; the report says what was done with each, and why.
    """
    given = [lora_argument(text) for text in loras]
    for name, read in (("rank", _rank), ("density", _number), ("output_strength", _number)):
        options[name] = read(name, options[name])
    finish(
        lambda how: merge_loras(*given, params=parameters(params, {}), metadata=metadata_object(metadata), **how),
        options,
    )


@_group.command("extract")
@click.argument("tuned", metavar="TUNED")
@click.argument("base", metavar="BASE")
@click.option("--rank", type=click.IntRange(1), help="Of matrices and 1×1 convolutions; default 64.")
@click.option("--conv-rank", type=click.IntRange(1), help="Of other convolutions; default 32, or --rank.")
@click.option("--keep", type=float, metavar="X", help="Share of each change's norm to keep, at the smallest rank.")
@click.option("--clamp", type=float, default=1.0, show_default=True, help="Keep changes within this quantile; 1: off.")
@click.option("--exact", is_flag=True, help="Full singular value decompositions: slower, the best there is.")
@click.option("--store-diffs", is_flag=True, help="Store norms, biases and embeddings as whole differences.")
@click.option("--min-diff", type=float, default=0.0, show_default=True, help="Leave out smaller changes.")
@click.option("--names", default="", metavar="STYLE", help="kohya (default), diffusers, or peft (LLMs).")
@_dtype
@writing_options
def _extract(tuned: str, base: str, metadata: str | None, **options: Any) -> None:
    """Store what TUNED has more than BASE as a LoRA: BASE + LoRA = TUNED, as far as the rank allows."""
    finish(lambda how: extract_lora(tuned, base, metadata=metadata_object(metadata), **how), options)


@_group.command("resize")
@click.argument("lora", metavar="LORA")
@click.option("--rank", type=click.IntRange(1), metavar="N", help="For every module.")
@click.option("--keep", type=float, metavar="X", help="Share to keep instead, at the smallest rank that does.")
@click.option("--rule", metavar="RULE", help="What the share is of: frobenius (default), cumulative or ratio.")
@click.option("--max-rank", type=click.IntRange(1), metavar="N", help="With --keep: no module gets more.")
@click.option("-p", "params", multiple=True, metavar="NAME=VALUE", help="A parameter of --rule kohya_resize.")
@lora_alpha_option
@_dtype
@writing_options
def _resize(lora: str, params: Sequence[str], metadata: str | None, **options: Any) -> None:
    """Cut a LoRA to a smaller rank; no module ever grows."""
    finish(
        lambda how: resize_lora(lora, params=parameters(params, {}), metadata=metadata_object(metadata), **how), options
    )


@_group.command("compare")
@click.argument("loras", nargs=-1, required=True, metavar="LORA[@W][:BLOCKS] ...")
@click.option("--report", "report_path", metavar="FILE", help="Write a per-weight report: .csv, .json or .html.")
@click.option("--overwrite", is_flag=True, help="Replace an existing report.")
@lora_alpha_option
@json_option
@debug_option
def _compare(
    loras: Sequence[str], lora_alpha: float | None, report_path: str | None, overwrite: bool, as_json: bool, debug: bool
) -> None:
    """Ranks and sizes of LoRAs, for each pair whether they pull together, and which can be merged into one.

    LORA@-1 turns a LoRA round, as a negative strength would; block weights count, LORA:BASE=0 leaves text encoders out.
    """
    table = Path(report_path) if report_path else None
    if table is not None:
        report.check_report_path(table, overwrite)
    found = compare_loras(*map(lora_argument, loras), lora_alpha=lora_alpha)
    if table is not None:
        report.save(found.rows, table, "compared LoRAs", {})
    print_json(found.to_dict()) if as_json else print(_compared(found))


def _compared(found: LoraComparison) -> str:
    lines = []
    for row in found.loras:
        low, high = row["rank_low"], row["rank_high"]
        ranks = "no rank" if low is None else f"rank {low}" if low == high else f"rank {low} … {high}"
        lines.append(f"{row['file']}: {row['format']}, {row['modules']} modules, {ranks}, norm {row['norm']:.4g}")
    lines += [
        f"{pair['a']} and {pair['b']}: {pair['shared']} modules in common ({pair['overlap']:.0%} of the smaller one), "
        f"cosine {pair['cosine']:+.3f}, conflict {pair['conflict']:.1%} ({pair['conflict_expected']:.1%} by chance), "
        f"compatibility {pair['compatibility']:+.2f}: {pair['strategy']}"
        for pair in found.pairs
    ]
    if len(found.loras) > 1:
        groups = [" + ".join(group) for group in found.together]
        lines.append(f"can be merged into {'one' if len(groups) == 1 else len(groups)}: {'; '.join(groups)}")
    return "\n".join([*lines, *(f"note: {text}" for text in found.notes)])


@_group.command("convert")
@click.argument("path", metavar="LORA")
@click.option("-o", "--output", "out", required=True, metavar="OUT", help="File (.safetensors) to write.")
@click.option("--names", required=True, metavar="|".join(STYLES), help="Whose module names to write.")
@click.option("--family", metavar="ID", help="Model family, such as flux; asked for only where that changes the names.")
@lora_alpha_option
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@click.option("--number", is_flag=True, help="Write NAME_1, NAME_2 … where the output exists.")
@click.option("--hash", is_flag=True, help="Compute the output's sha256.")
@click.option("--no-fsync", is_flag=True, help="Do not wait until the output is on the disk.")
@click.option("--dry-run", is_flag=True, help="Say what would be done and write nothing.")
@click.option("--strict", is_flag=True, help="A module that has no such name is an error.")
@json_option
@debug_option
def _convert(path: str, as_json: bool, debug: bool, no_fsync: bool, hash: bool, **options: Any) -> None:
    """Write a LoRA under another trainer's module names.

    Tensors keep their bytes where only names change. Where one module is several there, the rows of `up` are divided;
    where several are one, their factors are put together, exactly, and the ranks add up.
    """
    made = convert_lora(path, fsync=not no_fsync, hash=hash or as_json, **options)
    print_json(made.to_dict()) if as_json else print(_renamed(made, options["dry_run"]))


def _rank(name: str, text: str | None) -> int | Literal["auto"] | None:
    if text is None or text == "auto":
        return text  # type: ignore[return-value]
    if not text.isdecimal():
        raise click.UsageError(f"--rank {text}: neither a whole number nor auto")
    return int(text)


def _number(name: str, text: str | None) -> float | Literal["auto"] | None:
    if text is None or text == "auto":
        return text  # type: ignore[return-value]
    try:
        return float(text)
    except ValueError:
        raise click.UsageError(f"--{name.replace('_', '-')} {text}: neither a number nor auto") from None


def finish(work: Callable[[dict[str, Any]], LoraResult], options: dict[str, Any]) -> None:
    """Run a command with its common options and print what came of it."""
    as_json, report_path, how = asked(options)
    how["out"], how["report"] = how.pop("output"), report_path is not None
    with Bar() as bar:
        made = work({**how, "on_progress": bar})
    if made.plan is not None:
        print_json(lora_plan_dict(made.plan)) if as_json else print(describe_lora_plan(made.plan, made.output))
        return
    if report_path is not None:
        report.save([dict(row) for row in made.rows], report_path, made.output.name, {})
    print_json(made.to_dict()) if as_json else print(_described(made))


def _described(made: LoraResult) -> str:
    """What a run did, in a few lines."""
    ranks = sorted(made.ranks)
    told = "" if not ranks else f", rank {ranks[0]}" if len(ranks) == 1 else f", ranks {ranks[0]} … {ranks[-1]}"
    lines = [f"wrote {made.output}: {made.modules} modules{told}, {made.copied} tensors copied"]
    if made.strategies:
        lines.append(", ".join(f"{count} by {strategy}" for strategy, count in made.strategies.items()))
    error = f"relative error {made.error:.3g}" if made.error else "nothing cut off; its factors are rounded as stored"
    lines.append(f"{error}, largest {made.worst[1]:.3g} at {made.worst[0]}" if made.worst[1] else error)
    lines += [] if made.rounding is None else [f"rounding to the stored dtype adds {made.rounding:.3g}"]
    lines += [f"warning: {text}" for text in made.warnings]
    lines += [f"note: {text}" for text in made.notes]
    lines.append(f"{made.output_bytes / 1e6:,.1f} MB in {made.seconds:.1f} s, peak memory {made.peak_rss_mb:.0f} MB")
    if made.sha256:
        lines.append(f"sha256 {made.sha256}")
    return "\n".join(lines)


def _renamed(made: Converted, dry_run: bool) -> str:
    done = "would write" if dry_run else "wrote"
    counts = f"{made.renamed} modules renamed, {made.split} split off, {made.joined} joined, {len(made.unused)} unused"
    lines = [f"{done} {made.output}: {counts}"]
    lines += [f"warning: {text}" for text in made.warnings]
    lines += [f"note: {text}" for text in made.notes]
    if made.sha256:
        lines.append(f"sha256 {made.sha256}")
    return "\n".join(lines)
