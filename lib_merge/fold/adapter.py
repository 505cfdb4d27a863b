"""The adapter to fold, from PEFT or mlx-lm, as low-rank changes of named modules; anything else is refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import adapters
from ..errors import FileError, MergeError
from ..files.companion import ADAPTER_CONFIG
from ..files.header import load_json
from ..files.open import open_model
from ..files.source import Source
from .values import read_values

# What PEFT and mlx-lm call the weights in an adapter's folder.
_WEIGHTS = ("adapter_model.safetensors", "adapters.safetensors", "adapter_model.bin")
_MLX = re.compile(r"(?P<module>.+)\.lora_(?P<side>[ab])")
_PEFT_PREFIX = "base_model.model."
_FLOATS = ("F64", "F32", "BF16", "F16")

# Fields of a PEFT configuration that make the adapter more than B·A on some weights, and the value that does not.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "modules_to_save": ((), []),
    "layer_replication": ((), []),
    "trainable_token_indices": ((), [], {}),
    "target_parameters": ((), []),
    "use_qalora": (False,),
    "use_bdlora": (False, {}),
    "alora_invocation_tokens": ((), []),
    "arrow_config": ({},),
    "monteclora_config": ({},),
    "velora_config": ({},),
    "kasa_config": ({},),
}
_CONVERT = "merge the adapter into the dense model with its own trainer, and quantize the result"
# Names of models whose weights were already coded when the adapter was trained.
_CODED_NAME = re.compile(r"[1-8][-_ ]?bit|bnb|nf4|int[48]|gptq|awq|q[2-8]_[0k01]|mxfp|nvfp4", re.IGNORECASE)


@dataclass(frozen=True)
class LowRank:
    """One change: weight += scale · up · down.

    Attributes:
        module: name of the module, without any prefix of PEFT.
        up: key of the tensor [out, rank]; [rank, out] where `transposed`.
        down: key of the tensor [rank, in]; [in, rank] where `transposed`.
        shape: of the change, (out, in).
        rank: of the product.
        scale: alpha/rank, alpha/√rank for rsLoRA, or mlx-lm's own scale.
        transposed: both lie the other way round.
    """

    module: str
    up: str
    down: str
    shape: tuple[int, int]
    rank: int
    scale: float
    transposed: bool


@dataclass(frozen=True)
class AdapterFile:
    """An opened adapter.

    Attributes:
        source: its weights.
        changes: in the order of the file.
        notes: what a user should know.
        config: path of its configuration, None where there is none.
    """

    source: Source
    changes: tuple[LowRank, ...]
    notes: tuple[str, ...]
    config: Path | None


def open_adapter(path: Path, lora_alpha: float | None = None) -> AdapterFile:
    """Open an adapter; headers and configuration only.

    Args:
        path: its folder (PEFT, mlx-lm), or the weights file with adapter_config.json beside it.
        lora_alpha: alpha to use for every module, instead of what the configuration says.

    Raises:
        MergeError: it is none, does more than add low-rank products to weights, or its scale is unknown.
    """
    weights = _weights(path)
    config_path = weights.parent / ADAPTER_CONFIG
    config = _config(config_path) if config_path.exists() or config_path.is_symlink() else None
    source = open_model(weights)
    mlx = {key: found for key in source.tensors if (found := _MLX.fullmatch(key))}
    said: list[str] = []
    changes = _from_mlx(source, mlx, config, lora_alpha) if mlx else _from_peft(source, config, lora_alpha, said)
    if not changes:
        raise MergeError("the adapter changes no weight", file=weights)
    notes = (*said, *_trained_on(config or {}, bool(mlx)))
    return AdapterFile(source, tuple(changes), notes, config_path if config is not None else None)


def _weights(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = [path / name for name in _WEIGHTS if (path / name).exists() or (path / name).is_symlink()]
    if not found:
        raise FileError("the folder holds no adapter", file=path, hint=f"it should hold one of {', '.join(_WEIGHTS)}")
    return regular(found[0])


def regular(path: Path) -> Path:
    """The path, refused when it is no file, or a link to none.

    Raises:
        FileError: a broken link, a folder, a pipe or a device.
    """
    if not path.exists() and path.is_symlink():
        raise FileError("a broken link", file=path, hint="download the file that it should lead to")
    if not path.is_file():
        raise FileError("no plain file" if path.exists() else "no such file", file=path)
    return path


def _config(path: Path) -> dict[str, Any]:
    return load_json(regular(path).read_bytes(), path, "configuration")


def _from_peft(
    source: Source, config: dict[str, Any] | None, lora_alpha: float | None, notes: list[str]
) -> list[LowRank]:
    for name, plain in _PLAIN.items():
        value = (config or {}).get(name)
        if value is not None and value not in plain:
            raise MergeError(
                f"the adapter has {name} = {value!r}: only plain low-rank changes can be folded",
                file=source.path,
                hint=_CONVERT,
            )
    for name, rank in (("r", (config or {}).get("r")), *((config or {}).get("rank_pattern") or {}).items()):
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
            raise MergeError(f"the adapter's rank {name} = {rank!r} is no whole number of at least 1", file=source.path)
    if lora_alpha is not None:
        config = {**(config or {}), "lora_alpha": lora_alpha, "alpha_pattern": {}}
    tensors = {key: (info.dtype, info.shape) for key, info in source.tensors.items()}
    try:
        found = adapters.read(tensors, source.metadata, config)
    except MergeError as error:
        raise MergeError(error.what, file=source.path, tensor=error.tensor, hint=error.hint) from error
    if found.leftover:
        raise MergeError(
            f"{len(found.leftover)} tensors of the adapter belong to no change that is known",
            file=source.path,
            tensor=found.leftover[0],
            hint=_CONVERT,
        )
    notes += found.notes
    return [_of_piece(piece, source, lora_alpha) for piece in found.pieces]


def _of_piece(piece: adapters.Piece, source: Source, lora_alpha: float | None) -> LowRank:
    module = piece.stem.removeprefix(_PEFT_PREFIX)
    plain = {"up", "down"} <= piece.keys.keys() <= {"up", "down", "alpha"}
    if piece.format != "lora" or piece.param != "weight" or not plain:
        name = adapters.FORMATS[piece.format].label if piece.format in adapters.FORMATS else piece.format
        raise MergeError(
            f"the adapter changes {module} by {name} ({', '.join(sorted(piece.keys))}): "
            "only plain low-rank changes of weights can be folded",
            file=source.path,
            tensor=next(iter(piece.keys.values())),
            hint=_CONVERT,
        )
    rank = piece.settings.get("rank", piece.rank)
    alpha = _alpha(piece, source) if lora_alpha is None else lora_alpha
    if alpha is None and not piece.stem.startswith(_PEFT_PREFIX):
        alpha = piece.rank  # what every reader of such files takes; the adapter's notes say so
    if alpha is None:
        raise MergeError(
            "the adapter's alpha is not known: there is no adapter_config.json with lora_alpha beside it",
            file=source.path,
            hint="put the adapter's configuration beside it, or give --lora-alpha",
        )
    stored = source.tensors[piece.keys["down"]].shape[0] if source.tensors[piece.keys["down"]].shape else 0
    if isinstance(rank, bool) or rank != stored or stored < 1:
        raise MergeError(
            f"the adapter gives {module} rank {rank}, its factors have {stored}",
            file=source.path,
            tensor=piece.keys["down"],
        )
    if not math.isfinite(float(alpha)):
        raise MergeError(f"the adapter gives {module} alpha {alpha}: a finite number was expected", file=source.path)
    divisor = math.sqrt(stored) if piece.settings.get("rslora") else stored
    return _low_rank(module, piece.keys["up"], piece.keys["down"], float(alpha) / divisor, source)


def _alpha(piece: adapters.Piece, source: Source) -> float | None:
    """What the module's own tensor says, else the configuration; 0 in a tensor stands for the rank."""
    key = piece.keys.get("alpha")
    if key is None:
        found = piece.settings.get("alpha")
        return None if found is None else float(found)
    value = float(read_values(source, key).double().reshape(-1)[0])
    return value or piece.rank


