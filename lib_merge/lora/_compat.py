"""Merges as other programs make them, their faults included: for results that must equal theirs.

Δ = Σ wᵢ·γᵢ·Bᵢ·Aᵢ is what they approximate; each module's error against it is measured and reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..adapters import scale_of
from ..errors import RecipeError
from ..kernels import lowrank
from ..kernels.svd import svd
from ..lazy import torch
from ..recipe import Recipe
from ._groups import Group
from ._module import Module

if TYPE_CHECKING:
    from torch import Generator, Tensor

Params = Mapping[str, float | bool]


@dataclass(frozen=True)
class Part:
    """One LoRA's share of a module, as stored.

    Attributes:
        up: [out, r] as a matrix.
        down: [r, in·k].
        alpha: stored or configured; the rank where there is none.
        weight: the user's.
        scale: alpha/r or alpha/√r.
    """

    up: Tensor
    down: Tensor
    alpha: float
    weight: float
    scale: float

    @property
    def delta(self) -> Tensor:
        """γ·B·A."""
        return self.up @ self.down * self.scale


# What a method makes of a module: (up, down, alpha).
Made = tuple["Tensor", "Tensor", float]


def exact(parts: Sequence[Part]) -> Tensor:
    """The sum that is approximated."""
    total = parts[0].delta * parts[0].weight
    for part in parts[1:]:
        total = total + part.delta * part.weight
    return total


def distance(parts: Sequence[Part], up: Tensor, down: Tensor, alpha: float) -> float:
    """Relative error of a product against the exact sum, without either as a dense matrix."""
    terms = [(part.up.double(), part.down.double(), part.weight * part.scale) for part in parts]
    size = lowrank.product_norm(*lowrank.joined(terms))
    made = (up.double(), down.double(), -alpha / down.shape[0])
    return lowrank.product_norm(*lowrank.joined([*terms, made])) / size if size else 0.0


def _same_rank(parts: Sequence[Part]) -> None:
    ranks = sorted({part.down.shape[0] for part in parts})
    if len(ranks) > 1:
        raise RecipeError(f"this method needs LoRAs of one rank, not {ranks}", hint="use concat, which takes any ranks")


def _kohya_weights(parts: Sequence[Part]) -> list[float]:
    return [math.sqrt(part.alpha / parts[0].alpha) * part.weight for part in parts]


def kohya_merge(parts: Sequence[Part], params: Params, draws: Generator) -> Made:
    """A = Σ cᵢ·Aᵢ and B = Σ |cᵢ|·Bᵢ, cᵢ = √(αᵢ/α₁)·wᵢ: the strength squared, and terms of A and B crosswise."""
    _same_rank(parts)
    weights = _kohya_weights(parts)
    up = sum((part.up * abs(c) for part, c in zip(parts, weights, strict=True)), torch.zeros_like(parts[0].up))
    down = sum((part.down * c for part, c in zip(parts, weights, strict=True)), torch.zeros_like(parts[0].down))
    return up, down, parts[0].alpha


def kohya_concat(parts: Sequence[Part], params: Params, draws: Generator) -> Made:
    """The same factors side by side, with the first one's alpha though the ranks add up."""
    weights = _kohya_weights(parts)
    up = torch.cat([part.up * abs(c) for part, c in zip(parts, weights, strict=True)], 1)
    return up, torch.cat([part.down * c for part, c in zip(parts, weights, strict=True)]), parts[0].alpha


def kohya_svd(parts: Sequence[Part], params: Params, draws: Generator) -> Made:
    """The exact sum cut to `rank`, U·S beside V, both clamped to ± the `clamp` quantile of their signed entries."""
    u, s, v = svd(exact(parts))
    rank = min(int(params["rank"]), len(s), *_sides(parts))
    up, down = u[:, :rank] * s[:rank], v[:rank]
    return *_clamped(up, down, float(params["clamp"])), float(rank)


def _sides(parts: Sequence[Part]) -> tuple[int, int]:
    return parts[0].up.shape[0], parts[0].down.shape[1]


