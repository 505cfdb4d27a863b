"""Several LoRAs into one: the sum of what each does, whatever their ranks, names and formats."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lib_merge.errors import MergeError
from lib_merge.lora import merge_loras
from tests.adapters import golden
from tests.lora import files
from tests.lora.files import CONV, LINEAR, TEXT, deltas, make, relative


@pytest.fixture
def two(tmp_path):
    return make(tmp_path / "a.safetensors", 4, 2.0, 1), make(tmp_path / "b.safetensors", 8, None, 2)


@pytest.mark.parametrize("weights", [(0.7, 0.4), (0.7, -0.4), (-1.0, -0.5), (2.0, 3.0), (0.5, 0.5)])
@pytest.mark.parametrize("method", ["concat", "weighted_sum"])
def test_the_result_is_the_sum(two, tmp_path, weights, method):
    out = tmp_path / "out.safetensors"
    made = merge_loras(*zip(two, weights, strict=True), out=out, method=method)
    one, other, got = (deltas(path) for path in (*two, out))
    assert got.keys() == one.keys()
    for stem in got:
        assert relative(got[stem], weights[0] * one[stem] + weights[1] * other[stem]) <= 1e-6
        assert load_file(out)[f"{stem}.lora_down.weight"].shape[0] == 12
        assert float(load_file(out)[f"{stem}.alpha"]) == 12
    assert made.ranks == {12: 3}
    assert made.error == 0


@pytest.mark.parametrize("dtype", ["fp8_e4m3fn", "fp8_e5m2", "fp16", "bf16", "fp32"])
@pytest.mark.parametrize("wishes", [{}, {"method": "weighted_average", "lossless": True}])
def test_what_rounding_adds_is_told(two, tmp_path, dtype, wishes):
    exact, out = tmp_path / "exact.safetensors", tmp_path / "out.safetensors"
    strengths = list(zip(two, (0.7, -0.4), strict=True))
    plain = merge_loras(*strengths, out=exact, save_dtype="fp32", **wishes)
    made = merge_loras(*strengths, out=out, save_dtype=dtype, report=True, **wishes)
    want, got = deltas(exact), deltas(out)
    changed = torch.cat([(got[stem] - want[stem]).flatten() for stem in want]).norm()
    told = float(changed / torch.cat([delta.flatten() for delta in want.values()]).norm())
    assert plain.rounding is None
    assert (made.rounding or 0.0) == pytest.approx(told, rel=1e-3)
    assert (made.to_dict()["rounding"] is None) == (dtype == "fp32")
    assert (told > 0.01) == dtype.startswith("fp8")


def test_what_rounding_adds_is_measured_for_fp8_unasked(two, tmp_path):
    told = {
        dtype: merge_loras(*two, out=tmp_path / f"{dtype}.safetensors", save_dtype=dtype).rounding
        for dtype in ("fp8_e4m3fn", "fp16")
    }
    # Three bits after the leading one: at most 1/16 of each value, twice in a product.
    assert 0.01 < told["fp8_e4m3fn"] < 0.125
    assert told["fp16"] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_strengths_1_and_0_give_the_first_one_exactly(tmp_path, dtype):
    a = make(tmp_path / "a.safetensors", 4, 3.0, 1, dtype)
    b = make(tmp_path / "b.safetensors", 8, 1.0, 2, dtype)
    out = tmp_path / "out.safetensors"
    merge_loras((a, 1.0), (b, 0.0), out=out)
    before, after = load_file(a), load_file(out)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor.float(), after[key].float()), key
        assert key.endswith(".alpha") or after[key].dtype == dtype


def test_a_strength_of_minus_1_turns_every_sign(tmp_path):
    a = make(tmp_path / "a.safetensors")
    merge_loras((a, -1.0), out=tmp_path / "out.safetensors")
    got = deltas(tmp_path / "out.safetensors")
    assert all(torch.equal(got[stem], -delta) for stem, delta in deltas(a).items())


def test_modules_that_one_has_alone_take_its_strength(tmp_path):
    a = make(tmp_path / "a.safetensors", stems=(LINEAR,))
    b = make(tmp_path / "b.safetensors", seed=1, stems=(LINEAR, CONV))
    merge_loras((a, 0.5), (b, 0.25), out=tmp_path / "out.safetensors")
    got = deltas(tmp_path / "out.safetensors")
    assert got.keys() == {LINEAR, CONV}
    assert relative(got[CONV], 0.25 * deltas(b)[CONV]) <= 1e-12


def test_text_encoders_take_their_own_strength(two, tmp_path):
    merge_loras((two[0], 0.5, 0.1), (two[1], 0.25), out=tmp_path / "out.safetensors")
    one, other, got = (deltas(path) for path in (*two, tmp_path / "out.safetensors"))
    assert relative(got[TEXT], 0.1 * one[TEXT] + 0.25 * other[TEXT]) <= 1e-6
    assert relative(got[LINEAR], 0.5 * one[LINEAR] + 0.25 * other[LINEAR]) <= 1e-6


def test_weighted_average(two, tmp_path):
    merge_loras((two[0], 3.0), (two[1], 1.0), out=tmp_path / "out.safetensors", method="weighted_average")
    one, other, got = (deltas(path) for path in (*two, tmp_path / "out.safetensors"))
    assert all(relative(got[stem], 0.75 * one[stem] + 0.25 * other[stem]) <= 1e-6 for stem in got)
    merge_loras((two[0], 1.0), (two[1], -1.0), out=tmp_path / "signed.safetensors", method="weighted_average")
    got = deltas(tmp_path / "signed.safetensors")
    assert all(relative(got[stem], (one[stem] - other[stem]) / 2) <= 1e-6 for stem in got)


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_a_cut_is_the_best_of_its_rank(two, tmp_path, rank):
    out = tmp_path / "out.safetensors"
    made = merge_loras((two[0], 0.7), (two[1], 0.4), out=out, rank=rank)
    one, other, got = (deltas(path) for path in (*two, out))
    for row in made.rows:
        want = 0.7 * one[row["key"]] + 0.4 * other[row["key"]]
        s = torch.linalg.svdvals(want)
        best = float((s[rank:] ** 2).sum().sqrt() / s.norm())
        assert abs(relative(got[row["key"]], want) - best) <= 1e-5
        assert abs(row["svd_error"] - best) <= 1e-6
        assert row["rank"] == rank


def test_automatic_ranks_keep_the_error_below_what_was_asked(two, tmp_path):
    out = tmp_path / "out.safetensors"
    made = merge_loras((two[0], 0.7), (two[1], 0.4), out=out, rank="auto", max_error=0.3)
    one, other, got = (deltas(path) for path in (*two, out))
    for row in made.rows:
        want = 0.7 * one[row["key"]] + 0.4 * other[row["key"]]
        s = torch.linalg.svdvals(want)
        rank = int(row["rank"])
        assert relative(got[row["key"]], want) <= 0.3
        assert float((s[rank - 1 :] ** 2).sum().sqrt() / s.norm()) > 0.3  # one rank less would not do
    capped = merge_loras(
        (two[0], 0.7), (two[1], 0.4), out=tmp_path / "c.safetensors", rank="auto", max_error=0.01, max_rank=5
    )
    assert capped.ranks == {5: 3}


def test_ranks_never_exceed_the_weight(tmp_path):
    loras = [make(tmp_path / f"{n}.safetensors", 16, None, n, stems=(TEXT,)) for n in range(3)]
    made = merge_loras(*loras, out=tmp_path / "out.safetensors")
    assert made.ranks == {24: 1}
    got = deltas(tmp_path / "out.safetensors")[TEXT]
    assert relative(got, sum(deltas(path)[TEXT] for path in loras)) <= 1e-6


DTYPES = list(itertools.product([torch.float16, torch.bfloat16, torch.float32], repeat=2))


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_the_dtype_is_the_widest_of_the_inputs(tmp_path, dtypes):
    paths = [make(tmp_path / f"{n}.safetensors", 4, 2.0, n, dtype) for n, dtype in enumerate(dtypes)]
    merge_loras(*paths, out=tmp_path / "out.safetensors")
    want = torch.float32 if torch.float32 in dtypes else dtypes[0]
    tensors = load_file(tmp_path / "out.safetensors")
    assert {tensor.dtype for key, tensor in tensors.items() if not key.endswith("alpha")} == {want}
    limit = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[want]
    one, other, got = (deltas(path) for path in (*paths, tmp_path / "out.safetensors"))
    assert all(relative(got[stem], one[stem] + other[stem]) <= limit for stem in got)


@pytest.mark.parametrize(
    "name", ["loha_linear", "loha_conv", "lokr_both_lowrank", "lokr_factor_auto", "lokr_full_full"]
)
def test_loha_and_lokr_become_loras_exactly(tmp_path, name):
    case = golden.load(name)
    path = golden.ROOT / name / "adapter.safetensors"
    made = merge_loras((path, 0.7), out=tmp_path / "out.safetensors")
    got = deltas(tmp_path / "out.safetensors")
    assert len(got) == len(case.adapter.pieces) == made.modules
    for piece in case.adapter.pieces:
        format = golden.FORMATS[piece.format]
        up, down = format.factors(golden.parts_of(piece, case.tensors), piece.settings)
        assert relative(got[piece.stem], 0.7 * (up @ down)) <= 2e-6


def test_whole_differences_are_summed(tmp_path):
    case = golden.load("full_diff")
    path = golden.ROOT / "full_diff" / "adapter.safetensors"
    merge_loras((path, 0.5), (path, 0.25), out=tmp_path / "out.safetensors")
    got = load_file(tmp_path / "out.safetensors")
    assert got.keys() == case.tensors.keys()
    assert all(torch.allclose(got[key], 0.75 * case.tensors[key], rtol=1e-6) for key in got)


def test_every_trainer_s_name_of_a_module_is_one_module(tmp_path):
    random = files.generator(3)
    native, diffusers = tmp_path / "native.safetensors", tmp_path / "diffusers.safetensors"
    names = ("double_blocks.0.img_attn.qkv", "single_blocks.0.linear1", "double_blocks.0.img_mod.lin")
    sizes = {names[0]: (24, 8), names[1]: (56, 8), names[2]: (48, 8)}
    first = {}
    for name, (out, in_) in sizes.items():
        stem = "lora_unet_" + name.replace(".", "_")
        first[f"{stem}.lora_up.weight"] = torch.randn(out, 2, generator=random)
        first[f"{stem}.lora_down.weight"] = torch.randn(2, in_, generator=random)
        first[f"{stem}.alpha"] = torch.tensor(2.0)
    save_file(first, native)
    second = {}
    block, mlp = "transformer.transformer_blocks.0.attn.", "transformer.single_transformer_blocks.0.proj_mlp"
    for name, out in (
        (f"{block}to_q", 8),
        (f"{block}to_v", 8),
        ("transformer.single_transformer_blocks.0.proj_mlp", 32),
    ):
        second[f"{name}.lora_A.weight"] = torch.randn(3, 8, generator=random)
        second[f"{name}.lora_B.weight"] = torch.randn(out, 3, generator=random)
    save_file(second, diffusers)
    merge_loras((native, 1.0), (diffusers, 0.5), out=tmp_path / "out.safetensors")
    one, other, got = (deltas(path) for path in (native, diffusers, tmp_path / "out.safetensors"))
    assert got.keys() == one.keys()
    qkv = one["lora_unet_double_blocks_0_img_attn_qkv"].clone()
    qkv[0:8] += 0.5 * other[f"{block}to_q"]
    qkv[16:24] += 0.5 * other[f"{block}to_v"]
    assert relative(got["lora_unet_double_blocks_0_img_attn_qkv"], qkv) <= 1e-6
    linear1 = one["lora_unet_single_blocks_0_linear1"].clone()
    linear1[24:56] += 0.5 * other[mlp]
    assert relative(got["lora_unet_single_blocks_0_linear1"], linear1) <= 1e-6


def test_peft_folders_make_a_peft_folder(tmp_path):
    out = tmp_path / "out"
    folders = [golden.ROOT / name for name in ("peft_lora", "peft_patterns")]
    merge_loras((folders[0], 0.5), (folders[1], 2.0), out=out)
    config = json.loads((out / "adapter_config.json").read_text())
    sums: dict[str, torch.Tensor] = {}
    for name, weight in (("peft_lora", 0.5), ("peft_patterns", 2.0)):
        case = golden.load(name)
        for piece in case.adapter.pieces:
            up, down = golden.FORMATS["lora"].factors(golden.parts_of(piece, case.tensors), piece.settings)
            sums[piece.stem] = sums.get(piece.stem, 0) + weight * (up @ down)
    adapter = golden.read(*golden.header(out / "adapter_model.safetensors"), config)
    tensors = load_file(out / "adapter_model.safetensors")
    assert {piece.stem for piece in adapter.pieces} == sums.keys()
    for piece in adapter.pieces:
        up, down = golden.FORMATS["lora"].factors(golden.parts_of(piece, tensors), piece.settings)
        assert relative(up @ down, sums[piece.stem]) <= 1e-6
        assert piece.settings["alpha"] == piece.rank == piece.settings["rank"]


@pytest.mark.parametrize("name", ["dora_lora_in", "diag_oft", "ia3_in"])
def test_what_is_no_sum_needs_its_base(tmp_path, name):
    path, base = golden.ROOT / name / "adapter.safetensors", golden.ROOT / "base_sd15_tiny.safetensors"
    out = tmp_path / "out.safetensors"
    with pytest.raises(MergeError, match="is no sum") as caught:
        merge_loras(path, out=out)
    assert "--base" in caught.value.hint
    with pytest.raises(MergeError, match="cut to a rank"):
        merge_loras(path, out=out, base=base)
    merge_loras(path, out=out, base=base, rank=24)
    case, got = golden.load(name), deltas(out)
    wanted = {key: want.double() - case.base[key].double() for key, want in case.expected["1.0"].items()}
    assert len(got) == len(wanted)
    by_size = {tuple(delta.reshape(delta.shape[0], -1).shape): delta for delta in wanted.values()}
    for delta in got.values():
        want = by_size[tuple(delta.shape)]
        assert relative(delta, want.reshape(delta.shape)) <= 1e-5


def test_the_header_tells_how_it_was_made(tmp_path):
    tags = json.dumps({"10_cat": {"cat": 3, "sofa": 1}})
    other = json.dumps({"10_cat": {"cat": 2}, "5_ink": {"ink": 7}})
    common = {"ss_base_model_version": "sd_v1", "modelspec.architecture": "stable-diffusion-v1/lora"}
    a = make(
        tmp_path / "cat.safetensors", metadata={**common, "ss_tag_frequency": tags, "modelspec.trigger_phrase": "mycat"}
    )
    b = make(
        tmp_path / "ink.safetensors",
        seed=1,
        metadata={**common, "ss_tag_frequency": other, "modelspec.trigger_phrase": "ink style, mycat"},
    )
    out = tmp_path / "out.safetensors"
    merge_loras((a, 0.5), (b, 0.5), out=out, metadata={"note": {"x": 1}})
    with safe_open(out, "pt") as file:
        told = file.metadata()
    assert told["ss_network_module"] == "networks.lora"
    assert told["ss_network_dim"] == told["ss_network_alpha"] == "8"
    assert told["ss_base_model_version"] == "sd_v1"
    assert told["modelspec.architecture"] == "stable-diffusion-v1/lora"
    assert told["modelspec.merged_from"] == "cat, ink"
    assert told["modelspec.trigger_phrase"] == "mycat, ink style"
    assert json.loads(told["ss_tag_frequency"]) == {"10_cat": {"cat": 5, "sofa": 1}, "5_ink": {"ink": 7}}
    assert json.loads(told["note"]) == {"x": 1}
    recipe = json.loads(told["lib_merge.recipe"])
    assert [(lora["file"], lora["strength"], len(lora["sha256"])) for lora in recipe["loras"]] == [
        ("cat.safetensors", 0.5, 64), ("ink.safetensors", 0.5, 64),
    ]  # fmt: skip
    bare = tmp_path / "bare.safetensors"
    merge_loras((a, 0.5), (b, 0.5), out=bare, keep_recipe=False)
    with safe_open(bare, "pt") as file:
        assert not [text for text in file.metadata().values() if "cat.safetensors" in text or text == "cat, ink"]


def test_hashes_are_those_of_the_data(two, tmp_path):
    import hashlib

    out = tmp_path / "out.safetensors"
    merge_loras(*two, out=out)
    raw = out.read_bytes()
    data = hashlib.sha256(raw[8 + int.from_bytes(raw[:8], "little") :]).hexdigest()
    with safe_open(out, "pt") as file:
        assert file.metadata()["sshs_model_hash"] == data
        assert file.metadata()["modelspec.hash_sha256"] == f"0x{data}"


def test_the_bytes_do_not_depend_on_threads(two, tmp_path):
    outs = []
    for threads in (1, 3):
        outs.append(tmp_path / f"{threads}.safetensors")
        merge_loras((two[0], 0.7), (two[1], -0.4), out=outs[-1], rank=5, threads=threads)
    assert outs[0].read_bytes() == outs[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"method": "concatt"}, "no LoRA merge method"),
        ({"params": {"density": 0.5}}, "density takes effect only with method ties"),
        ({"rank": 0}, "rank must be"),
        ({"max_error": 1.5}, "max_error"),
    ],
)
def test_wrong_wishes_are_refused(two, tmp_path, arguments, said):
    with pytest.raises(MergeError, match=said):
        merge_loras(*two, out=tmp_path / "out.safetensors", **arguments)
    assert not (tmp_path / "out.safetensors").exists()


def test_loras_of_different_sizes_are_refused(tmp_path):
    a = make(tmp_path / "a.safetensors", stems=(LINEAR,))
    wide = {f"{LINEAR}.lora_up.weight": torch.ones(24, 2), f"{LINEAR}.lora_down.weight": torch.ones(2, 40)}
    save_file(wide, tmp_path / "b.safetensors")
    with pytest.raises(MergeError, match="sizes differ") as caught:
        merge_loras(a, tmp_path / "b.safetensors", out=tmp_path / "out.safetensors")
    assert caught.value.tensor == LINEAR


def test_an_existing_output_stays(two, tmp_path):
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"mine")
    with pytest.raises(MergeError, match="exists"):
        merge_loras(*two, out=out)
    assert out.read_bytes() == b"mine"
    assert merge_loras(*two, out=out, number=True).output.name == "out_1.safetensors"
    merge_loras(*two, out=out, overwrite=True)
    assert deltas(out)


def test_a_value_that_is_not_finite_stops_the_run(tmp_path):
    a = make(tmp_path / "a.safetensors", stems=(LINEAR,))
    tensors = load_file(a)
    tensors[f"{LINEAR}.lora_up.weight"][0, 0] = torch.inf
    save_file(tensors, a)
    with pytest.raises(MergeError, match="not finite") as caught:
        merge_loras(a, out=tmp_path / "out.safetensors")
    assert caught.value.tensor == f"{LINEAR}.lora_up.weight"
    assert list(tmp_path.glob("*out*")) == []


def test_a_value_beyond_fp16_stops_the_run(tmp_path):
    a = make(tmp_path / "a.safetensors", stems=(LINEAR,))
    tensors = load_file(a)
    tensors[f"{LINEAR}.lora_up.weight"] *= 1e6
    save_file(tensors, a)
    with pytest.raises(MergeError, match="does not fit fp16"):
        merge_loras(a, out=tmp_path / "out.safetensors", save_dtype="fp16")


@pytest.mark.parametrize("name", ["peft_gpt2_conv1d", "peft_embedding"])
@pytest.mark.parametrize("rank", [None, 3])
def test_peft_s_other_ways_to_store_factors_are_kept(tmp_path, name, rank):
    case, out = golden.load(name), tmp_path / "out"
    merge_loras((golden.ROOT / name, 0.5), (golden.ROOT / name, 0.25), out=out, rank=rank)
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["fan_in_fan_out"] == (name == "peft_gpt2_conv1d")
    weights = out / "adapter_model.safetensors"
    adapter, tensors = golden.read(*golden.header(weights), config), load_file(weights)
    before = {piece.stem: piece for piece in case.adapter.pieces}
    formats = {stem: piece.format for stem, piece in before.items()}
    assert {piece.stem: piece.format for piece in adapter.pieces} == formats
    for piece in adapter.pieces:

        def delta(piece, tensors):
            up, down = golden.FORMATS[piece.format].factors(golden.parts_of(piece, tensors), piece.settings)
            return up @ down

        want = 0.75 * delta(before[piece.stem], case.tensors)
        s = torch.linalg.svdvals(want)
        best = float((s[rank:] ** 2).sum().sqrt() / s.norm()) if rank else 0.0
        assert abs(relative(delta(piece, tensors), want) - best) <= 1e-5


def test_flat_convolutions_get_their_kernel_back(tmp_path):
    merge_loras(golden.ROOT / "loha_conv" / "adapter.safetensors", out=tmp_path / "out.safetensors")
    tensors = load_file(tmp_path / "out.safetensors")
    assert tensors["lora_unet_down_blocks_0_resnets_0_conv1.lora_down.weight"].shape == (9, 20, 3, 3)
    assert tensors["lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight"].shape == (9, 24)


def test_loras_on_stacked_experts_are_refused_by_name(tmp_path):
    folder = tmp_path / "moe"
    folder.mkdir()
    stem = "base_model.model.model.layers.0.mlp.experts"
    factors = {f"{stem}.lora_A.weight": torch.ones(6, 4), f"{stem}.lora_B.weight": torch.ones(5, 6)}
    save_file(factors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_parameters": ["mlp.experts.down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(MergeError, match="stacked experts"):
        merge_loras(folder, out=tmp_path / "out")


def test_peft_s_names_in_a_single_file_carry_their_scale_in_the_header(tmp_path):
    out = tmp_path / "out.safetensors"
    merge_loras((golden.ROOT / "peft_patterns", 0.5), out=out)
    adapter, tensors, case = golden.read(*golden.header(out)), load_file(out), golden.load("peft_patterns")
    assert not adapter.needs_alpha
    before = {piece.stem: piece for piece in case.adapter.pieces}
    for piece in adapter.pieces:
        old = before[piece.stem]
        up, down = golden.FORMATS["lora"].factors(golden.parts_of(piece, tensors), piece.settings)
        was_up, was_down = golden.FORMATS["lora"].factors(golden.parts_of(old, case.tensors), old.settings)
        assert relative(up @ down, 0.5 * was_up @ was_down) <= 1e-6


@pytest.mark.parametrize("method", ["concat", "auto", "ties"])
def test_nothing_but_zeros_is_no_result(two, tmp_path, method):
    with pytest.raises(MergeError, match="nothing would be left"):
        merge_loras((two[0], 0.0), (two[1], 0.0), out=tmp_path / "out.safetensors", method=method)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


def test_what_a_vote_cancels_is_no_result(two, tmp_path):
    with pytest.raises(MergeError, match="zero everywhere"):
        merge_loras((two[0], 1.0), (two[0], -1.0), out=tmp_path / "out.safetensors", method="ties")


@pytest.mark.parametrize("method", ["concat", "auto"])
def test_parts_of_different_ranks_are_refused_with_file_and_module(two, tmp_path, method):
    tensors = load_file(two[0])
    tensors[f"{LINEAR}.lora_up.weight"] = tensors[f"{LINEAR}.lora_up.weight"][:, :3].contiguous()
    save_file(tensors, tmp_path / "odd.safetensors")
    with pytest.raises(MergeError, match="different ranks: up 3, down 4") as caught:
        merge_loras(tmp_path / "odd.safetensors", two[1], out=tmp_path / "out.safetensors", method=method)
    assert (caught.value.file, caught.value.tensor) == (str(tmp_path / "odd.safetensors"), LINEAR)
    assert "damaged" in caught.value.hint


@pytest.mark.parametrize(
    "wishes", [{}, {"rank": 2}, {"method": "auto"}, {"method": "weighted_average"}, {"method": "peft_cat"}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_lora_and_its_opposite_leave_nothing_to_store(tmp_path, wishes, dtype):
    a, b = (make(tmp_path / f"{name}.safetensors", 4, 2.0, 1, dtype) for name in "ab")
    with pytest.raises(MergeError, match="zero everywhere"):
        merge_loras(a, (b, -1.0), out=tmp_path / "out.safetensors", **wishes)
    assert not (tmp_path / "out.safetensors").exists()


def test_a_small_difference_of_two_loras_is_no_zero(two, tmp_path):
    """Factors that differ by 2 % in single precision: the difference is far above what rounding makes."""
    near = {key: tensor * 1.02 if key.endswith("up.weight") else tensor for key, tensor in load_file(two[0]).items()}
    save_file(near, tmp_path / "near.safetensors")
    merge_loras((tmp_path / "near.safetensors", 1.0), (two[0], -1.0), out=tmp_path / "out.safetensors")
    got, want = deltas(tmp_path / "out.safetensors"), deltas(two[0])
    assert all(relative(got[stem], 0.02 * want[stem]) < 1e-4 for stem in want)


def test_strengths_of_0_leave_nothing_and_are_refused_before_any_work(two, tmp_path):
    out = tmp_path / "out.safetensors"
    for loras, wishes, told in (
        (((two[0], 0.0), (two[1], 0.0)), {}, "every LoRA has strength 0"),
        (two, {"method": "auto", "output_strength": 0.0}, "output_strength 0 would leave nothing"),
        (((two[0], float("nan")), two[1]), {}, "strength of a.safetensors is no finite number"),
        (((two[0], 1.0, float("inf")), two[1]), {}, "te_strength of a.safetensors is no finite number"),
    ):
        with pytest.raises(MergeError, match=told):
            merge_loras(*loras, out=out, dry_run=True, **wishes)


def test_one_lora_named_twice_is_noted(two, tmp_path):
    made = merge_loras((two[0], 0.5), two[1], (two[0], 0.25), out=tmp_path / "out.safetensors")
    assert "LoRA 1 and LoRA 3 are the same file; their strengths add up" in made.notes
