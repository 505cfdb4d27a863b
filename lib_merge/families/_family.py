"""What a family is made of: signs that tell it by, variants, and rules that sort its tensors into blocks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ._alias import Alias

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
Kind = Literal["checkpoint", "denoiser", "adapter", "text encoder", "vae", "llm", "unknown"]


@dataclass(frozen=True)
class Sign:
    """Tensors that a family is told by.

    Names stand below the denoiser's prefix. In them `#` is any number, a dot at the end means "anything that starts
    so", and `^` at the front means the full key, whatever the prefix is.

    Attributes:
        has: all of these are there.
        lacks: none of these is there.
        sizes: (name, axis, accepted lengths); the tensor is there and one of the lengths fits.
        naming: whose names the file uses.
    """

    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    sizes: tuple[tuple[str, int, tuple[int, ...]], ...] = ()
    naming: Literal["native", "diffusers"] = "native"


@dataclass(frozen=True)
class Mark:
    """A module path that an adapter for a family has.

    Attributes:
        path: regular expression for the start of the path below the adapter's prefix; a `.` also finds an underscore.
        sizes: accepted input lengths of that module; empty: any.
    """

    path: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rule:
    """Sorts tensors into a block by the start of their name.

    Attributes:
        start: below the denoiser's prefix; `#` is a number, a dot also finds an underscore (adapter names).
        blocks: most specific first; the first of them gets the index, if there is one.
        index: a constant, then one factor for each `#`; empty: no index.
    """

    start: str
    blocks: tuple[str, ...]
    index: tuple[int, ...] = ()

    def match(self, name: str) -> tuple[str, ...] | None:
        """The blocks of a tensor, or None when the rule is not about it."""
        found = _compiled(self.start).match(name)
        if found is None or not self.index:
            return None if found is None else self.blocks
        numbers = map(int, found.groups())
        number = self.index[0] + sum(f * n for f, n in zip(self.index[1:], numbers, strict=False))
        return (f"{self.blocks[0]}{number:02d}", *self.blocks[1:])


@lru_cache(maxsize=1024)
def _compiled(start: str) -> re.Pattern[str]:
    return re.compile(re.escape(start).replace(r"\#", r"(\d+)").replace(r"\.", "[._]"))


def numbered(block: str, *lists: str) -> tuple[Rule, ...]:
    """Rules for repeated lists: `numbered("D", "double_blocks")` makes `double_blocks.3.` D03."""
    return tuple(Rule(f"{name}.#.", (block,), (0, 1)) for name in lists)


def starting(blocks: tuple[str, ...], *starts: str) -> tuple[Rule, ...]:
    """One rule for each start, all with the same blocks."""
    return tuple(Rule(start, blocks) for start in starts)


# Modules after the last block, in all the transformers known here.
OUT_RULES = starting(
    ("OUT",),
    *("final_layer.", "final_linear.", "all_final_layer.", "norm_final.", "norm_out.", "proj_out.", "head."),
    *("conv_norm_out.", "conv_out.", "scale_shift_table", "modF.", "clf.", "out."),
)


@dataclass(frozen=True, eq=False)  # each is there once; hashing all its rules would take longer than using them
class Family:
    """One kind of model.

    Attributes:
        id: short and stable, for recipes and comparisons.
        name: for people.
        priority: detection goes from low to high; the first hit counts.
        signs: any one of them suffices.
        loose: as signs, asked only when the signs of no family fit: models of odd widths.
        variants: (name, sign); the first that fits.
        variant: when none of them fits.
        rules: blocks of the denoiser (or of the LLM); the first that matches.
        rest: blocks of a tensor that no rule matches.
        blocks: names that are always listed, whether the file holds them or not.
        named: names of text encoder blocks that are listed as blocks of their own, not as part of BASE.
        adapter: what an adapter for this family is told by.
        learned: start of positions that are trained although others of that name are fixed tables.
        kind: what a file of this family is.
        prefixes: where the family is looked for; empty: below the known denoiser prefixes.
        names: what others call its modules.
        kohya: whose module names kohya's trainers use for it.
        root: what diffusers calls the denoiser.
        encoders: its text encoders, in diffusers' order: "te1" and "te2" are CLIPs, "t5", "lm" a language model.
    """

    id: str
    name: str
    priority: int
    signs: tuple[Sign, ...]
    loose: tuple[Sign, ...] = ()
    variants: tuple[tuple[str, Sign], ...] = ()
    variant: str = ""
    rules: tuple[Rule, ...] = ()
    rest: tuple[str, ...] = ("IN",)
    blocks: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    adapter: tuple[Mark, ...] = ()
    learned: tuple[str, ...] = ()
    kind: Kind = "denoiser"
    prefixes: tuple[str, ...] = ()
    names: tuple[Alias, ...] = ()
    kohya: Literal["native", "diffusers"] = "native"
    root: Literal["transformer", "unet"] = "transformer"
    encoders: tuple[str, ...] = ("lm",)


@dataclass(frozen=True)
class Detected:
    """What a file is.

    Attributes:
        id: the family's id, or "unknown".
        name: the family's name for people, or "unknown".
        kind: what the file holds; "checkpoint" is a denoiser together with text encoders or a VAE.
        prefix: what stands before the family's own names, such as `model.diffusion_model.`; empty: nothing.
        variant: such as "inpaint" or "dev"; empty: the plain model, or not known.
        naming: "native" or "diffusers"; empty: not known, or an adapter.
        family: the tables; None when it is unknown.
    """

    id: str = "unknown"
    name: str = "unknown"
    kind: Kind = "unknown"
    prefix: str = ""
    variant: str = ""
    naming: str = ""
    family: Family | None = None
