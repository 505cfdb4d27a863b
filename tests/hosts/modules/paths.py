import os

data_path = script_path = os.environ["STAND_IN_ROOT"]
models_path = os.path.join(data_path, "models")
extensions_dir = os.path.join(data_path, "extensions")
