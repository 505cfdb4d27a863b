"""What lies beside the tensors: PEFT's adapter_config.json, diffusers' header metadata, LyCORIS' network arguments."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import MergeError

Value = float | int | bool | str

PEFT_PREFIX = "base_model.model."
_HEADER = "lora_adapter_metadata"
_NETWORK = "ss_network_args"
_HINT = "take the adapter_config.json that was saved with the adapter"


@dataclass(frozen=True)
class Config:
    """One adapter configuration.

    Attributes:
        values: the fields as PEFT names them; empty where there is no configuration.
        prefix: start of the stems it speaks for, which is no part of the module's name.
        network: LyCORIS' network arguments, from the header.
    """

    values: Mapping[str, object]
    prefix: str = ""
    network: Mapping[str, object] = field(default_factory=dict)

    def module(self, stem: str) -> str:
        """The module's name in its model: the stem without this configuration's prefix and PEFT's."""
        return stem.removeprefix(self.prefix).removeprefix(PEFT_PREFIX)

    def flag(self, name: str) -> bool:
        """A yes/no field; False when it is absent.

        Raises:
            MergeError: it is there and is neither.
        """
        found = self.values.get(name)
        if not isinstance(found, (bool, int, type(None))):
            raise MergeError(
                f"the adapter's configuration gives {name} as {found!r}, which is not yes or no", hint=_HINT
            )
        return bool(found)

    def names(self, name: str) -> tuple[str, ...]:
        """A field that lists names; empty when it is absent or not a list."""
        found = self.values.get(name)
        return tuple(str(item) for item in found) if isinstance(found, (list, tuple)) else ()

    def number(self, name: str) -> float | None:
        """A number field.

        Raises:
            MergeError: it is there and is no number.
        """
        found = self.values.get(name)
        return None if found is None else _number(found, name)

    def by_module(self, patterns: str, default: str, stem: str) -> float | None:
        """The number for one module: that of the first pattern which fits its name, else the general one.

        Raises:
            MergeError: the patterns are no patterns, or what they give is no number.
        """
        found = self.values.get(patterns) or {}
        if not isinstance(found, Mapping):
            raise MergeError(
                f"the adapter's configuration gives {patterns} as {found!r}, not names with numbers", hint=_HINT
            )
        module = self.module(stem)
        for pattern, value in found.items():
            if _fits(pattern, module, patterns):
                return _number(value, f"{patterns} of {pattern!r}")
        return self.number(default)

    def settings(self, stem: str) -> dict[str, Value]:
        """alpha, rank and rslora of one module; empty where the configuration names no alpha."""
        alpha_name = "lora_alpha" if "lora_alpha" in self.values else "alpha"
        alpha = self.by_module("alpha_pattern", alpha_name, stem)
        if alpha is None:
            return {}
        found: dict[str, Value] = {"alpha": alpha}
        if (rank := self.by_module("rank_pattern", "r", stem)) is not None:
            found["rank"] = int(rank)
        if self.flag("use_rslora"):
            found["rslora"] = True
        return found


def read_configs(metadata: Mapping[str, str], config: Mapping[str, object] | None) -> tuple[Config, ...]:
    """Configurations from a folder's adapter_config.json (already parsed), else from the header; longest prefix first.

    Raises:
        MergeError: the header's configuration is not JSON.
    """
    network = _json(metadata.get(_NETWORK), _NETWORK)
    if config is not None:
        return (Config(config, "", network),)
    found = _by_component(_json(metadata.get(_HEADER), _HEADER))
    return tuple(Config(found[prefix], prefix, network) for prefix in sorted(found, key=len, reverse=True)) or (
        Config({}, "", network),
    )


def config_of(configs: tuple[Config, ...], stem: str) -> Config:
    """The configuration that speaks for a stem; an empty one where none does."""
    for config in configs:
        if stem.startswith(config.prefix):
            return config
    return Config({})


def _number(found: object, name: str) -> float:
    """A finite number of a configuration."""
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found):
        raise MergeError(f"the adapter's configuration gives {name} as {found!r}, which is no number", hint=_HINT)
    return float(found)


def _fits(pattern: str, module: str, name: str) -> bool:
    """True when a module's name ends with a pattern, as PEFT asks."""
    try:
        return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
    except re.error as error:
        what = f"the adapter's configuration has {pattern!r} in {name}, which is no pattern ({error})"
        raise MergeError(what, hint=_HINT) from error


def _by_component(fields: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """`transformer.lora_alpha` -> `transformer.`: {`lora_alpha`: …}."""
    found: dict[str, dict[str, object]] = {}
    for name, value in fields.items():
        component, _, last = name.rpartition(".")
        found.setdefault(f"{component}." if component else "", {})[last] = value
    return found


def _json(text: str | None, name: str) -> Mapping[str, object]:
    if not text:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise MergeError(f"the metadata {name} is not JSON", hint="save the adapter again") from error
    return found if isinstance(found, dict) else {}
