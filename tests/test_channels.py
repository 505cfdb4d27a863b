"""First layers with different numbers of input channels: inpainting, pix2pix and Flux tools with plain models."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

import lib_merge
from lib_merge.channels import shared_channels
from lib_merge.kernels.registry import all_methods
from lib_merge.recipe import Output, Recipe, Slot
from lib_merge.steps import Channels, Joined, Stored
from tests.support import raw, read, read_raw, values, write, write_raw

METHODS = list(all_methods())
CONV = "model.diffusion_model.input_blocks.0.0.weight"
PLAIN, WIDE = (8, 4, 3, 3), (8, 9, 3, 3)


def model(path, shape, seed, key=CONV, dtype="<f4"):
    other = (
        f"{key.removesuffix('input_blocks.0.0.weight').removesuffix('conv_in.weight').removesuffix('img_in.weight')}w"
    )
    return write(path, {key: values(shape, seed, dtype), other: values((6,), seed + 50, dtype)})


def node(shape, dtype="F32"):
    return Stored("A", "x", dtype, shape)


def widths(method, wide):
    """One width for each slot: 9 input channels in those that `wide` names."""
    return {slot: WIDE if slot in wide else PLAIN for slot in all_methods()[method].inputs}


@pytest.mark.parametrize("wide", ["A", "B"])
@pytest.mark.parametrize("method", METHODS)
def test_shared_channels_are_merged_and_the_others_come_from_the_wider_model(tmp_path, method, wide):
    shapes = widths(method, wide)
    paths = {slot: model(tmp_path / f"{slot}.safetensors", shape, n) for n, (slot, shape) in enumerate(shapes.items())}
    # by hand: the same merge of models that are cut to 4 input channels before
    cut = {
        slot: write(tmp_path / f"cut{slot}.safetensors", {CONV: read(path)[CONV][:, :4].copy()})
        for slot, path in paths.items()
    }
    merged = lib_merge.merge(*cut.values(), out=tmp_path / "cut.safetensors", method=method, seed=7).output
    made = lib_merge.merge(*paths.values(), out=tmp_path / "out.safetensors", method=method, seed=7, report=True)
    result = read(made.output)[CONV]
    assert result.shape == WIDE
    assert result[:, :4].tobytes() == read(merged)[CONV].tobytes()
    assert result[:, 4:].tobytes() == read(paths[wide])[CONV][:, 4:].tobytes()
    assert lib_merge.verify(made.output).ok
    (row,) = [row for row in made.rows if row["key"] == CONV]
    assert (row["action"], row["method"], row["shape"]) == ("merged", method, list(WIDE))
    assert f"input channels from 4 on are copied from {wide}" in row["reason"]
    assert row["norm_a"] == pytest.approx(np.linalg.norm(read(cut["A"])[CONV]))
    assert any(CONV in problem.what for problem in made.plan.problems if problem.level == "note")
    assert made.warnings == ()


@pytest.mark.parametrize("method", METHODS)
def test_neither_tiles_nor_threads_change_a_byte(tmp_path, method):
    shapes = {slot: (70, 9 if slot == "B" else 4, 3, 3) for slot in all_methods()[method].inputs}
    paths = [model(tmp_path / f"{slot}.safetensors", shape, n) for n, (slot, shape) in enumerate(shapes.items())]
    ways = [{"threads": 1}, {"threads": 4, "tile": 64}, {"threads": 2, "tile": 1000}]
    made = [
        lib_merge.merge(*paths, out=tmp_path / f"{n}.safetensors", method=method, **way).output
        for n, way in enumerate(ways)
    ]
    assert len({path.read_bytes() for path in made}) == 1


def test_an_inpainting_model_is_built_by_add_difference(tmp_path):
    custom, inpaint, base = (
        model(tmp_path / f"{name}.safetensors", shape, n)
        for n, (name, shape) in enumerate((("custom", PLAIN), ("inpaint", WIDE), ("base", PLAIN)))
    )
    made = lib_merge.merge(custom, inpaint, base, out=tmp_path / "out.safetensors", method="add_difference")
    a, b, c = (read(path)[CONV].astype("<f8") for path in (custom, inpaint, base))
    result = read(made.output)[CONV]
    np.testing.assert_allclose(result[:, :4], a + (b[:, :4] - c), rtol=0, atol=1e-7)
    assert result[:, 4:].tobytes() == read(inpaint)[CONV][:, 4:].tobytes()


def test_channels_that_c_lacks_count_as_zero(tmp_path):
    a, b, c = (model(tmp_path / f"{n}.safetensors", shape, n) for n, shape in enumerate((WIDE, WIDE, PLAIN)))
    made = lib_merge.merge(a, b, c, out=tmp_path / "out.safetensors", method="add_difference", alpha=0.5)
    x, y, z = (read(path)[CONV].astype("<f8") for path in (a, b, c))
    z = np.concatenate([z, np.zeros((8, 5, 3, 3))], 1)
    np.testing.assert_allclose(read(made.output)[CONV], x + 0.5 * (y - z), rtol=0, atol=1e-7)
    assert any("count as 0 in C" in problem.what for problem in made.plan.problems)


@pytest.mark.parametrize(
    ("key", "shape", "wide"),
    [
        ("unet/conv_in.weight", (5, 4, 3, 3), (5, 8, 3, 3)),
        ("conv_in.weight", (5, 4, 3, 3), (5, 9, 3, 3)),
        ("img_in.weight", (32, 64), (32, 384)),
        ("model.diffusion_model.img_in.weight", (32, 64), (32, 128)),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_every_first_layer_in_both_orders(tmp_path, key, shape, wide, turned):
    a, b = model(tmp_path / "a.safetensors", shape, 1, key), model(tmp_path / "b.safetensors", wide, 2, key)
    pair = (b, a) if turned else (a, b)
    made = lib_merge.merge(*pair, out=tmp_path / "out.safetensors", alpha=0.25)
    first, second = (read(path)[key][:, : shape[1]] for path in pair)
    result = read(made.output)[key]
    assert result.shape == wide
    assert result[:, : shape[1]].tobytes() == (first - (first - second) * np.float32(0.25)).tobytes()
    assert result[:, shape[1] :].tobytes() == read(b)[key][:, shape[1] :].tobytes()


@pytest.mark.parametrize(
    ("key", "shapes"),
    [
        ("first_stage_model.encoder.conv_in.weight", (PLAIN, WIDE)),  # the VAE's
        ("model.diffusion_model.input_blocks.1.0.in_layers.2.weight", (PLAIN, WIDE)),
        (CONV, ((8, 4, 3, 3), (7, 9, 3, 3))),
        (CONV, ((8, 4, 3, 3), (8, 9, 1, 1))),
        (CONV, ((8,), (9,))),
        (CONV, ((8, 4, 3, 3), (8, 9))),
    ],
)
def test_other_shapes_are_a_mismatch(tmp_path, key, shapes):
    a, b = (model(tmp_path / f"{n}.safetensors", shape, n, key) for n, shape in enumerate(shapes))
    made = lib_merge.merge(a, b, out=tmp_path / "out.safetensors")
    assert read_raw(made.output)[1][key] == read_raw(a)[1][key]
    assert any(f"of another shape in B: {key}" in warning for warning in made.warnings)


@pytest.mark.parametrize(("channels", "told"), [(9, "is_inpainting"), (8, "is_instruct_pix2pix"), (4, "")])
@pytest.mark.parametrize("side", ["A", "B"])
def test_hosts_are_told_what_the_result_is(tmp_path, channels, told, side):
    text = {"model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": values((8, 768), 1)}
    plain = write(tmp_path / "plain.safetensors", {CONV: values(PLAIN, 1), **text})
    other = write(tmp_path / "other.safetensors", {CONV: values((8, channels, 3, 3), 2), **text})
    pair = (other, plain) if side == "A" else (plain, other)
    made = lib_merge.merge(*pair, out=tmp_path / "out.safetensors")
    note = json.loads(read_raw(made.output)[0]["sd_merge_recipe"])
    assert [name for name in ("is_inpainting", "is_instruct_pix2pix") if note[name]] == [told] * bool(told)


def test_an_excluded_or_missing_first_layer_stays_a(tmp_path):
    a, b = model(tmp_path / "a.safetensors", PLAIN, 1), model(tmp_path / "b.safetensors", WIDE, 2)
    made = lib_merge.merge(a, b, out=tmp_path / "out.safetensors", exclude=["input_blocks"])
    assert read_raw(made.output)[1][CONV] == read_raw(a)[1][CONV]
    none = write(tmp_path / "none.safetensors", {"model.diffusion_model.w": values((6,), 9)})
    skipped = lib_merge.merge(b, none, a, out=tmp_path / "skip.safetensors", method="add_difference")
    assert read_raw(skipped.output)[1][CONV] == read_raw(b)[1][CONV]


def test_the_wider_model_counts_in_the_dtype_rule(tmp_path):
    a = write_raw(tmp_path / "a.safetensors", {CONV: raw("BF16", values(PLAIN, 1))})
    b = write(tmp_path / "b.safetensors", {CONV: values(WIDE, 2)})
    made = lib_merge.merge(a, b, out=tmp_path / "out.safetensors", alpha=0)
    dtype, shape, _ = read_raw(made.output)[1][CONV]
    assert (dtype, shape) == ("F32", WIDE)
    assert read(made.output)[CONV][:, 4:].tobytes() == read(b)[CONV][:, 4:].tobytes()
    assert read(made.output)[CONV][:, :4].tobytes() == read(a)[CONV].tobytes()


@pytest.mark.parametrize("outer", [PLAIN, WIDE])
def test_a_recipe_inside_a_recipe_passes_its_channels_on(tmp_path, outer):
    paths = {
        "A.A": model(tmp_path / "x.safetensors", PLAIN, 1),
        "A.B": model(tmp_path / "y.safetensors", WIDE, 2),
        "B": model(tmp_path / "z.safetensors", outer, 3),
    }
    inner = Recipe(
        method="weighted_sum",
        params={"alpha": 0.5},
        models={"A": Slot(file="x.safetensors"), "B": Slot(file="y.safetensors")},
    )
    recipe = Recipe(
        method="weighted_sum", params={"alpha": 0.5}, models={"A": Slot(recipe=inner), "B": Slot(file="z.safetensors")}
    )
    result = read(lib_merge.run(recipe, out=tmp_path / "out.safetensors", files=paths).output)[CONV]
    x, y, z = (read(path)[CONV].astype("<f8") for path in paths.values())
    wide = np.concatenate([(x + y[:, :4]) / 2, y[:, 4:]], 1)
    shared = z.shape[1]
    expected = np.concatenate([(wide[:, :shared] + z) / 2, wide[:, shared:]], 1)
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-7)


def test_the_plan_is_made_of_the_two_nodes():
    found = shared_channels({"A": node((8, 4)), "B": node((8, 9)), "C": node((8, 6))})
    assert found.nodes == {"A": node((8, 4)), "B": Channels(node((8, 9)), 4), "C": Channels(node((8, 6)), 4)}
    assert found.wider == node((8, 9))
    joined = Joined(found.nodes["A"], found.wider, "F32")
    assert (joined.shape, found.nodes["B"].shape) == ((8, 9), (8, 4))


@pytest.mark.parametrize("sizes", list(itertools.product((4, 9), repeat=3)))
def test_the_widest_of_a_b_c_in_that_order_gives_the_rest(sizes):
    nodes = {slot: Stored(slot, "x", "F32", (8, size)) for slot, size in zip("ABC", sizes, strict=True)}
    found = shared_channels(nodes)
    if len(set(sizes)) == 1:
        assert found is None
        return
    assert {entry.shape for entry in found.nodes.values()} == {(8, min(sizes[:2]))}
    widest = next(slot for slot in "ABC" if nodes[slot].shape == (8, 9))
    assert found.wider == (None if min(sizes[:2]) == 9 else nodes[widest])


def test_models_without_the_tensor_and_whole_numbers_are_left_to_others():
    assert shared_channels({"A": node((8, 4)), "B": None}) is None
    assert shared_channels({"A": node((8, 4)), "B": node((8, 9), "I64")}) is None


def test_fp16_is_rounded_once(tmp_path):
    a, b = (
        model(tmp_path / "a.safetensors", PLAIN, 1, dtype="<f2"),
        model(tmp_path / "b.safetensors", WIDE, 2, dtype="<f2"),
    )
    made = lib_merge.merge(a, b, out=tmp_path / "out.safetensors", alpha=0.3)
    x, y = (read(path)[CONV].astype("<f4")[:, :4] for path in (a, b))
    assert read(made.output)[CONV][:, :4].tobytes() == (x - (x - y) * np.float32(0.3)).astype("<f2").tobytes()
    kept = lib_merge.merge(a, b, out=tmp_path / "wide.safetensors", save_dtype="fp32")
    assert read_raw(kept.output)[1][CONV][0] == "F32"
    assert Output(save_dtype="fp32") == kept.plan.recipe.output
