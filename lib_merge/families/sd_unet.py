"""Stable Diffusion's UNets: SD1, SD2, SDXL and its refiner, under the names of the originals and of diffusers."""

from __future__ import annotations

from ._alias import Alias, below, renamed, same
from ._family import Family, Mark, Rule, Sign

_CONV = "input_blocks.0.0.weight"
_TEXT = "input_blocks.#.#.transformer_blocks.#.attn2.to_k.weight"
_LABEL = "label_emb.0.0.weight"
_D_CONV = "conv_in.weight"
_D_TEXT = "down_blocks.#.attentions.#.transformer_blocks.#.attn2.to_k.weight"
_D_LABEL = "add_embedding.linear_1.weight"
_DEPTH_4 = "input_blocks.9."
_D_DEPTH_4 = "down_blocks.3."
# ControlNets have the first half of a UNet.
_CONTROL = ("input_hint_block.", "zero_convs.", "controlnet_cond_embedding.", "control_add_embedding.")

# What a width of the first convolution means.
_CHANNELS = {"inpaint": 9, "ix2pix": 8, "depth": 5}
_VARIANTS = tuple(
    (name, Sign(sizes=((conv, 1, (width,)),))) for name, width in _CHANNELS.items() for conv in (_CONV, _D_CONV)
)
# Distilled SDXL models (SSD-1B, Vega) have fewer than ten transformer blocks in the deep levels.
_PRUNED = tuple(
    ("pruned", Sign(has=(f"{stack}1.attn2.to_k.weight",), lacks=(f"{stack}9.",)))
    for stack in ("input_blocks.7.1.transformer_blocks.", "down_blocks.2.attentions.0.transformer_blocks.")
)


def unet_rules(last: str) -> tuple[Rule, ...]:
    """Blocks of a UNet.

    Args:
        last: the block that the output layers belong to, such as OUT11.
    """
    return (
        Rule("input_blocks.#.", ("IN",), (0, 1)),
        Rule("middle_block.", ("M00",)),
        Rule("output_blocks.#.", ("OUT",), (0, 1)),
        Rule("time_embed.", ("TIME", "BASE")),
        Rule("label_emb.", ("LABEL", "BASE")),
        Rule("out.", (last,)),
        Rule("conv_in.", ("IN00",)),
        Rule("down_blocks.#.resnets.#.", ("IN",), (1, 3, 1)),
        Rule("down_blocks.#.attentions.#.", ("IN",), (1, 3, 1)),
        Rule("down_blocks.#.downsamplers.", ("IN",), (3, 3)),
        Rule("mid_block.", ("M00",)),
        Rule("up_blocks.#.resnets.#.", ("OUT",), (0, 3, 1)),
        Rule("up_blocks.#.attentions.#.", ("OUT",), (0, 3, 1)),
        Rule("up_blocks.#.upsamplers.", ("OUT",), (2, 3)),
        Rule("time_embedding.", ("TIME", "BASE")),
        Rule("add_embedding.", ("LABEL", "BASE")),
        Rule("conv_norm_out.", (last,)),
        Rule("conv_out.", (last,)),
    )


