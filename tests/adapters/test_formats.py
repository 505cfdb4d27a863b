"""Each format's change to a weight, worked by hand or by loops written from the formula."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from lib_merge.adapters import FORMATS
from lib_merge.errors import MergeError


def t(values) -> torch.Tensor:
    return torch.tensor(np.array(values), dtype=torch.float64)


def parts(**named) -> dict[str, torch.Tensor]:
    return {role: t(values) for role, values in named.items()}


def delta(id: str, named: dict, shape: tuple[int, ...], settings: dict | None = None) -> np.ndarray:
    return FORMATS[id].delta(named, settings or {}, shape).numpy()


def applied(id: str, weight, named: dict, strength: float = 1.0, settings: dict | None = None) -> np.ndarray:
    before = t(weight)
    after = FORMATS[id].apply(before, named, settings or {}, strength)
    assert torch.equal(before, t(weight)), "the weight was overwritten"
    return after.numpy()


def close(got, want, limit: float = 1e-12) -> None:
    np.testing.assert_allclose(got, np.array(want, dtype=float), rtol=limit, atol=limit)


UP, DOWN = [[1, 2], [3, 4], [5, 6]], [[1, 0, -1, 2], [0, 1, 1, -1]]
PRODUCT = [[1, 2, 1, 0], [3, 4, 1, 2], [5, 6, 1, 4]]  # UP·DOWN


@pytest.mark.parametrize(
    ("more", "settings", "scale"),
    [
        ({}, {}, 1),  # without alpha, alpha is the rank
        ({"alpha": 1.0}, {}, 0.5),
        ({"alpha": [6.0]}, {}, 3),
        ({"alpha": 0.0}, {}, 1),  # a stored 0 counts as the rank
        ({}, {"alpha": 0.0}, 0),  # a configured 0 means no effect
        ({}, {"alpha": 8.0}, 4),
        ({}, {"alpha": 8.0, "rslora": True}, 8 / math.sqrt(2)),
        ({"alpha": 1.0}, {"alpha": 8.0}, 0.5),
        ({"alpha": 1.0, "scale": 0.25}, {}, 0.25),
    ],
)
def test_lora_and_its_scale(more, settings, scale):
    named = parts(up=UP, down=DOWN, **more)
    close(delta("lora", named, (3, 4), settings), scale * np.array(PRODUCT))
    up, down = FORMATS["lora"].factors(named, settings)
    close(up @ down, scale * np.array(PRODUCT))


def test_lora_of_a_convolution_is_the_composed_convolution():
    rng = np.random.default_rng(1)
    up, down = rng.normal(size=(3, 2, 1, 1)), rng.normal(size=(2, 4, 3, 3))
    want = np.zeros((3, 4, 3, 3))
    for o, i, y, x, r in itertools.product(range(3), range(4), range(3), range(3), range(2)):
        want[o, i, y, x] += up[o, r, 0, 0] * down[r, i, y, x]
    close(delta("lora", parts(up=up, down=down), (3, 4, 3, 3)), want)


def test_lora_on_a_linear_weight_fits_a_1x1_convolution_and_back():
    flat = parts(up=UP, down=DOWN)
    close(delta("lora", flat, (3, 4, 1, 1))[:, :, 0, 0], PRODUCT)
    conv = parts(up=np.reshape(UP, (3, 2, 1, 1)), down=np.reshape(DOWN, (2, 4, 1, 1)))
    close(delta("lora", conv, (3, 4)), PRODUCT)


def test_lora_with_a_core():
    rng = np.random.default_rng(2)
    up, mid, down = rng.normal(size=(3, 2, 1, 1)), rng.normal(size=(2, 2, 3, 3)), rng.normal(size=(2, 4, 1, 1))
    want = np.zeros((3, 4, 3, 3))
    for o, i, y, x, p, q in itertools.product(range(3), range(4), range(3), range(3), range(2), range(2)):
        want[o, i, y, x] += 0.5 * up[o, p, 0, 0] * mid[p, q, y, x] * down[q, i, 0, 0]
    named = parts(up=up, mid=mid, down=down, alpha=1.0)
    close(delta("lora", named, (3, 4, 3, 3)), want)
    left, right = FORMATS["lora"].factors(named, {})
    close(left @ right, want.reshape(3, -1))


def test_lora_on_a_weight_stored_in_out():
    named, settings = parts(up=UP, down=DOWN), {"fan_in_fan_out": True}
    close(delta("lora", named, (4, 3), settings), np.transpose(PRODUCT))
    left, right = FORMATS["lora"].factors(named, settings)
    close(left @ right, np.transpose(PRODUCT))


def test_lora_that_does_not_fit_is_refused():
    with pytest.raises(MergeError, match="does not fit"):
        delta("lora", parts(up=UP, down=DOWN), (3, 5))


def test_sparse_residual_is_scaled_with_the_product():
    named = parts(up=UP, down=DOWN, alpha=1.0, bias_indices=[[0, 2], [3, 1]], bias_values=[10, 20], bias_size=[3, 4])
    close(delta("sparse", named, (3, 4)), [[0.5, 1, 0.5, 5], [1.5, 2, 0.5, 1], [2.5, 13, 0.5, 2]])


def test_loha_is_the_entrywise_product_of_two_products():
    named = parts(
        hada_w1_a=[[1, 2], [3, 4]], hada_w1_b=[[1, 0, 2], [0, 1, 1]],
        hada_w2_a=[[1, 1], [2, 0]], hada_w2_b=[[1, 2, 3], [1, 1, 1]], alpha=1.0,
    )  # fmt: skip
    # [[1, 2, 4], [3, 4, 10]] ⊙ [[2, 3, 4], [2, 4, 6]] / 2
    close(delta("loha", named, (2, 3)), [[1, 3, 8], [3, 8, 30]])


def test_lokr_is_the_kronecker_product():
    named = parts(lokr_w1=[[1, 2]], lokr_w2_a=[[1], [3]], lokr_w2_b=[[1, 4]], alpha=2.0)
    close(delta("lokr", named, (2, 4)), [[2, 8, 4, 16], [6, 24, 12, 48]])


@pytest.mark.parametrize(
    ("settings", "scale"),
    [({}, 1), ({"alpha": 6.0, "rank": 2}, 3), ({"alpha": 6.0}, 1), ({"alpha": 0.0, "rank": 2}, 0)],
)
def test_lokr_of_two_whole_sides_has_scale_1_unless_peft_configures_it(settings, scale):
    named = parts(lokr_w1=[[1, 2]], lokr_w2=[[1, 4], [3, 5]], alpha=8.0)
    close(delta("lokr", named, (2, 4), settings), scale * np.array([[1, 4, 2, 8], [3, 5, 6, 10]]))


def test_lokr_s_second_side_gives_the_rank_where_both_are_low():
    named = parts(lokr_w1_a=[[1]], lokr_w1_b=[[2]], lokr_w2_a=[[1, 0], [0, 1]], lokr_w2_b=[[1, 2], [3, 4]], alpha=1.0)
    close(delta("lokr", named, (2, 2)), [[1, 2], [3, 4]])  # 2·(1/2)


@pytest.mark.parametrize(
    ("axis", "magnitude", "want"),
    [
        (0, [[10.0], [13.0]], [[6, 8], [5, 12]]),  # rows [3, 4] and [5, 12]
        (1, [[10.0, 10.0]], [[30 / math.sqrt(34), 40 / math.sqrt(160)], [50 / math.sqrt(34), 120 / math.sqrt(160)]]),
    ],
)
def test_dora_brings_rows_or_columns_to_the_learned_length(axis, magnitude, want):
    named = parts(up=[[1], [2]], down=[[1, 2]], magnitude=magnitude)  # W + ΔW = [[3, 4], [5, 12]]
    weight, settings = np.array([[2.0, 2.0], [3.0, 8.0]]), {"inner": "lora", "axis": axis}
    close(applied("dora", weight, named, 1.0, settings), want)
    close(applied("dora", weight, named, 0.25, settings), weight + 0.25 * (np.array(want) - weight))


def test_dora_leaves_a_row_of_zeros():
    named = parts(up=[[1], [0]], down=[[-2, -2]], magnitude=[[7.0], [5.0]])
    got = applied("dora", [[2.0, 2.0], [3.0, 4.0]], named, 1.0, {"inner": "lora", "axis": 0})
    close(got, [[0, 0], [3, 4]])


def rotation(angle: float) -> np.ndarray:
    return np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])


def half_tangent(angle: float) -> float:
    """Cayley's (I+Q)(I−Q)⁻¹ of Q = [[0, −q], [q, 0]] turns by 2·atan q."""
    return math.tan(angle / 2)


