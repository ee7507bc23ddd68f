"""Which modules become blocks, on the shapes that models really have."""

import pytest
from torch import nn

from onefold.model.blocks import block_of, find_blocks
from tests.models import ExpertsTree, LayerTree, ResidualTree, TransformerTree


def named(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def test_the_layers_of_a_transformer_are_its_blocks():
    assert find_blocks(TransformerTree(3), None) == ["layers.0", "layers.1", "layers.2"]


def test_the_residual_blocks_of_nested_sequentials_are_found_not_the_sequentials_that_hold_them():
    stages = nn.Sequential(*[nn.Sequential(ResidualTree(), ResidualTree()) for _ in range(2)])
    model = named(stem=nn.Conv2d(3, 2, 1), stages=stages, fc=nn.Linear(2, 2))
    assert find_blocks(model, None) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]


def test_experts_belong_to_the_block_they_are_in():
    model = named(layers=nn.ModuleList([ExpertsTree(), ExpertsTree()]))
    blocks = find_blocks(model, None)
    assert blocks == ["layers.0", "layers.1"]
    assert block_of("layers.1.experts.3.attention.weight", blocks) == "layers.1"


def test_experts_outside_a_repeated_block_are_blocks_themselves():
    assert find_blocks(named(only=ExpertsTree()), None) == [f"only.experts.{i}" for i in range(4)]


def test_two_stacks_are_found_each_in_registration_order():
    model = named(encoder=TransformerTree(2), decoder=TransformerTree(2))
    assert find_blocks(model, None) == ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"]


def test_plain_layers_are_no_blocks_so_small_ones_share_a_unit():
    assert find_blocks(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), None) == []
    assert find_blocks(nn.ModuleList(nn.Linear(2, 2) for _ in range(4)), None) == []


def test_a_list_without_two_equals_has_no_blocks():
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.ReLU(), nn.ReLU()), None) == []
    assert find_blocks(TransformerTree(1), None) == []


def test_equals_that_are_not_in_a_list_are_no_blocks():
    assert find_blocks(named(left=nn.Linear(2, 2), right=nn.Linear(2, 2)), None) == []


def test_the_odd_one_in_a_list_of_equals_is_no_block():
    assert find_blocks(nn.Sequential(LayerTree(), nn.LayerNorm(2), LayerTree()), None) == ["0", "2"]


def test_modules_without_parameters_neither_count_as_equals_nor_become_blocks():
    class Wrap(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

    bare = Wrap(nn.LayerNorm(2, elementwise_affine=False))
    assert find_blocks(nn.Sequential(Wrap(nn.LayerNorm(2)), bare), None) == []
    assert find_blocks(nn.Sequential(Wrap(nn.LayerNorm(2)), bare, Wrap(nn.LayerNorm(2))), None) == ["0", "2"]


def test_the_values_of_a_module_dict_are_blocks_too():
    assert find_blocks(nn.ModuleDict({"a": LayerTree(), "b": LayerTree()}), None) == ["a", "b"]


def test_a_layer_that_is_used_twice_is_one_module_and_one_block_at_most():
    layer = LayerTree()
    assert find_blocks(nn.Sequential(layer, layer, LayerTree()), None) == ["0", "2"]


def test_a_model_without_parameters_or_children_has_no_blocks():
    assert find_blocks(nn.Sequential(nn.ReLU(), nn.ReLU()), None) == []
    assert find_blocks(nn.Linear(2, 2), None) == []


# -- units= ------------------------------------------------------------------------------------------------------------


def test_units_as_a_class_takes_every_module_of_it():
    assert find_blocks(TransformerTree(2), nn.Embedding) == ["embed"]


def test_units_as_a_class_takes_its_subclasses():
    assert find_blocks(named(one=LayerTree(), two=nn.Linear(2, 2)), nn.Module) == ["one", "two"]


def test_units_as_a_tuple_takes_any_of_its_classes():
    assert find_blocks(TransformerTree(2), (LayerTree, nn.Embedding)) == ["embed", "layers.0", "layers.1"]


def test_units_as_a_callable_sees_name_and_module():
    seen = {}

    def first_layer_only(name: str, module: nn.Module) -> bool:
        seen[name] = module
        return name == "layers.0"

    model = TransformerTree(2)
    assert find_blocks(model, first_layer_only) == ["layers.0"]
    assert seen["layers.1"] is model.layers[1]
    assert "layers.0.mlp" not in seen  # nobody asks inside a block


def test_units_replaces_the_search_for_repeated_blocks():
    assert find_blocks(TransformerTree(3), lambda name, module: False) == []


def test_the_model_itself_is_never_a_block():
    assert find_blocks(LayerTree(), lambda name, module: isinstance(module, LayerTree)) == []


@pytest.mark.parametrize(
    "units", [None, nn.Module, (LayerTree, nn.Linear), lambda name, module: True], ids=["found", "all", "two", "asked"]
)
def test_no_block_lies_inside_another(units):
    model = named(a=TransformerTree(2), b=named(c=nn.Sequential(ExpertsTree(), ExpertsTree())))
    blocks = find_blocks(model, units)
    assert blocks
    assert not any(one.startswith(other + ".") for one in blocks for other in blocks)


# -- block_of ----------------------------------------------------------------------------------------------------------


def test_layers_1_and_layers_10_are_not_confused():
    model = TransformerTree(12)
    blocks = find_blocks(model, None)
    for name, _ in model.named_parameters():
        wanted = ".".join(name.split(".")[:2]) if name.startswith("layers.") else ""
        assert block_of(name, blocks) == wanted
    assert block_of("layers.10.mlp.0.weight", blocks[::-1]) == "layers.10"


def test_a_parameter_outside_every_block_belongs_to_none():
    assert block_of("layers_norm.weight", ["layers"]) == ""
    assert block_of("head.weight", []) == ""
