"""A layout rule says which layout n workers form."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.plan.layout import Layout, LayoutRule, after_a_loss, choose, layouts_by_size, uneven_experts
from elastic.plan.placement import padding
from storage.slices import Tensor

pytestmark = pytest.mark.fast

degrees = st.none() | st.integers(1, 5)


@st.composite
def models(draw: st.DrawFn) -> tuple[tuple[str, int], ...]:
    """Draws the degrees of the axes that divide the model; in half of all cases there are none."""
    degrees = draw(st.none() | st.lists(st.integers(1, 3), min_size=3, max_size=3)) or [1] * 3
    return tuple(
        (name, degree) for name, degree in zip(("pp", "cp", "tp"), degrees, strict=True) if degree > 1
    )


@st.composite
def rules(draw: st.DrawFn) -> LayoutRule:
    dp_shard = draw(degrees)
    return LayoutRule(
        draw(degrees),
        dp_shard,
        draw(st.integers(1, dp_shard or 5)),
        draw(st.sampled_from(("all", "fit"))),
        draw(models()),
    )


@pytest.mark.parametrize(
    ("rule", "becomes"),
    [
        (LayoutRule(), "1×1 2×1 3×1 4×1 5×1 6×1 7×1 8×1"),
        (LayoutRule(min_shard=2), "wait 1×2 1×3 2×2 1×5 3×2 1×7 4×2"),
        (LayoutRule(min_shard=2, use="fit"), "wait 1×2 1×2 2×2 2×2 3×2 3×2 4×2"),
        (LayoutRule(min_shard=3), "wait wait 1×3 1×4 1×5 2×3 1×7 2×4"),
        (LayoutRule(dp_shard=2), "wait 1×2 1×2 2×2 2×2 3×2 3×2 4×2"),
        (LayoutRule(dp_replicate=1), "1×1 1×2 1×3 1×4 1×5 1×6 1×7 1×8"),
        (LayoutRule(dp_replicate=2, min_shard=2), "wait wait wait 2×2 2×2 2×3 2×3 2×4"),
        (LayoutRule(dp_replicate=2, min_shard=2, use="fit"), "wait wait wait 2×2 2×2 2×2 2×2 2×2"),
        (LayoutRule(2, 3), "wait wait wait wait wait 2×3 2×3 2×3"),
    ],
    ids=str,
)
def test_table_of_what_n_workers_become(rule: LayoutRule, becomes: str) -> None:
    assert " ".join(str(layout or "wait") for _, layout in layouts_by_size(rule, 8)) == becomes
    assert [n for n, _ in layouts_by_size(rule, 8)] == list(range(1, 9))


def dumb_choose(
    workers: int, rule: LayoutRule, nodes: list[int], least: int, misfits: frozenset[int] = frozenset()
) -> Layout | None:
    """Tries every grid of at most ``workers`` workers, one after the other.  If its tensor groups lie over
    nodes, tries every grid of which all can lie within nodes, and takes the best if it is not much smaller.
    """
    model = dict(rule.model)
    group, tensor = math.prod(model.values()), model.get("tp", 1)
    anywhere = _best_grid(workers // group, rule, nodes, least, misfits)
    whole = sum(size // tensor for size in nodes) // (group // tensor)
    if anywhere is None or anywhere.world <= whole * group:
        return anywhere
    within = _best_grid(whole, rule, nodes, least, misfits)
    taken = within is not None and within.world >= least and within.world > anywhere.world * 2 / 3
    return within if taken else anywhere


def _best_grid(
    groups: int, rule: LayoutRule, nodes: list[int], least: int, misfits: frozenset[int]
) -> Layout | None:
    best, chosen, auto = [], rule.dp_shard is None and rule.use == "all", rule.dp_replicate is None
    model = dict(rule.model)
    group = math.prod(model.values())
    for shards in range(1, groups + 1):
        for replicas in range(1, groups // shards + 1):
            wrong = (
                shards < rule.min_shard
                or (rule.dp_shard is not None and shards != rule.dp_shard)
                or (rule.dp_replicate is not None and replicas != rule.dp_replicate)
                or (rule.dp_shard is None and rule.use == "fit" and shards != rule.min_shard)
            )
            if not wrong:
                used, size = replicas * shards, shards * group
                fitting = shards * model.get("cp", 1) not in misfits
                enough = chosen and fitting and used * group >= least and groups - used < groups / 8
                inside = enough and auto and sum(node // size for node in nodes) >= replicas
                whole = enough and auto and _has_whole_nodes(nodes, replicas, size)
                choice = (
                    (3, used, -shards)
                    if inside
                    else (2, replicas, shards)
                    if whole
                    else (1, replicas, shards)
                    if enough
                    else (0, used, -shards)
                )
                best.append((choice, Layout(replicas, shards, rule.model)))
    return max(best, key=lambda each: each[0])[1] if best else None


def _has_whole_nodes(nodes: list[int], replicas: int, size: int) -> bool:
    usual = max(size for size in nodes if nodes.count(size) == max(map(nodes.count, nodes)))
    full = len([size for size in nodes if size >= usual])
    return usual > 1 and size % usual == 0 and size // usual * replicas <= full


misfits = st.frozensets(st.integers(1, 24))


@given(st.integers(0, 24), rules(), st.integers(1, 24), misfits)
def test_choose_equals_the_dumb_search(
    workers: int, rule: LayoutRule, least: int, wrong: frozenset[int]
) -> None:
    found = choose(workers, rule, least=least, fits=lambda shards: shards not in wrong)
    assert found == dumb_choose(workers, rule, [1] * workers, least, wrong)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=7),
    st.integers(1, 9),
    st.integers(0, 3),
    misfits,
    models(),
    st.integers(1, 40),
)
def test_choose_knows_nodes_as_the_dumb_search_does(
    nodes: list[int],
    lowest: int,
    spares: int,
    wrong: frozenset[int],
    model: tuple[tuple[str, int], ...],
    least: int,
) -> None:
    workers, rule = max(1, sum(nodes) - spares), LayoutRule(min_shard=lowest, model=model)
    found = choose(workers, rule, nodes, least=least, fits=lambda shards: shards not in wrong)
    assert found == dumb_choose(workers, rule, nodes, least, wrong)


EIGHT = (("pp", 8), ("tp", 8))


@pytest.mark.parametrize(
    ("nodes", "rule", "becomes"),
    [
        ([8] * 128, LayoutRule(model=EIGHT), Layout(16, 1, EIGHT)),
        ([8] * 127, LayoutRule(model=EIGHT), Layout(15, 1, EIGHT)),
        ([8] * 127 + [7], LayoutRule(model=EIGHT), Layout(15, 1, EIGHT)),
        ([8] * 128, LayoutRule(min_shard=16, model=EIGHT), Layout(1, 16, EIGHT)),
        ([8] * 127, LayoutRule(min_shard=16, model=EIGHT), None),
        ([8] * 127, LayoutRule(dp_replicate=1, model=EIGHT), Layout(1, 15, EIGHT)),
        ([8] * 4, LayoutRule(min_shard=2, model=(("tp", 4),)), Layout(4, 2, (("tp", 4),))),
        ([8] * 4, LayoutRule(min_shard=3, model=(("tp", 4),)), Layout(2, 4, (("tp", 4),))),
        ([7], LayoutRule(model=(("tp", 8),)), None),
    ],
    ids=str,
)
def test_a_world_has_whole_model_groups(nodes: list[int], rule: LayoutRule, becomes: Layout | None) -> None:
    assert choose(sum(nodes), rule, nodes) == becomes


@pytest.mark.parametrize(
    ("nodes", "becomes"),
    [([8, 8, 8, 7, 7], 3), ([8, 7, 7], 2), ([8] * 8 + [7, 7], 8), ([1] * 16, 2), ([8, 4, 4], 2)],
    ids=str,
)
def test_workers_that_form_only_tensor_groups_over_nodes_are_left_over_if_they_are_few(
    nodes: list[int], becomes: int
) -> None:
    """Eight workers are one of four groups on five nodes, and half of what there is on three."""
    rule = LayoutRule(model=(("tp", 8),))
    assert choose(sum(nodes), rule, nodes) == Layout(becomes, 1, rule.model)
    wanted = sum(nodes) // 8 * 8
    assert choose(sum(nodes), rule, nodes, least=wanted) == Layout(wanted // 8, 1, rule.model)


def test_a_rule_counts_the_parts_of_all_axes() -> None:
    rule = LayoutRule(model=(("pp", 2), ("tp", 4)))
    assert (rule.group, rule.min_parts, rule.most_parts(31)) == (8, 8, 24)
    assert rule.at_least(8) == rule and rule.at_least(9).min_shard == rule.at_least(16).min_shard == 2
    assert str(rule) == "parallel (dp_replicate = auto, dp_shard = auto, min_shard = 1, pp = 2, tp = 4)"
    assert str(choose(16, rule)) == "2×1×2 pp×4 tp"
    fixed = LayoutRule(dp_shard=2, model=(("tp", 2),))
    assert fixed.at_least(100) == fixed


@pytest.mark.parametrize(
    ("nodes", "lowest", "becomes"),
    [
        ([8] * 128, 8, Layout(128, 8)),
        ([8] * 127 + [7], 8, Layout(127, 8)),
        ([8] * 125 + [7] * 3, 8, Layout(125, 8)),
        ([8] * 127, 8, Layout(127, 8)),
        ([8] * 127 + [7], 3, Layout(255, 4)),
        ([8] * 128, 12, Layout(64, 16)),
        ([8] * 127 + [7], 12, Layout(63, 16)),
        ([8] * 127 + [7], 1_000, Layout(1, 1_016)),
        ([7], 2, Layout(1, 7)),
        ([3, 3], 2, Layout(2, 3)),
        ([1] * 1021, 8, Layout(127, 8)),
    ],
    ids=lambda value: f"{sum(value)}" if isinstance(value, list) else str(value),
)
def test_a_loss_leaves_the_replicas_of_other_nodes_as_they_are(
    nodes: list[int], lowest: int, becomes: Layout
) -> None:
    """N6: 1,023 workers were 93×11 and 1,021 were 1×1021, which cut every replica anew and laid it over
    nodes.
    """
    assert choose(sum(nodes), LayoutRule(min_shard=lowest), nodes) == becomes


def test_a_degree_that_pads_much_is_not_chosen() -> None:
    """The weights of a Llama of 70 B, by number of rows: 1,021 shards of 8,192 rows have nine each, or none."""
    rows = {8_192: 369, 28_672: 470, 1_024: 17, 128_256: 26}
    classes = [Tensor(f"of {count}", "parameter", "F32", (count, 1)) for count in rows]
    pads = [padding(classes, list(rows.values()), shards) for shards in (8, 1_024, 1_021)]
    assert pads[0] == 0 and pads[1] < 0.01 and pads[2] > 0.05

    def fits(shards: int) -> bool:
        return padding(classes, list(rows.values()), shards) <= 0.05

    one = LayoutRule(dp_replicate=1)
    assert choose(1_021, one, [8] * 127 + [5]) == Layout(1, 1_021), (
        "the control: nothing is known of the state"
    )
    capped = choose(1_021, one, [8] * 127 + [5], fits=fits)
    assert (
        capped is not None and capped.dp_shard == max(each for each in range(1, 1_022) if fits(each)) < 1_021
    )
    assert choose(1_021, one, [8] * 127 + [5], fits=fits, least=1_021) == Layout(1, 1_021), (
        "workers.min counts more"
    )
    assert choose(1_021, LayoutRule(dp_shard=1_021), fits=fits) == Layout(1, 1_021), (
        "so does what the job fixes"
    )


@given(st.integers(1, 6), st.integers(1, 6))
def test_every_world_rank_has_coordinates_of_its_own(dp_replicate: int, dp_shard: int) -> None:
    layout = Layout(dp_replicate, dp_shard)
    grid = [(replica, shard) for replica in range(dp_replicate) for shard in range(dp_shard)]
    assert [tuple(layout.coordinates(rank).values()) for rank in range(layout.world)] == grid
    assert layout.world == len(grid)


@pytest.mark.parametrize(
    "layout", [Layout(2, 4, (("cp", 2), ("tp", 2))), Layout(1, 8, (("pp", 2),))], ids=str
)
@pytest.mark.parametrize("experts", [1, 2, 4, 8])
def test_an_expert_group_is_a_view_of_shards_and_parts_of_sequences(layout: Layout, experts: int) -> None:
    """Each member is in one group, in which each part of the experts is once, in order; a group lies in one
    replica, stage and tensor rank.
    """
    groups = {layout.expert_group(rank, experts) for rank in range(layout.world)}
    assert sorted(rank for group in groups for rank in group) == [*range(layout.world)]
    for group in groups:
        parts = [layout.shard(rank) * experts // layout.shards for rank in group]
        assert parts == [*range(experts)] and set(group) <= set(layout.shard_ranks(group[0]))
    assert layout.expert_group(0, 1) == (0,) and layout.expert_group(0, 8) == layout.shard_ranks(0)


def test_a_degree_of_experts_that_does_not_divide_the_shards_is_refused() -> None:
    said = r"parallel\.ep = 3 does not divide parallel\.dp_shard × parallel\.cp = 8; set .* to 1, 2, 4 or 8$"
    with pytest.raises(ValueError, match=said):
        Layout(1, 4, (("cp", 2),)).expert_group(0, 3)
    assert uneven_experts(2, 1).endswith("= 1; set parallel.ep to 1") and not uneven_experts(1, 1)


def test_an_axis_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"axes nowhere, which plan/axes\.py does not know"):
        _ = Layout(1, 2, (("nowhere", 2),)).world


@given(rules(), st.integers(1, 12), st.integers(0, 6))
def test_check_refuses_what_can_never_run_and_each_fix_that_it_names_works(
    rule: LayoutRule, least: int, more: int
) -> None:
    most = least + more
    possible = any(
        layout and layout.world >= least
        for layout in (choose(n, rule, least=least) for n in range(least, most + 1))
    )
    if possible:
        rule.check(least, most)
        return
    with pytest.raises(ValueError, match=rf"workers.min = {least} and workers.max = {most}; set ") as refusal:
        rule.check(least, most)
    fixes = re.findall(r"workers\.(min|max) = (\d+)", str(refusal.value).partition("; set ")[2])
    assert fixes or "degrees" in str(refusal.value)
    for name, value in fixes:
        rule.check(*((int(value), most) if name == "min" else (least, int(value))))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"dp_shard": 1, "min_shard": 2},
            (
                r"parallel\.dp_shard = 1 is less than parallel\.min_shard = 2; "
                r"set dp_shard = 2"
            ),
        ),
        ({"dp_shard": 0}, r"parallel\.dp_shard = 0 must be at least 1"),
        ({"dp_replicate": -1}, r"parallel\.dp_replicate = -1 must be at least 1"),
        ({"min_shard": 0}, r"parallel\.min_shard = 0 must be at least 1"),
        ({"model": (("tp", 0),)}, r"parallel\.tp = 0 must be at least 1"),
        ({"use": "some"}, r"parallel\.use = 'some' must be one of all, fit"),
    ],
)
def test_an_impossible_rule_is_refused_by_name(settings: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LayoutRule(**settings)  # type: ignore[arg-type]


def test_check_says_what_is_missing() -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"^parallel \(dp_replicate = 2, dp_shard = 2\) allows no world .*; set workers\.max = 4 or "
            r"smaller degrees$"
        ),
    ):
        LayoutRule(2, 2).check(1, 3)


@pytest.mark.parametrize(
    ("layout", "nodes", "becomes"),
    [
        (Layout(1, 4), "aaaa", Layout(1, 3)),
        (Layout(1, 4), "aabb", Layout(1, 2)),
        (Layout(1, 4), "aaab", Layout(1, 1)),
        (Layout(2, 2), "aabb", Layout(1, 2)),
        (Layout(1, 2), "ab", Layout(1, 1)),
        (Layout(1, 1), "a", None),
        (Layout(1, 4, (("tp", 2),)), "aaaabbbb", Layout(1, 2, (("tp", 2),))),
        (Layout(1, 2, (("tp", 2),)), "aaaa", Layout(1, 1, (("tp", 2),))),
    ],
    ids=str,
)
def test_what_follows_a_loss(layout: Layout, nodes: str, becomes: Layout | None) -> None:
    """Losing the node with most members is foreseen; of a single node, losing one worker."""
    replicas = None if layout.dp_replicate > 1 else 1
    rule = LayoutRule(replicas, min_shard=layout.dp_replicate, model=layout.more)
    assert after_a_loss(layout, nodes, rule, 1) == becomes
    assert after_a_loss(layout, nodes, rule, layout.world) is None, "too few are left"


@pytest.mark.parametrize("layout", [Layout(2, 3), Layout(2, 3, (("columns", 4), ("rows", 2)))])
def test_a_layout_read_back_from_json_is_the_same(layout: Layout) -> None:
    """JSON turns tuples into lists; the layout must still be equal and hashable."""
    value = json.loads(json.dumps(asdict(layout)))
    assert Layout.from_json(value) == layout and hash(Layout.from_json(value)) == hash(layout)


def test_the_fields_of_json_alone_are_another_layout() -> None:
    """The control."""
    value = json.loads(json.dumps(asdict(Layout(2, 3, (("columns", 4),)))))
    assert Layout(**value) != Layout.from_json(value)
    with pytest.raises(TypeError, match="unhashable"):
        hash(Layout(**value))
