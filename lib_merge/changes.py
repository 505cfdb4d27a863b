"""What the LoRAs of a recipe change: their modules matched with the tensors of a base, shapes compared."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import blocks
from .adapter_facts import stored_alphas, zero_alphas
from .adapters import FORMATS, Adapter, Piece, lacks_alpha
from .adapters import read as read_adapter
from .errors import MergeError, Problem, RecipeError
from .families import Detected, Names, Place, block_names, blocks_of, component_of, detect, is_first_layer, layer_names
from .files.companion import ADAPTER_CONFIG, adapter_config, adapter_path
from .files.dtypes import is_float
from .files.header import load_json
from .files.source import Source
from .lora_strengths import multipliers, strength_at
from .quant.coded import HINT as CODED_HINT
from .quant.coded import coded_tensors
from .recipe import Lora, Recipe, lora_slots
from .steps import Baked, Change, Channels, Node, Step, sliced_roles
from .wording import named

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
Shape = tuple[int, ...]
PathLike = Path | str
# A LoRA: path; then strength, the text encoders' strength (None: the same) and block weights, as far as they are given.
LoraLike = (
    PathLike
    | tuple[PathLike]
    | tuple[PathLike, float]
    | tuple[PathLike, float, float | None]
    | tuple[PathLike, float, float | None, str]
)

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Matched:
    """What LoRAs do to a base.

    Attributes:
        changes: key of the base -> what is done to it, in the order of the recipe.
        grown: first layers that get more input channels -> how many.
        unused: (slot path, key) of the LoRAs' tensors that no tensor of the base takes.
        problems: errors, warnings and notes.
    """

    changes: Mapping[str, tuple[Change, ...]]
    grown: Mapping[str, int]
    unused: tuple[tuple[str, str], ...]
    problems: tuple[Problem, ...]


NO_LORAS = Matched({}, {}, (), ())


def match(recipe: Recipe, base: Tensors, found: Detected, sources: Mapping[str, Source], path: str = "") -> Matched:
    """Find what every LoRA of a recipe changes.

    Args:
        recipe: its own LoRAs only, not those of recipes inside it.
        base: key -> (dtype, shape) of model A.
        found: what A is.
        sources: slot path -> opened file.
        path: slot path of the recipe with a trailing dot; empty for the outermost.

    Raises:
        MergeError: an adapter that cannot be baked, or block weights that cannot be read.
    """
    if not recipe.loras:
        return NO_LORAS
    if found.kind == "adapter":
        raise RecipeError("the checkpoint is an adapter itself", hint="name the checkpoint first, then the LoRAs")
    matcher = _Matcher(base, found, Names(base, found), _is_tied(sources.get(f"{path}A")))
    general = recipe.blocks if recipe.task == "bake" else {}
    for slot, lora in lora_slots(recipe):
        matcher.add(path + slot, sources[path + slot], lora, blocks.parse(lora.blocks) or general)
    return Matched(
        {key: tuple(items) for key, items in matcher.changes.items()},
        matcher.grown,
        tuple(matcher.unused),
        tuple(matcher.problems),
    )


def baked(step: Step, matched: Matched, coded: Mapping[str, str]) -> Step:
    """The step with the LoRAs' changes on top, if there are any.

    Args:
        step: of a base.
        matched: what LoRAs do to that base.
        coded: key -> storage of the base's coded weights.

    Raises:
        RecipeError: the tensor holds no numbers that could be changed.
    """
    changes = matched.changes.get(step.key, ())
    if not changes:
        return step
    if step.key in coded:
        what = f"the checkpoint holds coded weights ({coded[step.key]}), to which nothing can be added"
        raise RecipeError(what, tensor=step.key, hint=CODED_HINT)
    if not is_float(step.node.dtype):
        raise RecipeError(f"a LoRA changes a tensor of {step.node.dtype}, which holds no fractions", tensor=step.key)
    base: Node = step.node
    width = matched.grown.get(step.key)
    if width is not None:
        base = Channels(base, width)
    return replace(step, shape=base.shape, action="merged", node=Baked(base, changes, step.dtype))


@dataclass
class _Matcher:
    """Takes one LoRA after the other and remembers what the user should hear."""

    base: Tensors
    found: Detected
    names: Names
    tied: bool = False
    changes: dict[str, list[Change]] = field(default_factory=dict)
    grown: dict[str, int] = field(default_factory=dict)
    unused: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def add(self, slot: str, source: Source, lora: Lora, weights: blocks.Values) -> None:
        """Match one LoRA."""
        tensors = {key: (info.dtype, info.shape) for key, info in source.tensors.items()}
        adapter = read_lora(source, lora)
        of_block = self._block_weights(lora, weights)
        shapes = {key: shape for key, (_, shape) in tensors.items()}
        lost: list[Piece] = []
        applied: set[str] = set()
        misfits: list[str] = []
        found = [(piece, self.names.find(piece.stem, piece.param)) for piece in adapter.pieces]
        if by_end := [piece.stem for piece, _ in found if piece.stem in self.names.by_end]:
            what = f"{len(by_end)} modules of {lora.file} are known by the ends of their names alone: {named(by_end)}"
            self.problems.append(Problem("note", what, str(source.path)))
        alphas = stored_alphas(source, adapter.pieces)
        self.problems += zero_alphas(lora.file, source, alphas)
        doubled = self._doubled(found)
        if doubled:
            what = f"{len(doubled)} modules of {lora.file} change what others of it change already, and are left out"
            self.problems.append(Problem("note", f"{what}: {named(sorted(doubled))}", str(source.path)))
        for piece, places in found:
            self._refuse_tied(piece, source)
            if not places:
                lost.append(piece)
            for place in () if piece.stem in doubled else places:
                parts = {role: shapes[key] for role, key in piece.keys.items()}
                fitted = _fit(piece, parts, place, self._shape(place), is_first_layer(place.key, self.found))
                if isinstance(fitted, str):
                    misfits.append(f"{piece.stem} changes {fitted} ({place.key})")
                    continue
                self._grow(place, fitted)
                strength = self._strength(lora, place.key, of_block)
                change = _change(slot, _scaled(piece, alphas), place, fitted, strength, shapes)
                applied.update(piece.keys.values())
                self.changes.setdefault(place.key, []).append(change)
        self._follow_tied(slot)
        # A part may serve two parameters of a module, of which the base has one.
        lost = [piece for piece in lost if not applied.issuperset(piece.keys.values())]
        keys = [key for piece in lost for key in piece.keys.values() if key not in applied]
        self.unused += [(slot, key) for key in (*keys, *adapter.leftover)]
        self._tell(source, lora, adapter, lost, misfits, detect(tensors))

    def _doubled(self, found: Sequence[tuple[Piece, tuple[Place, ...]]]) -> set[str]:
        """Modules that a file holds twice, fused and split: those of the copy that does not count."""
        claimed: Counter[tuple[str, str]] = Counter()
        for piece, places in found:
            for place in places:
                claimed[piece.format, place.key] += place.rows[1] if place.rows else self._rows(place.key)
        over = {form for (form, key), count in claimed.items() if count > self._rows(key)}
        return {
            stem
            for form in over
            for stem in self.names.doubles(piece.stem for piece, _ in found if piece.format == form)
        }

    def _rows(self, key: str) -> int:
        return (self.base[key][1] or (1,))[0]

    def _shape(self, place: Place) -> Shape:
        return self.base[place.key][1]

    def _strength(self, lora: Lora, key: str, of_block: Mapping[str, float]) -> float:
        """The LoRA's strength on a tensor of the base, its block weight included."""
        names = blocks_of(key, self.found) if of_block else ()
        return strength_at(lora, component_of(key, self.found), names, of_block)

    def _grow(self, place: Place, shape: Shape) -> None:
        """Remember a first layer that takes more channels than the base has."""
        stored = self._shape(place)
        if is_first_layer(place.key, self.found) and len(shape) > 1 and len(stored) > 1 and shape[1] > stored[1]:
            wide = self.grown[place.key] = max(shape[1], self.grown.get(place.key, 0))
            what = f"{place.key} grows from {stored[1]} to {wide} channels, filled up with zeros"
            self.problems.append(Problem("note", f"{what}: the result is a model of another kind", tensor=place.key))

    def _block_weights(self, lora: Lora, weights: blocks.Values) -> dict[str, float]:
        """Block -> multiplier; what the base lacks is noted."""
        if not weights:
            return {}
        names, layers = block_names(self.base, self.found, overrides=True), layer_names(self.base, self.found)
        if missing := blocks.unknown(weights, names):
            known = f"it has {', '.join(names)}" if names else "it has no blocks that are known"
            what = f"the block weights of {lora.file} name {', '.join(missing)}, which the checkpoint lacks"
            self.problems.append(Problem("warning", what, hint=known))
        return multipliers(lora, weights, names, layers)

    def _refuse_tied(self, piece: Piece, source: Source) -> None:
        """An output layer that is the embedding itself cannot get a change of its own."""
        if piece.stem.rpartition(".")[2] == "lm_head" and (self.tied or not self._ending(_HEAD)):
            raise RecipeError(
                "the LoRA changes lm_head, which in this checkpoint is tied to the embedding",
                file=source.path,
                tensor=next(iter(piece.keys.values())),
                hint="take a checkpoint that stores lm_head.weight, or a LoRA without it",
            )

    def _follow_tied(self, slot: str) -> None:
        """Where the output layer is the embedding, it changes with it, whether it is stored or not."""
        embedding, head = self._ending(_EMBEDDING), self._ending(_HEAD)
        changes = [change for change in self.changes.get(embedding, ()) if change.slot == slot]
        if not changes or (head and not self.tied):
            return
        if head:
            self.changes.setdefault(head, []).extend(changes)
        what = f"{head or 'the output layer'} is tied to {embedding} and changes with it"
        self.problems.append(Problem("note", what, tensor=embedding))

    def _ending(self, name: str) -> str:
        """The base's tensor of that last name in a language model; empty if there is none."""
        return next((key for key in self.base if key.endswith(name)), "") if self.found.kind == "llm" else ""

    def _tell(
        self,
        source: Source,
        lora: Lora,
        adapter: Adapter,
        lost: Sequence[Piece],
        misfits: Sequence[str],
        meant: Detected,
    ) -> None:
        """Everything the user should hear about one LoRA."""
        file = str(source.path)
        say = self.problems.append
        for note in adapter.notes:
            say(Problem("note", f"{lora.file}: {note}", file))
        if adapter.ignored:
            shown = [f"{key} ({why})" for key, why in adapter.ignored]
            say(Problem("note", f"{lora.file}: {len(shown)} tensors are not needed: {named(shown)}", file))
        other = _other_family(meant, self.found)
        if other and (lost or misfits):
            say(Problem("error", f"{lora.file} is for {meant.name}, the checkpoint is {other}", file,
                        hint="take a checkpoint of the family that the LoRA was trained on"))  # fmt: skip
        elif misfits and (coded := coded_tensors({key: dtype for key, (dtype, _) in self.base.items()})):
            storage = next(iter(coded.values()))
            what = f"the checkpoint holds coded weights ({storage}), to which {lora.file} cannot be added"
            say(Problem("error", what, tensor=next(iter(coded)), hint=CODED_HINT))
        elif misfits:
            what = f"{len(misfits)} modules of {lora.file} do not fit the checkpoint: {named(misfits)}"
            say(Problem("error", what, file, hint="the LoRA was trained on another model"))
        elif len(lost) == len(adapter.pieces):
            samples = f"it has {next(iter(source.tensors), 'no tensors')}, the checkpoint {next(iter(self.base), '')}"
            what = f"no module of {lora.file} {'is found in the checkpoint' if lost else 'has all of its parts'}"
            hint = "check that the two are of one family" if lost else "download or copy the file again"
            say(Problem("error", f"{what} ({samples})", file, hint=hint))
        elif lost:
            names = [piece.stem for piece in lost]
            what = f"{len(names)} modules of {lora.file} are not found in the checkpoint and not used: {named(names)}"
            say(Problem("warning", what, file, tensor=names[0]))
        if adapter.leftover:
            what = f"{len(adapter.leftover)} tensors of {lora.file} lack what belongs to them, and are not used"
            say(Problem("warning", f"{what}: {named(adapter.leftover)}", file, tensor=adapter.leftover[0]))


