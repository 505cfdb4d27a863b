from __future__ import annotations

from pathlib import Path

import pytest

from lib_merge.errors import FileError, OutputError
from lib_merge.host import Host, Models, standalone
from tests.support import values, write

pytestmark = pytest.mark.portable


def model(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write(path, {"w": values((2, 2), 0)})


@pytest.fixture
def folders(tmp_path):
    for name in ("one/a", "one/sub/a", "one/sub/deep/b", "two/a", "two/c"):
        model(tmp_path / f"{name}.safetensors")
    return [tmp_path / "one", tmp_path / "two"]


def test_names_are_relative_and_stand_for_one_file_each(folders):
    models = Models(folders, [], "checkpoint")
    one, two = folders
    paths = {
        f"a.safetensors ({one})": one / "a.safetensors",
        f"a.safetensors ({two})": two / "a.safetensors",
        "c.safetensors": two / "c.safetensors",
        "sub/a.safetensors": one / "sub" / "a.safetensors",
        "sub/deep/b.safetensors": one / "sub" / "deep" / "b.safetensors",
    }
    assert models.names == list(paths)
    assert {name: models.resolve(name) for name in models.names} == paths
    assert {models.name_of(path): path for path in paths.values()} == paths
    assert models.name_of(one / "other.safetensors") is None


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("c.safetensors", "two/c.safetensors"),
        ("c.safetensors [3f9c1e07ab]", "two/c.safetensors"),
        ("  c.safetensors ", "two/c.safetensors"),
        ("b.safetensors", "one/sub/deep/b.safetensors"),
        ("sub/deep/b.safetensors [0123456789]", "one/sub/deep/b.safetensors"),
    ],
)
def test_a_value_of_the_list_means_a_file(folders, value, found):
    assert Models(folders, [], "checkpoint").resolve(value) == folders[0].parent / found


def test_a_value_that_means_no_file_says_so(folders):
    models = Models(folders, [], "checkpoint")
    with pytest.raises(FileError, match="not among the models") as caught:
        models.resolve("d.safetensors")
    assert "did you mean c.safetensors?" in caught.value.hint
    with pytest.raises(FileError, match="several times"):
        models.resolve("a.safetensors")
    (folders[1] / "c.safetensors").unlink()
    with pytest.raises(FileError, match="not there any more") as caught:
        models.resolve("c.safetensors")
    assert "refresh" in caught.value.hint
    with pytest.raises(FileError, match="not among"):
        Models([], [], "checkpoint").resolve("c.safetensors")


def test_an_odd_folder_or_file_is_listed_once(folders, tmp_path):
    (tmp_path / "link").symlink_to(folders[0])
    (folders[0] / "circle").symlink_to(folders[0])
    single = model(tmp_path / "elsewhere" / "single.safetensors")
    gone = tmp_path / "gone.safetensors"
    models = Models(
        [folders[0], folders[0] / "sub", tmp_path / "link", tmp_path / "no such"], [single, gone], "checkpoint"
    )
    assert models.names == ["a.safetensors", "single.safetensors", "sub/a.safetensors", "sub/deep/b.safetensors"]


def test_names_in_any_writing(tmp_path):
    names = ["Ünïcode 模型.safetensors", "with space [x].safetensors", "quote'\"&<b>.safetensors"]
    for name in names:
        model(tmp_path / name)
    models = Models([tmp_path], [], "checkpoint")
    assert sorted(models.names) == sorted(names)
    assert all(models.resolve(name) == tmp_path / name for name in names)


def test_vaes_beside_checkpoints_are_told_apart(tmp_path):
    for name in ("a", "a.vae", "b.VAE"):
        model(tmp_path / f"{name}.safetensors")
    assert Models([tmp_path], [], "checkpoint").names == ["a.safetensors"]
    assert Models([tmp_path], [], "vae").names == ["a.safetensors", "a.vae.safetensors", "b.VAE.safetensors"]


def host(*folders: Path) -> Host:
    return Host("x", lambda kind: folders)


def test_results_go_where_the_host_saves(tmp_path):
    (tmp_path / "other").mkdir()
    saving = host(tmp_path / "models", tmp_path / "other")
    assert saving.save_folders("checkpoint") == {"models": tmp_path / "models", "other": tmp_path / "other"}
    assert saving.target("checkpoint", "", "new.safetensors") == tmp_path / "models" / "new.safetensors"
    assert (
        saving.target("checkpoint", "other", "mixes/new.safetensors")
        == tmp_path / "other" / "mixes" / "new.safetensors"
    )
    with pytest.raises(OutputError, match="no folder to save to"):
        saving.target("checkpoint", "others", "new.safetensors")
    with pytest.raises(OutputError, match="there is no folder"):
        host().target("checkpoint", "", "new.safetensors")
    same = host(tmp_path / "a" / "models", tmp_path / "b" / "models")
    assert list(same.save_folders("lora")) == [str(tmp_path / "a" / "models"), str(tmp_path / "b" / "models")]


@pytest.mark.parametrize(
    "name",
    ["", "  ", "..", "../new.safetensors", "a/../../new.safetensors", "/tmp/new.safetensors", "C:\\new.safetensors",
     "..\\new.safetensors", "a//b.safetensors", "a/. ./b.safetensors", "x\0.safetensors", "out/new.safetensors"],
)  # fmt: skip
def test_no_name_leads_out_of_the_folder(tmp_path, name):
    inside, outside = tmp_path / "models", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (inside / "out").symlink_to(outside)
    with pytest.raises(OutputError):
        host(inside).target("checkpoint", "", name)


def test_a_link_that_stays_inside_is_fine(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert host(tmp_path).target("checkpoint", "", "link/new").parent == tmp_path / "link"


def test_standalone(tmp_path):
    checkpoints, loras, output = (tmp_path / name for name in ("c", "l", "o"))
    for folder in (checkpoints, loras, output):
        folder.mkdir()
    model(checkpoints / "a.safetensors")
    model(loras / "l.safetensors")
    alone = standalone([checkpoints], [loras], output=output)
    assert alone.models("checkpoint").names == ["a.safetensors"]
    assert alone.models("lora").names == ["l.safetensors"]
    assert alone.target("checkpoint", "", "n.safetensors") == output / "n.safetensors"
    assert (alone.loaded(), alone.use, alone.threads) == (None, None, None)
    assert standalone([checkpoints]).models("lora").names == ["a.safetensors"]
    assert standalone([checkpoints]).target("checkpoint", "", "n") == checkpoints / "n"
    assert standalone([Path("c")]).target("checkpoint", "", "n").is_absolute()


def test_lists_are_kept_for_a_moment_and_looked_up_anew_when_asked(tmp_path):
    model(tmp_path / "a.safetensors")
    saving = host(tmp_path)
    assert saving.models("checkpoint").names == ["a.safetensors"]
    model(tmp_path / "b.safetensors")
    assert saving.models("checkpoint").names == ["a.safetensors"]
    saving.look_again()
    assert saving.models("checkpoint").names == ["a.safetensors", "b.safetensors"]


def test_a_result_s_place_is_its_folder_and_its_path_in_there(tmp_path):
    for name in ("one", "two/deep"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "two", target_is_directory=True)
    host = Host("test", lambda kind: [tmp_path / "one", tmp_path / "link"])
    assert host.place_of("lora", tmp_path / "one" / "x.safetensors") == ("one", "x.safetensors")
    assert host.place_of("lora", tmp_path / "two" / "deep" / "x.safetensors") == ("link", "deep/x.safetensors")
    assert host.place_of("lora", tmp_path / "x.safetensors") == ("", "x.safetensors")
