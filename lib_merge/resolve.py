"""Recipe to steps: names are matched, filters and parameters applied, dtypes chosen; plain data in, plain data out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from .dtype_rule import rank, stored_dtype
from .errors import Level, Problem, RecipeError
from .families import PREFIXES, Detected, component_of, detect, never_merged
from .files.dtypes import BY_OPTION, DTYPES, is_float
from .files.source import Source
from .kernels.random import stream_key
from .kernels.registry import Method, method
from .matching import finder
from .patterns import Patterns
from .quant.coded import HINT as CODED_HINT
from .quant.coded import coded_tensors
from .recipe import Recipe, Slot
from .settings import Settings, checked
from .steps import Merged, Node, Step, Stored, Zeros

_NAMED_AT_MOST = 8
# Where a VAE's tensors stand in a checkpoint, and in a file of its own (bare names).
_VAE_PREFIXES = ("first_stage_model.", "vae.", "vae/", "")
# Last names of tensors that are copied bit for bit, whatever dtype is asked for; empty tensors are too.
_MARKERS = ("position_ids", "v_pred", "ztsnr")


@dataclass(frozen=True)
class Resolved:
    """Result of `resolve`; see `plan.Plan` for the fields."""

    recipe: Recipe
    steps: tuple[Step, ...]
    discarded: tuple[str, ...]
    unused: tuple[tuple[str, str], ...]
    problems: tuple[Problem, ...]


def resolve(recipe: Recipe, sources: Mapping[str, Source], path: str = "") -> Resolved:
    """Decide what happens to every tensor.

    Args:
        recipe: the run; nested recipes are resolved first.
        sources: slot path -> opened model.
        path: slot path of this recipe inside the outermost one, with a trailing dot; empty for the outermost.

    Raises:
        RecipeError: method, parameter, slot or pattern is not usable.
    """
    recipe, problems = checked(recipe)
    models: dict[str, Mapping[str, Node]] = {}
    slots: dict[str, Slot | None] = {}
    discarded: list[str] = []
    unused: list[tuple[str, str]] = []
    for name, slot in recipe.models.items():
        if slot is not None and slot.recipe is not None:
            inner = _inner(slot.recipe, sources, path, name)
            models[name] = {step.key: step.node for step in inner.steps}
            slots[name] = Slot(recipe=inner.recipe)
            problems += inner.problems
            unused += inner.unused
            discarded += inner.discarded if name == "A" else ()
        else:
            models[name] = _stored(f"{path}{name}", sources[f"{path}{name}"])
            slots[name] = slot
    recipe = msgspec.structs.replace(recipe, models=slots)
    resolver = _Resolver(recipe, models, path)
    if recipe.vae is not None:
        resolver.take_vae(_stored(f"{path}vae", sources[f"{path}vae"]))
    steps = [step for key in models["A"] if (step := resolver.step(key)) is not None]
    return Resolved(
        recipe,
        tuple(steps),
        (*discarded, *resolver.discarded),
        (*unused, *resolver.unused()),
        (*problems, *resolver.problems(steps)),
    )


def _inner(recipe: Recipe, sources: Mapping[str, Source], path: str, name: str) -> Resolved:
    """A model that is a recipe itself; what it has to say tells where it stands."""
    where = f"in the recipe of {name}: "
    try:
        inner = resolve(recipe, sources, f"{path}{name}.")
    except RecipeError as error:
        raise RecipeError(where + error.what, file=error.file, tensor=error.tensor, hint=error.hint) from error
    return replace(inner, problems=tuple(replace(found, what=where + found.what) for found in inner.problems))


def _stored(slot: str, source: Source) -> dict[str, Stored]:
    return {key: Stored(slot, key, info.dtype, info.shape) for key, info in source.tensors.items()}


@dataclass
class _Resolver:
    """Decides one tensor after the other and remembers what the user should hear."""

    recipe: Recipe
    models: Mapping[str, Mapping[str, Node]]
    path: str
    discarded: list[str] = field(default_factory=list)
    mismatched: dict[str, list[str]] = field(default_factory=dict)
    used: set[tuple[str, str]] = field(default_factory=set)
    vae: dict[str, Stored] = field(default_factory=dict)
    vae_unused: list[tuple[str, str]] = field(default_factory=list)
    merged: int = 0
    kept_codes: list[str] = field(default_factory=list)
    found: list[Problem] = field(default_factory=list)

    def __post_init__(self) -> None:
        recipe, base = self.recipe, self.models["A"]
        self.method: Method | None = method(recipe.method) if recipe.method else None
        self.donors = [name for name in self.models if name != "A"]
        self.find = {name: finder(base, self.models[name], PREFIXES) for name in self.donors}
        self.exclude = Patterns(recipe.exclude, recipe.glob)
        self.discard = Patterns(recipe.discard, recipe.glob)
        self.family = detect(_shapes(base))
        self.settings = Settings(recipe, self.method, _shapes(base), self.family)
        self.coded = {
            name: coded_tensors({key: node.dtype for key, node in tensors.items()})
            for name, tensors in self.models.items()
        }

    def take_vae(self, tensors: Mapping[str, Stored]) -> None:
        """Match A's VAE tensors with those of the VAE file; all of them must be there, half a VAE decodes nothing."""
        family = detect(_shapes(tensors))
        theirs = {_bare(key, component_of(key, family) == "vae"): node for key, node in tensors.items()}
        mine = [key for key in self.models["A"] if component_of(key, self.family) == "vae"]
        for key in mine:
            other = theirs.get(_bare(key, True))
            if other is not None and other.shape == self.models["A"][key].shape:
                self.vae[key] = other
        lacking = [key for key in mine if key not in self.vae]
        if lacking or not mine:
            what = f"lacks {_count(lacking)} that A's VAE has, or in another shape: {_names(lacking)}"
            raise RecipeError(
                f"the VAE file {what}" if mine else "model A has no VAE that could be replaced",
                hint="take a VAE of the same family, with the names of a checkpoint's VAE" if mine else None,
            )
        coded = coded_tensors({key: node.dtype for key, node in tensors.items()})
        for node in self.vae.values():
            if node.key in coded:
                raise RecipeError(f"the VAE file holds coded weights ({coded[node.key]})", tensor=node.key)
        taken = {node.key for node in self.vae.values()}
        self.vae_unused = [(f"{self.path}vae", key) for key in tensors if key not in taken]

    def step(self, key: str) -> Step | None:
        """What happens to a tensor of A; None when it is left out."""
        base = self.models["A"][key]
        operands = {name: self._operand(name, key) for name in self.donors}
        if self.discard.match(key) or not self._kept_component(key):
            self.discarded.append(key)
            return None
        if key in self.vae:
            return self._copy(key, self.vae[key], "taken from the VAE file")
        if self.method is None:
            return self._copy(key, base, "")
        if self.exclude.match(key) != self.recipe.include_mode:
            return self._copy(key, base, "not included" if self.recipe.include_mode else "excluded")
        self._refuse_coded(key, base, operands)
        reason = _never(key, base, self.family) or self._mismatch(key, base, operands)
        if reason:
            return self._copy(key, base, reason)
        inputs = [base, *(node if node is not None else Zeros(base.dtype, base.shape) for node in operands.values())]
        return self._merge(key, base, inputs)

    def _kept_component(self, key: str) -> bool:
        return self.recipe.only is None or component_of(key, self.family).startswith(self.recipe.only)

    def _operand(self, name: str, key: str) -> Node | None:
        other = self.find[name](key)
        if other is None:
            return None
        self.used.add((name, other))
        return self.models[name][other]

    def _mismatch(self, key: str, base: Node, operands: dict[str, Node | None]) -> str:
        """Why B, C … keep the tensor from being merged, or empty. Zeros stand in where the recipe says so."""
        reason = ""
        for name, node in operands.items():
            if node is None:
                kind = what = f"missing in {name}"
            elif node.shape != base.shape:
                kind, what = f"of another shape in {name}", f"{list(base.shape)} in A, {list(node.shape)} in {name}"
            elif not is_float(node.dtype):
                kind = what = f"{node.dtype} in {name}, no numbers that can be merged"
            else:
                continue
            self.mismatched.setdefault(kind, []).append(key if what == kind else f"{key} ({what})")
            if self.recipe.mismatch == "zeros":
                operands[name] = None
            else:
                reason = reason or what
        return reason

    def _refuse_coded(self, key: str, base: Node, operands: Mapping[str, Node | None]) -> None:
        """Codes are not numbers: a merge that meets them is refused, unless they are excluded."""
        for name, node in {"A": base, **operands}.items():
            storage = self.coded[name].get(node.key) if isinstance(node, Stored) else None
            if storage:
                raise RecipeError(
                    f"model {name} holds coded weights ({storage}), which cannot be merged as numbers",
                    tensor=key,
                    hint=CODED_HINT,
                )

    def _copy(self, key: str, node: Node, reason: str) -> Step:
        """A tensor that this recipe applies no method to; where A is a recipe, that one may have."""
        keep = self.recipe.output.save_dtype == "keep"
        dtype = stored_dtype([self.models["A"][key].dtype if keep else node.dtype], self.recipe.output)
        if 0 in node.shape or key.rpartition(".")[2] in _MARKERS:
            dtype = node.dtype
        elif dtype != node.dtype and key not in self.vae and key in self.coded["A"]:
            self._keep_codes(key)
            dtype = node.dtype
        return Step(key, dtype, node.shape, "merged" if isinstance(node, Merged) else "copied", node, reason)

    def _keep_codes(self, key: str) -> None:
        """Codes have the dtype they have: convert refuses another one, a merge that excludes them leaves them alone."""
        if self.method is None:
            raise RecipeError(
                f"model A holds coded weights ({self.coded['A'][key]}), which cannot be stored as another dtype",
                tensor=key,
                hint="leave --save-dtype out to copy them as they are, or take the 16-bit version of the model",
            )
        self.kept_codes.append(key)

    def _merge(self, key: str, base: Node, inputs: Sequence[Node]) -> Step:
        assert self.method is not None
        self.merged += 1
        params, reason = self.settings.of(key)
        contributing = [node.dtype for node in inputs] if params[self.method.strength] != 0 else [base.dtype]
        dtype = stored_dtype(contributing, self.recipe.output)
        more = (self.path.rstrip("."),) if self.path else ()
        stream = stream_key(self.recipe.seed, key, *more) if self.method.random else 0
        node = Merged(
            self.method.id,
            params,
            tuple(inputs),
            dtype,
            base.shape,
            stream,
            whole=self.method.needs_whole(params),
            rows=self.method.rows,
            measured=bool(self.method.measures),
        )
        return Step(key, dtype, base.shape, "merged", node, reason)

    def unused(self) -> list[tuple[str, str]]:
        """(slot path, key) of the other files' tensors that have no counterpart in A."""
        return self.vae_unused + [
            (self.path + name, key) for name in self.donors for key in self.models[name] if (name, key) not in self.used
        ]

    def problems(self, steps: Sequence[Step]) -> list[Problem]:
        """What the user should hear about the whole."""
        level: Level = "error" if self.recipe.mismatch == "error" else "warning"
        kept = {"zeros": "zeros stand in for them", "skip": "A's values are kept", "error": "mismatch is error"}
        for what, keys in self.mismatched.items():
            self.found.append(
                Problem(
                    level,
                    f"{_count(keys)} {what}: {_names(keys)}; {kept[self.recipe.mismatch]}",
                    tensor=keys[0].partition(" (")[0],
                )
            )
        keys = list(self.models["A"])
        for option, patterns in (("exclude", self.exclude), ("discard", self.discard)):
            for text in patterns.unmatched(keys):
                self.found.append(Problem("warning", f"the {option} pattern {text!r} matches no tensor of model A"))
        self.found += self.settings.notes
        if self.method is not None and not self.merged:
            self.found.append(self._nothing_merged())
        if not steps:
            lacking = f"; model A has no {self.recipe.only}" if self.recipe.only else ""
            self.found.append(Problem("error", f"nothing is left: every tensor is discarded{lacking}"))
        if self.kept_codes:
            what = f"{_count(self.kept_codes)} of coded weights kept as stored: {_names(self.kept_codes)}"
            self.found.append(Problem("note", what, tensor=self.kept_codes[0]))
        if not self.path:  # what an inner recipe gives is not stored
            self.found += _broken_positions(steps)
            self.found += _wider(steps, self.models["A"], self.recipe)
        if unused := self.unused():
            self.found.append(
                Problem(
                    "note",
                    f"{_count(unused)} of the other models without a counterpart in A, not used: "
                    f"{_names([key for _, key in unused])}",
                )
            )
        return self.found

    def _nothing_merged(self) -> Problem:
        if self.recipe.include_mode and not self.exclude.texts:
            return Problem(
                "error",
                "nothing would be merged: include mode without a pattern includes nothing",
                hint="name what is to be merged with --exclude PATTERN",
            )
        samples = {name: next(iter(tensors), "no tensors") for name, tensors in self.models.items()}
        shown = ", ".join(f"{name} has {key}" for name, key in samples.items())
        return Problem(
            "error",
            f"nothing would be merged: no tensor of A is both allowed and found in the others ({shown})",
            hint="check that the models are of one family, and the patterns",
        )