def test_diag_oft_turns_blocks_of_rows():
    angles = (0.3, -1.1)
    blocks = [[[0, 0], [half_tangent(angle), 0]] for angle in angles]
    weight = np.arange(8.0).reshape(4, 2)
    want = np.concatenate([rotation(angle).T @ weight[2 * k : 2 * k + 2] for k, angle in enumerate(angles)])
    close(applied("oft", weight, parts(oft_blocks=blocks, alpha=0.0)), want)
    close(applied("oft", weight, parts(oft_blocks=blocks)), want)
    rescale = np.array([[1.0], [2], [3], [4]])
    close(applied("oft", weight, parts(oft_blocks=blocks, rescale=rescale)), rescale * want)
    # In between: s·R + (1−s)·I, and the lengths likewise.
    close(applied("oft", weight, parts(oft_blocks=blocks), 0.7), 0.7 * want + 0.3 * weight)
    half = (0.7 * want + 0.3 * weight) * (1 + 0.7 * (rescale - 1))
    close(applied("oft", weight, parts(oft_blocks=blocks, rescale=rescale), 0.7), half)
    close(applied("oft", weight, parts(oft_diag=[rotation(angle) for angle in angles])), want)


def test_diag_oft_s_constraint_limits_the_norm_of_all_blocks_together():
    # Q has norm √2·q in each of two blocks, 2·q together; the limit is alpha·rows = 0.4.
    weight = np.arange(8.0).reshape(4, 2)
    blocks = [[[0, 0], [1.0, 0]]] * 2
    turn = rotation(2 * math.atan(0.2)).T
    want = np.concatenate([turn @ weight[:2], turn @ weight[2:]])
    close(applied("oft", weight, parts(oft_blocks=blocks, alpha=0.1)), want)
    close(
        applied("oft", weight, parts(oft_blocks=blocks, alpha=10.0)), applied("oft", weight, parts(oft_blocks=blocks))
    )


