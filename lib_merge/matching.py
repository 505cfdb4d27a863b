"""Which tensor of B or C is meant by a tensor of A: the same name, also when only the denoiser's prefix differs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

Find = Callable[[str], "str | None"]


def finder(base: Collection[str], other: Collection[str], prefixes: Sequence[str]) -> Find:
    """A function from a key of A to the key of the other model, or None.

    Args:
        base: A's keys.
        other: the other model's keys.
        prefixes: known denoiser prefixes (`model.diffusion_model.` …), the empty one included.
    """
    left = [key for key in base if key not in other]
    mine, theirs = _best_swap(left, other, prefixes)

    def find(key: str) -> str | None:
        if key in other:
            return key
        if mine is not None and key.startswith(mine):
            candidate = theirs + key[len(mine) :]
            # What A has under that very name is that tensor's counterpart, not this one's.
            return candidate if candidate in other and candidate not in base else None
        return None

    return find


def _best_swap(left: Sequence[str], other: Collection[str], prefixes: Sequence[str]) -> tuple[str | None, str]:
    """The pair of prefixes that finds most of the keys not found as they are."""
    best: tuple[int, str | None, str] = (0, None, "")
    for mine in prefixes:
        rest = [key[len(mine) :] for key in left if key.startswith(mine)]
        for theirs in prefixes:
            if theirs != mine:
                found = sum(theirs + name in other for name in rest)
                if found > best[0]:
                    best = (found, mine, theirs)
    return best[1], best[2]
