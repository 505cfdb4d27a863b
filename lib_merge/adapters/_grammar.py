"""The ends of adapter keys: which part of a module each tensor is."""

from __future__ import annotations

import re

# {a}: the name of the adapter, such as `.default`, that PEFT may put between.
_NAME = r"(?:\.(?!(?:weight|bias)$)[\w-]+)?"

# role -> ends of keys, as patterns; the longest end that fits decides.
_ROLES: dict[str, tuple[str, ...]] = {
    "down": (
        r"\.lora_down\.weight",
        r"\.lora_A{a}(?:\.weight)?",
        r"_lora\.down\.weight",
        r"\.lora\.down\.weight",
        r"\.lora_linear_layer\.down\.weight",
        r"\.down\.weight",
    ),
    "up": (
        r"\.lora_up\.weight",
        r"\.lora_B{a}(?:\.weight)?",
        r"_lora\.up\.weight",
        r"\.lora\.up\.weight",
        r"\.lora_linear_layer\.up\.weight",
        r"\.up\.weight",
    ),
    "mid": (r"\.lora_mid\.weight",),
    "up_bias": (r"\.lora_B{a}\.bias", r"\.lora_up\.bias"),
    "alpha": (r"\.alpha",),
    "scale": (r"\.scale",),
    "magnitude": (r"\.dora_scale",),
    "peft_magnitude": (r"\.lora_magnitude_vector{a}(?:\.weight)?",),
    **{
        role: (rf"\.{role}",)
        for role in (
            *("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
            *("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
            *("oft_blocks", "oft_diag", "rescale", "on_input"),
            *("bias_indices", "bias_values", "bias_size"),
        )
    },
    "oft_r": (r"\.oft_R{a}(?:\.weight)?",),
    "boft_r": (r"\.boft_R{a}(?:\.weight)?",),
    "boft_s": (r"\.boft_s{a}(?:\.weight)?",),
    "hra_u": (r"\.hra_u{a}(?:\.weight)?",),
    "ia3_l": (r"\.ia3_l{a}(?:\.weight)?",),
    "diff": (r"\.diff",),
    "diff_b": (r"\.diff_b",),
    "diff_m": (r"\.diff_m",),
    "set": (r"\.set_weight",),
    "w_norm": (r"\.w_norm",),
    "b_norm": (r"\.b_norm",),
    "reshape": (r"\.reshape_weight",),
    **{f"glora_{part}": (rf"\.{part}\.weight",) for part in ("a1", "a2", "b1", "b2", "bm")},
    "embedding_down": (r"\.lora_embedding_A{a}(?:\.weight)?",),
    "embedding_up": (r"\.lora_embedding_B{a}(?:\.weight)?",),
    # What is left may be a full copy of a parameter.
    "weight": (r"(?:\.modules_to_save{a})?\.weight",),
    "bias": (r"(?:\.modules_to_save{a}|\.base_layer)?\.bias",),
}

# Parts that a checkpoint may hold as well: alone they make no adapter.
PLAIN_ROLES = frozenset({"", "weight", "bias", "scale"})

ROLES = tuple(_ROLES)


def _pattern() -> re.Pattern[str]:
    ends = (f"(?P<{role}>{'|'.join(_ROLES[role])})" for role in _ROLES)
    return re.compile(f"(?:{'|'.join(ends)})$".replace("{a}", _NAME))


_END = _pattern()
# Where an end can begin: a search through all of a key would take ten times as long.
_BEGIN = re.compile(r"\.|_lora\.")


def split(key: str) -> tuple[str, str]:
    """The module's path, prefix included, and the part's role; role "" for a key without any known end."""
    for begin in _BEGIN.finditer(key):  # from left to right: the first that fits is the longest end
        found = _END.match(key, begin.start())
        if found is not None and found.lastgroup:
            return key[: begin.start()], found.lastgroup
    return key, ""
