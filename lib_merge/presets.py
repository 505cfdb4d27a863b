"""Recipes that are kept by name: listed, loaded, saved, imported from what others sent, shared as text."""

from __future__ import annotations

import base64
import binascii
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from .errors import FileError, OutputError, RecipeError
from .files.open import open_model
from .files.userdata import data_folder, write_whole
from .foreign import host_recipe
from .recipe import METADATA_KEY, Lora, Recipe, Slot, from_json, to_json
from .wording import suggestion

SUFFIX = ".json"
LARGEST_BYTES = 1 << 20
# Text that may stand in a link: this mark, then base64url of the deflated canonical JSON.
SHARED_MARK = "lib-merge-1."

_LONGEST_NAME = 80
_FORBIDDEN = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
# Windows opens a device instead of a file of these names, whatever their ending.
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


@dataclass(frozen=True)
class Preset:
    """A recipe that has a name.

    Attributes:
        name: of the file, without its ending.
        path: the file.
        own: the user's, not one that comes with the program.
    """

    name: str
    path: Path
    own: bool

    def recipe(self) -> Recipe:
        """What it says.

        Raises:
            FileError: it cannot be read.
            RecipeError: it is no recipe.
        """
        return from_json(read_limited(self.path), where=self.path)


class Presets:
    """The recipes that come with the program and those of a user, whose names win.

    Args:
        folder: of the user's; None for `presets` in `data_folder()`. It is made when the first one is saved.
        shipped: of those that come with the program; None for its own.
    """

    def __init__(self, folder: Path | None = None, shipped: Path | None = None) -> None:
        self.folder = folder or data_folder() / "presets"
        self._shipped = shipped or shipped_folder()

    def all(self) -> dict[str, Preset]:
        """Name -> preset, the user's first, each part sorted without regard to case."""
        own = [Preset(path.stem, path, True) for path in _listed(self.folder)]
        taken = {preset.name.casefold() for preset in own}
        shipped = [Preset(path.stem, path, False) for path in _listed(self._shipped)]
        return {preset.name: preset for preset in [*own, *(p for p in shipped if p.name.casefold() not in taken)]}

    def get(self, name: str) -> Preset:
        """The preset of that name.

        Raises:
            FileError: there is none.
        """
        known = self.all()
        if name not in known:
            hint = suggestion(name, list(known)) if known else "there are no presets"
            raise FileError(f"there is no preset {name!r}", hint=hint[:300])
        return known[name]

    def load(self, name: str) -> Recipe:
        """The recipe of that name.

        Raises:
            FileError: there is none, or it cannot be read.
            RecipeError: it is no recipe.
        """
        return self.get(name).recipe()

    def save(self, name: str, recipe: Recipe, *, overwrite: bool = False) -> Path:
        """Keep a recipe under a name; one that comes with the program is covered by it, never changed.

        Raises:
            OutputError: the name is no good for a file, is taken and may not be replaced, or it cannot be written.
            RecipeError: the recipe is not valid.
        """
        checked_name(name)
        taken = next((p for p in self.all().values() if p.own and p.name.casefold() == name.casefold()), None)
        if taken is not None and not overwrite:
            raise OutputError(
                f"there is a preset {taken.name!r} already",
                file=taken.path,
                hint="choose another name, or say that it may be replaced",
            )
        path = taken.path if taken else self.folder / f"{name}{SUFFIX}"
        write_whole(path, readable(recipe).encode(), overwrite=overwrite)
        return path

    def delete(self, name: str) -> None:
        """Delete one of the user's presets.

        Raises:
            FileError: there is none of that name.
            OutputError: it comes with the program, or cannot be deleted.
        """
        preset = self.get(name)
        if not preset.own:
            raise OutputError(f"{name!r} comes with the program and stays", hint="save another one under its name")
        try:
            preset.path.unlink()
        except OSError as error:
            raise OutputError(f"cannot delete the preset: {error.strerror or error}", file=preset.path) from error


def shipped_folder() -> Path:
    """Where the recipes lie that come with the program: beside the package in the tree, inside it in a wheel."""
    here = Path(__file__).resolve().parent
    packed = here / "_data" / "presets"
    return packed if packed.is_dir() else here.parent / "presets"


