"""Loads extensions' scripts as the hosts do: the module is named like its file and stays out of `sys.modules`."""

import importlib.util
import os
import sys

from modules import family, paths, script_callbacks


def load_scripts():
    script_callbacks.clear_callbacks()
    for name in sorted(os.listdir(paths.extensions_dir)):
        extension = os.path.join(paths.extensions_dir, name)
        folder = os.path.join(extension, "scripts")
        before = list(sys.path)
        sys.path.insert(0, extension)
        for script in sorted(os.listdir(folder)):
            path = os.path.join(folder, script)
            if script.endswith(".py"):
                spec = importlib.util.spec_from_file_location(script, path)
                spec.loader.exec_module(importlib.util.module_from_spec(spec))
        if family.NAME == "a1111":
            sys.path[:] = before  # the others keep every extension's folder on the path
