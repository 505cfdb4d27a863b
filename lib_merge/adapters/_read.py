"""An adapter file's header to its pieces: which parts belong together, of which format, with which settings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..errors import MergeError
from . import dora, moe
from ._config import PEFT_PREFIX, Config, Value, config_of, read_configs
from ._grammar import PLAIN_ROLES, split
from ._refuse import refuse_configs, refuse_keys
from ._registry import SHARED, Format, Shapes, all_formats

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]

# Keys that change nothing, and why.
_IGNORED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\.base_layer\.weight$"), "an untouched copy of the base's weight"),
    (re.compile(r"\.original_module\."), "an untouched copy of the base's module"),
    (re.compile(r"^bundle_emb\."), "a textual inversion that came along"),
    (re.compile(r"position_ids$"), "positions, never merged"),
)
# role -> (format, the part's name in it, parameter) of parts that stand alone.
_SINGLE = {
    "diff": ("diff", "diff", "weight"),
    "diff_b": ("diff", "diff", "bias"),
    "diff_m": ("diff", "diff", "modulation"),
    "w_norm": ("norm", "diff", "weight"),
    "b_norm": ("norm", "diff", "bias"),
    "set": ("set", "value", "weight"),
    "scale": ("set", "value", "scale"),
    "weight": ("full", "value", "weight"),
    "bias": ("full", "value", "bias"),
    "": ("full", "value", ""),
}
# Parts that may be stored as whole numbers; all others are factors and values, which are floats.
_WHOLE_NUMBERS = frozenset({"alpha", "scale", "bias_indices", "bias_size", "on_input", "reshape"})
_SCALARS = ("alpha", "scale")
_ALONE = {format for format, _, _ in _SINGLE.values()}
_MAGNITUDES = ("magnitude", "peft_magnitude")


@dataclass(frozen=True)
class Piece:
    """What an adapter does to one parameter of one module.

    Attributes:
        stem: the module's path as in the file, prefix included; the parameter's full name where `param` is empty.
        param: the parameter it changes: `weight`, `bias`, `modulation`, …; empty when the stem is its full name.
        format: id of the `Format`.
        keys: role -> key in the file.
        rank: of the factors, None where the format has none.
        settings: what its functions need beside the parts; `optional` is set where a base without this parameter is
            in order.
    """

    stem: str
    param: str
    format: str
    keys: Mapping[str, str]
    rank: int | None
    settings: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Adapter:
    """A whole adapter file.

    Attributes:
        pieces: what it changes, in the order of the file.
        ignored: (key, why) of tensors that change nothing.
        leftover: keys that belong to no piece.
        formats: ids of the formats that occur, sorted.
        notes: what a user should know.
        needs_alpha: its names are PEFT's, yet no alpha came with it: without one its scale would be a guess.
    """

    pieces: tuple[Piece, ...]
    ignored: tuple[tuple[str, str], ...]
    leftover: tuple[str, ...]
    formats: tuple[str, ...]
    notes: tuple[str, ...]
    needs_alpha: bool = False


def read(tensors: Tensors, metadata: Mapping[str, str], config: Mapping[str, object] | None = None) -> Adapter:
    """Find the pieces of an adapter; reads names and shapes only.

    Args:
        tensors: key -> (dtype, shape).
        metadata: of the header.
        config: the parsed adapter_config.json beside the file, if there is one. `{"lora_alpha": X}` alone sets alpha.

    Raises:
        MergeError: it is no adapter, or one that cannot be put into weights (named, with what to do).
    """
    refuse_keys(tensors)
    configs = read_configs(metadata, config)
    refuse_configs(configs)
    ignored = {key: why for key in tensors if (why := _ignored(key))}
    modules = _modules(key for key in tensors if key not in ignored)
    if all(role in PLAIN_ROLES for keys in modules.values() for role in keys):
        raise MergeError("no part of an adapter was found", hint="is this a checkpoint?")
    pieces: list[Piece] = []
    leftover: list[str] = []
    for stem, keys in modules.items():
        shapes = {role: tensors[key][1] for role, key in keys.items()}
        found = _pieces(stem, keys, shapes, config_of(configs, stem))
        pieces += found
        used = {key for piece in found for key in piece.keys.values()}
        leftover += [key for key in keys.values() if key not in used]
    for piece in pieces:
        _check_parts(piece, tensors)
    formats = sorted({piece.format for piece in pieces})
    without = sum(map(lacks_alpha, pieces))
    needs_alpha = any(lacks_alpha(piece) and piece.stem.startswith(PEFT_PREFIX) for piece in pieces)
    notes = (f"{without} modules have no alpha: their scale is 1 (alpha = rank)",) if without else ()
    return Adapter(tuple(pieces), tuple(ignored.items()), tuple(leftover), tuple(formats), notes, needs_alpha)


def _check_parts(piece: Piece, tensors: Tensors) -> None:
    """Refuse parts that cannot be computed with."""
    for role, key in piece.keys.items():
        dtype, shape = tensors[key]
        if piece.format != "full" and role not in _WHOLE_NUMBERS and not dtype.startswith(("F", "BF")):
            what = (
                f"a part of a {all_formats()[piece.format].label} module is stored as {dtype}, which holds no fractions"
            )
            raise MergeError(what, tensor=key, hint="take the file that its trainer saved, in fp16, bf16 or fp32")
        if role in _SCALARS and math.prod(shape) != 1:
            what = f"the {role} of a module has shape {list(shape)}, but it is one number"
            raise MergeError(what, tensor=key, hint="take the file that its trainer saved")


def _ignored(key: str) -> str | None:
    return next((why for pattern, why in _IGNORED if pattern.search(key)), None)


def lacks_alpha(piece: Piece) -> bool:
    """True when nothing says how a piece's factors are scaled, so that their scale is 1."""
    return piece.rank is not None and not {"alpha", "scale"} & (piece.keys.keys() | piece.settings.keys())


