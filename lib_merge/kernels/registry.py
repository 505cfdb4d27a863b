"""Every merge method as data: inputs, parameters, formula, and how its tensors may be cut into tiles.

A file in this folder that holds functions decorated with `merge_method` is found by itself.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from ..errors import RecipeError
from ..wording import suggestion

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["elementwise", "whole"]
Columns = dict[str, float | str]
Chance = Literal["", "element", "tensor"]
Value = float | bool

_LARGEST = sys.float_info.max


@dataclass(frozen=True)
class Param:
    """One parameter of a method.

    Attributes:
        name: as in recipes and on the command line.
        default: value when it is not given; its type (float or bool) is the parameter's.
        meaning: one line for tooltips and help.
        low, high: limits; infinite where there is none.
        clamp: values outside are moved to the limit with a warning instead of refused.
        slider: lowest and highest value that a slider offers.
    """

    name: str
    default: Value
    meaning: str
    low: float = -math.inf
    high: float = math.inf
    clamp: bool = False
    slider: tuple[float, float] = (0.0, 1.0)

    @property
    def shown_default(self) -> str:
        """The default for display: `0.5`, `false`."""
        return str(self.default).lower() if isinstance(self.default, bool) else f"{self.default:g}"

    @property
    def range(self) -> str:
        """Allowed values for display: `0 … 1`, `any number`, `true or false`."""
        if isinstance(self.default, bool):
            return "true or false"
        if math.isinf(self.high):
            return "any number" if math.isinf(self.low) else f"{self.low:g} or more"
        return f"{self.low:g} … {self.high:g}"

    def check(self, value: object) -> Value:
        """The value to work with.

        Raises:
            RecipeError: of another type, not finite, or outside the limits (unless `clamp`).
        """
        if isinstance(self.default, bool):
            if isinstance(value, bool):
                return value
            raise RecipeError(f"{self.name} must be true or false, not {value!r}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
            raise RecipeError(f"{self.name} must be a finite number, not {value!r}")
        if not self.low <= value <= self.high and not self.clamp:
            raise RecipeError(f"{self.name} must be {self.range}, not {value!r}")
        return min(max(float(value), self.low), self.high)


@dataclass(frozen=True)
class Measure:
    """A number (or a vector) that a method must know of the whole tensor before it can touch an element.

    Attributes:
        tile: takes what the method's function takes (`measures` holds those before this one) and returns the tile's
            part; it must leave the tensors as they are.
        combine: the parts in the order of the tiles -> the measure. It must not depend on where tiles were cut: a
            maximum, a sum of whole blocks in their order, an exact sum.
        drawn: it needs the method's draws; they are None otherwise.
        needed: parameters -> False where the method gives its result without it, and without all that follow it.
    """

    tile: Callable[..., Any]
    combine: Callable[[list[Any]], Any]
    drawn: bool = False
    needed: Callable[[Mapping[str, Value]], bool] = lambda params: True


@dataclass(frozen=True)
class Method:
    """One merge method; made by `merge_method`.

    Attributes:
        id: name in recipes and on the command line.
        label: name for people.
        inputs: slots it needs, A first.
        more: it takes models beyond these too, as many as there are, each but A with a strength of its own; the
            function then takes `strengths`, one for each but A.
        strength: the parameter that a bare block number sets; its value 0 always gives A.
        params: all parameters.
        formula: for display; A, B, C are the models' tensors.
        kind: `elementwise` methods may be cut into tiles, `whole` ones see a whole tensor in its shape.
        whole_when: a bool parameter that makes an elementwise method need whole tensors, or empty.
        rows: tiles are whole rows, and tensors come as matrices [rows, columns]: the first dimension against the rest,
            vectors as one column. Blocks of `row_block` rows are never cut.
        measures: what it must know of the whole tensor first; the function then takes `measures`, the values of those
            that `needed_measures` names.
        random: the function takes `draws` (see `kernels.random`): of each `element` of its tile, or the first of the
            whole `tensor`, the same for every tile; empty for methods without chance.
        settled: a parameter whose value 1 leaves nothing to chance, so that `draws` is None; empty where there is none.
        shows: parameters of a method of plain arithmetic; while none of them is 0 or 1, a value of any operand that is
            not finite shows in the result. None where it may stay hidden.
        exact_arithmetic: made of IEEE + − × ÷ and comparisons only: the same bytes on every CPU.
        exact_a: when the result is A bit for bit, for display.
        exact_b: when it is B bit for bit, or empty.
        caution: parameters -> what a user should be told of them, or empty.
        explain: takes what the function takes, leaves the tensors as they are, and returns what the report says of the
            tensor: columns by name; None where there is nothing to say.
        function: takes the slots' tensors in order, then the parameters by name. The tensors are its own: it may
            overwrite them. All have one shape and dtype (float32, or float64 where an input is); so has the result.
    """

    id: str
    label: str
    inputs: tuple[str, ...]
    more: bool
    strength: str
    params: tuple[Param, ...]
    formula: str
    kind: Kind
    whole_when: str
    rows: bool
    measures: tuple[Measure, ...]
    random: Chance
    settled: str
    shows: tuple[str, ...] | None
    exact_arithmetic: bool
    exact_a: str
    exact_b: str
    caution: Callable[[Mapping[str, Value]], str]
    explain: Callable[..., Columns] | None
    function: Callable[..., Tensor]

    @property
    def models(self) -> str:
        """The slots for display: `A B`, `A B C …`."""
        return " ".join([*self.inputs, *(["…"] if self.more else [])])

    @property
    def summary(self) -> str:
        """What it does, in one line: the first line of the function's docstring."""
        return (inspect.getdoc(self.function) or "").split("\n", 1)[0]

    def param(self, name: str) -> Param:
        """The parameter of that name.

        Raises:
            RecipeError: there is none; suggests the nearest.
        """
        for param in self.params:
            if param.name == name:
                return param
        names = [param.name for param in self.params]
        raise RecipeError(f"{self.id} has no parameter {name!r}", hint=suggestion(name, names))

    def check(self, values: Mapping[str, object]) -> dict[str, Value]:
        """All parameters: the given ones checked, the others by default.

        Raises:
            RecipeError: an unknown name or a value that is not allowed.
        """
        given = {name: self.param(name).check(value) for name, value in values.items()}
        return {param.name: given.get(param.name, param.default) for param in self.params}

    def needs_draws(self, params: Mapping[str, Value]) -> bool:
        """True when chance plays a part with these parameters."""
        return bool(self.random) and not (self.settled and params[self.settled] == 1)

    def needed_measures(self, params: Mapping[str, Value]) -> tuple[Measure, ...]:
        """What must be known of the whole tensor with these parameters; the function takes only their values."""
        return tuple(itertools.takewhile(lambda measure: measure.needed(params), self.measures))

    def shows_damage(self, params: Mapping[str, Value]) -> bool:
        """True when an operand's value that is not finite makes that element of the result not finite."""
        if self.shows is None or self.needs_whole(params) or params[self.strength] == 0:
            return False
        return all(params[name] not in (0, 1) for name in self.shows)

    def needs_whole(self, params: Mapping[str, Value]) -> bool:
        """True when these parameters need whole tensors."""
        return self.kind == "whole" or bool(self.whole_when and params[self.whole_when])