def _clamped(up: Tensor, down: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Both factors within ± the quantile of all their entries, taken with their signs."""
    limit = float(torch.quantile(torch.cat([up.flatten(), down.flatten()]), share))
    return up.clamp(-limit, limit), down.clamp(-limit, limit)


def supermerger_same_strength(parts: Sequence[Part], params: Params, draws: Generator) -> Made:
    """√|cᵢ| on both factors, the sign on A: one LoRA comes out exact, several with terms crosswise."""
    _same_rank(parts)
    roots = [math.sqrt(part.alpha / parts[0].alpha) * math.sqrt(abs(part.weight)) for part in parts]
    signs = [math.copysign(1.0, part.weight) for part in parts]
    up = sum((part.up * c for part, c in zip(parts, roots, strict=True)), torch.zeros_like(parts[0].up))
    terms = zip(parts, roots, signs, strict=True)
    down = sum((part.down * c * sign for part, c, sign in terms), torch.zeros_like(parts[0].down))
    return up, down, parts[0].alpha


def peft_cat(parts: Sequence[Part], params: Params, draws: Generator) -> Made:
    """wᵢ·γᵢ·Aᵢ beside Bᵢ with alpha = rank: exact."""
    down = torch.cat([part.down * part.weight * part.scale for part in parts])
    return torch.cat([part.up for part in parts], 1), down, float(down.shape[0])


Mix = Callable[[Sequence["Tensor"], Sequence[float], Params, "Generator"], "Tensor"]


def mix_linear(tensors: Sequence[Tensor], weights: Sequence[float], params: Params, draws: Generator) -> Tensor:
    """Σ wᵢ·Tᵢ."""
    stacked = torch.stack(list(tensors))
    return (stacked * _column(weights, stacked)).sum(0)


def mix_magnitude(tensors: Sequence[Tensor], weights: Sequence[float], params: Params, draws: Generator) -> Tensor:
    """Σ wᵢ·(the largest entries of Tᵢ)."""
    return mix_linear([largest(tensor, float(params["density"])) for tensor in tensors], weights, params, draws)


def mix_dare(tensors: Sequence[Tensor], weights: Sequence[float], params: Params, draws: Generator) -> Tensor:
    """Σ wᵢ·(entries of Tᵢ kept by chance, made larger in return)."""
    return mix_linear([chosen(tensor, float(params["density"]), draws) for tensor in tensors], weights, params, draws)


def mix_ties(tensors: Sequence[Tensor], weights: Sequence[float], params: Params, draws: Generator) -> Tensor:
    """The mean of what agrees with the elected sign, of the largest entries."""
    return elected([largest(tensor, float(params["density"])) for tensor in tensors], weights, params)


def mix_dare_ties(tensors: Sequence[Tensor], weights: Sequence[float], params: Params, draws: Generator) -> Tensor:
    """The same, of entries kept by chance."""
    return elected([chosen(tensor, float(params["density"]), draws) for tensor in tensors], weights, params)


def largest(tensor: Tensor, density: float) -> Tensor:
    """A tensor with only the share of its entries that is largest in size."""
    if density >= 1:
        return tensor
    mask = torch.zeros_like(tensor).reshape(-1)
    mask[tensor.abs().reshape(-1).topk(int(density * tensor.numel())).indices] = 1
    return tensor * mask.reshape(tensor.shape)


def chosen(tensor: Tensor, density: float, draws: Generator) -> Tensor:
    """Entries kept with that probability and divided by it."""
    if density >= 1:
        return tensor
    return tensor * torch.bernoulli(torch.full_like(tensor, density), generator=draws) / density


def elected(tensors: Sequence[Tensor], weights: Sequence[float], params: Params) -> Tensor:
    """Entries that agree with the sign of the sum, or of most of them (`frequency`), weighted, by their number."""
    stacked = torch.stack(list(tensors))
    votes = stacked.sign() if params["frequency"] else stacked
    agree = stacked.sign() == torch.where(votes.sum(0) >= 0, 1, -1)
    return (stacked * _column(weights, stacked) * agree).sum(0) / agree.sum(0).clamp(min=1.0)


def _column(weights: Sequence[float], stacked: Tensor) -> Tensor:
    numbers = torch.tensor(list(weights), dtype=torch.float32)  # as there, whatever the tensors are
    return numbers.to(stacked.dtype).reshape(-1, *[1] * (stacked.dim() - 1))


def _factors(mix: Mix) -> Method:
    """A mix of the factors by themselves, √|wᵢ·γᵢ| on both and the sign on A; alpha becomes the rank."""

    def method(parts: Sequence[Part], params: Params, draws: Generator) -> Made:
        _same_rank(parts)
        weights = [part.weight * part.scale for part in parts]
        roots = [math.sqrt(abs(weight)) for weight in weights]
        signed = [math.copysign(root, weight) for root, weight in zip(roots, weights, strict=True)]
        if len(parts) == 1:  # one adapter is taken as it is
            mixed = mix_linear
        else:
            mixed = mix  # type: ignore[assignment]
        down = mixed([part.down for part in parts], signed, params, draws)
        up = mixed([part.up for part in parts], roots, params, draws)
        return up, down, float(down.shape[0])

    return method


def _deltas(mix: Mix) -> Method:
    """A mix of the dense changes, cut by SVD: U·S beside V, clamped where `clamp` is below 1; alpha = rank."""

    def method(parts: Sequence[Part], params: Params, draws: Generator) -> Made:
        mixed = mix([part.delta for part in parts], [part.weight for part in parts], params, draws)
        u, s, v = svd(mixed)
        rank = int(params["rank"]) or max(part.down.shape[0] for part in parts)
        up, down = u[:, :rank] * s[:rank], v[:rank]
        if params["clamp"] < 1:
            up, down = _clamped(up, down, float(params["clamp"]))
        return up, down, float(rank)

    return method


Method = Callable[[Sequence[Part], Params, "Generator"], Made]

_SVD = ("rank", "clamp")
_PRUNE = ("density",)
_ELECT = ("density", "frequency")
# id -> (what makes a module, its parameters).
_METHODS: Mapping[str, tuple[Method, tuple[str, ...]]] = {
    "kohya_merge": (kohya_merge, ()),
    "kohya_concat": (kohya_concat, ()),
    "kohya_svd": (kohya_svd, _SVD),
    "supermerger_same_strength": (supermerger_same_strength, ()),
    "peft_cat": (peft_cat, ()),
    "peft_linear": (_factors(mix_linear), ()),
    "peft_magnitude_prune": (_factors(mix_magnitude), _PRUNE),
    "peft_ties": (_factors(mix_ties), _ELECT),
    "peft_dare_linear": (_factors(mix_dare), _PRUNE),
    "peft_dare_ties": (_factors(mix_dare_ties), _ELECT),
    "peft_svd": (_deltas(mix_linear), _SVD),
    "peft_magnitude_prune_svd": (_deltas(mix_magnitude), (*_SVD, *_PRUNE)),
    "peft_ties_svd": (_deltas(mix_ties), (*_SVD, *_ELECT)),
    "peft_dare_linear_svd": (_deltas(mix_dare), (*_SVD, *_PRUNE)),
    "peft_dare_ties_svd": (_deltas(mix_dare_ties), (*_SVD, *_ELECT)),
}
COMPATIBLE: Mapping[str, tuple[str, ...]] = {id: params for id, (_, params) in _METHODS.items()}
# The other programs' own defaults; rank 0: the largest of the inputs.
_DEFAULTS: Params = {"rank": 0, "clamp": 1.0, "density": 0.5, "frequency": False}


def made(method: str, parts: Sequence[Part], given: Params, draws: Generator) -> Made:
    """What another program makes of a module.

    Args:
        method: an id of `COMPATIBLE`.
        parts: in the order of the LoRAs, those that have the module.
        given: parameters.
        draws: torch's generator, which random methods go on using from module to module.
    """
    function, _ = _METHODS[method]
    clamp = {"clamp": 0.99} if method == "kohya_svd" else {}
    params = {**_DEFAULTS, **clamp, **given}
    if method == "kohya_svd" and not params["rank"]:
        raise RecipeError("kohya_svd needs a rank", hint="--rank 8")
    return function(parts, params, draws)


def spend(sizes: Sequence[tuple[int, int, int]], draws: Generator) -> None:
    """Draw what PEFT draws before it merges: it makes new layers at random first, and overwrites them.

    Args:
        sizes: (out, in·k, rank of the result) of each module, in order.
        draws: torch's generator.
    """
    for out, columns, rank in sizes:
        for count in (rank * columns, out * rank, rank * columns):
            torch.empty(count).uniform_(generator=draws)


def compatible_jobs(method: str, groups: Sequence[Group], recipe: Recipe) -> list[Callable[[], Sequence[Module]]]:
    """One job for each module, to be run in this order."""
    draws = torch.Generator().manual_seed(recipe.seed)
    if "dare" in method:
        spend([_size(group, int(recipe.params.get("rank", 0))) for group in groups], draws)

    def job(group: Group) -> Callable[[], Sequence[Module]]:
        return lambda: [_module(method, group, recipe.params, draws)]

    return [job(group) for group in groups]


def _size(group: Group, rank: int) -> tuple[int, int, int]:
    """(out, in·k, rank of the result) of a module."""
    shapes = [term.input.shapes(term.piece) for term in group.terms]
    if any("down" not in parts or "up" not in parts for parts in shapes):
        return 0, 0, 0  # refused when its turn comes
    most = max(parts["down"][0] for parts in shapes)
    return shapes[0]["up"][0], math.prod(shapes[0]["down"][1:]), rank or most


def _module(method: str, group: Group, params: Params, draws: Generator) -> Module:
    parts: list[Part] = []
    kernel: tuple[int, ...] = ()
    for term in group.terms:
        if term.piece.format != "lora" or "mid" in term.piece.keys or term.target.rows != group.target.rows:
            raise RecipeError(
                f"{method} takes plain LoRAs of one trainer alone", file=term.input.path, tensor=group.stem
            )
        loaded = term.input.parts(term.piece)
        up, down = loaded["up"].reshape(loaded["up"].shape[0], -1), loaded["down"].reshape(loaded["down"].shape[0], -1)
        scale = scale_of(loaded, term.piece.settings, down.shape[0])
        kernel = kernel or tuple(loaded["down"].shape[1:] if loaded["down"].dim() > 2 else ())
        parts.append(Part(up, down, scale * down.shape[0], term.strength, scale))
    up, down, alpha = made(method, parts, params, draws)
    error = distance(parts, up, down, alpha)
    style = "kohya" if alpha != down.shape[0] else group.style
    before = sum(part.down.shape[0] for part in parts)
    note = f"differs by {error:.1%} from the exact sum" if error > 1e-6 else ""
    return Module(group.stem, group.param, style, group.component, up, down, alpha, kernel=kernel,
                  rank_before=before, error=error, note=note)  # fmt: skip


def kohya_rank(s: Tensor, params: Params) -> int:
    """The rank that kohya's resize takes: one more than the rule asks for, at most `rank`.

    Args:
        s: singular values of B·A, falling.
        params: rank, and one of ratio, cumulative, frobenius.
    """
    most = int(params.get("rank", len(s)))
    if float(s[0]) <= 1e-6:
        return 1
    if "ratio" in params:
        wanted = int((s > s[0] / params["ratio"]).sum())
    elif "cumulative" in params:
        wanted = _reaching(s, float(params["cumulative"]))
    elif "frobenius" in params:
        wanted = _reaching(s**2, float(params["frobenius"]) ** 2)
    else:
        return min(most, len(s))
    return min(max(1, min(wanted, len(s) - 1)) + 1, most)


def _reaching(values: Tensor, share: float) -> int:
    return int(torch.searchsorted(values.cumsum(0) / values.sum(), share)) + 1