def _from_mlx(
    source: Source, keys: Mapping[str, re.Match[str]], config: dict[str, Any] | None, lora_alpha: float | None
) -> list[LowRank]:
    for key in source.tensors:
        if key not in keys:
            raise MergeError(
                "the adapter holds a tensor that is no factor of a low-rank change (DoRA, or a full weight)",
                file=source.path,
                tensor=key,
                hint=_CONVERT,
            )
    kind = (config or {}).get("fine_tune_type", "lora")
    if kind != "lora":
        raise MergeError(
            f"the adapter was trained as {kind!r}: only low-rank changes can be folded", file=source.path, hint=_CONVERT
        )
    changes = []
    for module in dict.fromkeys(found["module"] for found in keys.values()):
        up, down = f"{module}.lora_b", f"{module}.lora_a"
        for key in (up, down):
            if key not in source.tensors:
                raise MergeError(f"the adapter lacks a factor of {module}", file=source.path, tensor=key)
        rank = source.tensors[down].shape[-1] if source.tensors[down].shape else 0
        scale = lora_alpha / max(1, rank) if lora_alpha is not None else _mlx_scale(config, source)
        changes.append(_low_rank(module, up, down, scale, source, transposed=True))
    return changes


def _mlx_scale(config: dict[str, Any] | None, source: Source) -> float:
    """The number that mlx-lm multiplies the product with."""
    values = (config or {}).get("lora_parameters")
    values = values if isinstance(values, dict) else {}
    scale = values.get("scale")
    if "alpha" in values:  # some versions of mlx-lm multiply by alpha/rank too, others leave it out
        raise MergeError(
            "the adapter's configuration has both scale and alpha, which mlx-lm has read in two ways",
            file=source.path,
            hint="give --lora-alpha: the weight changes by alpha/rank times the product",
        )
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise MergeError(
            "the adapter's scale is not known: there is no adapter_config.json with lora_parameters.scale beside it",
            file=source.path,
            hint="put the adapter's configuration beside it, or give --lora-alpha (scale times rank)",
        )
    return float(scale)


