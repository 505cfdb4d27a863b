"""Recipe and headers to a plan: each tensor's step, each problem, bytes out, expected memory; reads no tensor data."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import fused
from . import recipe as recipes
from .errors import FileError, PlanError, Problem, RecipeError
from .families import detect
from .files.dtypes import nbytes
from .files.open import OUTPUT_SUFFIX, open_model
from .files.sidecar import sidecar_of, sidecar_problems
from .files.sink import OutPart
from .files.source import Part, Source
from .files.target import target_problems
from .kernels.registry import method
from .metadata import header_metadata
from .quant.coded import coded_tensors
from .recipe import Recipe, called
from .resolve import Resolved, resolve
from .steps import Step
from .tiles import KEEP_BYTES, worker_bytes
from .wording import count_of, named

# Resident memory of a process that has loaded torch.
_BASE_BYTES = 262 << 20


@dataclass(frozen=True)
class Plan:
    """What a run will do.

    Attributes:
        recipe: complete: every parameter written out.
        sources: slot path (`A`, `B.C`, `vae`) -> opened model.
        steps: one per output tensor, in the order of model A.
        discarded: keys of A that are left out.
        unused: (slot, key) of the inputs' tensors that have no counterpart in A.
        problems: errors, warnings and notes.
        parts: files to write, with place holders for hashes that are not known yet.
        base: slot path of the file whose layout and metadata the output follows: A, or A's A where that is a recipe.
        keep_recipe: the recipe is stored in the output.
        sidecar: config beside that file, to be copied with the output; None where there is none.
        known_hashes: slot path -> sha256, where it is remembered.
        threads: workers the memory is planned for.
    """

    recipe: Recipe
    sources: Mapping[str, Source]
    steps: tuple[Step, ...]
    discarded: tuple[str, ...]
    unused: tuple[tuple[str, str], ...]
    problems: tuple[Problem, ...]
    parts: tuple[OutPart, ...]
    base: str
    keep_recipe: bool
    sidecar: Path | None = None
    known_hashes: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1

    @property
    def counts(self) -> dict[str, int]:
        """Tensors by what happens to them: merged, copied, discarded, unused."""
        actions = Counter(step.action for step in self.steps)
        return {
            "merged": actions["merged"],
            "copied": actions["copied"],
            "discarded": len(self.discarded),
            "unused": len(self.unused),
        }

    @property
    def folder(self) -> bool:
        """True when the output is a folder."""
        return self.sources[self.base].kind == "folder"

    @property
    def variant(self) -> str:
        """What kind of its family the output is, such as `inpaint`; empty for the plain one."""
        return detect({step.key: (step.dtype, step.shape) for step in self.steps}).variant

    @property
    def output_bytes(self) -> int:
        """Size of the output: headers and data."""
        data = sum(nbytes(step.dtype, step.numel) for step in self.steps)
        return data + sum(len(part.header(part.metadata)) for part in self.parts)

    @property
    def peak_bytes(self) -> int:
        """Expected peak resident memory of the process, torch included."""
        between = KEEP_BYTES if any(step.measured for step in self.steps) else 0
        workers = self.threads * max(map(worker_bytes, self.steps), default=0)
        return _BASE_BYTES + between + fused.memory(self.steps) + workers

    def errors(self) -> list[Problem]:
        """The problems that stop the run."""
        return [problem for problem in self.problems if problem.level == "error"]

    def warnings(self) -> list[Problem]:
        """The problems that do not stop it."""
        return [problem for problem in self.problems if problem.level == "warning"]

    def check(self) -> None:
        """Refuse a plan that has errors.

        Raises:
            PlanError: with all problems of level error.
        """
        if errors := self.errors():
            raise PlanError(errors)

    def close(self) -> None:
        """Close the inputs."""
        for source in self.sources.values():
            source.close()


def default_threads() -> int:
    """Cores this process may use, at most 8: more only wait for the disk."""
    try:
        return min(8, len(os.sched_getaffinity(0)))
    except AttributeError:
        return min(8, os.cpu_count() or 1)


def make_plan(
    recipe: Recipe,
    files: Mapping[str, Path | str],
    *,
    target: Path | None = None,
    overwrite: bool = False,
    strict: bool = False,
    keep_recipe: bool = True,
    known_hashes: Mapping[str, str] | None = None,
    threads: int | None = None,
) -> Plan:
    """Plan a run from the recipe and the inputs' headers; no torch, no tensor data.

    Args:
        recipe: what to do.
        files: slot path (`A`, `B`, `B.C`, `vae`) -> file or folder, for every open or named slot.
        target: where the result goes, to be checked too; None leaves that out.
        overwrite: an existing target may be replaced.
        strict: warnings count as errors.
        keep_recipe: store the recipe in the output.
        known_hashes: sha256 of inputs that are remembered, by slot path.
        threads: workers to plan memory for.

    Raises:
        PlanError: an input cannot be opened.
        RecipeError: method, parameter or pattern is not usable.
    """
    recipe = _named(recipe, files)
    sources = _open_all(recipe, files)
    resolved = resolve(recipe, sources)
    hashes = dict(known_hashes or {})
    problems = [
        *_source_notes(sources),
        *_other_files(recipe, sources, hashes),
        *resolved.problems,
        *_without_effect(recipe, sources, resolved.steps),
    ]
    base = base_slot(recipe)
    plan = Plan(
        resolved.recipe,
        sources,
        resolved.steps,
        resolved.discarded,
        resolved.unused,
        (),
        (),
        base,
        keep_recipe,
        _sidecar(recipe, sources[base]),
        hashes,
        threads or default_threads(),
    )
    plan = replace(plan, parts=_out_parts(plan, sources[base].parts, resolved))
    if target is not None:
        inputs = {slot: source.path for slot, source in sources.items()}
        problems += target_problems(
            target, folder=plan.folder, overwrite=overwrite, inputs=inputs, size_bytes=plan.output_bytes
        )
        if not plan.folder and target.suffix == OUTPUT_SUFFIX:
            problems += sidecar_problems(plan.sidecar, target, overwrite)
    if strict:
        problems = [replace(p, level="error") if p.level == "warning" else p for p in problems]
    return replace(plan, problems=tuple(problems))


def _named(recipe: Recipe, files: Mapping[str, Path | str]) -> Recipe:
    """Open slots of the recipe filled with the names of the files given for them."""
    import msgspec

    models = {
        slot: recipes.Slot(file=Path(files[slot]).name) if model is None and slot in files else model
        for slot, model in recipe.models.items()
    }
    return msgspec.structs.replace(recipe, models=models)


def _open_all(recipe: Recipe, files: Mapping[str, Path | str]) -> dict[str, Source]:
    """Open every input; all that fail are reported together."""
    sources: dict[str, Source] = {}
    problems = []
    if extra := files.keys() - {slot for slot, _ in recipes.files(recipe)}:
        raise RecipeError(f"the recipe has no model {sorted(extra)[0]}", hint="give files for the slots it has")
    opened: dict[Path, Source] = {}
    for slot, model in recipes.files(recipe):
        if slot not in files:
            problems.append(
                Problem(
                    "error",
                    f"no file is given for {called(slot)} ({model.file})",
                    hint="name the folder it lies in",
                )
            )
            continue
        path = Path(files[slot])
        try:
            sources[slot] = opened[path] = opened.get(path) or open_model(path)
        except FileError as error:
            problems.append(Problem("error", f"{called(slot)}: {error.what}", error.file, error.tensor, error.hint))
    if problems:
        raise PlanError(problems)
    return sources


def _source_notes(sources: Mapping[str, Source]) -> Iterable[Problem]:
    for slot, source in sources.items():
        for note in source.notes:
            yield Problem("note", f"{called(slot)}: {note}", str(source.path))


def _other_files(recipe: Recipe, sources: Mapping[str, Source], hashes: Mapping[str, str]) -> Iterable[Problem]:
    """Files that carry the right name but not the contents that the recipe was made with."""
    for slot, model in recipes.files(recipe):
        if model.sha256 and hashes.get(slot, model.sha256) != model.sha256:
            yield wrong_file(slot, sources[slot].path)


def wrong_file(slot: str, path: Path) -> Problem:
    """The finding that an input is not the file the recipe names."""
    return Problem(
        "error",
        f"{called(slot)} has another sha256 than the recipe says: it is not the same file",
        str(path),
        hint="find the file that the recipe was made with",
    )


def _without_effect(recipe: Recipe, sources: Mapping[str, Source], steps: Sequence[Step]) -> Iterable[Problem]:
    """Runs that are allowed and change nothing, or less than their user may think."""
    loras = [slot for slot, _ in recipes.lora_slots(recipe)]
    yield from twins({slot: sources[slot] for slot in recipe.models if slot in sources})
    yield from twins({slot: sources[slot] for slot in loras if slot in sources})
    if loras and not any(lora.strength or lora.te_strength for lora in recipe.loras):
        yield Problem("note", "every LoRA has strength 0: the checkpoint gets nothing of them")
    if recipe.seed and recipe.method and not method(recipe.method).random:
        yield Problem("note", f"seed changes nothing: {recipe.method} is not random")
    if recipe.glob and not (recipe.exclude or recipe.discard or recipe.rules):
        yield Problem("note", "glob changes nothing: there are no patterns")
    if recipe.task == "convert":
        yield from _coded_copies(sources[base_slot(recipe)], steps)
    merges = [step.merge for step in steps if step.merge is not None and step.action == "merged"]
    if merges and all(node.params.get(method(node.method).strength) == 0 for node in merges):
        told = " and ".join(sorted({method(node.method).strength for node in merges}))
        yield Problem("note", f"{told} is 0 everywhere: the merge leaves model A as it is")


def _coded_copies(source: Source, steps: Sequence[Step]) -> Iterable[Problem]:
    """A copy of a quantized model is a quantized model."""
    stored = {step.key: step.dtype for step in steps}
    kinds = coded_tensors({key: info.dtype for key, info in source.tensors.items()})
    if kept := [key for key in kinds if stored.get(key) == source.tensors[key].dtype]:
        what = f"{count_of(kept)} of coded weights ({kinds[kept[0]]}) copied as they are, quantized: {named(kept)}"
        yield Problem("note", what, tensor=kept[0])


def twins(sources: Mapping[str, Source]) -> Iterable[Problem]:
    """Notes of inputs that are one and the same file.

    Args:
        sources: slot -> opened input.
    """
    first: dict[str, str] = {}
    for slot, source in sources.items():
        twin = first.setdefault(os.path.realpath(source.path), slot)
        if twin != slot:
            added = "; their strengths add up" if slot.startswith("lora") else ""
            yield Problem("note", f"{called(twin)} and {called(slot)} are the same file{added}", str(source.path))


def base_slot(recipe: Recipe) -> str:
    """Slot path of the file that the output follows: A, or A.A … where A is a recipe."""
    slot, model = "A", recipe.models["A"]
    while model is not None and model.recipe is not None:
        slot, model = f"{slot}.A", model.recipe.models["A"]
    return slot


def _out_parts(plan: Plan, parts: Sequence[Part], resolved: Resolved) -> tuple[OutPart, ...]:
    """The files to write, cut as A is; parts that lose all their tensors are left out."""
    steps = {step.key: step for step in resolved.steps}
    kept = []
    for part in parts:
        tensors = {key: (steps[key].dtype, steps[key].shape) for key in part.keys if key in steps}
        if tensors or len(parts) == 1:
            kept.append(OutPart(part.name, part.prefix, tensors, {}, part.index, part.metadata))
    values = header_metadata(
        plan.recipe,
        plan.sources,
        [part.inherited for part in kept],
        plan.known_hashes,
        {},
        plan.keep_recipe,
        plan.variant,
    )
    return tuple(replace(part, metadata=value) for part, value in zip(kept, values, strict=True))


def _sidecar(recipe: Recipe, base: Source) -> Path | None:
    """The config of the output: A's, unless only a part of A is written that it does not describe."""
    return sidecar_of(base.path) if recipe.only in (None, "unet") else None
