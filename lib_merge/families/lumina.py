"""Lumina 2 and Z-Image: refiners of noise and text, then one list of layers."""

from __future__ import annotations

from ._family import OUT_RULES, Family, Mark, Sign, numbered

_RULES = (
    *numbered("NR", "noise_refiner"),
    *numbered("CR", "context_refiner"),
    *numbered("L", "layers"),
    *OUT_RULES,
)
_CAPTION = "cap_embedder.1.weight"


def _adapter(width: int) -> tuple[Mark, ...]:
    return (Mark(r"(?:layers|noise_refiner|context_refiner).\d+.(?:attn|attention|feed_forward)", (width,)),)


FAMILIES = (
    Family(
        "z_image",
        "Z-Image",
        50,
        signs=(
            Sign(has=("all_x_embedder.2-1.weight",), naming="diffusers"),
            Sign(has=(_CAPTION, "layers.#.adaLN_modulation.0.weight")),
        ),
        rules=_RULES,
        adapter=_adapter(3840),
    ),
    Family(
        "lumina2",
        "Lumina 2",
        51,
        signs=(
            Sign(has=(_CAPTION, "layers.#.adaLN_modulation.1.weight")),
            Sign(has=("layers.#.attn.to_q.weight", "noise_refiner."), naming="diffusers"),
        ),
        rules=_RULES,
        adapter=_adapter(2304),
    ),
)
