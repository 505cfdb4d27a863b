import json
import os
from argparse import Namespace

from modules import call_queue, family, paths

config_filename = os.path.join(paths.data_path, "config.json")
# Options that a family does not know are absent, not None.
_OPTIONS = (
    {"ckpt_dirs": [], "vae_dirs": [], "lora_dirs": []}
    if family.NAME == "neo"
    else {"ckpt_dir": None, "ckpt": None, "vae_dir": None}
)
cmd_opts = Namespace(
    **{"no_gradio_queue": False, "lora_dir": os.path.join(paths.models_path, "Lora"), **_OPTIONS},
)
for _name, _value in json.loads(os.environ.get("STAND_IN_OPTIONS", "{}")).items():
    setattr(cmd_opts, _name, _value)


class Options:
    sd_model_checkpoint = None
    frozen = False

    def set(self, key, value):
        assert not self.frozen, f"changing setting {key} is not allowed"
        if getattr(self, key) == value:
            return False
        setattr(self, key, value)
        if key == "sd_model_checkpoint":
            with call_queue.queue_lock:
                family.events.append(f"loaded {value}")
        return True

    def save(self, filename):
        with open(filename, "w") as file:
            json.dump({"sd_model_checkpoint": self.sd_model_checkpoint}, file)


class State:
    job, textinfo = "", None
    job_count = job_no = sampling_step = sampling_steps = 0
    interrupted = False

    def begin(self, job="(unknown)"):
        self.job, self.interrupted, self.sampling_step, self.job_no = job, False, 0, 0
        self.job_count = -1

    def end(self):
        self.job, self.job_count = "", 0

    def interrupt(self):
        self.interrupted = True


opts, state = Options(), State()
