from __future__ import annotations

import hashlib
import os

import pytest

from lib_merge import FileError, PlanError, Recipe
from lib_merge.catalog import Catalog, known_hashes, locate, model_hash, search
from lib_merge.files.hashes import HashCache
from lib_merge.recipe import Slot
from tests.support import values, write

pytestmark = pytest.mark.portable


def sha256(path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def model(path, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    return write(path, {"w": values((2, 2), seed)})


@pytest.fixture
def cache(tmp_path_factory):
    return HashCache(tmp_path_factory.mktemp("hashes"))


@pytest.fixture
def catalog(tmp_path, cache):
    return Catalog([tmp_path], cache)


def names(catalog, root):
    return [path.relative_to(root).as_posix() for path in catalog.files()]


# Listing


def test_every_model_below_the_folders_is_listed_once(tmp_path, catalog):
    for name in ("b.safetensors", "a.ckpt", "sub/c.pt", "sub/deep/d.bin", "sub/b.safetensors"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    for other in ("readme.txt", ".hidden.safetensors", ".git/x.safetensors", "sub/image.png", "yaml/a.yaml"):
        (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / other).write_bytes(b"x")
    assert names(catalog, tmp_path) == [
        *("a.ckpt", "b.safetensors", "sub/b.safetensors", "sub/c.pt", "sub/deep/d.bin"),
    ]


def test_links_are_followed_and_may_run_in_circles(tmp_path, catalog):
    model(tmp_path / "real" / "a.safetensors")
    (tmp_path / "real" / "back").symlink_to(tmp_path)
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    (tmp_path / "file.safetensors").symlink_to(tmp_path / "real" / "a.safetensors")
    (tmp_path / "broken.safetensors").symlink_to(tmp_path / "nothing")
    assert sorted(path.name for path in catalog.files()) == ["a.safetensors", "file.safetensors"]


def test_folders_inside_one_another_are_listed_once(tmp_path, cache):
    model(tmp_path / "sub" / "a.safetensors")
    assert len(list(Catalog([tmp_path, tmp_path / "sub", tmp_path], cache).files())) == 1
    assert list(Catalog([tmp_path / "nothing"], cache).files()) == []


@pytest.mark.parametrize("sign", ["model.safetensors.index.json", "model_index.json", "config.json"])
def test_model_folders_are_listed_too(tmp_path, catalog, sign):
    model(tmp_path / "llm" / "model.safetensors")
    (tmp_path / "llm" / sign).write_text("{}")
    assert names(catalog, tmp_path) == ["llm", "llm/model.safetensors"]


def test_a_config_alone_makes_no_model(tmp_path, catalog):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "config.json").write_text("{}")
    assert names(catalog, tmp_path) == []


def test_near_folders_are_not_searched_deep(tmp_path, cache):
    for name in ("a.safetensors", "sub/b.safetensors", "llm/model.safetensors"):
        model(tmp_path / name)
    (tmp_path / "llm" / "config.json").write_text("{}")
    assert names(Catalog([], cache, near=[tmp_path]), tmp_path) == ["a.safetensors", "llm"]
    assert len(list(Catalog([tmp_path], cache, near=[tmp_path]).files())) == 4


# Finding


def test_a_name_is_found_anywhere(tmp_path, catalog):
    path = model(tmp_path / "x" / "y" / "a.safetensors")
    assert catalog.find(Slot(file="a.safetensors")) == path
    with pytest.raises(FileError, match=r"b\.safetensors is in none of the folders"):
        catalog.find(Slot(file="b.safetensors"))
    with pytest.raises(FileError):
        catalog.find(Slot(file="A.safetensors"))


def test_the_same_name_twice_is_not_guessed(tmp_path, catalog):
    for seed, folder in enumerate("xy"):
        model(tmp_path / folder / "a.safetensors", seed)
    with pytest.raises(FileError) as caught:
        catalog.find(Slot(file="a.safetensors"))
    assert str(tmp_path / "x" / "a.safetensors") in caught.value.what
    assert str(tmp_path / "y" / "a.safetensors") in caught.value.what


def test_the_hash_tells_which_of_them_is_meant(tmp_path, catalog):
    for seed, folder in enumerate("xyz"):
        model(tmp_path / folder / "a.safetensors", seed)
    for folder in "xyz":
        path = tmp_path / folder / "a.safetensors"
        assert catalog.find(Slot(file="a.safetensors", sha256=sha256(path))) == path


def test_other_contents_under_the_right_name_are_not_taken(tmp_path, catalog):
    model(tmp_path / "a.safetensors")
    with pytest.raises(FileError, match="another file than the recipe was made with") as caught:
        catalog.find(Slot(file="a.safetensors", sha256="0" * 64))
    assert caught.value.file == str(tmp_path / "a.safetensors")


def test_a_renamed_file_is_found_by_its_remembered_hash(tmp_path, cache):
    path = model(tmp_path / "new name.safetensors", 1)
    model(tmp_path / "old name.safetensors", 2)
    wanted = Slot(file="old name.safetensors", sha256=sha256(path))
    with pytest.raises(FileError):  # nobody reads all files of a collection to find one
        Catalog([tmp_path], cache).find(wanted)
    cache.compute(path)
    assert Catalog([tmp_path], cache).find(wanted) == path
    path.write_bytes(path.read_bytes() + b" ")  # what is remembered no longer holds
    with pytest.raises(FileError):
        Catalog([tmp_path], cache).find(wanted)


def test_model_folders_are_told_by_their_hash(tmp_path, catalog, cache):
    for seed, folder in enumerate("xy"):
        model(tmp_path / folder / "llm" / "model.safetensors", seed)
        (tmp_path / folder / "llm" / "config.json").write_text("{}")
    for folder in "xy":
        path = tmp_path / folder / "llm"
        line = f"{sha256(path / 'model.safetensors')}  model.safetensors\n"
        digest = hashlib.sha256(line.encode()).hexdigest()
        assert catalog.find(Slot(file="llm", sha256=digest)) == path
        assert model_hash(path, cache, compute=False) == digest
    with pytest.raises(FileError, match="another file"):
        catalog.find(Slot(file="llm", sha256="0" * 64))


def test_what_cannot_be_read_is_told(tmp_path, catalog, monkeypatch):
    path = model(tmp_path / "a.safetensors")

    def refuse(*args):
        raise FileError("cannot read: I/O error", file=path)

    monkeypatch.setattr(HashCache, "compute", refuse)
    located, missing = search(Recipe(models={"A": Slot(file="a.safetensors", sha256="0" * 64)}), {}, catalog)
    assert (located, str(missing["A"].file)) == ({}, str(path))


# Inputs of a recipe


def nested() -> Recipe:
    inner = Recipe(models={"A": Slot(file="x.safetensors"), "B": Slot(file="y.safetensors")})
    return Recipe(models={"A": Slot(file="a.safetensors"), "B": Slot(recipe=inner)}, vae=Slot(file="v.safetensors"))


def test_all_inputs_are_located_by_slot_path(tmp_path, cache):
    for name in "axyv":
        model(tmp_path / name / f"{name}.safetensors")
    elsewhere = tmp_path / "given.safetensors"
    located = locate(nested(), {"B.B": elsewhere}, [tmp_path], cache)
    assert located == {
        "A": tmp_path / "a" / "a.safetensors",
        "B.A": tmp_path / "x" / "x.safetensors",
        "B.B": elsewhere,
        "vae": tmp_path / "v" / "v.safetensors",
    }


def test_all_that_are_missing_are_told_together(tmp_path, cache):
    model(tmp_path / "x.safetensors")
    with pytest.raises(PlanError) as caught:
        locate(nested(), {}, [tmp_path], cache)
    told = [problem.what for problem in caught.value.problems]
    assert told == [
        "model A: a.safetensors is in none of the folders",
        "model B.B: y.safetensors is in none of the folders",
        "model vae: v.safetensors is in none of the folders",
    ]
    assert all("--models" in problem.hint for problem in caught.value.problems)


def test_without_folders_only_what_is_given_counts(tmp_path, cache):
    assert locate(nested(), {"A": str(tmp_path / "a")}, [], cache) == {"A": tmp_path / "a"}


def test_remembered_hashes_are_those_of_files_that_did_not_change(tmp_path, cache):
    a, b = model(tmp_path / "a.safetensors", 1), model(tmp_path / "b.safetensors", 2)
    cache.compute(a)
    located = {"A": a, "B": b, "C": tmp_path / "nothing"}
    assert known_hashes(located, cache) == {"A": sha256(a)}
    os.utime(a, ns=(1, 1))
    assert known_hashes(located, cache) == {}