def _modules(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """Keys by stem and role."""
    found: dict[str, dict[str, str]] = {}
    for key in keys:
        stem, role = split(key)
        parts = found.setdefault(stem, {})
        if role in parts:
            raise MergeError(
                f"two tensors are the same part of one module: {parts[role]} and {key}",
                tensor=key,
                hint="the file holds several adapters: save each on its own",
            )
        parts[role] = key
    return found


def _pieces(stem: str, keys: Mapping[str, str], shapes: Shapes, config: Config) -> list[Piece]:
    """The pieces of one module: those of several parts first, then what stands alone."""
    stem, param = moe.parameter(config, stem) or (stem, "")
    free = set(keys)
    found = []
    for format in _formats(bool(param)):
        roles = format.claims({role: shapes[role] for role in free})
        if roles:
            free -= set(roles) - SHARED
            settings = format.settings(config, stem, shapes)
            own = {role: shapes[role] for role in roles}
            keys_here = {role: keys[role] for role in roles}
            found.append(Piece(stem, param or format.param, format.id, keys_here, format.rank(own), settings))
    if magnitude := next((role for role in _MAGNITUDES if role in free), None):
        found = [_with_magnitude(piece, magnitude, keys[magnitude], shapes[magnitude], config) for piece in found]
    found += [_bias_of(piece) for piece in found if piece.settings.get("scales_bias")]
    alone = free - SHARED if found else free
    return found + [_single(stem, role, keys[role]) for role in keys if role in alone & _SINGLE.keys()]


def _formats(expert: bool) -> list[Format]:
    """Formats that are made of named parts; those of expert weights only where the configuration names such."""
    return [
        format
        for format in all_formats().values()
        if format.stage != "dora" and format.id not in _ALONE and (format.id in moe.EXPERT) == expert
    ]


def _single(stem: str, role: str, key: str) -> Piece:
    format, name, param = _SINGLE[role]
    return Piece(stem, param, format, {name: key}, None)


def _bias_of(piece: Piece) -> Piece:
    """The same scaling of the module's bias, where the base has one."""
    settings = {**piece.settings, "optional": True, "scales_bias": False}
    return Piece(piece.stem, "bias", piece.format, piece.keys, None, settings)


def _with_magnitude(piece: Piece, role: str, key: str, shape: tuple[int, ...], config: Config) -> Piece:
    """The piece as the inside of a DoRA; a bias beside it stays what it is."""
    if piece.param == "bias":
        return piece
    if all_formats()[piece.format].stage != "add":
        raise MergeError(f"a DoRA magnitude on {piece.format}, which nobody defined", tensor=key)
    axis = dora.axis_of(role, shape, piece.format, config.flag("fan_in_fan_out"))
    settings = {**piece.settings, "inner": piece.format, "axis": axis}
    return Piece(piece.stem, piece.param, "dora", {**piece.keys, "magnitude": key}, piece.rank, settings)
