"""What is to be done, as plain frozen data: read from JSON, written as canonical JSON, free of paths and of torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

import msgspec

from .choose import Profile, Refinement, Rules, Scope, Sparsify
from .errors import RecipeError

VERSION = 1
METADATA_KEY = "lib_merge.recipe"
VERSION_KEY = "lib_merge.version"

Task = Literal["merge", "convert", "bake", "lora_merge", "lora_extract", "lora_resize", "fold"]
Mismatch = Literal["skip", "zeros", "error"]
SaveDtype = Literal["auto", "keep", "fp64", "fp32", "fp16", "bf16", "fp8_e4m3fn", "fp8_e5m2"]
Component = Literal["unet", "te", "vae"]
LoraNames = Literal["", "kohya", "diffusers", "peft"]
ConflictMode = Literal["all", "low_conflict", "high_conflict"]
KeyFilter = Literal["all", "shared_only", "unique_only"]
Value = float | bool


class _Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all recipe parts: frozen, unknown fields refused."""


class Slot(_Data, frozen=True, omit_defaults=True):
    """A model: a file or folder by name, or another recipe, computed on the way without an intermediate file.

    Attributes:
        file: file or folder name, no path.
        sha256: of the file, once known (a folder's: see `files.hashes.combined`).
        recipe: the recipe whose result this model is.
        made_by: how the file was made, as it says itself; told along, not carried out.
        strength: multiplier of what the model changes, 1 where it is None; of methods that take any number of models.
    """

    file: str | None = None
    sha256: str | None = None
    recipe: Recipe | None = None
    made_by: Recipe | None = None
    strength: float | None = None

    def __post_init__(self) -> None:
        if (self.file is None) == (self.recipe is None):
            raise ValueError("a model has either a file or a recipe")


class Lora(_Data, frozen=True):
    """A LoRA to bake, with its strengths; any kind of adapter file counts.

    Attributes:
        file: file or PEFT folder by name, no path.
        sha256: of the file, once known (a folder's, its `adapter_config.json` included: see `files.hashes.combined`).
        strength: multiplier of what it changes; any sign.
        te_strength: of the text encoders; None for the same.
        blocks: block weights as text (see `blocks.parse`); a number multiplies the strength, blocks not named keep it.
        alpha: for files that carry none; None takes their rank, so that their scale is 1.
        conflict_mode: of LoRAs that are merged: the entries that take part: all, those whose sign is the elected one
            (`low_conflict`), or those whose sign is not (`high_conflict`).
        key_filter: of LoRAs that are merged: the weights that take part: all, those that another LoRA changes too
            (`shared_only`), or those that none does (`unique_only`).
        made_by: how the file was made, as it says itself; told along, not carried out.
    """

    file: str
    sha256: str | None = None
    strength: float = 1.0
    te_strength: float | None = None
    blocks: str = ""
    alpha: float | None = None
    conflict_mode: ConflictMode = "all"
    key_filter: KeyFilter = "all"
    made_by: Recipe | None = None


class Rule(_Data, frozen=True):
    """Parameters for the tensors whose name matches a pattern; a later rule wins over an earlier one."""

    match: str
    params: dict[str, Value]


class Optimizer(_Data, frozen=True):
    """How LoRAs are put together, as far as words say it; numbers are parameters. Of the task lora_merge.

    Attributes:
        scope: one decision for each weight, one for all, or sums everywhere.
        profile: the strategies to choose from.
        rules: the tests that choose, see `choose`.
        refinement: `enhanced` protects what one LoRA alone brings and takes from each what it shares with stronger
            ones; `maximum` does so in a common basis of the LoRAs.
        sparsify: entries dropped by chance before LoRAs are put together.
    """

    scope: Scope = "per_prefix"
    profile: Profile = "v1.2"
    rules: Rules = "ordered"
    refinement: Refinement = "standard"
    sparsify: Sparsify = "none"


class Output(_Data, frozen=True):
    """How the result is stored.

    Attributes:
        save_dtype: least precise dtype of float tensors.
        override_dtype: that dtype for all of them.
        names: of a LoRA that is extracted: whose names its modules have; empty: those of its kind.
        metadata: extra header metadata.
    """

    save_dtype: SaveDtype = "auto"
    override_dtype: bool = False
    names: LoraNames = ""
    metadata: dict[str, str] = {}