def read_lora(source: Source, lora: Lora) -> Adapter:
    """The adapter in a file or PEFT folder.

    Args:
        source: the opened file or folder.
        lora: as the recipe names it; its alpha stands in where the file has none.

    Raises:
        MergeError: it is no adapter, one that cannot be used, or one whose strength would be a guess or is no number.
    """
    for name, value in (("strength", lora.strength), ("te_strength", lora.te_strength), ("alpha", lora.alpha)):
        if value is not None and not math.isfinite(value):
            raise RecipeError(f"{name} of {lora.file} is no finite number: {value}")
    config = adapter_config(source)
    tensors = {key: (info.dtype, info.shape) for key, info in source.tensors.items()}
    try:
        adapter = read_adapter(tensors, source.metadata, config)
        if lora.alpha is not None and any(map(lacks_alpha, adapter.pieces)):
            adapter = read_adapter(tensors, source.metadata, {**(config or {}), "lora_alpha": lora.alpha})
    except MergeError as error:
        found = detect(tensors)
        if found.kind not in ("adapter", "unknown"):
            what = f"{lora.file} stands in the place of a LoRA and is none: it holds {found.name}"
            raise RecipeError(
                what, file=source.path, hint="mix checkpoints with: lib-merge merge A B -o OUT"
            ) from error
        raise type(error)(error.what, file=source.path, tensor=error.tensor, hint=error.hint) from error
    if adapter.needs_alpha:
        raise RecipeError(
            "the LoRA has PEFT's names but no alpha: how strong it is stands in the adapter_config.json it came with",
            file=source.path,
            hint=f"put {ADAPTER_CONFIG} beside it, or give the number it was trained with: --lora-alpha X",
        )
    return adapter


