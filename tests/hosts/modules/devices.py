from modules import family


def torch_gc():
    family.events.append("torch_gc")