class Recipe(_Data, frozen=True):
    """A whole run as data. See `docs/recipe.schema.json`.

    Attributes:
        lib_merge: version of this format.
        task: what kind of run it is.
        method: id of a merge method; None for tasks that have none.
        params: the method's parameters by name; those left out take the method's defaults.
        seed: of random methods, 0 … 2**64 − 1.
        models: slot name (A, B, C, …) -> model; None leaves a slot open (presets).
        loras: LoRAs to bake into the result, before its one rounding.
        blocks: block name or range -> parameters; of the task bake: -> `strength`, for LoRAs without their own.
        rules: parameters by name pattern.
        exclude: patterns of tensors that keep A's values; with `include_mode`, of those that are merged.
        discard: patterns of tensors that are left out of the output.
        glob: patterns are shell globs instead of regular expressions; both match anywhere in the name.
        mismatch: what happens where B, C … lack a tensor or have another shape.
        allow_mixed_prediction: merge although only one of A and B has a marker of what it predicts; A's markers stay.
        only: convert: keep this component alone.
        vae: file whose VAE replaces A's.
        optimizer: lora_merge: how LoRAs are put together.
    """

    lib_merge: int = VERSION
    task: Task = "merge"
    method: str | None = None
    params: dict[str, Value] = {}
    seed: int = 0
    models: dict[str, Slot | None] = {}
    loras: tuple[Lora, ...] = ()
    blocks: dict[str, dict[str, Value]] = {}
    rules: tuple[Rule, ...] = ()
    exclude: tuple[str, ...] = ()
    include_mode: bool = False
    discard: tuple[str, ...] = ()
    glob: bool = False
    mismatch: Mismatch = "skip"
    allow_mixed_prediction: bool = False
    only: Component | None = None
    vae: Slot | None = None
    optimizer: Optimizer = Optimizer()
    output: Output = Output()


# version -> function that turns a document of that version into one of the next.
UPGRADES: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}


def from_json(text: str | bytes, *, where: object = None) -> Recipe:
    """Read a recipe.

    Args:
        text: JSON of any known version.
        where: file it came from, for errors.

    Raises:
        RecipeError: no JSON, an unknown version or field, or a value of the wrong type; says which.
    """
    try:
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"the recipe is not JSON: {error}", file=where) from error
    return _converted(document, where)


def validated(recipe: Recipe) -> Recipe:
    """The recipe with every value checked against its type, as if it had been read from JSON.

    Raises:
        RecipeError: a value of the wrong type.
    """
    try:
        document = msgspec.to_builtins(recipe, enc_hook=_plain_number)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecipeError(f"the recipe is not valid: {error}") from error
    return _converted(document, None)


def to_json(recipe: Recipe) -> str:
    """Canonical JSON: every field written out, keys sorted, no spaces; equal recipes give equal text.

    Raises:
        RecipeError: a value of the wrong type, or a number that is not finite.
    """
    document = _without_minus_zero(msgspec.to_builtins(validated(recipe)))
    try:
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise RecipeError("the recipe is not valid: it holds a number that is not finite") from error


def json_schema() -> dict[str, Any]:
    """JSON schema of `Recipe`, draft 2020-12."""
    return msgspec.json.schema(Recipe)


def files(recipe: Recipe, path: str = "") -> Iterator[tuple[str, Slot]]:
    """Yield (slot path, slot) of every input file, nested ones too: `A`, `B`, `B.C`, `vae`, `lora1`."""
    loras = [(name, Slot(file=lora.file, sha256=lora.sha256)) for name, lora in lora_slots(recipe)]
    own = sorted([*recipe.models.items(), ("vae", recipe.vae)], key=lambda item: item[0])
    for name, slot in own + loras:
        if slot is not None and slot.recipe is not None:
            yield from files(slot.recipe, f"{path}{name}.")
        elif slot is not None:
            yield path + name, slot


def lora_slots(recipe: Recipe) -> Iterator[tuple[str, Lora]]:
    """Yield (slot, LoRA) of a recipe's own LoRAs: `lora1`, `lora2` and so on."""
    return ((f"lora{number}", lora) for number, lora in enumerate(recipe.loras, 1))


def called(slot: str) -> str:
    """What a slot path is called in messages: `model A`, `LoRA 2`, `LoRA 1 of B`."""
    inside, _, name = slot.rpartition(".")
    number = name.removeprefix("lora")
    if number == name:
        return f"model {slot}"
    return f"LoRA {number}" + (f" of {inside}" if inside else "")


def with_hashes(recipe: Recipe, hashes: Mapping[str, str], path: str = "") -> Recipe:
    """The recipe with the sha256 of each input filled in; `hashes` goes by slot path as in `files`."""

    def filled(name: str, slot: Slot | None) -> Slot | None:
        if slot is None:
            return None
        if slot.recipe is not None:
            inner = with_hashes(slot.recipe, hashes, f"{path}{name}.")
            return msgspec.structs.replace(slot, recipe=inner)
        return msgspec.structs.replace(slot, sha256=hashes.get(path + name, slot.sha256))

    models = {name: filled(name, slot) for name, slot in recipe.models.items()}
    loras = tuple(
        msgspec.structs.replace(lora, sha256=hashes.get(path + name, lora.sha256)) for name, lora in lora_slots(recipe)
    )
    return msgspec.structs.replace(recipe, models=models, vae=filled("vae", recipe.vae), loras=loras)


