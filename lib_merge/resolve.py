"""Recipe to steps: names are matched, filters and parameters applied, dtypes chosen; plain data in, plain data out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
    for name, slot in recipe.models.items():
        if slot is not None and slot.recipe is not None:
            inner = resolve(slot.recipe, sources, f"{path}{name}.")
            models[name] = {step.key: step.node for step in inner.steps}
            slots[name] = Slot(recipe=inner.recipe)
            problems += inner.problems
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
        tuple(resolver.discarded),
        tuple(resolver.unused()),
        (*problems, *resolver.problems(steps)),
    )


def _stored(slot: str, source: Source) -> dict[str, Node]:
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
    vae: dict[str, Node] = field(default_factory=dict)
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

    def take_vae(self, tensors: Mapping[str, Node]) -> None:
        """Match A's VAE tensors with those of the VAE file."""
        theirs = {_bare(key, component_of(key) == "vae"): node for key, node in tensors.items()}
        for key, node in self.models["A"].items():
            other = theirs.get(_bare(key, True)) if component_of(key, self.family) == "vae" else None
            if other is not None and other.shape == node.shape:
                self.vae[key] = other
        if not self.vae:
            raise RecipeError(
                "no tensor of the VAE file fits a VAE tensor of model A",
                hint="take a VAE of the same family, with the names of a checkpoint's VAE",
            )

    def step(self, key: str) -> Step | None:
        """What happens to a tensor of A; None when it is left out."""
        base = self.models["A"][key]
        if self.discard.match(key) or not self._kept_component(key):
            self.discarded.append(key)
            return None
        if key in self.vae:
            return self._copy(key, self.vae[key], "taken from the VAE file")
        if self.method is None:
            return self._copy(key, base, "")
        operands = {name: self._operand(name, key) for name in self.donors}
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
                what = f"missing in {name}"
            elif node.shape != base.shape:
                what = f"shape differs in {name}: {list(base.shape)} and {list(node.shape)}"
            elif not is_float(node.dtype):
                what = f"{name} holds {node.dtype}, not numbers that can be merged"
            else:
                continue
            self.mismatched.setdefault(what.split(":")[0], []).append(key)
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
        dtype = stored_dtype([node.dtype], self.recipe.output)
        if isinstance(node, Stored) and node.key in self.coded["A"]:
            dtype = node.dtype
        return Step(key, dtype, node.shape, "copied", node, reason)

    def _merge(self, key: str, base: Node, inputs: Sequence[Node]) -> Step:
        assert self.method is not None
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
        """(slot path, key) of the donors' tensors that have no counterpart in A."""
        return [
            (self.path + name, key) for name in self.donors for key in self.models[name] if (name, key) not in self.used
        ]

    def problems(self, steps: Sequence[Step]) -> list[Problem]:
        """What the user should hear about the whole."""
        level: Level = "error" if self.recipe.mismatch == "error" else "warning"
        kept = {"zeros": "zeros stand in for them", "skip": "A's values are kept", "error": "mismatch is error"}
        for what, keys in self.mismatched.items():
            self.found.append(
                Problem(level, f"{_count(keys)} {what}: {_names(keys)}; {kept[self.recipe.mismatch]}", tensor=keys[0])
            )
        keys = list(self.models["A"])
        for option, patterns in (("exclude", self.exclude), ("discard", self.discard)):
            for text in patterns.unmatched(keys):
                self.found.append(Problem("warning", f"the {option} pattern {text!r} matches no tensor of model A"))
        self.found += self.settings.notes
        if self.method is not None and not any(step.action == "merged" for step in steps):
            self.found.append(self._nothing_merged())
        if not steps:
            self.found.append(Problem("error", "nothing is left: every tensor is discarded"))
        self.found += _broken_positions(steps)
        self.found += _wider(steps, self.models["A"], self.recipe)
        if unused := self.unused():
            self.found.append(
                Problem(
                    "note",
                    f"{_count(unused)} of the other models have no counterpart in A and are "
                    f"not used: {_names([key for _, key in unused])}",
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
                f"{_count(wider)} come out wider than in A: {_names(wider)}",
                hint="--save-dtype keep stores them as A does",
            )
        )
    wanted = BY_OPTION.get(recipe.output.save_dtype)
    over = [step.key for step in steps if wanted and rank(step.dtype) > wanted.rank]
    if over:
        notes.append(
            Problem(
                "note",
                f"{_count(over)} stay wider than {recipe.output.save_dtype}: {_names(over)}",
                hint="--override-dtype forces every float tensor to it",
            )
        )
    return notes


def _count(keys: Sequence[object]) -> str:
    return f"{len(keys)} tensor{'s' if len(keys) != 1 else ''}"


def _names(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _NAMED_AT_MOST} more" if len(keys) > _NAMED_AT_MOST else ""
    return ", ".join(keys[:_NAMED_AT_MOST]) + more
