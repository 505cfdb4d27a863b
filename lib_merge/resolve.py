"""Recipe to steps: names are matched, filters and parameters applied, dtypes chosen; plain data in, plain data out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from .changes import NO_LORAS, Matched, baked, match
from .channels import Shared, shared_channels
from .decoding import Tensors, as_stored, coded_again, decoded
from .dtype_rule import stored_dtype, width_notes
from .errors import Level, Problem, RecipeError
from .families import PREFIXES, Detected, component_of, detect, is_first_layer, never_merged
from .files.dtypes import DTYPES, is_float
from .files.source import Source
from .kernels.random import stream_key
from .kernels.registry import Method, method
from .matching import finder
from .patterns import Patterns
from .prediction import MARKERS, prediction_problems
from .quant.coded import HINT as CODED_HINT
from .recipe import Recipe, Slot
from .repairs import REPAIRED, position_problems, repaired
from .settings import Settings, checked
from .steps import Baked, Joined, Merged, Node, Scaled, Step, Stored, Zeros
from .vae import replaced_vae
from .wording import count_of, named

# Last names of tensors that are copied bit for bit, whatever dtype is asked for; empty tensors are too.
_MARKERS = ("position_ids", *MARKERS)


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
            slots[name] = msgspec.structs.replace(slot, recipe=inner.recipe)
            problems += inner.problems
            unused += inner.unused
            discarded += inner.discarded if name == "A" else ()
        else:
            models[name] = _stored(f"{path}{name}", sources[f"{path}{name}"])
            slots[name] = slot
    recipe = msgspec.structs.replace(recipe, models=slots)
    tensors = {name: decoded(nodes, recipe.output, inner=bool(path)) for name, nodes in models.items()}
    resolver = _Resolver(recipe, tensors, path)
    resolver.matched = match(recipe, _shapes(resolver.models["A"]), resolver.family, sources, path)
    if recipe.vae is not None:
        theirs = _stored(f"{path}vae", sources[f"{path}vae"])
        resolver.vae = replaced_vae(models["A"], resolver.family, theirs)
        taken = {node.key for node in resolver.vae.values()}
        resolver.vae_unused = [(f"{path}vae", key) for key in theirs if key not in taken]
    steps = resolver.settled([step for key in models["A"] if (step := resolver.step(key)) is not None])
    return Resolved(
        recipe,
        tuple(steps),
        (*discarded, *resolver.discarded),
        (*unused, *resolver.unused(), *resolver.matched.unused),
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
    tensors: Mapping[str, Tensors]
    path: str
    discarded: list[str] = field(default_factory=list)
    mismatched: dict[str, list[str]] = field(default_factory=dict)
    used: set[tuple[str, str]] = field(default_factory=set)
    vae: dict[str, Stored] = field(default_factory=dict)
    vae_unused: list[tuple[str, str]] = field(default_factory=list)
    merged: list[str] = field(default_factory=list)
    matched: Matched = NO_LORAS
    kept_codes: list[str] = field(default_factory=list)
    cautions: dict[str, list[str]] = field(default_factory=dict)
    found: list[Problem] = field(default_factory=list)

    def __post_init__(self) -> None:
        recipe, base = self.recipe, self.tensors["A"].nodes
        self.sides = self.tensors["A"].sides
        self.coded = {name: tensors.coded for name, tensors in self.tensors.items()}
        self.models = {name: base if name == "A" else tensors.without_sides for name, tensors in self.tensors.items()}
        self.method: Method | None = method(recipe.method) if recipe.method else None
        self.donors = sorted(name for name in self.models if name != "A")
        self.find = {name: finder(base, self.models[name], PREFIXES) for name in self.donors}
        self.exclude = Patterns(recipe.exclude, recipe.glob)
        self.discard = Patterns(recipe.discard, recipe.glob)
        self.family = detect(_shapes(base))
        self.settings = Settings(recipe, self.method, _shapes(base), self.family)

    def step(self, key: str) -> Step | None:
        """What happens to a tensor of A; None when it is left out."""
        base = self.models["A"][key]
        operands = {name: self._operand(name, key) for name in self.donors}
        if self.discard.match(key) or not self._kept_component(key):
            self.discarded.append(key)
            return None
        if key in self.vae:
            return self._bake(self._copy(key, self.vae[key], "taken from the VAE file"))
        if key in self.sides:
            return Step(key, base.dtype, base.shape, "copied", base, "goes with fp8 codes")
        if (table := repaired(key, base)) is not None:
            return Step(key, table.dtype, table.shape, "copied", table, REPAIRED)
        if self._excluded(key):
            return self._copy(key, base, "not included" if self.recipe.include_mode else "excluded")
        return self._bake(self._merged_or_copied(key, base, operands))

    def _excluded(self, key: str) -> bool:
        return self.recipe.task != "convert" and self.exclude.match(key) != self.recipe.include_mode

    def _bake(self, step: Step) -> Step:
        """The step with the recipe's LoRAs on top, if they change it."""
        return step if self._excluded(step.key) else baked(step, self.matched, self.coded["A"])

    def _merged_or_copied(self, key: str, base: Node, operands: dict[str, Node | None]) -> Step:
        """What the method makes of a tensor, LoRAs left aside."""
        if self.method is None:
            return self._copy(key, base, "")
        self._refuse_coded(key, base, operands)
        shared = shared_channels({"A": base, **operands}) if is_first_layer(key, self.family) else None
        first = base
        if shared is not None:
            first, operands = shared.nodes["A"] or base, {name: shared.nodes[name] for name in self.donors}
        reason = _never(key, base, self.family) or self._mismatch(key, first, operands)
        if reason:
            return self._copy(key, base, reason)
        inputs = [first, *(node or Zeros(base.dtype, first.shape) for node in operands.values())]
        return self._merge(key, inputs, shared)

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
        return Step(key, dtype, node.shape, "merged" if isinstance(node, (Merged, Baked)) else "copied", node, reason)

    def _keep_codes(self, key: str) -> None:
        """Codes have the dtype they have: convert refuses another one, a merge that excludes them leaves them alone."""
        if self.method is None:
            raise RecipeError(
                f"model A holds coded weights ({self.coded['A'][key]}), which cannot be stored as another dtype",
                tensor=key,
                hint="leave --save-dtype out to copy them as they are, or take the 16-bit version of the model",
            )
        self.kept_codes.append(key)

    def settled(self, steps: list[Step]) -> list[Step]:
        """The steps once it is known whether A's fp8 codes become numbers: all of them do, or none.

        A merge that takes some of them as numbers decodes the others too, and so does a convert that names a dtype.
        Where all of them are to be stored as fp8 they become codes again, with scales as A has them.
        """
        codes = [key for key, node in self.models["A"].items() if isinstance(node, Scaled)]
        names_dtype = self.recipe.output.save_dtype not in ("auto", "keep")
        numbers = {*self.merged, *(step.key for step in steps if isinstance(step.node, Baked))}
        if (self.method is None and names_dtype) or not numbers.isdisjoint(codes):
            coded = coded_again(steps, self.tensors["A"]) if codes and not self.path else None
            if coded is not None:
                self._tell_coded([step.key for step in coded if step.scale])
                return coded
            gone = [step.key for step in steps if step.key in self.sides]
            if codes:
                self.discarded += gone
                what = f"{count_of(codes)} of scaled fp8 decoded, and {count_of(gone)} left out that went with them"
                self.found.append(Problem("note", f"{what}: {named(gone)}", tensor=codes[0]))
            return [step for step in steps if step.key not in self.sides]
        if self.method is not None:
            self.kept_codes += [step.key for step in steps if step.key in codes and self._would_cast(step)]
        return [as_stored(step) if step.key in codes else step for step in steps]

    def _tell_coded(self, fresh: Sequence[str]) -> None:
        if fresh:
            what = f"{count_of(fresh)} stored as scaled fp8 again, each with a fresh scale: {named(fresh)}"
            self.found.append(Problem("note", what, tensor=fresh[0]))

    def _would_cast(self, step: Step) -> bool:
        codes = as_stored(step).dtype
        return stored_dtype([codes], self.recipe.output) != codes

    def _merge(self, key: str, inputs: Sequence[Node], shared: Shared | None) -> Step:
        assert self.method is not None
        self.merged.append(key)
        params, reason = self.settings.of(key)
        if caution := self.method.caution(params):
            self.cautions.setdefault(caution, []).append(key)
        strengths = self._strengths() if self.method.more else ()
        shares = [1.0, *strengths] if self.method.more else [1.0] * len(inputs)
        acting = zip(inputs[1:], shares[1:], strict=True) if params[self.method.strength] != 0 else ()
        contributing = [inputs[0].dtype, *(node.dtype for node, share in acting if share)]
        wider = shared.wider if shared else None
        dtype = stored_dtype([*contributing, *([wider.dtype] if wider else [])], self.recipe.output)
        more = (self.path.rstrip("."),) if self.path else ()
        stream = stream_key(self.recipe.seed, key, *more) if self.method.random else 0
        node = Merged(
            self.method.id,
            params,
            tuple(inputs),
            dtype,
            inputs[0].shape,
            stream,
            whole=self.method.needs_whole(params),
            rows=self.method.rows,
            measured=bool(self.method.needed_measures(params)),
            strengths=strengths,
        )
        if shared:
            reason = ", ".join(filter(None, [reason, shared.reason]))
            self.found.append(Problem("note", f"{key}: {shared.reason}", tensor=key))
        joined = Joined(node, wider, dtype) if wider else node
        return Step(key, dtype, joined.shape, "merged", joined, reason)

    def _strengths(self) -> tuple[float, ...]:
        """Of every model but A."""
        given = [slot.strength if slot is not None else None for slot in map(self.recipe.models.get, self.donors)]
        return tuple(1.0 if strength is None else strength for strength in given)

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
                    f"{count_of(keys)} {what}: {named(keys)}; {kept[self.recipe.mismatch]}",
                    tensor=keys[0].partition(" (")[0],
                )
            )
        keys = list(self.models["A"])
        for option, patterns in (("exclude", self.exclude), ("discard", self.discard)):
            for text in patterns.unmatched(keys):
                self.found.append(Problem("warning", f"the {option} pattern {text!r} matches no tensor of model A"))
        self.found += self.settings.notes
        for caution, keys in self.cautions.items():
            self.found.append(Problem("warning", f"{count_of(keys)}: {caution}", tensor=keys[0]))
        if any(component_of(key, self.family) == "unet" for key in self.merged) and "B" in self.models:
            allowed = self.recipe.allow_mixed_prediction
            self.found += prediction_problems(self.models["A"], self.models["B"], allowed=allowed)
        if self.method is not None and not self.merged:
            self.found.append(self._nothing_merged())
        self.found += self.matched.problems
        if self.matched.changes and not any(isinstance(step.node, Baked) for step in steps):
            self.found.append(Problem("error", "nothing would be baked: what the LoRAs change is left out or excluded"))
        if not steps:
            lacking = f"; model A has no {self.recipe.only}" if self.recipe.only else ""
            self.found.append(Problem("error", f"nothing is left: every tensor is discarded{lacking}"))
        if self.kept_codes:
            what = f"{count_of(self.kept_codes)} of coded weights kept as stored: {named(self.kept_codes)}"
            self.found.append(Problem("note", what, tensor=self.kept_codes[0]))
        if not self.path:  # what an inner recipe gives is not stored
            self.found += position_problems(steps)
            base = {key: node.dtype for key, node in self.models["A"].items()}
            self.found += width_notes({step.key: step.dtype for step in steps}, base, self.recipe.output)
        if unused := self.unused():
            self.found.append(
                Problem(
                    "note",
                    f"{count_of(unused)} of the other models without a counterpart in A, not used: "
                    f"{named([key for _, key in unused])}",
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
        for name in self.donors:
            if detect(_shapes(self.models[name])).kind == "adapter":
                slot = self.recipe.models[name]
                return Problem(
                    "error",
                    f"nothing would be merged: model {name} is a LoRA, not a checkpoint",
                    slot.file if slot else None,
                    hint="bake it in: lib-merge bake CHECKPOINT LORA, or add it to a merge with --lora",
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


def _never(key: str, node: Node, family: Detected) -> str:
    """Why a tensor is never merged whatever the others hold; empty when it may be."""
    if DTYPES[node.dtype].kind == "integer":
        return "integers are copied"
    if node.dtype == "C64":
        return "complex numbers are copied"
    if 0 in node.shape:
        return "an empty marker is copied"
    return never_merged(key, node.dtype, node.shape, family) or ""