def test_boft_pairs_rows_that_lie_further_apart_at_each_stage():
    # Blocks of 2 on four rows: stage 0 turns (0, 1) and (2, 3), stage 1 turns (0, 2) and (1, 3).
    angles = [[0.3, -0.8], [1.2, 0.4]]
    blocks = [[[[0, 0], [half_tangent(angle), 0]] for angle in stage] for stage in angles]
    weight = np.arange(12.0).reshape(4, 3)
    want = weight.copy()
    for pairs, stage in zip(([(0, 1), (2, 3)], [(0, 2), (1, 3)]), angles, strict=True):
        for pair, angle in zip(pairs, stage, strict=True):
            want[list(pair)] = rotation(angle) @ want[list(pair)]
    close(applied("boft", weight, parts(oft_blocks=blocks, alpha=0.0)), want)


def test_boft_takes_the_strength_stage_by_stage():
    blocks = [[[[0, 0], [0.5, 0]]], [[[0, 0], [0.5, 0]]]]
    weight = np.array([[1.0], [2.0]])
    partly = 0.6 * rotation(2 * math.atan(0.5)) + 0.4 * np.eye(2)
    with pytest.raises(RuntimeError):  # two rows have no second stage
        applied("boft", weight, parts(oft_blocks=blocks), 0.6)
    close(applied("boft", weight, parts(oft_blocks=blocks[:1]), 0.6), partly @ weight)