def named_loras(given: Sequence[LoraLike], alpha: float | None) -> tuple[tuple[Lora, ...], dict[str, PathLike]]:
    """LoRAs as a recipe names them, and slot -> path.

    Args:
        given: paths, or tuples that begin with one.
        alpha: of those that carry none.
    """
    loras, paths = [], []
    for item in given:
        path, *rest = item if isinstance(item, tuple) else (item,)
        fields = dict(zip(("strength", "te_strength", "blocks"), rest, strict=False))
        paths.append(adapter_path(path))
        loras.append(Lora(file=os.path.basename(os.path.abspath(paths[-1])), alpha=alpha, **fields))  # type: ignore[arg-type]
    named = tuple(loras)
    return named, {slot: path for (slot, _), path in zip(lora_slots(Recipe(loras=named)), paths, strict=True)}


def _is_tied(source: Source | None) -> bool:
    """True when a model folder says that its output layer is its embedding."""
    if source is None or source.kind != "folder" or not (source.path / "config.json").is_file():
        return False
    path = source.path / "config.json"
    return load_json(path.read_bytes(), path, "config").get("tie_word_embeddings") is True


def _scaled(piece: Piece, alphas: Mapping[str, float]) -> Piece:
    """The piece with its alpha as a number; 0 counts as the rank."""
    value = alphas.get(piece.keys.get("alpha", ""))
    if value is None or piece.rank is None:
        return piece
    keys = {role: key for role, key in piece.keys.items() if role != "alpha"}
    return replace(piece, keys=keys, settings={**piece.settings, "alpha": value or float(piece.rank)})


