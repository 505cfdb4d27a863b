_ui_tabs = []


def on_ui_tabs(callback):
    _ui_tabs.append(callback)


def clear_callbacks():
    _ui_tabs.clear()


def ui_tabs_callback():
    return [tab for callback in _ui_tabs for tab in callback() or []]
