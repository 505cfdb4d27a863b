from modules import family


def refresh_vae_list():
    family.events.append("refresh_vae_list")