def checked_name(name: str) -> str:
    """The name, if a file on any system can have it.

    Raises:
        OutputError: says what is wrong with it.
    """
    if not name.strip():
        raise OutputError("the preset has no name", hint="type one")
    if len(name) > _LONGEST_NAME:
        raise OutputError(f"a preset's name has at most {_LONGEST_NAME} characters", hint="shorten it")
    if found := _FORBIDDEN.search(name):
        raise OutputError(f"a preset's name cannot hold {found[0]!r}", hint="use letters, digits, spaces, - _ . + ( )")
    if name != name.strip(" .") or _DEVICES.fullmatch(name):
        raise OutputError(f"{name!r} cannot be the name of a file", hint="use letters and digits at both ends")
    return name


def readable(recipe: Recipe) -> str:
    """A recipe as indented JSON, without the fields that say what they say by themselves; `lib-merge run` takes it."""
    return json.dumps(_said(recipe), indent=2, ensure_ascii=False) + "\n"


def _said(recipe: Recipe) -> dict[str, Any]:
    """The fields of a recipe that differ from their defaults, and those that tell what it is."""
    plain = json.loads(to_json(Recipe()))
    always = ("lib_merge", "task", "method", "models")
    full = json.loads(to_json(recipe))
    output = {name: value for name, value in full["output"].items() if value != plain["output"][name]}
    fields = {**full, "output": output or plain["output"]}
    order = [*always, *(name for name in full if name not in always)]
    return {name: fields[name] for name in order if name in always or fields[name] != plain[name]}