_RESNET_NAMES = renamed(
    *(("norm1", "in_layers.0"), ("conv1", "in_layers.2"), ("time_emb_proj", "emb_layers.1")),
    *(("norm2", "out_layers.0"), ("conv2", "out_layers.3"), ("conv_shortcut", "skip_connection")),
)
_ATTENTION_NAMES = (
    *same("norm", "proj_in", "proj_out"),
    *below(
        *("transformer_blocks.#", "transformer_blocks.#"),
        *same("norm1", "norm2", "norm3", "ff.net.0.proj", "ff.net.2"),
        *same(*(f"attn{n}.{name}" for n in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0"))),
    ),
)


def unet_names(levels: int, plain_top: bool) -> tuple[Alias, ...]:
    """Diffusers' names of a UNet's modules.

    Args:
        levels: resolutions.
        plain_top: the first level on the way up has no attention, so its upsampler stands in another place.
    """
    rows = [
        *renamed(("conv_in", "input_blocks.0.0"), ("conv_norm_out", "out.0"), ("conv_out", "out.2")),
        *renamed(*((f"time_embedding.linear_{n}", f"time_embed.{2 * n - 2}") for n in (1, 2))),
        *renamed(*((f"add_embedding.linear_{n}", f"label_emb.0.{2 * n - 2}") for n in (1, 2))),
        *below("mid_block.attentions.0", "middle_block.1", *_ATTENTION_NAMES),
    ]
    for n in (0, 1):
        rows += below(f"mid_block.resnets.{n}", f"middle_block.{2 * n}", *_RESNET_NAMES)
    for level in range(levels):
        up = 1 if plain_top and level == 0 else 2
        rows += renamed(
            (f"down_blocks.{level}.downsamplers.0.conv", f"input_blocks.{3 * level + 3}.0.op"),
            (f"up_blocks.{level}.upsamplers.0.conv", f"output_blocks.{3 * level + 2}.{up}.conv"),
        )
        for n in range(3):
            places = [("up", "output", 3 * level + n)] + ([("down", "input", 3 * level + n + 1)] if n < 2 else [])
            for way, native, block in places:
                rows += below(f"{way}_blocks.{level}.resnets.{n}", f"{native}_blocks.{block}.0", *_RESNET_NAMES)
                rows += below(f"{way}_blocks.{level}.attentions.{n}", f"{native}_blocks.{block}.1", *_ATTENTION_NAMES)
    return tuple(rows)


_FOUR_LEVELS = unet_names(4, plain_top=True)


def _names(count: int) -> tuple[str, ...]:
    numbers = [f"{number:02d}" for number in range(count)]
    return ("BASE", *(f"IN{n}" for n in numbers), "M00", *(f"OUT{n}" for n in numbers))


def _by_text(width: int) -> tuple[Sign, ...]:
    return (
        Sign(lacks=_CONTROL, sizes=((_TEXT, 1, (width,)),)),
        Sign(lacks=_CONTROL, sizes=((_D_TEXT, 1, (width,)),), naming="diffusers"),
    )


def _adapter(width: int) -> tuple[Mark, ...]:
    return (Mark(r"(?:input|middle|output|down|mid|up)_blocks?.*attn2.to_[kv]$", (width,)),)


FAMILIES = (
    Family(
        "sdxl",
        "SDXL",
        200,
        signs=(*_by_text(2048), Sign(has=(_CONV,), sizes=((_LABEL, 1, (2816,)),))),
        loose=(
            Sign(has=(_CONV, _LABEL), lacks=(_DEPTH_4, *_CONTROL)),
            Sign(has=(_D_CONV, _D_LABEL), lacks=(_D_DEPTH_4, *_CONTROL), naming="diffusers"),
        ),
        variants=(*_VARIANTS, *_PRUNED),
        rules=unet_rules("OUT08"),
        rest=("BASE",),
        blocks=_names(9),
        adapter=_adapter(2048),
        names=unet_names(3, plain_top=False),
        root="unet",
        encoders=("te1", "te2"),
    ),
    Family(
        "sdxl_refiner",
        "SDXL refiner",
        201,
        signs=(*_by_text(1280), Sign(has=(_CONV,), sizes=((_LABEL, 1, (2560,)),))),
        loose=(
            Sign(has=(_CONV, _LABEL, _DEPTH_4), lacks=("^cond_stage_model.", *_CONTROL)),
            Sign(has=(_D_CONV, _D_LABEL, _D_DEPTH_4), lacks=_CONTROL, naming="diffusers"),
        ),
        variants=_VARIANTS,
        variant="refiner",
        rules=unet_rules("OUT11"),
        rest=("BASE",),
        blocks=_names(12),
        adapter=_adapter(1280),
        names=_FOUR_LEVELS,
        root="unet",
        encoders=("te1",),
    ),
    Family(
        "sd2",
        "SD 2.x",
        202,
        signs=_by_text(1024),
        loose=(Sign(has=(_TEXT, "^cond_stage_model.model."), lacks=_CONTROL),),
        variants=_VARIANTS,
        rules=unet_rules("OUT11"),
        rest=("BASE",),
        blocks=_names(12),
        adapter=_adapter(1024),
        names=_FOUR_LEVELS,
        kohya="diffusers",
        root="unet",
        encoders=("te1",),
    ),
    Family(
        "sd1",
        "SD 1.x",
        203,
        signs=_by_text(768),
        loose=(
            Sign(has=(_TEXT,), lacks=(_LABEL, *_CONTROL)),
            Sign(has=(_D_TEXT,), lacks=(_D_LABEL, *_CONTROL), naming="diffusers"),
        ),
        variants=_VARIANTS,
        rules=unet_rules("OUT11"),
        rest=("BASE",),
        blocks=_names(12),
        adapter=_adapter(768),
        names=_FOUR_LEVELS,
        kohya="diffusers",
        root="unet",
        encoders=("te1",),
    ),
    Family(
        "unet",
        "UNet",
        290,
        signs=(),
        loose=(
            Sign(has=(_CONV,), lacks=_CONTROL),
            Sign(has=("down_blocks.0.resnets.0.conv1.weight",), lacks=_CONTROL, naming="diffusers"),
        ),
        variants=_VARIANTS,
        rules=unet_rules("OUT11"),
        rest=("BASE",),
        blocks=_names(12),
        names=_FOUR_LEVELS,
        kohya="diffusers",
        root="unet",
        encoders=("te1",),
    ),
)