_CHOICES = {
    "task": Task,
    "mismatch": Mismatch,
    "save_dtype": SaveDtype,
    "only": Component,
    "names": LoraNames,
    "scope": Scope,
    "profile": Profile,
    "rules": Rules,
    "refinement": Refinement,
    "sparsify": Sparsify,
    "conflict_mode": ConflictMode,
    "key_filter": KeyFilter,
}


def _converted(document: object, where: object) -> Recipe:
    document = _current(document, where)
    try:
        recipe = msgspec.convert(document, Recipe)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$.")
        field = _full(document, place.rstrip("`"))
        choices = get_args(_CHOICES.get(field.rpartition(".")[2]))
        hint = f"choose one of: {', '.join(choices)}" if choices else None
        if choices and where is None and "enum value" in what:  # from an option or an argument: no recipe was written
            name = field.rpartition(".")[2].replace("_", " ")
            raise RecipeError(f"{name} cannot be {what.split(maxsplit=3)[-1]}", hint=hint) from error
        shown = f"{field}: {what}" if field else what.replace("Object contains", "it has an")
        raise RecipeError(f"the recipe is not valid: {shown}", file=where, hint=hint) from error
    _check_names(recipe, where)
    _check_merged_loras(recipe, where)
    return recipe


def _full(document: Any, field: str) -> str:
    """A field as it is called: `params[...]` with the name that the dots stand for."""
    shown, inner = "", document
    for part in re.findall(r"\[\.\.\.\]|\[\d+\]|\.?[^.\[]+", field):
        if part == "[...]":
            name = next((name for name in inner if _fails_alone(document, inner, name)), None)
            if name is None:
                return field
            shown, inner = f"{shown}.{name}", inner[name]
        else:
            shown += part
            inner = inner[int(part[1:-1])] if part[0] == "[" else inner.get(part.lstrip(".")) or {}
    return shown


def _fails_alone(document: Any, table: dict[str, Any], name: str) -> bool:
    """True when the document is wrong also without the other entries of one of its tables."""
    others = {other: table.pop(other) for other in list(table) if other != name}
    try:
        msgspec.convert(document, Recipe)
    except msgspec.ValidationError:
        return True
    finally:
        table.update(others)
    return False


def _current(document: object, where: object) -> object:
    """A document, and the recipes inside it, brought to this version."""
    if not isinstance(document, dict) or "lib_merge" not in document:
        raise RecipeError(
            "this is not a lib_merge recipe: it has no field lib_merge",
            file=where,
            hint='write "lib_merge": 1 into it, and into every recipe inside it',
        )
    while (version := document["lib_merge"]) != VERSION or isinstance(version, bool):
        if isinstance(version, bool) or not isinstance(version, int) or version not in UPGRADES:
            raise RecipeError(
                f"the recipe has version {version!r}, this program knows {VERSION}", file=where, hint="update lib_merge"
            )
        document = UPGRADES[version](document)
    models, loras = document.get("models"), document.get("loras")
    loras = loras if isinstance(loras, (list, tuple)) else ()
    for slot in [*(models.values() if isinstance(models, dict) else ()), document.get("vae"), *loras]:
        for field in ("recipe", "made_by"):
            if isinstance(slot, dict) and slot.get(field) is not None:
                slot[field] = _current(slot[field], where)
    return document


def _check_names(recipe: Recipe, where: object) -> None:
    """Files stand in a recipe by name: a path would tell of one machine, and could lead out of the folders meant."""
    for name in [slot.file or "" for _, slot in files(recipe)]:
        if name in ("", ".", "..") or "/" in name or "\\" in name:
            raise RecipeError(
                f"a recipe names files without their folders, not {name!r}",
                file=where,
                hint="say on the command line where they lie: --models DIR",
            )
        try:
            name.encode()
        except UnicodeEncodeError:
            raise RecipeError(f"the file name {name!r} is no valid text", file=where, hint="rename the file") from None


def _check_merged_loras(recipe: Recipe, where: object) -> None:
    """What belongs to LoRAs that are merged would go unheeded in other tasks."""
    if recipe.task == "lora_merge":
        return
    parts = [lora.file for lora in recipe.loras if (lora.conflict_mode, lora.key_filter) != ("all", "all")]
    if parts or recipe.optimizer != Optimizer():
        what = f"conflict_mode and key_filter of {parts[0]}" if parts else "optimizer"
        raise RecipeError(f"{what}: the task {recipe.task} has no such thing", file=where, hint="it is of lora_merge")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands in it twice")
    return result


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _plain_number(value: Any) -> Any:
    """A number of numpy or torch as Python's own."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a recipe cannot hold a value of type {type(value).__name__}")


def _without_minus_zero(value: Any) -> Any:
    """−0.0 equals 0.0, so both are written the same."""
    if isinstance(value, dict):
        return {key: _without_minus_zero(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_minus_zero(item) for item in value]
    return value + 0.0 if isinstance(value, float) else value