def test_ia3_of_lycoris_multiplies_inputs_or_outputs():
    weight = np.array([[1.0, 2, 3], [4, 5, 6]])
    close(applied("ia3", weight, parts(on_input=1, weight=[1.0, 0, -1]), 0.5), weight * [1.5, 1, 0.5])
    close(applied("ia3", weight, parts(on_input=0, weight=[[1.0], [-2]]), 0.5), weight * [[1.5], [0]])


def test_ia3_of_peft_multiplies_by_the_numbers_themselves():
    weight = np.array([[1.0, 2, 3], [4, 5, 6]])
    close(applied("peft_ia3", weight, parts(ia3_l=[[2.0, 1, 0]]), 1.0, {"axis": 1}), weight * [2, 1, 0])
    close(applied("peft_ia3", weight, parts(ia3_l=[[2.0], [0]]), 0.5, {"axis": 0}), weight * [[1.5], [0.5]])
    close(applied("peft_ia3", [1.0, 2], parts(ia3_l=[[2.0], [0]]), 1.0, {"axis": 0}), [2, 0])


def test_peft_s_oft_turns_blocks_of_inputs():
    angles = (0.3, -1.1)
    weight = np.arange(8.0).reshape(2, 4)
    named = parts(oft_r=[[math.tan(angle / 2)] for angle in angles])  # Q = [[0, q], [−q, 0]]
    exact = np.concatenate([weight[:, 2 * k : 2 * k + 2] @ rotation(angle).T for k, angle in enumerate(angles)], 1)
    close(applied("peft_oft", weight, named, 1.0, {"exact": True, "terms": 5}), exact)
    close(applied("peft_oft", weight, named, 0.5, {"exact": True, "terms": 5}), (weight + exact) / 2)
    want = []
    for k, angle in enumerate(angles):
        q = math.tan(angle / 2) * np.array([[0.0, 1], [-1, 0]])
        series = np.eye(2) + 2 * q + 2 * q @ q + 2 * q @ q @ q + q @ q @ q @ q
        want.append(weight[:, 2 * k : 2 * k + 2] @ series.T)
    close(applied("peft_oft", weight, named, 1.0, {"exact": False, "terms": 5}), np.concatenate(want, 1))


def test_one_block_of_peft_s_oft_stands_for_all():
    weight = np.arange(8.0).reshape(2, 4)
    shared = applied("peft_oft", weight, parts(oft_r=[[0.4]]), 1.0, {"exact": True, "terms": 5})
    close(shared, applied("peft_oft", weight, parts(oft_r=[[0.4], [0.4]]), 1.0, {"exact": True, "terms": 5}))


def test_peft_s_oft_on_a_weight_stored_in_out():
    weight, named = np.arange(8.0).reshape(2, 4), parts(oft_r=[[0.4], [0.1]])
    plain = applied("peft_oft", weight, named, 1.0, {"exact": True, "terms": 5})
    swapped = applied("peft_oft", weight.T, named, 1.0, {"exact": True, "terms": 5, "fan_in_fan_out": True})
    close(swapped, plain.T)


def test_peft_s_boft_shuffles_half_blocks():
    # Blocks of 4 on eight inputs; before stage 1 the half-blocks 0 1 2 3 stand as 0 2 1 3.
    rng = np.random.default_rng(3)
    stages = rng.normal(size=(2, 2, 4, 4)) * 0.3
    scale, weight = np.array([[2.0], [0.5]]), rng.normal(size=(2, 8))
    columns = weight.T.copy()
    for index, order in enumerate(([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 4, 5, 2, 3, 6, 7])):
        shuffled = columns[order]
        for block in range(2):
            skew = (stages[index, block] - stages[index, block].T) / 2
            turn = (np.eye(4) - skew) @ np.linalg.inv(np.eye(4) + skew)
            shuffled[4 * block : 4 * block + 4] = turn @ shuffled[4 * block : 4 * block + 4]
        columns[order] = shuffled
    want = columns.T * scale
    named = parts(boft_r=stages, boft_s=scale)
    close(applied("peft_boft", weight, named), want)
    close(applied("peft_boft", weight, named, 0.25), weight + 0.25 * (want - weight))


