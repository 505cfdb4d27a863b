"""A model's tensors as numbers: codes whose scale is known become values, other codes stay what must not be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .quant.coded import coded_tensors
from .quant.fp8 import scales_of, sides_of
from .recipe import Output
from .steps import Node, Scaled, Step, Stored

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


def decoded(nodes: Mapping[str, Node], output: Output) -> Tensors:
    """Put each weight's codes and scale together.

    Args:
        nodes: key -> tensor, of a whole model.
        output: with a dtype asked for, numbers from fp8 count as fp8 in the dtype rule; else as bf16.
    """
    stored = {key: node for key, node in nodes.items() if isinstance(node, Stored)}
    shapes = {key: (node.dtype, node.shape) for key, node in stored.items()}
    scales = scales_of(shapes)
    sides = sides_of(shapes, scales)
    coded = coded_tensors({key: node.dtype for key, node in nodes.items() if not isinstance(node, Scaled)})
    plain = output.save_dtype in ("auto", "keep")
    found = {
        key: Scaled(stored[key], stored[scale], DECODED_DTYPE if plain else stored[key].dtype)
        for key, scale in scales.items()
    }
    left = {key: storage for key, storage in coded.items() if key not in scales and key not in sides}
    return Tensors({**nodes, **found}, frozenset(sides), left)


def as_stored(step: Step) -> Step:
    """A step that copies decoded numbers, as one that copies their codes."""
    return replace(step, dtype=step.node.codes.dtype, node=step.node.codes) if isinstance(step.node, Scaled) else step