def _change(
    slot: str, piece: Piece, place: Place, shape: Shape, strength: float, shapes: Mapping[str, Shape]
) -> Change:
    form, keys = FORMATS[piece.format], dict(piece.keys)
    sliced = sliced_roles(form, keys, place)
    numel = sum(math.prod(shapes[key]) for role, key in keys.items() if role not in sliced)
    whole = form.stage not in ("replace", "add") or (form.factors is None and not sliced)
    guessed = lacks_alpha(piece)
    return Change(slot, form.id, keys, dict(piece.settings), strength, place, shape, piece.rank, numel, whole, guessed)


def _fit(piece: Piece, shapes: Mapping[str, Shape], place: Place, stored: Shape, first_layer: bool) -> Shape | str:
    """Shape of the module's own weight where it fits its place, else what is wrong.

    Weights may be flattened ([out, in·k]); at a model's first layer the numbers of channels may differ.
    """
    form = FORMATS[piece.format]
    if any(0 in shape for shape in shapes.values()):
        return "nothing: one of its parts is empty"
    region = stored if place.rows is None else (place.rows[1], *stored[1:])
    region = region[::-1] if place.post == "transpose" else region
    try:
        own = form.shape(shapes, piece.settings) if form.shape is not None else None
    except MergeError as error:
        return f"nothing: {error.what}"
    if own is None:
        return region
    rows = place.part[1] if place.part is not None else own[0] if own else 1
    if form.stage in ("multiply", "dora") and place.part is not None:
        return f"{list(own)} by {form.label}, which cannot be split over several tensors"
    total = own[0] if own else 1
    columns, wanted = (-1 if -1 in own[1:] else math.prod(own[1:])), math.prod(region[1:])
    if rows not in (-1, region[0] if region else 1):
        return f"{list(own)}, but there are {list(region)}"
    if columns in (-1, wanted):
        return region if place.part is None else (total, *region[1:])
    kernel = math.prod(region[2:])
    if form.stage == "add" and len(region) > 1 and first_layer and columns % kernel == 0:
        return (total, columns // kernel, *region[2:])
    return f"{list(own)}, but there are {list(region)}"


def _other_family(meant: Detected, base: Detected) -> str:
    """The base's family by name where it is known and not the LoRA's."""
    if meant.family is None or base.family is None or meant.id == base.id:
        return ""
    return base.name