def merge_method(
    id: str,
    *,
    label: str,
    inputs: str,
    more: bool = False,
    strength: str,
    params: tuple[Param, ...],
    formula: str,
    kind: Kind = "elementwise",
    whole_when: str = "",
    rows: bool = False,
    measures: tuple[Measure, ...] = (),
    random: Chance = "",
    settled: str = "",
    shows: tuple[str, ...] | None = None,
    exact_arithmetic: bool = False,
    exact_a: str,
    exact_b: str = "",
    caution: Callable[[Mapping[str, Value]], str] = lambda params: "",
    explain: Callable[..., Columns] | None = None,
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register the decorated function as a method; see `Method` for the arguments (`inputs` as letters: `AB`)."""

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        before = _METHODS.get(id)
        if before is not None and _path(before.function) != _path(function):
            raise ValueError(f"two methods are called {id}")
        if missing := {strength, *(shows or ()), *filter(None, [whole_when])} - {param.name for param in params}:
            raise ValueError(f"{id} has no parameter {missing.pop()}")
        _METHODS[id] = Method(
            id,
            label,
            tuple(inputs),
            more,
            strength,
            params,
            formula,
            kind,
            whole_when,
            rows,
            measures,
            random,
            settled,
            shows,
            exact_arithmetic,
            exact_a,
            exact_b,
            caution,
            explain,
            function,
        )
        return function

    return register


_METHODS: dict[str, Method] = {}


def _path(function: Callable[..., Tensor]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


@lru_cache(maxsize=1)
def all_methods() -> dict[str, Method]:
    """Every method by id; imports the files of this folder but not torch."""
    package: Any = importlib.import_module(__package__)
    for module in sorted(item.name for item in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"{__package__}.{module}")
    return dict(sorted(_METHODS.items()))


def method(id: str) -> Method:
    """The method of that id.

    Raises:
        RecipeError: there is none; suggests the nearest.
    """
    methods = all_methods()
    if id not in methods:
        raise RecipeError(f"there is no method {id!r}", hint=suggestion(id, list(methods)))
    return methods[id]
