from modules import family


def unload_all_models():
    family.events.append("unload_all_models")