def shared_text(recipe: Recipe) -> str:
    """A recipe as one word that may stand in a link or a message.

    Raises:
        RecipeError: it is not valid.
    """
    text = json.dumps(_said(recipe), separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    packed = zlib.compress(text.encode(), 9)
    return SHARED_MARK + base64.urlsafe_b64encode(packed).decode().rstrip("=")


def from_text(text: str) -> Recipe:
    """A recipe as somebody pasted it: JSON, or the word that `shared_text` makes, also inside other text.

    Raises:
        RecipeError: there is no recipe in it, or it is larger than any recipe.
    """
    if len(text) > 2 * LARGEST_BYTES:
        raise RecipeError(f"the text is larger than any recipe: {len(text):,} characters")
    word = re.search(rf"{re.escape(SHARED_MARK)}([\w-]+)", text, re.ASCII)
    if word is not None and not text.lstrip().startswith("{"):
        return from_json(_unpacked(word[1]))
    if not text.strip():
        raise RecipeError("there is no text", hint="paste a recipe")
    return from_json(text)


def _unpacked(word: str) -> bytes:
    """The JSON of a shared word; a small text that would unpack to a huge one is refused."""
    try:
        packed = base64.urlsafe_b64decode(word + "=" * (-len(word) % 4))
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(packed, LARGEST_BYTES)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise RecipeError("the shared text is damaged", hint="copy all of it, or ask for the recipe as JSON") from error
    if unpacking.unconsumed_tail:
        raise RecipeError(f"the shared text holds more than {LARGEST_BYTES:,} bytes, more than any recipe")
    if not unpacking.eof:
        raise RecipeError("the shared text was cut short", hint="copy all of it, or ask for the recipe as JSON")
    return text


def from_file(path: Path, tell: Callable[[str], None] = lambda note: None) -> Recipe:
    """A recipe from a `.json` or `.txt` file as somebody sent it, or from the header of a merged model.

    A merge of a web UI's own is taken over as far as this program has it.

    Args:
        path: the file.
        tell: takes what could not be taken over, a line each.

    Raises:
        FileError: it cannot be read.
        RecipeError: there is no recipe in it.
    """
    if path.suffix.lower() in (SUFFIX, ".txt") and path.is_file():
        try:
            return from_text(read_limited(path).decode())
        except UnicodeDecodeError as error:
            raise RecipeError("the recipe is not text", file=path) from error
        except RecipeError as error:
            raise RecipeError(error.what, file=path, hint=error.hint) from error
    source = open_model(path)
    try:
        taken = None if METADATA_KEY in source.metadata else host_recipe(source.metadata, path)
        if taken is None:
            return in_header(source.metadata, path)
        for note in taken[1]:
            tell(note)
        return taken[0]
    finally:
        source.close()


def in_header(metadata: Mapping[str, str], where: object) -> Recipe:
    """The recipe that a model's header holds.

    Args:
        metadata: of the model.
        where: the model, for errors.

    Raises:
        RecipeError: there is none.
    """
    text = metadata.get(METADATA_KEY)
    if text is None:
        raise RecipeError(
            "the file holds no recipe", file=where, hint="it was not written by lib_merge, or with --no-recipe"
        )
    return from_json(text, where=where)


def read_limited(path: Path) -> bytes:
    """What a small file holds.

    Raises:
        FileError: it cannot be read, or is larger than any recipe.
    """
    try:
        with path.open("rb") as stream:
            found = stream.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise FileError(f"cannot read: {error.strerror or error}", file=path) from error
    if len(found) > LARGEST_BYTES:
        raise FileError(f"this is larger than any recipe: more than {LARGEST_BYTES:,} bytes", file=path)
    return found


def opened(recipe: Recipe) -> Recipe:
    """The recipe with its model slots left open and without its LoRAs: what it does, for other models."""
    vae = recipe.vae if recipe.vae is None or recipe.vae.recipe else None
    models: dict[str, Slot | None] = dict.fromkeys(recipe.models)
    return msgspec.structs.replace(recipe, models=models, loras=(), vae=vae)


def open_slots(recipe: Recipe) -> list[str]:
    """Slots without a model, in order: `A`, `B`."""
    return sorted(name for name, slot in recipe.models.items() if slot is None)


def filled(recipe: Recipe, names: Mapping[str, str], loras: Sequence[Lora] = ()) -> Recipe:
    """The recipe with models in its open slots, and more LoRAs behind its own.

    Args:
        recipe: a preset.
        names: slot -> file name.
        loras: further ones.
    """
    models = {
        slot: Slot(file=names[slot]) if model is None and slot in names else model
        for slot, model in recipe.models.items()
    }
    return msgspec.structs.replace(recipe, models=models, loras=(*recipe.loras, *loras))


def _listed(folder: Path) -> list[Path]:
    """The recipe files of a folder; none where it is not there or may not be read."""
    try:
        found = [path for path in folder.iterdir() if path.suffix == SUFFIX and not path.name.startswith(".")]
    except OSError:
        return []
    return sorted((path for path in found if path.is_file()), key=lambda path: (path.stem.casefold(), path.stem))


def described(recipe: Recipe) -> str:
    """What a recipe does, in one line: task, method, what it changes of the defaults, models or open slots."""
    plain, said = Recipe(), [f"{recipe.task} {recipe.method or ''}".strip()]
    said += [f"{name} {_short(value)}" for name, value in recipe.params.items()]
    values = {name: _block(entry) for name, entry in recipe.blocks.items()}
    said += [f"blocks {', '.join(f'{name}={text}' for name, text in values.items())}"] if values else []
    if recipe.exclude:
        said.append(f"{'only' if recipe.include_mode else 'not'} {', '.join(recipe.exclude)}")
    said += [f"{len(recipe.rules)} rules"] if recipe.rules else []
    said += [f"without {', '.join(recipe.discard)}"] if recipe.discard else []
    for name in ("only", "mismatch", "seed"):
        if (value := getattr(recipe, name)) != getattr(plain, name):
            said.append(f"{name} {value}")
    said += [recipe.output.save_dtype] if recipe.output.save_dtype != plain.output.save_dtype else []
    chosen = recipe.optimizer
    fields = [name for name in chosen.__struct_fields__ if getattr(chosen, name) != getattr(plain.optimizer, name)]
    said += [f"{name} {getattr(chosen, name)}" for name in fields]
    said += [f"{slot} {_model(model)}" for slot, model in sorted(recipe.models.items())]
    said += [f"VAE {_model(recipe.vae)}"] if recipe.vae else []
    return "; ".join([*said, *(f"LoRA {lora.file} {lora.strength:g}" for lora in recipe.loras)])


def _short(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


def _block(entry: Mapping[str, float | bool]) -> str:
    return " ".join(_short(value) for value in entry.values())


def _model(slot: Slot | None) -> str:
    if slot is None:
        return "open"
    return slot.file or "made by a recipe of its own"
