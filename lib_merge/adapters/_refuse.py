"""Adapters that cannot be put into weights, each by its name and with what to do instead."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import MergeError
from ._config import Config

_MERGE = "merge it with PEFT first"
_EMBEDDINGS = "put it into the folder of embeddings and write its name into the prompt"
_CONTROL = "load it beside the checkpoint in the program that runs it"
_CONVERT = "convert it to a plain LoRA with its own trainer"

# (end of a key, name, hint)
_KEYS: tuple[tuple[str, str, str], ...] = (
    (r"\.(?:q_layer|p_layer|lambda_layer)(?:\.weight)?", "T-LoRA, whose rank goes by the time step", "keep it apart"),
    (r"\.lora_[AB]\.\d+", "a raw DyLoRA", "export it as a plain LoRA of one rank with its own trainer"),
    (r"vera_(?:lambda_[bd]|[AB])(?:\.[\w-]+)*", "VeRA", _CONVERT),
    (r"fourierft_spectrum(?:\.[\w-]+)*", "FourierFT", _CONVERT),
    (r"waveft_spectrum(?:\.[\w-]+)*", "WaveFT", _CONVERT),
    (r"c3a_kernel(?:\.[\w-]+)*", "C3A", _CONVERT),
    (r"vblora_(?:logits_[AB]|vector_bank)(?:\.[\w-]+)*", "VB-LoRA", _CONVERT),
    (r"randlora_(?:lambda|gamma|[AB])(?:\.[\w-]+)*", "RandLoRA", _CONVERT),
    (r"default_lora_latent_mapping\.weight", "LoRA-XS", _CONVERT),
    (r"\.lora_E(?:\.[\w-]+)*", "AdaLoRA", _CONVERT),
    (r"(?:^|\.)prompt_embeddings", "a prompt tuning, which changes no weight", "load it in the program that made it"),
    (r"trainable_tokens_(?:delta|original)(?:\.[\w-]+)*", "trainable tokens", _MERGE),
    (r"\.(?:smooth_factor|proj_down|wscales)", "Nunchaku's SVDQuant", "use the LoRA that it was made from"),
    (r"\.oft_r(?:\.[\w-]+)*", "OFT of an old PEFT", "save it again with PEFT 0.16 or later"),
    (r"^(?:emb_params|clip_[lg])", "a textual inversion, which changes no weight", _EMBEDDINGS),
    (r"(?:^|\.)lora_controlnet|^(?:control_model|controlnet_cond_embedding|input_hint_block)\..*",
     "a ControlNet or ControlNet-LoRA, a model of its own", _CONTROL),
    (r"^(?:ip_adapter|image_proj)\..*", "an IP-Adapter, which adds layers of its own", _CONTROL),
    (r"(?:bone|miss)_(?:block|weight)?(?:\.[\w-]+)*", "Bone or MiSS", _MERGE),
    (r"(?:shira_weight|road_theta|delora_[AB]|poly_lora_[AB])(?:\.[\w-]+)*", "of a rare kind of PEFT", _MERGE),
)  # fmt: skip
_REFUSED = tuple((re.compile(f"(?:{end})$"), name, hint) for end, name, hint in _KEYS)
# Words of which each pattern has one: to look for them takes a tenth of the time.
_MARKS = (
    *("q_layer", "p_layer", "lambda_layer", "lora_A.", "lora_B.", "vera_", "fourierft", "waveft", "c3a_", "vblora"),
    *("randlora", "lora_latent_mapping", "lora_E", "prompt_embeddings", "trainable_tokens", "smooth_factor"),
    *("proj_down", "wscales", "oft_r", "bone_", "miss_", "shira_", "road_", "delora_", "poly_lora"),
    *("emb_params", "clip_l", "clip_g", "lora_controlnet", "control_model.", "controlnet_cond", "input_hint_block"),
    *("ip_adapter.", "image_proj."),
)

KINDS = ("LORA", "LOHA", "LOKR", "IA3", "OFT", "BOFT", "HRA")
# Starts of `init_lora_weights` whose raw adapter belongs to a base that was changed when training began.
_CHANGED_BASE = {"pissa": "PiSSA", "olora": "OLoRA", "corda": "CorDA", "lora_ga": "LoRA-GA", "loftq": "LoftQ"}


def refuse_keys(keys: Iterable[str]) -> None:
    """Stop at an adapter kind that cannot be baked.

    Raises:
        MergeError: names the kind and the first tensor that shows it.
    """
    for key in keys:
        if any(mark in key for mark in _MARKS):
            for pattern, name, hint in _REFUSED:
                if pattern.search(key):
                    raise MergeError(f"the adapter is {name}: it cannot be put into weights", tensor=key, hint=hint)


def refuse_configs(configs: Iterable[Config]) -> None:
    """Stop at a configuration that makes an ordinary looking adapter something else.

    Raises:
        MergeError: the kind is unknown, works only after certain tokens, or belongs to a changed base.
    """
    for config in configs:
        _check(config)


def _check(config: Config) -> None:
    kind = str(config.values.get("peft_type") or "LORA").upper().removeprefix("PEFTTYPE.")
    if kind not in KINDS:
        raise MergeError(f"the adapter is PEFT's {kind}: it cannot be put into weights", hint=_MERGE)
    if config.values.get("alora_invocation_tokens"):
        raise MergeError("the adapter is an aLoRA, which works only after certain tokens", hint="load it with PEFT")
    for name in ("use_qalora", "use_bdlora", "layer_replication", "arrow_config"):
        if config.values.get(name):
            raise MergeError(f"the adapter was trained with {name}, which no weight can hold", hint="load it with PEFT")
    start = str(config.values.get("init_lora_weights")).lower()
    for mark, name in _CHANGED_BASE.items():
        if start.startswith(mark):
            raise MergeError(
                f"the adapter began as {name} and was saved unconverted: it fits only a base that was changed with it",
                hint="save it from PEFT with path_initial_model_for_weight_conversion, which makes it a plain LoRA",
            )
