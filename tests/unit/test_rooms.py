"""The maintainers' pages are current: the picture of the rooms, and the files of each."""

import pytest

from tools.rooms import home, idea_of, levels, main, reduced, rooms


def test_picture_and_lists_of_files_are_what_the_source_says(capsys):
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_every_room_and_file_says_its_idea():
    found = rooms().values()
    assert not [room.name for room in found if not room.idea]
    assert not [str(path) for room in found for path in room.files if not idea_of(path)]


@pytest.mark.parametrize(
    ("module", "room"), [("optim.kernels.cache", "optim.kernels"), ("optim.finite", "optim"), ("x", "")]
)
def test_a_module_belongs_to_the_innermost_room(module, room):
    assert home(module, ["optim", "optim.kernels"]) == room


def test_arrows_that_follow_from_two_others_are_left_out():
    arrows = {"top": {"middle", "bottom"}, "middle": {"bottom"}, "bottom": set()}
    assert reduced(arrows) == {"top": {"middle"}, "middle": {"bottom"}, "bottom": set()}
    assert levels(arrows) == {"bottom": 0, "middle": 1, "top": 2}