def test_householder_reflections():
    vectors = np.array([[3.0, 0], [4, 2]])  # columns [3, 4]/5 and [0, 1]
    weight = np.array([[1.0, 2], [3, 4], [5, 6]])
    first = np.eye(2) - 2 / 25 * np.array([[9, 12], [12, 16]])
    want = weight @ first @ np.diag([1.0, -1])
    close(applied("hra", weight, parts(hra_u=vectors), 1.0, {"orthogonal": False}), want)
    close(applied("hra", weight, parts(hra_u=vectors), 0.5, {"orthogonal": False}), (weight + want) / 2)
    # Made orthogonal, two reflections in the plane turn everything round.
    close(applied("hra", weight, parts(hra_u=vectors), 1.0, {"orthogonal": True}), -weight)


def test_glora_in_both_orders():
    rng = np.random.default_rng(4)
    a1, a2, b1, b2 = (rng.normal(size=size) for size in ((4, 2), (2, 4), (3, 2), (2, 4)))
    weight = rng.normal(size=(3, 4))
    want = weight + 0.5 * 1.5 * (b1 @ b2 + weight @ a1 @ a2)
    new = parts(glora_a1=a1, glora_a2=a2, glora_b1=b1, glora_b2=b2, alpha=3.0)
    close(applied("glora", weight, new, 0.5), want)
    old = parts(glora_a1=a2, glora_a2=a1, glora_b1=b2, glora_b2=b1, alpha=3.0)
    close(applied("glora", weight, old, 0.5), want)


def test_glora_of_a_convolution_goes_through_each_tap():
    rng = np.random.default_rng(5)
    a1, a2, b1, b2 = (rng.normal(size=size) for size in ((4, 2, 1, 1), (2, 4, 1, 1), (3, 2, 1, 1), (2, 4, 3, 3)))
    weight = rng.normal(size=(3, 4, 3, 3))
    want = weight + np.einsum("or,riyx->oiyx", b1[:, :, 0, 0], b2)
    want += np.einsum("oiyx,ir,rj->ojyx", weight, a1[:, :, 0, 0], a2[:, :, 0, 0])
    close(applied("glora", weight, parts(glora_a1=a1, glora_a2=a2, glora_b1=b1, glora_b2=b2)), want)


def test_embedding_lora_is_stored_the_other_way_round():
    named = parts(embedding_down=[[1, 2, 3]], embedding_up=[[1], [10]], alpha=2.0)
    close(delta("embedding", named, (3, 2)), [[2, 20], [4, 40], [6, 60]])
    left, right = FORMATS["embedding"].factors(named, {})
    close(left @ right, [[2, 20], [4, 40], [6, 60]])


def test_expert_loras_take_their_share_of_the_factors():
    down = [[1, 0], [0, 1], [2, 0], [0, 2]]  # two experts of rank 2
    up = [[1, 10, 2, 20], [3, 30, 4, 40], [5, 50, 6, 60]]  # [out, rank·experts], the expert running fastest
    first, second = np.array([[1, 2], [3, 4], [5, 6]]), 2 * np.array([[10, 20], [30, 40], [50, 60]])
    named = parts(down=down, up=up)
    close(delta("moe", named, (2, 3, 2)), [first, second])
    close(delta("moe", named, (2, 2, 3)), [first.T, second.T])
    close(delta("moe", named, (2, 3, 2), {"alpha": 6.0}), [3 * first, 3 * second])
    with pytest.raises(MergeError, match="do not fit"):
        delta("moe", named, (2, 3, 4))


