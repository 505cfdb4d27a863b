"""A model's tensors as numbers: codes whose scale is known become values, and codes again where all are to stay so.

Other codes stay what must not be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .errors import RecipeError
from .quant.coded import coded_tensors
from .quant.fp8 import FORMAT_SIDE, FORMATS, MARKER, is_layout, scales_of, sides_of
from .recipe import Output
from .steps import FreshScale, Node, Scaled, Step, Stored

# What scaled fp8 is stored as where nothing else is asked for.
DECODED_DTYPE = "BF16"


@dataclass(frozen=True)
class Tensors:
    """What a model offers.

    Attributes:
        nodes: key -> numbers, or what is copied.
        sides: keys of the tensors that only the codes need: scales and markers.
        coded: key -> name of the storage, of codes that are not decoded.
    """

    nodes: Mapping[str, Node]
    sides: frozenset[str]
    coded: Mapping[str, str]

    @property
    def without_sides(self) -> dict[str, Node]:
        """The nodes that stand for weights."""
        return {key: node for key, node in self.nodes.items() if key not in self.sides}


def decoded(nodes: Mapping[str, Node], output: Output, *, inner: bool = False) -> Tensors:
    """Put each weight's codes and scale together.

    Args:
        nodes: key -> tensor, of a whole model.
        output: with a dtype asked for, numbers from fp8 count as fp8 in the dtype rule; else as bf16.
        inner: they are for a recipe inside another one, which stores nothing: there is nothing to keep.
    """
    stored = {key: node for key, node in nodes.items() if isinstance(node, Stored)}
    shapes = {key: (node.dtype, node.shape) for key, node in stored.items()}
    scales = scales_of(shapes)
    sides = sides_of(shapes, scales)
    coded = coded_tensors({key: node.dtype for key, node in nodes.items() if not isinstance(node, Scaled)})
    plain = output.save_dtype in (("auto", "keep") if inner else ("auto",))
    found = {
        key: Scaled(stored[key], stored[scale], DECODED_DTYPE if plain else stored[key].dtype)
        for key, scale in scales.items()
    }
    left = {key: storage for key, storage in coded.items() if key not in scales and key not in sides}
    return Tensors({**nodes, **found}, frozenset(sides), left)


def as_stored(step: Step) -> Step:
    """A step that copies decoded numbers, as one that copies their codes."""
    return replace(step, dtype=step.node.codes.dtype, node=step.node.codes) if isinstance(step.node, Scaled) else step


def coded_again(steps: Sequence[Step], base: Tensors) -> list[Step] | None:
    """The steps where all weights that model A holds as codes are to be codes again: fresh ones, or A's own.

    Args:
        steps: of numbers.
        base: model A.

    Returns:
        None where a weight is to be stored wider, or its scale does not fit it: then they stay numbers.

    Raises:
        RecipeError: a scale is left out, or the model says elsewhere that its codes are of another kind.
    """
    codes = {key: node for key, node in base.nodes.items() if isinstance(node, Scaled)}
    weights = {step.key: step for step in steps if step.key in codes}
    if not all(_can_be_coded(step, codes[key], base) for key, step in weights.items()):
        return None
    fresh = {
        key: FreshScale(codes[key].scale.key, codes[key].scale.shape, step.node)
        for key, step in weights.items()
        if step.node != codes[key] or step.dtype != codes[key].codes.dtype
    }
    dtypes = {weights[key].dtype for key in fresh if weights[key].dtype != codes[key].codes.dtype}
    _refuse_contradictions(steps, base, fresh, dtypes)
    scales = {
        scale.key: Step(scale.key, scale.dtype, scale.shape, weights[key].action, scale, "a fresh scale of fp8 codes")
        for key, scale in fresh.items()
    }
    settled = []
    for step in steps:
        if step.key in weights:
            step = replace(step, scale=fresh[step.key]) if step.key in fresh else as_stored(step)
        elif dtypes and step.key in base.sides and step.key.rpartition(".")[2] == MARKER:
            step = replace(step, dtype=min(dtypes))
        settled.append(scales.get(step.key, step))
    return settled


def _can_be_coded(step: Step, codes: Scaled, base: Tensors) -> bool:
    return step.dtype in FORMATS and codes.scale.key in base.sides and is_layout(step.shape, codes.scale.shape)


def _refuse_contradictions(
    steps: Sequence[Step], base: Tensors, fresh: Mapping[str, FreshScale], dtypes: set[str]
) -> None:
    kept = {step.key for step in steps}
    lacking = [scale.key for scale in fresh.values() if scale.key not in kept]
    if lacking:
        raise RecipeError(
            "the scale of fp8 codes that are made anew is discarded",
            tensor=lacking[0],
            hint="keep it, or leave --save-dtype out to store the weights as bf16",
        )
    told = [key for key in base.sides & kept if key.endswith(FORMAT_SIDE)]
    if told and dtypes:
        raise RecipeError(
            "model A says which kind of fp8 its weights are, which would not be true any more",
            tensor=min(told),
            hint="--save-dtype keep stores them as model A does",
        )
