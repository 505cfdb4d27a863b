from modules import family, sd_models, shared


def checkpoint_change(ckpt_name, save=True, refresh=True):
    info = sd_models.get_closet_checkpoint_match(ckpt_name)
    shared.opts.sd_model_checkpoint = info.name
    family.events.append(f"checkpoint_change {ckpt_name}")
    return True