def _shapes(tensors: Mapping[str, Node]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {key: (node.dtype, node.shape) for key, node in tensors.items()}


def _bare(key: str, in_vae: bool) -> str:
    """A VAE key without the prefix that checkpoints give it."""
    return key.removeprefix(next(p for p in _VAE_PREFIXES if key.startswith(p))) if in_vae else key


def _never(key: str, node: Node, family: Detected) -> str:
    """Why a tensor is never merged whatever the others hold; empty when it may be."""
    if DTYPES[node.dtype].kind == "integer":
        return "integers are copied"
    if node.dtype == "C64":
        return "complex numbers are copied"
    if 0 in node.shape:
        return "an empty marker is copied"
    return never_merged(key, node.dtype, node.shape, family) or ""


def _broken_positions(steps: Sequence[Step]) -> list[Problem]:
    """Position tables that an earlier merge turned into floats."""
    keys = [step.key for step in steps if step.key.endswith("position_ids") and is_float(step.dtype)]
    return [
        Problem(
            "warning",
            f"{key} holds floats where whole numbers belong: an earlier merge damaged it; it is copied as it is",
            tensor=key,
            hint="take A from a file in which it is int64",
        )
        for key in keys
    ]


def _wider(steps: Sequence[Step], base: Mapping[str, Node], recipe: Recipe) -> list[Problem]:
    """Notes on tensors that take more room than in A, or than asked for."""
    notes = []
    wider = [step.key for step in steps if rank(step.dtype) > rank(base[step.key].dtype)]
    if wider:
        notes.append(
            Problem(
                "note",
                f"{_count(wider)} stored wider than in A: {_names(wider)}",
                hint="--save-dtype keep stores them as A does",
            )
        )
    wanted = BY_OPTION.get(recipe.output.save_dtype)
    over = [step.key for step in steps if wanted and rank(step.dtype) > wanted.rank]
    if over:
        notes.append(
            Problem(
                "note",
                f"{_count(over)} still wider than {recipe.output.save_dtype}: {_names(over)}",
                hint="--override-dtype forces every float tensor to it",
            )
        )
    return notes


def _count(keys: Sequence[object]) -> str:
    return f"{len(keys)} tensor{'s' if len(keys) != 1 else ''}"


def _names(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _NAMED_AT_MOST} more" if len(keys) > _NAMED_AT_MOST else ""
    return ", ".join(keys[:_NAMED_AT_MOST]) + more
