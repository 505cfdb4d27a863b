import os
import re
import types

from modules import family, paths, shared
from modules.hashes import sha256_from_cache

model_path = os.path.join(paths.models_path, "Stable-diffusion")
checkpoints_list, checkpoint_aliases = {}, {}
_SUFFIXES = (".ckpt", ".safetensors", ".gguf") if family.FORGE else (".ckpt", ".safetensors")


class CheckpointInfo:
    def __init__(self, filename, root):
        self.filename = filename
        self.name = os.path.relpath(filename, root)
        self.model_name = os.path.splitext(os.path.basename(filename))[0]
        self.sha256 = sha256_from_cache(filename, f"checkpoint/{self.name}")
        self.title = f"{self.name} [{self.sha256[:10]}]" if self.sha256 else self.name

    def register(self):
        checkpoints_list[self.title] = self
        for alias in (
            self.title,
            self.name,
            self.model_name,
            *([self.sha256, self.sha256[:10]] if self.sha256 else ()),
        ):
            checkpoint_aliases[alias] = self


def _roots():
    options = vars(shared.cmd_opts)
    return [model_path, *filter(None, [options.get("ckpt_dir")]), *(options.get("ckpt_dirs") or [])]


def list_models():
    family.events.append("list_models")
    checkpoints_list.clear()
    checkpoint_aliases.clear()
    for root in _roots():
        for folder, _, names in os.walk(root, followlinks=True):
            for name in sorted(names):
                if name.endswith(_SUFFIXES) and ".vae." not in name:
                    CheckpointInfo(os.path.join(folder, name), root).register()


def checkpoint_tiles():
    infos = checkpoints_list.values()
    return list({info.name for info in infos}) if family.FORGE else sorted(info.title for info in infos)


def get_closet_checkpoint_match(search):
    if not search:
        return None
    known = checkpoint_aliases.get(search)
    if known is not None:
        return known
    plain = re.sub(r" \[[0-9a-f]+\]$", "", search)
    return next((info for info in checkpoints_list.values() if plain in info.title), None)


model_data = types.SimpleNamespace(sd_model=None)
if family.FORGE:
    model_data.forge_hash = "of the model that is loaded"
else:

    def send_model_to_cpu(model):
        family.events.append(f"{model} to cpu")

    def send_model_to_device(model):
        family.events.append(f"{model} to device")