def test_whole_changes():
    close(delta("diff", parts(diff=[[1, 2], [3, 4]]), (2, 2)), [[1, 2], [3, 4]])
    close(delta("norm", parts(diff=[1, 2]), (2,)), [1, 2])
    close(delta("up_bias", parts(up_bias=[1, 2], alpha=6.0), (2,), {"rank": 3}), [2, 4])
    close(delta("up_bias", parts(up_bias=[1, 2]), (2,), {"rank": 3}), [1, 2])
    close(applied("set", [1.0, 2], parts(value=[5, 6]), 0.3), [5, 6])
    close(applied("full", [1.0, 2], parts(value=[5, 6]), 1.0), [5, 6])
    close(applied("full", [1.0, 2], parts(value=[5, 6]), 0.25), [2, 3])


RNG = np.random.default_rng(7)


def rand(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape)


# (format, shapes of the parts, shape of the weight)
SHAPES = [
    ("lora", {"up": (6, 2), "down": (2, 8), "alpha": ()}, (6, 8)),
    ("lora", {"up": (6, 2, 1, 1), "down": (2, 4, 3, 3)}, (6, 4, 3, 3)),
    ("lora", {"up": (6, 2), "mid": (2, 2, 3, 3), "down": (2, 4)}, (6, 4, 3, 3)),
    ("loha", {"hada_w1_a": (6, 2), "hada_w1_b": (2, 8), "hada_w2_a": (6, 2), "hada_w2_b": (2, 8)}, (6, 8)),
    (
        "loha",
        {"hada_w1_a": (2, 6), "hada_w1_b": (2, 4), "hada_t1": (2, 2, 3, 3)}
        | {"hada_w2_a": (2, 6), "hada_w2_b": (2, 4), "hada_t2": (2, 2, 3, 3), "alpha": ()},
        (6, 4, 3, 3),
    ),
    ("lokr", {"lokr_w1": (2, 4), "lokr_w2_a": (3, 1), "lokr_w2_b": (1, 2), "alpha": ()}, (6, 8)),
    ("lokr", {"lokr_w1": (4, 2), "lokr_w2": (3, 2, 3, 3)}, (12, 4, 3, 3)),
    ("lokr", {"lokr_w1_a": (4, 1), "lokr_w1_b": (1, 2), "lokr_w2": (2, 5)}, (8, 10)),
    (
        "lokr",
        {"lokr_w1": (2, 2), "lokr_w2_a": (1, 3), "lokr_w2_b": (1, 2), "lokr_t2": (1, 1, 3, 3)},
        (6, 4, 3, 3),
    ),
    ("embedding", {"embedding_down": (2, 9), "embedding_up": (4, 2)}, (9, 4)),
]
LOW_RANK = [(id, {role: rand(*size) for role, size in sizes.items()}, shape) for id, sizes, shape in SHAPES]
names = [f"{id}-{index}" for index, (id, _, _) in enumerate(LOW_RANK)]


@pytest.mark.parametrize(("id", "named", "shape"), LOW_RANK, ids=names)
def test_factors_make_the_change(id, named, shape):
    format, tensors = FORMATS[id], parts(**named)
    up, down = format.factors(tensors, {})
    want = delta(id, tensors, shape)
    close((up @ down).numpy(), want.reshape(shape[0], -1))
    shapes = {role: tuple(part.shape) for role, part in tensors.items()}
    seen = format.shape(shapes, {})
    assert math.prod(seen) == math.prod(shape)
    assert seen[0] == shape[0]


@pytest.mark.parametrize(("id", "named", "shape"), LOW_RANK, ids=names)
def test_rows_may_be_computed_alone(id, named, shape):
    format, tensors = FORMATS[id], parts(**named)
    sliced = format.by_rows(frozenset(tensors))
    if not sliced:
        return
    some = {role: part[1:4] if role in sliced else part for role, part in tensors.items()}
    close(delta(id, some, (3, *shape[1:])), delta(id, tensors, shape)[1:4])


def test_formats_that_say_so_can_be_computed_by_rows():
    told = {id for id, format in FORMATS.items() if format.by_rows(frozenset(format.needs))}
    assert told == {"loha", "diff", "norm", "set", "full"}