def _low_rank(module: str, up: str, down: str, scale: float, source: Source, *, transposed: bool = False) -> LowRank:
    """The change that two float matrices make which share their rank."""
    shapes = []
    for key in (up, down):
        info = source.tensors[key]
        if info.dtype not in _FLOATS or len(info.shape) != 2:
            raise MergeError(
                f"a factor of {module} is {info.dtype} {list(info.shape)}: a matrix of floats was expected",
                file=source.path,
                tensor=key,
                hint="stacked experts, convolutions and embeddings cannot be folded",
            )
        shapes.append(info.shape[::-1] if transposed else info.shape)
    (out, rank), (also_rank, inner) = shapes
    if rank != also_rank or rank < 1:
        raise MergeError(f"the factors of {module} do not fit: {shapes}", file=source.path, tensor=up)
    return LowRank(module, up, down, (out, inner), rank, scale, transposed)


def _trained_on(config: Mapping[str, Any], mlx: bool) -> tuple[str, ...]:
    """A note for adapters that were trained on coded weights."""
    base = str(config.get("base_model_name_or_path") or config.get("model") or "")
    if not (_CODED_NAME.search(base) or (mlx and not base)):
        return ()
    trained = f"was trained on {base}" if base else "may have been trained on a quantized model"
    return (
        f"the adapter {trained}, whose weights differ from the dense ones by their rounding; folding it into the dense "
        "weights is still the usual choice, but compare the two where the adapter is very weak",
    )
